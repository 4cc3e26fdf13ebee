"""kvzap: kept sets against the maps by hand, both layouts of files, what is refused."""

from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import kvpass
from kvpass.cache.plan import plan
from kvpass.compiler import backend
from kvpass.graphs.decompose_linear import decompose_linear_pass
from masked_oracle import kept_columns
from numeric_checks import assert_close
from pairwise import each_value, quick, quick_rows
from recorded_calls import inputs_and_outputs
from tiny_models import (
    VOCABULARY,
    added_in_place,
    compiled_once,
    in_blocks,
    kvzap_file,
    left_pad,
    random_ids,
    raw,
    tiny_model,
)

LAYERS, KV_HEADS, HIDDEN, WINDOW, SINKS, BUDGET = 3, 2, 64, 5, 3, 12


def full() -> tuple[nn.Module, nn.Module]:
    """A model and its compiled copy, whose policy a test sets."""
    return compiled_once("llama", layers=LAYERS, policy="full", budget=None, backend="eager")


def stacked(maps: dict[str, Tensor]) -> list[Tensor]:
    """Weight and bias of the linear maps of all layers."""
    return [torch.stack([maps[f"module_list.{i}.{x}"] for i in range(LAYERS)]) for x in ("weight", "bias")]


def entering(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """What enters the attention of each layer, ``[N, hidden]``."""
    with torch.no_grad(), inputs_and_outputs(layer.self_attn for layer in model.model.layers) as found:
        model(ids)
    return [x[0] for x, _ in found]


def published(path, *, inner: int | None) -> nn.ModuleDict:
    """Write a file as NVIDIA does: the state of a module list of linear layers, or of pairs of them."""
    torch.manual_seed(3)

    def one() -> nn.Module:
        if inner is None:
            return nn.Linear(HIDDEN, KV_HEADS)
        return nn.Sequential(nn.Linear(HIDDEN, inner), nn.GELU(), nn.Linear(inner, KV_HEADS))

    maps = nn.ModuleDict({"module_list": nn.ModuleList(one() for _ in range(LAYERS))})
    save_file(maps.state_dict(), path)
    return maps


def kept_by(scores: Tensor, split: str, shares: Tensor | None = None) -> Tensor:
    """Keep mask ``[L, K, N]``: sinks, the newest, and the best of all, of a layer or of a head."""
    n = scores.shape[2]
    keep = torch.zeros(scores.shape, dtype=torch.bool)
    keep[..., n - WINDOW :] = True
    keep[..., :SINKS] = True
    rest = scores[..., SINKS : n - WINDOW]
    each = min(BUDGET, n) - WINDOW - SINKS
    if each <= 0:
        return torch.ones_like(keep) if n <= BUDGET else keep
    if split == "file":  # one entry after the other, to the head that is furthest from its share
        order = rest.argsort(dim=2, descending=True, stable=True)
        counts = torch.full(shares.shape, float(SINKS))
        for _ in range(each * LAYERS * KV_HEADS):
            left = counts - SINKS < rest.shape[2]
            layer, head = divmod(int(torch.where(left, shares / (counts + 0.5), -1).argmax()), KV_HEADS)
            keep[layer, head, SINKS + order[layer, head, int(counts[layer, head]) - SINKS]] = True
            counts[layer, head] += 1
        return keep
    groups = {"layers": 0, "heads": 1, "none": 2}[split]
    flat = rest.flatten(groups) if groups < 2 else rest
    count = each * rest.shape[:2].numel() // max(flat.shape[:-1].numel(), 1)
    best = torch.zeros(flat.shape, dtype=torch.bool).scatter(-1, flat.topk(count, -1).indices, True)
    keep[..., SINKS : n - WINDOW] = best.view(rest.shape)
    return keep


KINDS = [*product(["layers", "heads", "none"], ["ours", "linear", "mlp"]), ("file", "ours")]  # NVIDIA's have no shares


@pytest.mark.parametrize(("split", "kind"), quick_rows(KINDS, [*KINDS[::4], KINDS[-1]]))
def test_padded_rows_in_blocks_keep_what_the_maps_say_by_hand(split, kind, tmp_path):
    path = tmp_path / "model.safetensors"
    if kind == "ours":
        path = kvzap_file()
        maps = [nn.Linear(HIDDEN, KV_HEADS) for _ in range(LAYERS)]
        nn.ModuleDict({"module_list": nn.ModuleList(maps)}).load_state_dict(load_file(path), strict=False)
    else:
        maps = published(path, inner=None if kind == "linear" else 24)["module_list"]
    given = {"weights": str(tmp_path if kind == "mlp" else path)}
    model, fast = full()
    fast.set_policy("kvzap", BUDGET, window=WINDOW, sinks=SINKS, split=split, **given)
    prompts = [torch.randperm(VOCABULARY)[None, :tokens] for tokens in (41, 19)]  # equal tokens have equal scores
    with in_blocks(fast, 8):
        cache = fast.compress(*left_pad([ids[0] for ids in prompts]))
    shares = load_file(path)["head_shares"] if kind == "ours" else None
    for row, ids in enumerate(prompts):
        with torch.no_grad():
            scores = torch.stack([one(x).T for one, x in zip(maps, entering(model, ids), strict=True)])
        wanted = kept_by(scores, split, shares)
        assert torch.equal(kept_columns(cache, 41)[row, ..., -ids.shape[1] :], wanted)
        x = torch.stack(entering(model, ids))[:, None]
        q, k, v = torch.randn(3, LAYERS, 1, KV_HEADS, ids.shape[1], 4)
        options = {"window": WINDOW, "sinks": SINKS, "split": split, **given}
        assert torch.equal(plan("kvzap", q, k, v, budget=BUDGET, entering=x, **options).keep[:, 0], wanted)


@each_value(budget=[1.0, 16, WINDOW + 1], quantile=[1.0, 0.6, 0.0])
def test_a_threshold_keeps_what_scores_as_much_up_to_the_budget(quantile, budget):
    path = kvzap_file()
    model, fast = full()
    prompts = [torch.randperm(VOCABULARY)[None, :tokens] for tokens in (41, 19)]
    entered = [torch.stack(entering(model, ids)) for ids in prompts]
    weight, bias = stacked(load_file(path))
    scores = [weight @ x.mT + bias[..., None] for x in entered]
    inner = torch.cat([s[..., SINKS : s.shape[2] - WINDOW].flatten() for s in scores]).sort().values
    least = float(inner[int(quantile * (len(inner) - 1))]) - 1e-4  # not a score itself: rounding decides there
    options = {"window": WINDOW, "sinks": SINKS, "weights": path, "threshold": least}
    fast.set_policy("kvzap", budget, **options)
    with in_blocks(fast, 8):
        cache = fast.compress(*left_pad([ids[0] for ids in prompts]))
    totals = []
    for row, (x, s) in enumerate(zip(entered, scores, strict=True)):
        n = s.shape[2]
        s[..., :SINKS] = torch.tensor([3e38, 2e38, 1e38])
        room = (n if budget == 1.0 else min(budget, n)) - WINDOW
        flat = s[..., : n - WINDOW].flatten()
        best = flat.topk(room * LAYERS * KV_HEADS).values[-1]
        wanted = s >= max(least, float(best))
        wanted[..., n - WINDOW :] = True
        if budget == WINDOW + 1:  # of equal sinks those of lower layers and heads
            assert wanted[..., SINKS:-WINDOW].sum() == 0
        q, k, v = torch.randn(3, LAYERS, 1, KV_HEADS, n, 4)
        keep = plan("kvzap", q, k, v, budget=budget, entering=x[:, None], **options).keep[:, 0]
        assert torch.equal(keep, wanted)
        assert torch.equal(kept_columns(cache, 41)[row, ..., -n:], wanted)
        totals.append(int(wanted.sum()))
    report = fast.report()
    assert report.lengths.sum((1, 2)).tolist() == totals
    assert f"entries kept: {sum(totals)} of {60 * LAYERS * KV_HEADS}" in str(report)
    pool_k = cache.state.full_layers[0].buffers.pool_k
    assert pool_k.shape[1] == max(2, max(totals) - WINDOW * LAYERS * KV_HEADS)
    assert pool_k.untyped_storage().nbytes() == pool_k.nbytes


def held_by_hand(scores: Tensor, first: Tensor, quota: list[int], threshold: float, tokens: int) -> list[Tensor]:
    """Entries of one row after each token of an answer: keep masks ``[L, K, N]``.

    Args:
        scores: of prompt and answer, ``[L, K, N]``. first: keep mask of the prompt, ``[L, K, tokens]``. quota: of each
            head, besides the window.
    """
    layers, kv_heads, n = scores.shape
    lines = [set(first[divmod(i, kv_heads)].nonzero().flatten().tolist()) for i in range(layers * kv_heads)]
    masks = []
    for now in range(tokens, n):
        mask = torch.zeros(scores.shape, dtype=torch.bool)
        for i, line in enumerate(lines):
            worth = scores[divmod(i, kv_heads)].tolist()
            line.add(now)
            older = sorted((p for p in line if p <= now - WINDOW), key=lambda p: -worth[p])
            line -= set(older[quota[i] :]) | {p for p in older if worth[p] < threshold}
            mask[divmod(i, kv_heads)][list(line)] = True
        masks.append(mask)
    return masks


@pytest.mark.parametrize("split", quick(["layers", "heads", "none", "threshold"], ["threshold"]))
def test_answers_keep_what_scores_by_hand_keep(split):
    """That compiled models evict as ``plan`` says: tests/e2e/test_decode_eviction.py."""
    weight, bias = stacked(load_file(kvzap_file()))
    options = {"window": WINDOW, "sinks": SINKS, "weights": kvzap_file(), "evict_during_decode": True}
    steps = 40
    for n in (41, 19, 9):
        x = torch.randn(LAYERS, 1, n + steps, HIDDEN)
        scores = weight @ x[:, 0].mT + bias[..., None]
        given = {"threshold": float(scores.quantile(0.96))} if split == "threshold" else {"split": split}
        scores[..., :SINKS] = torch.tensor([3e38, 2e38, 1e38])
        prompt, new = torch.randn(LAYERS, 1, KV_HEADS, n + steps, 4).split([n, steps], 3)
        decode = (new.permute(3, 0, 1, 2, 4),) * 3
        found = plan("kvzap", *[prompt] * 3, budget=BUDGET, decode=decode, entering=x, **options, **given)
        kept = found.lengths[:, 0] - WINDOW
        quota = kept + ((BUDGET - WINDOW) * kept.numel() - kept.sum()) // kept.numel()
        first, least = found.keep[:, 0], given.get("threshold", -1e9)
        wanted = held_by_hand(scores, first, quota.flatten().tolist(), least, n)
        for step, expected in enumerate(wanted):
            assert torch.equal(found.decode_keep[step, :, 0], expected), f"{n} tokens, step {step}"
        if split in ("layers", "heads") and n > BUDGET:
            assert len(set(kept.flatten().tolist())) > 1, "heads are ragged"
        held = wanted[-1].sum(-1)
        assert bool((held == quota + WINDOW).all()) == (split != "threshold"), "the threshold decides"


@pytest.mark.parametrize("dtype", quick([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_a_step_whose_products_are_reductions_finds_what_enters_attention(dtype, monkeypatch):
    """As steps of one row on a CPU are compiled."""
    model, found, run = tiny_model("llama", layers=1, dtype=dtype), [], backend.run_passes

    def run_with_reductions(gm, passes, *, label):
        return run(gm, [*passes, decompose_linear_pass] if label.startswith("decode") else passes, label=label)

    for reduces in (False, True):
        with monkeypatch.context() as patch:
            if reduces:
                patch.setattr(backend, "run_passes", run_with_reductions)
            given = {"budget": BUDGET, "weights": kvzap_file(1), "window": WINDOW, "evict_during_decode": True}
            fast = kvpass.compile(model, policy="kvzap", backend="eager", **given)
            found.append(fast(random_ids(1, 30)).past_key_values)
            for step in range(20):
                fast(random_ids(1, 1, seed=step), past_key_values=found[-1])
        names = [record.name for record in fast.report().compiled[-1].passes]
        assert ("decompose_linear" in names) == reduces
    assert torch.equal(found[0].positions, found[1].positions)


@pytest.mark.parametrize("shape", [(2, 2, 64), (3, 1, 64), (3, 2, 32)])
def test_contract_10_a_file_of_another_shape_is_refused_and_the_model_goes_on(shape):
    _, fast = full()
    fast.set_policy("kvzap", BUDGET, window=WINDOW, weights=kvzap_file(*shape))
    numbers = f"of {shape[0]} layers of {shape[1]} KV heads and tokens of {shape[2]} numbers"
    with pytest.raises(ValueError, match=f"{numbers}, but the model has 3 layers of 2 KV heads .* tokens of 64"):
        fast.compress(random_ids(1, 30))
    fast.set_policy("kvzap", BUDGET, window=WINDOW, weights=kvzap_file())
    for tokens in (30, 1):
        lengths = fast.compress(random_ids(1, tokens)).lengths
        assert int(lengths.sum()) == min(BUDGET, tokens) * LAYERS * KV_HEADS


def test_contract_10_what_is_no_file_of_maps_is_refused(tmp_path):
    tensors = load_file(kvzap_file())
    bad = {
        "text": None,
        "gap": {name: x for name, x in tensors.items() if not name.startswith("module_list.1.")},
        "no bias": {name: x for name, x in tensors.items() if name != "module_list.2.bias"},
        "other": {"statistics": torch.ones(2)},
        "layers that differ": {**tensors, "module_list.1.weight": torch.ones(KV_HEADS, 3)},
        "bias": {**tensors, "module_list.0.bias": torch.ones(5)},
        "shares": {**tensors, "head_shares": torch.ones(LAYERS, KV_HEADS + 1)},
        "inner": {
            **{"module_list.0.0.weight": torch.ones(8, HIDDEN), "module_list.0.0.bias": torch.ones(8)},
            **{"module_list.0.2.weight": torch.ones(KV_HEADS, 9), "module_list.0.2.bias": torch.ones(KV_HEADS)},
        },
    }
    _, fast = full()
    for name, held in bad.items():
        path = tmp_path / f"{name}.safetensors"
        if held is None:
            path.write_text("no safetensors")
        else:
            save_file(held, path)
        with pytest.raises(ValueError, match="weights="):
            fast.set_policy("kvzap", BUDGET, weights=str(path), window=WINDOW)
    published(tmp_path / "linear.safetensors", inner=None)
    for given, said in (
        ({"weights": "gone"}, r"weights='gone': cannot be read"),
        ({}, r"weights=None: .* or file or folder of nvidia/KVzap-"),
        ({"weights": str(tmp_path / "linear.safetensors"), "split": "file"}, "holds no head shares"),
    ):
        with pytest.raises(ValueError, match=said):
            fast.set_policy("kvzap", BUDGET, window=WINDOW, **given)


def test_a_decoder_that_adds_in_place_is_compressed_and_a_plan_without_inputs_is_refused():
    """Also to entries in fewer bits."""
    given = {"policy": "kvzap", "budget": BUDGET, "window": WINDOW, "weights": kvzap_file(), "backend": "eager"}
    ids, other = random_ids(2, 30), kvpass.compile(added_in_place(tiny_model("llama", layers=LAYERS)), **given)
    for entries in ("model", "int8"):
        _, usual = compiled_once("llama", layers=LAYERS, entries=entries, **given)
        assert torch.equal(usual.compress(ids).positions, other.compress(ids).positions)
    q, k, v = torch.randn(3, LAYERS, 1, KV_HEADS, 30, 4)
    with pytest.raises(ValueError, match=r"pass entering="):
        plan("kvzap", q, k, v, budget=BUDGET, window=WINDOW, weights=kvzap_file())


class Narrow(nn.Module):
    """A decoder without a residual stream, of which a layer ends behind the linear layer of the next one's queries."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.projections = nn.ModuleList(nn.Linear(64, 24) for _ in range(3))
        self.outputs = nn.ModuleList(nn.Linear(8, 64) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for projection, output in zip(self.projections, self.outputs, strict=True):
            q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in projection(x).chunk(3, -1))
            x = output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x @ self.embedding.weight.T


def test_blocks_of_a_layer_that_ends_behind_what_enters_attention():
    ids, model, found = random_ids(2, 50), Narrow(), []
    for block in (16, 50):
        options = {"policy": "kvzap", "weights": kvzap_file(), "budget": 16, "window": 8, "prefill_block": block}
        compiled = raw(model, {**options, "compiler": "eager"})
        with torch.no_grad(), kvpass.session():
            found.append(torch.cat([compiled(ids), compiled(random_ids(2, 3, seed=1))], 1))
    assert_close("logits", *found, atol=1e-5)

"""Eviction while decoding in the compiled graphs: what `kvpass.plan` says, in a cache of constant size."""

import itertools
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import kvpass
from compiled_models import compiled_anew, greedy, padded, prompts_of, two_layers
from kvpass.cache import prefill
from kvpass.cache.plan import plan
from kvpass.kernels import cpu
from kvpass.ops import reference
from kvpass.policies import resolve
from kvpass.policies.r_kv import RKV
from masked_oracle import MaskedOracle, Transcript, kept_columns
from numeric_checks import assert_close
from pairwise import each_value, quick, quick_rows
from recorded_calls import recorded_calls
from tiny_models import HEAD_MAP, compiled_once, kvzap_file, left_pad, random_ids, statistics_file, tiny_model

RULES = {
    "cake": {"tau1": 1.6, "tau2": 0.4, "window": 6},
    "tova": {},
    "h2o": {"window": 6},
    "streaming_llm": {"window": 6},
    "vatp": {"window": 6, "indicator": "h2o", "sinks": 2},
    "r_kv": {"window": 6, "buffer": 5},
    "triattention": {"buffer": 5},
}
OF_TOKENS = {"kvzap": {"window": 6, "weights": kvzap_file(2), "evict_during_decode": True}}
"""Compared with scores by hand in test_kvzap.py; of two layers."""
KVZAP = {"policy": "kvzap", "window": 8, "weights": kvzap_file(3)}
PAIRS = {
    "lava+h2o": {"policy": "lava", "window": 8, "decode_policy": "h2o", "decode_window": 6},
    "lava+triattention": {"policy": "lava", "window": 8, "decode_policy": "triattention", "decode_buffer": 5},
    "keydiff+r_kv": {"policy": "keydiff", "window": 8, "decode_policy": RKV(window=6, buffer=5)},
    "kvzap+r_kv": {**KVZAP, "decode_policy": "r_kv", "decode_buffer": 5},
    "kvzap+h2o": {**KVZAP, "decode_policy": "h2o", "decode_window": 6},
    "kvzap+streaming_llm": {**KVZAP, "decode_policy": "streaming_llm"},
    "snapkv+kvzap": {"policy": "snapkv", "window": 8, "decode_policy": "kvzap", "decode_window": 6},
}
PAIRS["snapkv+kvzap"] |= {"decode_weights": KVZAP["weights"], "decode_evict_during_decode": True}
"""One policy for the prompt and another's decode rule."""
EVICTING = {
    f"{name}, {parity}": {"policy": name, "parity": parity, **options}
    for parity in ("paper", "code")
    for name, options in RULES.items()
}
EVICTING |= PAIRS
BUDGET, STEPS = 16, 12


def compiled(layers=2, budget=BUDGET, **options):
    """A compiled model that is shared with other tests."""
    return compiled_once("llama", layers=layers, backend="eager", budget=budget, **options)[1]


OFTEN = [*zip(EVICTING, itertools.cycle(["eager", "cpp"]), strict=False)]
SELDOM = ("kvzap+h2o", "kvzap+streaming_llm", "lava+triattention", "keydiff+r_kv")
SELDOM += tuple(f"{name}, code" for name in ("tova", "h2o", "streaming_llm", "vatp"))  # which evict as by the paper


@pytest.mark.parametrize(
    ("name", "impl"),
    quick_rows([*itertools.product(EVICTING, ["eager", "cpp"])], [row for row in OFTEN if row[0] not in SELDOM]),
)
def test_a_padded_batch_keeps_what_plan_says_of_each_row_at_every_step(monkeypatch, name, impl):
    """Prompts above the budget, and below it: these first grow to it."""
    calls, entered = recorded_calls(monkeypatch), {}
    if impl == "cpp":
        for function in ("attend_slots", "evict_lowest", "pool_in_order"):
            monkeypatch.setattr(reference, function, getattr(cpu, function))
    policy = resolve(**EVICTING[name])
    original = type(policy).token_scores

    def scored(self, x, layer, *args):
        entered.setdefault(layer, []).append(x.clone())
        return original(self, x, layer, *args)

    monkeypatch.setattr(type(policy), "token_scores", scored)
    fast = compiled(layers=3, budget=None, policy="full")
    fast.set_policy(policy, BUDGET)
    prompts = prompts_of(40, BUDGET + 3, BUDGET - 4)
    ids, mask = left_pad(prompts)
    cache = fast(ids, attention_mask=mask, logits_to_keep=1).past_key_values
    found = [kept_columns(cache, 40)]
    for step in range(STEPS):
        fast(random_ids(3, 1, seed=step), past_key_values=cache)
        found.append(kept_columns(cache, cache.columns))
    assert int(cache.lengths.max()) <= found[0].sum(-1).max() + 8, "it does not grow"
    every = {layer: torch.cat(parts, 1) for layer, parts in entered.items()}
    steps = [calls[3 * (step + 1) : 3 * (step + 2)] for step in range(STEPS)]
    for row, prompt in enumerate(prompts):
        n, pad = len(prompt), 40 - len(prompt)
        own = slice(row, row + 1)
        q, k, v = (torch.stack([call[i][own, :, pad:] for call in calls[:3]]) for i in range(3))
        new = ([torch.stack([call[i][own, :, 0] for call in step]) for step in steps] for i in range(3))
        decode = tuple(map(torch.stack, new))
        x = torch.stack([every[i][own, pad:] for i in range(3)]) if "token_scores" in policy.inputs else None
        asked = {"rope_frequencies": fast.model.rotary_emb.inv_freq.expand(3, -1), "entering": x}
        expected = plan(policy, q, k, v, budget=BUDGET, decode=decode, **asked)
        assert torch.equal(found[0][row, ..., pad:], expected.keep[:, 0])
        for step in range(STEPS):
            wanted = expected.decode_keep[step, :, 0, :, : n + step + 1]
            assert torch.equal(found[step + 1][row, ..., pad:], wanted), f"row {row}, step {step}"
    if name in PAIRS:
        assert fast.report().to_dict()["policy"] == name
        fast.set_policy(policy.prompt, BUDGET)
        alone = fast(ids, attention_mask=mask).past_key_values
        assert torch.equal(kept_columns(alone, 40), found[0]), "as the prompt's policy alone"


def released_cake(scores, lengths, prompt_keys, decode, scale, window):
    """What CAKE's released code keeps after each step, ``[S, K, N + S]``, and its closest call, in float64.

    Lists in the order in which the code stores entries: it concatenates the best older ones, best first, and the
    newest. The closest call is the smallest distance of two scores that it puts in order, relative to the larger.
    """
    (kv_heads, n), (queries, keys) = scores.shape, decode
    order = [
        torch.cat([scores[h, : n - window].topk(int(lengths[h])).indices, torch.arange(n - window, n)])
        for h in range(kv_heads)
    ]
    keep = torch.zeros(len(queries), kv_heads, n + len(queries), dtype=torch.bool)
    every, closest = prompt_keys.double(), 1.0
    for step, (query, key) in enumerate(zip(queries.double(), keys.double(), strict=True)):
        every = torch.cat([every, key[:, None]], 1)
        for head, rows in enumerate(query.unflatten(0, (kv_heads, -1))):
            held = torch.cat([order[head], torch.tensor([n + step])])
            attention = (rows @ every[head, held].T * scale).softmax(-1)[None, :, :-window]
            pooled = torch.nn.functional.avg_pool1d(attention, 5, 1, 2)[0].mean(0)
            best, index = pooled.sort(descending=True)
            closest = min(closest, float(((best[:-1] - best[1:]) / best[:-1]).min()))
            order[head] = torch.cat([held[:-window][index[: int(lengths[head])]], held[-window:]])
            keep[step, head, order[head]] = True
    return keep, closest


@pytest.mark.parametrize("family", quick(["gemma3", "qwen3"], ["gemma3"]))
def test_a_long_decode_of_cake_as_released_keeps_what_its_lists_keep(monkeypatch, family):
    """In the layers that attend to all tokens; of the others nothing is compressed."""
    calls, window, tokens, steps = recorded_calls(monkeypatch), 6, 40, 40
    options = {"tau1": 1.6, "tau2": 0.4, "window": window, "parity": "code"}
    model, fast = two_layers(family, policy="cake", budget=26, **options)
    ids = random_ids(1, tokens, seed=1)
    cache = fast(ids).past_key_values
    full = list(cache.layer_ids)
    prompt = [calls[layer] for layer in full]
    lengths = kept_columns(cache, tokens - window)[0, full].sum(-1)
    text = Transcript(MaskedOracle(model), ids, torch.ones_like(ids), len(cache), 2)
    calls.clear()
    logits, found = [], []
    for step in range(steps):
        new = random_ids(1, 1, seed=1000 + step)
        text.append(new, kept_columns(cache, tokens + step))
        logits.append(fast(new, past_key_values=cache).logits)
        found.append(kept_columns(cache, tokens + steps)[0, full])
    assert_close("logits", torch.cat(logits, 1), text.logits()[:, tokens:], atol=1e-4)
    q, k, v = (torch.stack([call[i] for call in prompt]) for i in range(3))
    scale = model.model.layers[0].self_attn.scaling
    scores = plan("cake", q, k, v, budget=26, scale=scale, **options).scores
    for i, layer in enumerate(full):
        decode = [torch.stack([call[part][0, :, 0] for call in calls[i :: len(full)]]) for part in range(2)]
        expected, closest = released_cake(scores[i, 0], lengths[i], k[i, 0], decode, scale, window)
        assert closest > 1e-6, "two scores are a tie in float32"
        for step in range(steps):
            assert torch.equal(found[step][i], expected[step][:, : tokens + steps]), f"layer {layer}, step {step}"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("policy", "window"), [("h2o", 6), ("kvzip_plus", 0), ("criticalkv", 6)])
def test_a_float64_model_keeps_what_it_keeps_in_float32(policy, window):
    caches, single = [], compiled(policy=policy, window=window)
    double = compiled_anew(tiny_model("llama", layers=2).double(), policy=policy, budget=BUDGET, window=window)
    for fast in (single, double):
        cache = fast(random_ids(1, 40)).past_key_values
        fast(random_ids(1, 1, seed=1), past_key_values=cache)
        caches.append(kept_columns(cache, 41))
    assert torch.equal(*caches)


@each_value(
    parity=["paper", "code"],
    policy=[
        name
        for name, kind in sorted(kvpass.POLICIES.items())
        if not (name in {*RULES, "full"} or kind.inputs & {"replays", "token_scores"})
    ],
)
def test_a_padded_prompt_keeps_what_plan_says_of_each_row(monkeypatch, policy, parity):
    """test_replays.py has those that replay, test_kvzap.py the one that reads what enters attention."""
    calls = recorded_calls(monkeypatch)
    options = {"window": 8, "parity": parity}
    if policy == "duo_attention":
        options |= {"head_map": HEAD_MAP, "sinks": 3}
    fast = compiled(layers=3, policy=policy, **options)
    cache = fast(*padded(50, 37), logits_to_keep=1).past_key_values
    if "projection" in kvpass.POLICIES[policy].inputs:
        options["output_weights"] = torch.stack([layer.self_attn.o_proj.weight.detach() for layer in fast.model.layers])
    if "rotation" in kvpass.POLICIES[policy].inputs:
        options["rope_frequencies"] = fast.model.rotary_emb.inv_freq.expand(3, -1)
    for row, n in enumerate((50, 37)):
        q, k, v = (torch.stack([call[i][row : row + 1, :, 50 - n :] for call in calls]) for i in range(3))
        expected = plan(policy, q, k, v, budget=BUDGET, **options)
        assert torch.equal(kept_columns(cache, 50)[row, ..., 50 - n :], expected.keep[:, 0])
        assert torch.equal(cache.lengths[row], expected.lengths[:, 0])


@pytest.mark.parametrize("policy", quick([*RULES, *OF_TOKENS], ["cake", "r_kv", "kvzap"]))
def test_several_tokens_at_once_evict_as_one_after_another(policy):
    fast = compiled(policy=policy, **(RULES | OF_TOKENS)[policy])
    ids, new = random_ids(2, 40), random_ids(2, 7, seed=1)
    together, single = fast(ids).past_key_values, fast(ids).past_key_values
    logits = fast(new, past_key_values=together).logits
    each = torch.cat([fast(token, past_key_values=single).logits for token in new.split(1, 1)], 1)
    assert_close("logits", logits, each, atol=1e-4)
    assert torch.equal(together.positions, single.positions)
    for token in random_ids(2, 8, seed=2).split(1, 1):  # those tokens leave the window
        fast(token, past_key_values=together)
        fast(token, past_key_values=single)
    assert torch.equal(together.positions, single.positions)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["r_kv, paper", "triattention, paper", *PAIRS])
def test_inductor_evicts_as_eager_does(name):
    """Rows of a padded batch, whose buffers are full at different steps; one graph for all of them."""
    model, found = tiny_model("llama", layers=3), []
    ids, mask = padded(40, 21, 3)
    for backend in ("inductor", "eager"):
        fast = kvpass.compile(model, backend=backend, budget=BUDGET, **EVICTING[name])
        found.append(greedy(fast, ids, 25, attention_mask=mask, return_dict_in_generate=True))
        assert [record.phase for record in fast.report().compiled] == ["prefill", "decode"]
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert torch.equal(found[0].past_key_values.positions, found[1].past_key_values.positions)


@torch.no_grad()
def test_statistics_of_a_file_alone_decide_what_is_kept():
    held, prompt = load_file(statistics_file()), random_ids(2, 40)
    fast = compiled(policy="triattention", buffer=5)
    own = fast(prompt).past_key_values
    fast.set_policy("triattention", BUDGET, buffer=5, statistics=statistics_file())
    cache = fast(prompt).past_key_values
    for row in (0, 1):
        rows = cache.state.full_layers[0].buffers.rule_rows[:, row]
        assert_close("mean", rows[..., 0, :], held["query_mean"], atol=0)
        assert_close("modulus", rows[..., 1, :8], held["query_modulus"], atol=0)
    assert not torch.equal(cache.positions, own.positions)
    fast.set_policy("triattention", BUDGET, buffer=5)


@pytest.mark.parametrize("policy", ["triattention", "expected_attention"])
def test_statistics_that_do_not_fit_are_refused(policy, tmp_path):
    other = "query_modulus" if policy == "triattention" else "query_covariance"
    held, file = load_file(statistics_file()), tmp_path / "file"
    save_file({name: x for name, x in held.items() if name != other}, tmp_path / "lacks")
    save_file(held | {"query_mean": held["query_mean"] * torch.nan}, tmp_path / "nan")
    (tmp_path / "text").write_text("no tensors")
    fast = compiled(budget=None, policy="full")
    for name, message in (
        *(("none", "cannot be read"), ("text", "cannot be read"), ("nan", "query_mean: all values must be finite")),
        ("lacks", f"lacks query_mean or {other}, which 'kvpass calibrate' writes"),
    ):
        with pytest.raises(ValueError, match=f"statistics=.*{message}"):
            fast.set_policy(policy, BUDGET, statistics=str(tmp_path / name))
    shutil.copy(statistics_file((1, 2, 2)), file)
    fast.set_policy(policy, BUDGET, statistics=str(file))
    with pytest.raises(ValueError, match=r"holds .*\(1, 2, 2, 16\).*need .*\(2, 2, 2, 16\)"):
        fast(random_ids(1, 30))
    shutil.copy(statistics_file(), file)
    fast.set_policy(policy, BUDGET, statistics=str(file))
    assert int(fast(random_ids(1, 30)).past_key_values.lengths.sum()) == BUDGET * 4, "it is read again"


def test_the_first_slot_table_is_made_without_another_pool(monkeypatch):
    """Whatever is made on the way, nothing has as many elements as the pool's values."""
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made.append(func(*args, **(kwargs or {})))
            return made[-1]

    original = prefill.first_slots

    def watched(*args):
        with Watch():
            return original(*args)

    monkeypatch.setattr(prefill, "first_slots", watched)
    cache = compiled(policy="h2o", window=6, budget=3 * BUDGET)(random_ids(1, 64)).past_key_values
    pool_v = cache.state.full_layers[0].buffers.pool_v
    results = [result for result in made if isinstance(result, torch.Tensor) and result.is_floating_point()]
    assert 0 < max(result.numel() for result in results if result.data_ptr() != pool_v.data_ptr()) < pool_v.numel()

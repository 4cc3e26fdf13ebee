"""Decoders with recurrent layers beside attention: their states are part of the cache."""

from itertools import cycle, product
from pathlib import Path

import pytest
import torch
import torch._dynamo
from transformers import DynamicCache

import kvpass
from compiled_models import UNLIMITED, compiled_anew, greedy, in_pieces, padded, two_layers
from kvpass.compiler import backend as backends
from masked_oracle import assert_decodes_like_the_masked_model, assert_padded_rows_equal_alone
from numeric_checks import assert_close
from pairwise import quick, quick_rows
from support_table import listed, supported_row
from tiny_models import HYBRIDS, in_blocks, random_ids, tiny_model
from versions import STATES

pytestmark = STATES
MODELS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
FAMILY = [pytest.param(name, marks=[] if name == "lfm2" else pytest.mark.exhaustive) for name in HYBRIDS]
POLICIES = dict(zip(HYBRIDS, cycle(["lava", "pyramidkv", "cake", "ada_snapkv", "tova", "keydiff"]), strict=False))
OPTIONS = {"cake": {"tau1": 1.0, "tau2": 1.0, "evict_during_decode": False}, "tova": {"evict_during_decode": False}}


def pair(family="lfm2", budget=UNLIMITED, backend="eager"):
    """A model of all layers, or of two: of lfm2 on the eager backend, which is tried in every run."""
    layers = 2 if (family, backend) == ("lfm2", "eager") else None
    return two_layers(family, layers=layers, budget=budget, backend=backend)


def states_of(cache):
    return [state.buffers.held.clone() for state in cache.state.states]


COMPILED = ["lfm2", "granitemoehybrid", "falcon_h1", "qwen3_next", "qwen3_5", "olmo_hybrid"]


@pytest.mark.parametrize(
    ("family", "backend"),
    quick_rows([*product(HYBRIDS, ["eager"]), *product(COMPILED, ["inductor"])], [("lfm2", "eager")] * bool(HYBRIDS)),
)
def test_contracts_1_4_6_two_turns_and_a_padded_batch(family, backend):
    model, fast = pair(family, backend=backend)
    ids, told = random_ids(2, 61), {"return_dict_in_generate": True, "output_logits": True}
    first, expected = (greedy(subject, ids, **told) for subject in (fast, model))
    torch.testing.assert_close(first.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(first.sequences, expected.sequences)
    longer = torch.cat([first.sequences, random_ids(2, 13, seed=3)], 1)
    seen = {"attention_mask": torch.ones_like(longer)}  # the answer may hold the id of padding
    expected = greedy(model, longer, **seen)
    assert torch.equal(greedy(fast, longer, past_key_values=first.past_key_values, **seen), expected)
    assert_padded_rows_equal_alone(fast, "lava", copies=2)
    assert supported_row(family, fast) in listed(MODELS_PAGE.read_text())


@pytest.mark.parametrize("family", FAMILY)
def test_states_are_those_of_transformers(family):
    model, fast = two_layers(family, budget=UNLIMITED)
    ids = random_ids(2, 40)
    cache = fast.compress(ids[:, :25], reusable=False)
    for part in ids[:, 25:39], ids[:, 39:]:
        fast(part, past_key_values=cache, logits_to_keep=1)
    expected = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=expected, use_cache=True)
    for state in cache.state.states:
        layer = expected.layers[state.shape.layer]
        kind, index = state.shape.name.rstrip("0123456789"), int(state.shape.name[-1])
        torch.testing.assert_close(state.buffers.held, getattr(layer, f"{kind}_states")[index], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILY)
def test_attention_layers_decode_like_the_masked_model(family):
    (model, fast), policy = pair(family), POLICIES[family]
    fast.set_policy(policy, 20, window=8, **OPTIONS.get(policy, {}))
    assert_decodes_like_the_masked_model(model, fast, [61, 37], [*[1] * 9, 21])
    heads = fast.report().lengths
    assert int(heads.sum()) == heads.numel() * 20


@pytest.mark.parametrize("family", FAMILY)
def test_blocks_of_a_prompt_change_neither_entries_nor_states(family):
    _, fast = pair(family, 24)
    ids, mask = padded(100, 61, 7)
    found = []
    for block in (10**6, 17, 40):
        with in_blocks(fast, block):
            out = fast(ids, attention_mask=mask, logits_to_keep=0)
            last = fast(ids, attention_mask=mask, logits_to_keep=1).logits
        found.append((out.logits[mask.bool()], last, out.past_key_values))
    assert fast.report().compiled[0].not_in_blocks == ""
    for logits, last, cache in found[1:]:
        assert_close("logits", logits, found[0][0], atol=1e-4)
        assert_close("last logits", last, found[0][1], atol=1e-4)
        assert torch.equal(cache.positions, found[0][2].positions)
        torch.testing.assert_close(states_of(cache), states_of(found[0][2]), atol=1e-4, rtol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["bamba", "qwen3_5", "jamba", "kimi_linear"])
def test_no_length_compiles_again(family):
    fast = compiled_anew(tiny_model(family), budget=UNLIMITED)
    fast(random_ids(1, 100), logits_to_keep=1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (150, 300, 5000):
            fast(random_ids(1, tokens), logits_to_keep=1)
    assert [record.phase for record in fast.report().compiled] == ["prefill"]


def test_a_reusable_cache_and_rows_of_beams_have_states_of_their_own_which_are_reported_and_not_cropped():
    _, fast = pair(budget=24)
    cache, report = fast.compress(random_ids(2, 60)), fast.report()
    size = sum(state.buffers.held.nbytes + state.buffers.made.nbytes for state in cache.state.states)
    assert report.to_dict()["model_layers"] == [1] and report.layer_ids == (0,)
    assert report.to_dict()["state_nbytes"] == size > 0
    assert f"recurrent layers are outside the budget: {size} bytes of states" in str(report)
    before = states_of(cache)
    later = fast(random_ids(2, 5), past_key_values=cache).past_key_values
    assert all(map(torch.equal, before, states_of(cache)))
    cache.reorder_cache(torch.tensor([1, 1]))
    for state, old in zip(cache.state.states, before, strict=True):
        assert torch.equal(state.buffers.held, old[[1, 1]])
    with pytest.raises(ValueError, match="a recurrent layer holds the state after the last token"):
        later.crop(-1)
    assert later.columns == 65


def test_a_call_that_fails_leaves_the_states(monkeypatch):
    _, fast = pair(budget=24)
    cache, question = fast.compress(random_ids(2, 60), reusable=False), random_ids(2, 7, seed=2)
    twin = cache.clone()
    fast(question, past_key_values=cache.clone())  # compiles
    begin = backends.Call.begin

    def interrupted(call):
        begin(call)
        for state in call.cache.state.states:  # as if the graph had written them
            state.buffers.made.fill_(7.0)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(backends.Call, "begin", interrupted)
        fast(question, past_key_values=cache)
    assert all(map(torch.equal, states_of(cache), states_of(twin)))
    expected = fast(question, past_key_values=twin).logits
    assert torch.equal(fast(question, past_key_values=cache).logits, expected)


@pytest.mark.exhaustive
def test_recompression_leaves_the_states():
    texts = random_ids(1, 60), random_ids(1, 20, seed=4)
    caches = []
    for recompress in ("every_turn", "never"):
        _, fast = two_layers("lfm2", budget=24, recompress=recompress)
        caches.append(fast.compress(texts[0], reusable=False))
        fast(texts[1], past_key_values=caches[-1])
    assert int(caches[0].lengths.sum()) < int(caches[1].lengths.sum())
    torch.testing.assert_close(states_of(caches[0]), states_of(caches[1]))


def test_a_layer_that_mixes_tokens_beside_its_state_is_refused():
    model = tiny_model("lfm2", layers=2)
    kind = type(model.model.layers[0].feed_forward)

    class Shifted(kind):
        def forward(self, x):
            return super().forward(x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])

    model.model.layers[0].feed_forward.__class__ = Shifted
    with pytest.raises(kvpass.UnsupportedAttentionError, match="is not that for pieces"):
        kvpass.compile(model, policy="full", backend="eager")(random_ids(1, 20))


@torch.no_grad()
@pytest.mark.parametrize("dtype", quick([torch.float16, torch.bfloat16], [torch.float16]), ids=str)
@pytest.mark.parametrize("family", quick([*HYBRIDS], ["lfm2"] if HYBRIDS else []))
def test_16_bits_are_as_near_to_float32_as_the_uncompiled_model_where_routing_is_held(family, dtype):
    """Experts of random weights are nearly ties, which rounding decides: every token takes all of them."""
    layers = 2 if family == "lfm2" else None
    config = tiny_model(family, layers=layers).config
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    every = next((count for name in names if (count := getattr(config, name, None))), None)
    changes = {} if every is None else {"num_experts_per_tok": every}
    model, exact = (tiny_model(family, layers=layers, dtype=dtype, **changes) for _ in range(2))
    exact.float()
    fast = compiled_anew(model, budget=UNLIMITED)
    own, ours = [], []
    for seed in range(3):
        text = random_ids(2, 48, seed=seed)
        found = [in_pieces(each, text, [40, *[1] * 8])[0][:, 40:].float() for each in (exact, model, fast)]
        for errors, logits in zip((own, ours), found[1:], strict=True):
            errors.append((logits - found[0]).abs().max().item())
    mean = [sum(errors) / len(errors) for errors in (ours, own)]
    print(f"\n{family}, {dtype}: largest error of a logit {mean[0]:.4f}, of the uncompiled model {mean[1]:.4f}")
    assert mean[0] <= 2 * mean[1]
    most = 2 if family == "lfm2_moe" else 4
    assert all(x <= most * y for x, y in zip(ours, own, strict=True)), (ours, own)

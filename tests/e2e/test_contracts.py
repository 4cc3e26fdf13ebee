"""The contracts of the design that hold for a whole model; the name of each test says which."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import kvpass
from compiled_models import UNLIMITED, compiled_anew, greedy, in_pieces, padded, reloaded, spoken, two_layers
from masked_oracle import (
    PROMPT,
    assert_decodes_like_the_masked_model,
    assert_padded_rows_equal_alone,
    kept_columns,
    under,
)
from numeric_checks import assert_close
from pairwise import each_value, quick
from policy_variants import BUILT_IN
from support_table import listed, supported_row
from tiny_models import (
    ALIBI,
    FAMILIES,
    LATENT,
    NEWEST,
    ROTATED,
    compiled_once,
    random_ids,
    tiny_model,
)
from versions import before

MODELS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
POLICIES = sorted(BUILT_IN)
NEW, PIECES = 12, [PROMPT, 1, 1, 5]
OFTEN = {"llama": 2, "gemma2": 2, "gemma3": 2, "deepseek_v3": 2, "falcon": 1}
"""Families tried in every run under one policy, and layers of each.

Of others, test_chunked_attention.py, test_cache_file.py, test_padded_questions.py (ALiBi), test_parts.py (diffllama)
and test_attention.py (gpt_neo) compare padded rows or logits with the model;
test_decode_eviction.py and test_replays.py compare padded rows of every policy with the reference.
"""
OTHER = {"gpt_oss", "mistral_sliding", "gptj", "bloom", "falcon", "falcon_alibi", "gpt_neo", "mpt", "xglm", "llama4"}
"""These, and families without a layer under the budget or with attention of their own, which no oracle can replace."""
MET_OTHERWISE = {"diffllama"} if before("5.17") else set() if before("5.24") else {"gptj"}
if before("5.16"):
    MET_OTHERWISE |= {"deepseek_v3", *LATENT}
"""Families that this version of transformers writes otherwise than the one that docs/models.md was made with."""


def policies_of(family):
    """Those that find in the family what they read: a linear layer right after attention, a rotary embedding, keys."""
    missing = set() if family in ROTATED else {"rotation"}
    missing |= {"projection"} if family in ("diffllama", "deepseek_v3", *LATENT) else set()
    missing |= {"keys"} if family in ALIBI else set()
    return [name for name in POLICIES if not missing & kvpass.POLICIES[name].inputs]


EXHAUSTIVE = [
    pytest.param(family, policies_of(family), None, id=f"{family}-all", marks=pytest.mark.exhaustive)
    for family in FAMILIES
]


def pair(family, layers=None):
    """A tiny model, and its compiled copy under any policy and budget."""
    return compiled_once(family, layers=layers, backend="eager", policy="full", budget=None)


@pytest.mark.exhaustive  # of one layer of a Llama in every run: test_compile.py
@pytest.mark.parametrize("family", FAMILIES)
def test_contract_1_unlimited_budget_is_identity_in_every_family(family):
    model = tiny_model(family)
    fast = compiled_anew(model, budget=UNLIMITED, backend="inductor")
    text = random_ids(2, PROMPT + 7, seed=1)
    assert_close("logits", in_pieces(fast, text, PIECES)[0], model(text).logits, atol=1e-4)
    ids = text[:, :PROMPT]
    assert torch.equal(spoken(fast, ids, NEW), greedy(model, ids, NEW)), "greedy tokens differ"


@pytest.mark.parametrize(
    ("family", "policies", "layers"),
    [
        *(pytest.param(family, ["lava"], OFTEN[family], id=family) for family in OFTEN if family in FAMILIES),
        *EXHAUSTIVE,
    ],
)
def test_contracts_1_and_4_identity_and_padded_rows_as_alone_under_every_policy(family, policies, layers):
    model, fast = pair(family, layers)
    for policy in policies:
        assert_identical_without_a_limit(model, fast, policy)
        assert_padded_rows_equal_alone(fast, policy, copies=1 if layers is None else 3)
    if family not in MET_OTHERWISE:
        assert supported_row(family, fast) in listed(MODELS_PAGE.read_text()), "run make support-table"


def assert_identical_without_a_limit(model, fast, policy):
    ids = random_ids(3, PROMPT + 7, seed=1)
    logits, cache = under(fast, policy, UNLIMITED, ids, [PROMPT, 1, 1, 1, 4])
    assert_close(policy, logits, model(ids).logits, atol=1e-4)
    assert cache.policy.name == policy
    assert all(int(store.lengths.min()) == PROMPT + 7 for store in cache.state.full_layers)


@pytest.mark.parametrize("family", NEWEST)
def test_contracts_1_and_4_in_families_of_the_newest_transformers(family):
    model, fast = pair(family)
    assert_identical_without_a_limit(model, fast, "lava")
    assert_padded_rows_equal_alone(fast, "lava", copies=3)
    ids = random_ids(2, PROMPT, seed=1)
    fast.set_policy("full")
    assert torch.equal(greedy(fast, ids), greedy(model, ids)), "with a cache of transformers"


@pytest.mark.skipif("dory" not in NEWEST, reason="transformers without this family")
def test_a_decoder_whose_loops_read_the_cache_of_the_last_one_is_refused():
    with pytest.raises(ValueError, match="recurrent_kv_cache_mode='last_loop'"):
        kvpass.compile(tiny_model("dory", recurrent_kv_cache_mode="last_loop"), policy="full")


@pytest.mark.parametrize("backend", quick(["eager", "inductor"], ["eager"]))
@pytest.mark.parametrize("dtype", quick([torch.bfloat16, torch.float16], [torch.bfloat16]), ids=str)
@pytest.mark.parametrize("family", quick(["llama", "gpt2"], ["llama"]))
def test_contract_1_identity_in_16_bits(family, dtype, backend):
    """Under policies that append and that evict; the cache has 16 bits too."""
    model, fast = compiled_once(family, layers=2, budget=UNLIMITED, backend=backend, changes={"dtype": dtype})
    text = random_ids(2, PROMPT + 7, seed=1)
    reference = tiny_model(family, layers=2)
    reference.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    with torch.no_grad():
        exact = reference(text).logits
        theirs = (model(text).logits.float() - exact).abs().max()
        for policy in ("lava", "h2o"):
            fast.set_policy(policy, UNLIMITED, window=8)
            ours = (in_pieces(fast, text, PIECES)[0].float() - exact).abs().max()
            assert ours <= 2 * theirs, f"{policy}: error {ours} against {theirs} of the eager model"
            fast.set_budget(20)
            cache = fast(text[:, :PROMPT]).past_key_values
            assert int(cache.lengths.sum()) == cache.lengths.numel() * 20
            logits, held = fast(text[:, PROMPT:], past_key_values=cache).logits, cache.state.full_layers[0].buffers
            assert logits.dtype == dtype == held.pool_k.dtype == held.tail_v.dtype and logits.isfinite().all()


@each_value(policy=["lava", "snapkv", "streaming_llm"], budget=[20, 0.5, "12KiB"])
def test_contract_2_kept_entries_are_exactly_the_budget(policy, budget):
    _, fast = two_layers(policy=policy, budget=budget)
    lengths = [PROMPT, 40, 24]
    cache = fast(*padded(*lengths)).past_key_values
    g = cache.state.full_layers[0].geometry
    per_head = {20: 20, "12KiB": 12288 // (g.layers * g.kv_heads * g.entry_bytes())}.get(budget)
    for row, n in enumerate(lengths):
        entries = min(per_head if per_head is not None else int(budget * n), n)
        assert int(cache.lengths[row].sum()) == entries * g.layers * g.kv_heads
        kept = cache.positions[row]
        for layer in range(g.layers):
            for head in range(g.kv_heads):
                positions = kept[layer, head][kept[layer, head] >= 0]
                assert torch.equal(positions, positions.unique()), "positions repeat or are unordered"
                assert set(range(n - min(8, n), n)) <= set(positions.tolist()), "the window was not kept"


@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
@pytest.mark.parametrize("budget", [0.25, "2KiB"])
def test_a_prompt_no_longer_than_the_window_is_kept_whole_by_a_fraction_and_by_bytes(policy, budget, tmp_path):
    """As by an int budget: alone and beside a longer row, of which bytes keep the window and one entry more."""
    model, fast = two_layers(policy=policy, budget=budget)
    ids = random_ids(1, 5)
    assert torch.equal(greedy(fast, ids, new=4), greedy(model, ids, new=4))
    with pytest.warns(UserWarning, match="9 are kept") if budget == "2KiB" else nullcontext():
        cache = fast(*padded(PROMPT, 9, 5)).past_key_values
    most = 9 if budget == "2KiB" else PROMPT // 4
    assert [row.unique().tolist() for row in cache.lengths] == [[most], [9], [5]]
    assert torch.equal(reloaded(cache, fast, tmp_path).positions, cache.positions)


@pytest.mark.parametrize(
    ("family", "place"), [("llama", "cpu"), ("gemma3", "cpu"), pytest.param("llama", "cuda", marks=pytest.mark.gpu)]
)
def test_contract_2_nbytes_is_what_the_storages_occupy_and_does_not_grow_with_the_prompt(family, place):
    _, fast = two_layers(family) if place == "cpu" else (None, compiled_anew(tiny_model(family, layers=2)))
    fast.to(place)
    cache, bigger = (fast(random_ids(2, tokens).to(place)).past_key_values for tokens in (PROMPT, 2000))
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensors in (vars(cache.state).values(), *(part.buffers for part in cache.state.parts))
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.ndim > 0
    }
    assert cache.nbytes == sum(storages.values())
    full = 2 * PROMPT * cache.state.full_layers[0].geometry.token_bytes()
    assert bigger.ids.nbytes == 2 * 2000 * 4
    assert bigger.nbytes - bigger.ids.nbytes == cache.nbytes - cache.ids.nbytes < full * 2000 / PROMPT


@pytest.mark.parametrize(  # test_compile.py has llama in compiled code
    "family", quick([family for family in FAMILIES if family == "gpt_oss" or family not in OTHER], ["gpt_oss"])
)
def test_contract_6_compressed_decoding_equals_masking_the_full_model(family):
    model, fast = two_layers(family, budget=14)
    assert_decodes_like_the_masked_model(model, fast, [PROMPT, 37], [*[1] * 9, 50, *[1] * 9, 10])


def test_contract_7_what_is_not_understood_fails_closed_with_path_and_reason():
    model = tiny_model("llama", layers=1)
    model.model.layers[0].self_attn.is_causal = False
    fast = compiled_anew(model)
    with pytest.raises(kvpass.UnsupportedAttentionError, match=r"model\.layers\.0\.self_attn.*not causal") as refusal:
        fast(random_ids(1, PROMPT))
    assert refusal.value.module_path == "model.layers.0.self_attn"


@pytest.mark.parametrize(("family", "said"), [("gemma3", "ring of 24"), ("llama4", "chunk of 24")])
def test_contract_7_the_report_states_layers_with_a_sliding_window_or_chunks_apart(family, said):
    _, fast = two_layers(family)
    cache = fast.compress(random_ids(2, PROMPT))
    report = fast.report().to_dict()
    assert report["layers"] == list(cache.layer_ids) == [1] and report["rings"][0]["layers"] == (0,)
    assert report["ring_nbytes"] == 2 * 2 * 24 * 2 * 16 * 4 and said in str(fast.report())
    assert report["rings"][0]["chunked"] == (family == "llama4") and int(cache.lengths.sum()) == 2 * 2 * 20


def test_layers_of_a_ring_share_the_table_of_its_columns():
    _, fast = two_layers("mistral_sliding")
    fast(random_ids(2, 1), past_key_values=fast(random_ids(2, PROMPT)).past_key_values)
    compiled = fast.report().to_dict()["compiled"]
    passes = next(record["passes"] for record in reversed(compiled) if record["phase"] == "decode")
    rewrite = next(record for record in passes if record["name"] == "rewrite_cached")
    assert "kvpass.attend_ring.default: 0 -> 2 (+2)" in rewrite["op_diff"]
    assert "kvpass.columns_held.default: 0 -> 1 (+1)" in rewrite["op_diff"]


def test_contract_9_the_reported_mass_is_the_attention_of_the_window_on_what_was_kept():
    model, (_, fast) = tiny_model("llama", layers=2), two_layers(budget=16)
    ids = random_ids(1, PROMPT, seed=3)
    cache = fast(ids).past_key_values
    model.set_attn_implementation("eager")
    attentions = model(ids, output_attentions=True).attentions
    keep = kept_columns(cache, PROMPT)[0]
    mass = torch.tensor(fast.report().to_dict()["window_attention_mass"])[0]
    for layer, attention in enumerate(attentions):
        window = attention[0, :, -8:].unflatten(0, (2, 2)).mean((1, 2))
        assert_close(f"mass of layer {layer}", mass[layer], (window * keep[layer]).sum(-1), atol=1e-5)
    assert 0 < float(mass.min()) < float(mass.max()) < 1

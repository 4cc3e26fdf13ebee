"""Models whose prompts are read in selected blocks, against the uncompiled model that attends to the same blocks."""

import copy

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

import kvpass
from compiled_models import GIVEN, compiled_anew, padded, prompts_of
from kvpass.block_sparse import BlockSparse, MInference, XAttention
from kvpass.operands import Attention
from kvpass.ops.reference import attend_blocks
from kvpass.policies import Policy
from numeric_checks import assert_close
from pairwise import quick, quick_rows
from tiny_models import FAMILIES, HYBRIDS, in_blocks, random_ids, raw, tiny_model

SPARSE = MInference(vertical_size=30, slash_size=100, last_q=16)
"""Of a prompt of 420 tokens it leaves out a fifth of the blocks; XAttention's are larger."""
ORACLE = "block_sparse_oracle"


def attends_to_blocks(prefill: BlockSparse):
    """Attention of the uncompiled model: the selected blocks of all layers but the last, by a mask."""

    def attend(module, query, key, value, attention_mask, scaling=None, **given):
        call = Attention(query, key, value, scaling)
        n = query.shape[2]
        seen = torch.ones(1, query.shape[1], n, n, dtype=torch.bool)
        if prefill.dense_layers <= module.layer_idx < module.config.num_hidden_layers - 1:
            blocks, columns = prefill.selected(call, GIVEN["window"])
            seen = blocks.repeat_interleave(prefill.block, 2).repeat_interleave(prefill.block, 3)[..., :n, :n]
            single = torch.zeros(*blocks.shape[:2], n, dtype=torch.bool).scatter_(2, columns.long(), True)
            seen = seen | single[:, :, None]
        keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        logits = (query @ keys.mT * scaling).masked_fill(~seen.tril(), float("-inf"))
        return (logits.softmax(-1) @ values).transpose(1, 2).contiguous(), None

    return attend


def expected_logits(model: nn.Module, ids: torch.Tensor, prefill: BlockSparse) -> torch.Tensor:
    AttentionInterface.register(ORACLE, attends_to_blocks(prefill))
    twin = copy.deepcopy(model)
    twin.set_attn_implementation(ORACLE)
    return twin(ids, use_cache=False).logits


def kept(fast, *prompt):
    out = fast(*prompt)
    return out.past_key_values.positions, out.logits


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(
    "prefill",
    [SPARSE, MInference(vertical_size=30, slash_size=100, last_q=16, dense_layers=2), XAttention(threshold=0.05)],
    ids=lambda prefill: prefill.text,
)
def test_logits_are_those_of_the_model_that_attends_to_the_selected_blocks(backend, prefill):
    model, ids = tiny_model("llama", layers=4), random_ids(1, 900)
    fast = kvpass.compile(model, policy="full", prefill=prefill, backend=backend)
    out = fast(ids)
    assert_close("logits", out.logits, expected_logits(model, ids, prefill), atol=2e-4)
    assert (out.logits - model(ids).logits).abs().max() > 1e-2, "and not those of the whole attention"
    text, shares = fast.report().prompt.computed
    assert text == prefill.text and len(shares) == 3 - prefill.dense_layers
    assert all(0.1 < share < 0.9 for share in shares.values())
    assert f"of the blocks of attention were computed in {len(shares)}" in " ".join(str(fast.report()).split())


@pytest.mark.parametrize("family", quick([*FAMILIES, *HYBRIDS], ["gemma2", "gpt_oss", "gptj", "qwen3_next", "bloom"]))
def test_with_everything_selected_a_family_reads_its_prompts_as_ever(family):
    layers = {"layers": 3} if family not in HYBRIDS else {}
    model = tiny_model(family, **layers)
    ids = random_ids(2, 200)
    full = kvpass.compile(model, **GIVEN)
    try:
        fast = kvpass.compile(model, **GIVEN, prefill="xattention")
        positions, logits = kept(fast, ids)
    except ValueError as error:
        assert "no layer of this model can take it" in str(error)
        return
    expected, exact = kept(full, ids)
    assert torch.equal(positions, expected)
    assert_close("logits", logits, exact, atol=1e-4)


@pytest.mark.parametrize("prefill", [SPARSE, XAttention(threshold=0.3)], ids=lambda prefill: prefill.name)
def test_padded_rows_and_blocks_of_tokens_change_nothing(prefill):
    fast = compiled_anew(tiny_model("llama", layers=3), prefill=prefill)
    lengths = (420, 700, 30)
    prompts, (ids, mask) = prompts_of(*lengths), padded(*lengths)
    positions, logits = kept(fast, ids, mask)
    for row, prompt in enumerate(prompts):
        alone, expected = kept(fast, prompt[None])
        real = alone.shape[-1]
        assert torch.equal(positions[row, ..., :real], alone[0]) and (positions[row, ..., real:] < 0).all()
        assert_close("logits", logits[row, -len(prompt) :], expected[0], atol=1e-5)
    with in_blocks(fast, 130):
        again, in_pieces = kept(fast, ids, mask)
    assert torch.equal(again, positions)
    assert_close("logits", in_pieces[mask.bool()], logits[mask.bool()], atol=2e-5)


READING = [("kvzip", {}), ("r_kv", {}), ("compactor", {}), ("lava", {"window": 200})]


@pytest.mark.parametrize(("policy", "options"), quick_rows([*READING, ("kvzip", {"compact": True})], READING))
def test_policies_read_what_the_selected_attention_gives(policy, options):
    """Replays and a second reading too; the same as ever where the prefill leaves out nothing."""
    model, ids = tiny_model("llama", layers=3), random_ids(1, 520)
    given = {"policy": policy, "budget": 210 if policy == "lava" else 40, "backend": "eager", **options}
    expected, exact = kept(kvpass.compile(model, **given), ids)
    whole = MInference(vertical_size=520, slash_size=520)
    positions, logits = kept(kvpass.compile(model, **given, prefill=whole), ids)
    assert torch.equal(positions, expected)
    assert_close("logits", logits, exact, atol=1e-4)
    sparse = kept(kvpass.compile(model, **given, prefill=SPARSE), ids)
    assert not torch.equal(sparse[0], expected)


def test_programs_show_the_selection_and_raw_captures_take_it():
    model = tiny_model("llama", layers=3)
    fast = kvpass.compile(model, **GIVEN, prefill=XAttention(threshold=0.5, dense_layers=1))
    fast(random_ids(1, 40))
    text = str(fast.program())
    assert "select_blocks_1 = kvpass.select_blocks(entering_1, start, 'xattention" in text
    assert "finish_layer_1 = prompt.finish_layer(1, begin_layer_1, select_blocks_1, queries = 8)" in text
    assert "run_layer_0" in text and "run_layer_2" in text and "select_blocks_0" not in text

    module = tiny_model("llama", layers=3)
    ids = random_ids(1, 500)
    options = {"policy": "snapkv", "budget": 64, "window": 8, "compiler": "eager"}
    sparse = raw(module.forward, {**options, "prefill": SPARSE})
    with torch.no_grad(), kvpass.session():
        got = sparse(ids, position_ids=torch.arange(500)[None], use_cache=False).logits
    assert_close("logits", got, expected_logits(module, ids, SPARSE), atol=2e-4)


def test_what_cannot_select_is_refused():
    @kvpass.register_policy
    @kvpass.policies.base.dataclass(frozen=True, kw_only=True)
    class ReadsQueries(Policy):
        name = "reads_queries_of_a_prompt"

        def score(self, obs):
            return obs.recent_sum(obs.length)[:, ::2, : obs.evictable]

    model = tiny_model("llama", layers=3)
    for policy in ("h2o", ReadsQueries()):
        with pytest.raises(ValueError, match="may read the attention of all queries"):
            kvpass.compile(model, policy=policy, budget=64, prefill="xattention")
    fast = kvpass.compile(model, policy="lava", budget=64, prefill="xattention", backend="eager")
    with pytest.raises(ValueError, match="may read the attention of all queries"):
        fast.set_policy("h2o", 64)
    with pytest.raises(ValueError, match="prefill='xatention'"):
        kvpass.compile(model, policy="lava", budget=64, prefill="xatention")
    for family, layers in (("deepseek_v3", 2), ("llama", 1)):
        fast = kvpass.compile(tiny_model(family, layers=layers), **GIVEN, prefill="xattention")
        with pytest.raises(ValueError, match="prefill='xattention': no layer of this model can take it"):
            fast(random_ids(1, 40))


def test_an_appended_text_attends_to_everything_that_is_kept():
    model, ids = tiny_model("llama", layers=3), random_ids(1, 460)
    fast = kvpass.compile(model, policy="full", prefill=SPARSE, backend="eager")
    out = fast(ids[:, :420])
    more = fast(ids[:, 420:], past_key_values=out.past_key_values).logits
    cache = fast(ids[:, :420]).past_key_values
    one_by_one = [fast(ids[:, i : i + 1], past_key_values=cache).logits for i in range(420, 460)]
    assert_close("logits", more, torch.cat(one_by_one, 1), atol=2e-4)


def test_the_reference_attends_to_blocks_in_any_dtype():
    call = Attention(*(torch.randn(1, heads, 130, 16, dtype=torch.bfloat16) for heads in (4, 2, 2)), 0.25)
    selection = SPARSE.selected(call, 8)
    found = attend_blocks(call, selection, SPARSE.block)
    exact = attend_blocks(call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float()), selection, SPARSE.block)
    assert found.out.dtype == torch.bfloat16
    assert_close("out", found.out.float(), exact.out, atol=2e-2)

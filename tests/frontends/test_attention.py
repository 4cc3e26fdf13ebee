"""The transformers frontend: a window in the mask alone is refused, and a decoder is exact up to its end."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvpass
from compiled_models import greedy, in_pieces, padded
from kvpass.cache.cache_file import read_cache_file
from numeric_checks import assert_close
from pairwise import quick, quick_rows
from tiny_models import LLAMA_LIKE, random_ids, tiny_model
from versions import needs_transformers

EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
TWO_EXPERTS = {**EXPERTS, "num_experts_per_tok": 2}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 16}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}
SECOND_SLIDES = {"max_window_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
IN_MASK_ONLY = {
    "phimoe": ({**TWO_EXPERTS, "sliding_window": 8}, "layers.0", "sliding window of 8"),
    "qwen2_moe": ({**SHARED_EXPERT, **WINDOW, **SECOND_SLIDES}, "layers.1", "sliding window of 8"),
}
FEW = {"gpt_neo": 2}  # a local layer and a global one


def tiny(model_type, options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**LLAMA_LIKE, "num_hidden_layers": 2, **options})
    config.initializer_range = 0.1
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("model_type", quick([*IN_MASK_ONLY], ["qwen2_moe"]))
def test_contract_7_a_window_in_the_mask_alone_is_refused(model_type):
    options, layer, reason = IN_MASK_ONLY[model_type]
    fast = kvpass.compile(tiny(model_type, options), policy="full", backend="eager")
    with pytest.raises(kvpass.UnsupportedAttentionError, match=reason) as refusal:
        fast(random_ids(1, 20))
    assert layer in refusal.value.module_path


SHARED = {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1, "head_dim": 16, "global_head_dim": 16}
SHARED |= {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
"""Of gemma4_text: the second layer attends to keys and values of the first."""


@needs_transformers("5.23", "before, it keeps all queries")
def test_a_layer_without_a_query_of_each_token_is_refused(monkeypatch):
    def last(_, hidden, per_layer, rotary, masks, *__, **___):
        rotary = {name: (cos[:, -1:], sin[:, -1:]) for name, (cos, sin) in rotary.items()}
        return hidden[:, -1:], per_layer[:, -1:], rotary, masks

    model = tiny("gemma4_text", SHARED)
    monkeypatch.setattr(type(model.model), "_maybe_slice_kv_shared_inputs", last)
    fast = kvpass.compile(model, policy="full", backend="eager")
    with pytest.raises(kvpass.UnsupportedAttentionError, match="not every token of the prompt has a query") as refusal:
        fast.generate(random_ids(1, 20), max_new_tokens=2)
    assert "layers.1" in refusal.value.module_path


ENDS = {
    **dict.fromkeys(("gpt_neo", "xglm", "mpt"), (256, {})),
    **dict.fromkeys(("gpt2", "gptj"), (64, {"n_positions": 64})),
    "opt": (64, {"max_position_embeddings": 64}),
}
"""Where tables of positions end, and options that say so."""


@pytest.mark.parametrize("family", quick([*ENDS], ["mpt", "gpt2"]))
@torch.no_grad()
def test_a_decoder_whose_table_ends_is_exact_up_to_its_end_and_says_so_beyond(family):
    """Masks of gpt_neo and ALiBi of mpt are cut from tables, for positions after its table xglm makes a longer one.

    Where others look up a row by position, compiled code would end the process.
    """
    end, changes = ENDS[family]
    model = tiny_model(family, layers=FEW.get(family, 1), **changes)
    fast = kvpass.compile(model, policy="full", backend="eager")
    ids = random_ids(2, end + 6)
    if family == "gpt2":  # also where nothing is captured yet
        with pytest.raises(ValueError, match=f"{end + 6} tokens after 0: the decoder does not take more than {end}"):
            fast(ids)
    logits, cache = in_pieces(fast, ids[:, :end], [end - 6, 2, 1, 1, 2])
    assert_close("logits", logits, model(ids[:, :end]).logits, atol=1e-4)
    short = fast(ids[:, : end - 6]).past_key_values
    for held, seen, tokens in ((cache, end, 1), (cache, end, 6), (None, 0, end + 6), (short, end - 6, 7)):
        refused = f"{tokens} tokens after {seen}: the decoder does not take more than {end}"
        with pytest.raises(ValueError, match=refused):
            fast(ids[:, seen : seen + tokens], past_key_values=held)
    assert cache.columns == end


@pytest.mark.parametrize(
    ("family", "tokens"), quick_rows([("gpt_neo", 3), ("gpt_neo", 1), ("gpt2", 1), ("gpt2", 6)], [("gpt_neo", 3)])
)
def test_a_refused_call_on_a_loaded_cache_spoils_nothing(family, tokens, tmp_path):
    """Rings are written over; a model that has captured nothing learns of the end in the call."""
    ids, changes = random_ids(1, 256), {"n_positions": 256} if family == "gpt2" else {}
    model = tiny_model(family, layers=2, **changes)
    fast, later = (kvpass.compile(model, policy="full", backend="eager") for _ in range(2))
    cache = fast(ids[:, :250]).past_key_values
    fast(ids[:, 250:], past_key_values=cache)
    cache.save(tmp_path / "cache.kv")
    loaded = kvpass.load_cache(tmp_path / "cache.kv", later)
    with pytest.raises(ValueError, match=f"{tokens} tokens after 256: the decoder does not take more than 256"):
        later(ids[:, :tokens], past_key_values=loaded)
    loaded.save(tmp_path / "again.kv")
    was, again = (read_cache_file(tmp_path / name)[1] for name in ("cache.kv", "again.kv"))
    assert was.keys() == again.keys() and all(torch.equal(was[name], again[name]) for name in was)


@torch.no_grad()
def test_tables_of_positions_are_measured_by_positions_which_are_not_counted_from_a_padding_token():
    model = tiny_model("gpt2", layers=1, n_positions=64)
    fast = kvpass.compile(model, policy="full", backend="eager")
    ids, mask = (torch.nn.functional.pad(x, (44, 0)) for x in padded(20, 12))
    assert torch.equal(greedy(fast, ids, attention_mask=mask), greedy(model, ids, attention_mask=mask))
    with pytest.raises(ValueError, match="its table of positions ends there and one would be at 69"):
        fast(ids[:, :20], position_ids=torch.arange(50, 70).expand(2, -1), logits_to_keep=1)
    with pytest.raises(ValueError, match="counts positions from its padding token"):
        kvpass.compile(tiny("roberta", {"is_decoder": True}), policy="full", backend="eager")


@pytest.mark.parametrize("family", quick(["gptj", "gpt_neo"], ["gpt_neo"]))
@torch.no_grad()
def test_a_first_prompt_may_be_at_other_positions(family):
    """A capture looks at positions where masks are made of them."""
    model, ids, later = tiny_model(family, layers=1), random_ids(1, 20), torch.arange(5, 25)[None]
    fast = kvpass.compile(model, policy="full", backend="eager")
    assert_close("at 5", fast(ids, position_ids=later).logits, model(ids, position_ids=later).logits, atol=1e-4)


@pytest.mark.parametrize("family", quick(["gptj", "gpt_neo"], ["gpt_neo"]))
@torch.no_grad()
def test_a_first_prompt_may_be_of_one_token_and_not_as_long_as_a_table_or_longer(family):
    model = tiny_model(family, layers=1)
    fast = kvpass.compile(model, policy="full", backend="eager")
    for tokens, reason in ((256, "for exactly 256 tokens"), (257, "fails on an input of 257 tokens")):
        if family == "gpt_neo":
            with pytest.raises(ValueError, match=reason):
                fast(random_ids(1, tokens))
    ids = random_ids(1, 4)
    assert_close("logits", in_pieces(fast, ids, [1] * 4)[0], model(ids).logits, atol=1e-4)

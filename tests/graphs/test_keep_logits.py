"""One capture serves every ``logits_to_keep``, and the head is run for the tokens that are asked for."""

from functools import partial

import pytest
from torch._dynamo.utils import counters
from torch.nn import functional as F
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import kvpass
from kvpass.graphs.keep_logits import keep_logits_pass
from kvpass.graphs.passes import CANONICAL_PASSES
from numeric_checks import assert_close
from tiny_models import random_ids, tiny_model

KEEP = (9, 1, 0, 40)


class CutsLogits(LlamaForCausalLM):
    """Computes the logits of all tokens, and returns the last ones."""

    def forward(self, *, logits_to_keep=0, **given):
        logits = self.lm_head(self.model(**given).last_hidden_state)
        return CausalLMOutputWithPast(logits=logits[:, -logits_to_keep:] if logits_to_keep else logits)


@pytest.mark.parametrize(
    ("family", "rows", "before_head"), [("llama", 2, 1), ("gemma2", 1, 1), ("lfm2", 1, 1), ("cuts", 1, 0)]
)
def test_one_capture_gives_the_logits_that_are_asked_for(family, before_head, rows):
    model = tiny_model("llama" if family == "cuts" else family, layers=2)
    if family == "cuts":
        model.__class__ = CutsLogits
    fast, ids = kvpass.compile(model, policy="full", budget=None, backend="eager"), random_ids(rows, 60)
    counters.clear()
    expected = model(input_ids=ids).logits
    fast(ids[:, :3])  # the capture is made with fewer tokens than logits are kept of later
    for keep in KEEP:
        prompt = fast(ids[:, :20], logits_to_keep=keep)
        more = fast(ids[:, 20:], past_key_values=prompt.past_key_values, logits_to_keep=keep)
        assert_close(f"prompt, {keep}", prompt.logits, expected[:, :20][:, -keep:], atol=1e-4)
        assert_close(f"more, {keep}", more.logits, expected[:, 20:][:, -keep:], atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
    passes = [record for graph in fast.report().compiled for record in graph.passes]
    assert [record.sites for record in passes if record.name == "keep_logits"] == [before_head] * 4


def test_a_prompt_of_fewer_tokens_is_not_captured_anew():
    model = tiny_model("llama", layers=1)
    fast, ids = kvpass.compile(model, policy="full", budget=None, backend="eager"), random_ids(1, 30)
    counters.clear()
    for tokens, keep in ((30, 7), (5, 3), (4, 1), (2, 0), (1, 1), (2, 1)):
        logits = fast(ids[:, :tokens], logits_to_keep=keep).logits
        assert_close(f"{tokens}, {keep}", logits, model(ids[:, :tokens]).logits[:, -keep:], atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_slice_before_attention_is_not_where_tokens_are_left_out(capture, decoder, inputs):
    module = decoder()

    class NoPositions(type(module)):
        def forward(self, ids, positions):
            x = self.embed(ids)[:, 0:]  # all tokens, before attention that sees neither positions nor sizes
            rows = self.layers[0].projection(x).unflatten(-1, (8, 8)).transpose(1, 2)
            out = F.scaled_dot_product_attention(*rows.split([4, 2, 2], 1), is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(2) @ self.embed.weight.T

    module.__class__ = NoPositions
    passes = [*CANONICAL_PASSES, partial(keep_logits_pass, logits=1)]
    graph, counts = capture(module, inputs(), passes, execute=False)
    (logits,) = graph.graph.output_node().all_input_nodes
    assert counts[-1] == 0 and logits.meta["example_value"].shape[1] == 1

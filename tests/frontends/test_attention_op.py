"""kvpass.attention: equal to its formula, and compressed in a module of one's own."""

import pytest
import torch

import kvpass
from kvpass.operands import Attention
from numeric_checks import exact_attention
from small_decoders import DIM, SmallDecoder
from tiny_models import in_session, random_ids, raw

KV_HEADS = 2


def attention(query, key, value, sliding_window=None, softcap=None, sinks=None):
    """What ``kvpass.attention`` promises, from the definition."""
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    hidden = (distance < 0) | (distance >= (sliding_window or query.shape[2]))
    return exact_attention(Attention(query, key, value, DIM**-0.5, softcap, sinks), hidden).out.value.float()


FORMS = [{}, {"sliding_window": 5}, {"softcap": 0.1, "sinks": torch.arange(4.0)}]
"""Options of each layer."""


class Decoder(SmallDecoder):
    """With ``kvpass.attention``, or with what it promises."""

    def __init__(self, declared: bool) -> None:
        super().__init__(layers=len(FORMS), kv_heads=KV_HEADS)
        self.declared = declared

    def attend(self, q, k, v, layer):
        return (kvpass.attention if self.declared else attention)(q, k, v, **FORMS[layer])


@torch.no_grad()
def test_a_declared_attention_op_computes_and_decodes_what_it_promises():
    declared, plain, ids = Decoder(True), Decoder(False), random_ids(2, 30)
    torch.testing.assert_close(declared(ids), plain(ids), atol=1e-4, rtol=1e-4)
    compiled = raw(declared, {"policy": "full", "compiler": "eager"})
    logits, cache = in_session(compiled, [20, *[1] * 10], ids)
    torch.testing.assert_close(logits, plain(ids), atol=1e-4, rtol=1e-4)
    assert [ring.group.sliding_window for ring in cache.state.sliding_layers] == [5]


def test_operands_that_do_not_go_together_are_refused():
    for query, key, options, message in (
        ((1, 4, 5, 8), (1, 2, 6, 8), {}, r"key \(1, 2, 6, 8\)"),
        ((1, 3, 5, 8), (1, 2, 5, 8), {}, "3 query heads: must be a multiple of the 2"),
        ((1, 4, 5, 8), (1, 2, 5, 8), {"sliding_window": 0}, "sliding_window=0: must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            kvpass.attention(*map(torch.zeros, (query, key, key)), **options)

"""kvpass.attention: equal to its formula, and compressed in a module of one's own."""

from typing import Any

import pytest
import torch

import kvpass
from kvpass.operands import Attention
from numeric_checks import exact_attention
from pairwise import quick
from small_decoders import DIM, SmallDecoder
from tiny_models import random_ids

KV_HEADS = 2


def attention(query, key, value, sliding_window=None, softcap=None, sinks=None):
    """What ``kvpass.attention`` promises, from the definition."""
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    hidden = (distance < 0) | (distance >= (sliding_window or query.shape[2]))
    return exact_attention(Attention(query, key, value, DIM**-0.5, softcap, sinks), hidden).out.value.float()


class Decoder(SmallDecoder):
    """With ``kvpass.attention``, or with what it promises."""

    def __init__(self, declared: bool, options: dict[str, Any]) -> None:
        super().__init__(layers=1, kv_heads=KV_HEADS)
        self.declared, self.options = declared, options

    def attend(self, q, k, v, layer):
        return (kvpass.attention if self.declared else attention)(q, k, v, **self.options)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


FORMS = {"plain": {}, "sliding window": {"sliding_window": 5}}
FORMS["softcap and sinks"] = {"softcap": 0.1, "sinks": torch.arange(4.0)}


@pytest.mark.parametrize("form", quick([*FORMS], ["sliding window", "softcap and sinks"]))
@torch.no_grad()
def test_a_declared_attention_op_computes_and_decodes_what_it_promises(form):
    options = FORMS[form]
    declared, plain = (Decoder(name, options) for name in (True, False))
    ids = random_ids(2, 30)
    torch.testing.assert_close(declared(ids), plain(ids), atol=1e-4, rtol=1e-4)
    settings = {"policy": "full", "compiler": "eager"}
    compiled = torch.compile(declared, backend="kvpass", fullgraph=True, dynamic=True, options=settings)
    with kvpass.session() as session:
        logits = [compiled(ids[:, :20])] + [compiled(ids[:, i : i + 1]) for i in range(20, 30)]
    torch.testing.assert_close(torch.cat(logits, 1), plain(ids), atol=1e-4, rtol=1e-4)
    windows = [ring.group.sliding_window for ring in session.cache.state.sliding_layers]
    assert windows == [window for name, window in options.items() if name == "sliding_window"]


def test_operands_that_do_not_go_together_are_refused():
    for query, key, options, message in (
        ((1, 4, 5, 8), (1, 2, 6, 8), {}, r"key \(1, 2, 6, 8\)"),
        ((1, 3, 5, 8), (1, 2, 5, 8), {}, "3 query heads: must be a multiple of the 2"),
        ((1, 4, 5, 8), (1, 2, 5, 8), {"sliding_window": 0}, "sliding_window=0: must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            kvpass.attention(*map(torch.zeros, (query, key, key)), **options)

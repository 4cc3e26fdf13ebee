"""Sites get KV heads as they were before the repeat, only where the repeat is proved.

All repeats of a table are captured as one graph of as many attention calls, since a capture is what takes time.
"""

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional as F

from kvpass.graphs.canonical import find_sites
from kvpass.graphs.find.repeat_kv import strip_repeat_kv_pass
from kvpass.graphs.find.sdpa import find_attention_pass

G = 2


def expand_and_reshape(x: Tensor) -> Tensor:
    b, kv_heads, t, d = x.shape
    return x[:, :, None, :, :].expand(b, kv_heads, G, t, d).reshape(b, kv_heads * G, t, d)


def before_the_transpose(x: Tensor) -> Tensor:
    """As in code that keeps ``[B, T, K, D]`` until the attention call."""
    x = x.transpose(1, 2).contiguous()
    b, t, kv_heads, d = x.shape
    return x[:, :, :, None, :].expand(b, t, kv_heads, G, d).reshape(b, t, kv_heads * G, d).transpose(1, 2)


INTERLEAVED = {
    "expand and reshape": expand_and_reshape,
    "repeat_interleave": lambda x: x.repeat_interleave(G, dim=1),
    "stack": lambda x: torch.stack([x, x], dim=2).flatten(1, 2),
    "repeat of a new axis": lambda x: x.unsqueeze(2).repeat(1, 1, G, 1, 1).view(x.shape[0], -1, x.shape[2], x.shape[3]),
    "before the transpose": before_the_transpose,
    "scaled before": lambda x: (x * 3).repeat_interleave(G, dim=1),
    "written to before": lambda x: write(x.clone(), 1).repeat_interleave(G, dim=1),
}

OTHER_ORDER = {
    "tiled": lambda x: x.repeat(1, G, 1, 1),
    "reversed heads": lambda x: x.repeat_interleave(G, dim=1).flip(1),
    "clamped": lambda x: x.repeat_interleave(G, dim=1).clamp(-8, 8),
    "small ones dropped": lambda x: F.hardshrink(x.repeat_interleave(G, dim=1), 1e-2),
    "rolled tokens": lambda x: x.repeat_interleave(G, dim=1).roll(1, dims=2),
    "written to afterwards": lambda x: write(x.repeat_interleave(G, dim=1), 1),
    "base written to afterwards": lambda x: repeat_then_write(x.clone()),
}


def write(x: Tensor, head: int) -> Tensor:
    x[:, head].mul_(-1.0)
    return x


def repeat_then_write(x: Tensor) -> Tensor:
    repeated = x.repeat_interleave(G, dim=1)
    x.mul_(-1.0)
    return repeated


def run(repeats, capture, *, batch: int = 2, dynamic: bool = True) -> tuple[GraphModule, int, list[tuple[int, int]]]:
    """Graph, sites stripped, and (key heads, value heads) of the site of every (repeat of K, repeat of V)."""

    def attend(qkv: Tensor) -> list[Tensor]:
        q, k, v = qkv.split([4, 2, 2], dim=1)
        return [F.scaled_dot_product_attention(q, for_k(k), for_v(v), is_causal=True) for for_k, for_v in repeats]

    passes = [find_attention_pass, strip_repeat_kv_pass]
    gm, (found, stripped) = capture(attend, [torch.randn(batch, 8, 11, 8)], passes, dynamic=dynamic)
    assert found == len(repeats)
    heads = [tuple(int(x.meta["example_value"].shape[1]) for x in (site.k, site.v)) for site in find_sites(gm)]
    return gm, stripped, heads


@pytest.mark.parametrize(("batch", "dynamic"), [(1, True), (2, False)])
def test_every_interleaved_repeat_is_undone(batch, dynamic, capture):
    repeats = [(repeat, repeat) for repeat in INTERLEAVED.values()]
    gm, stripped, heads = run(repeats, capture, batch=batch, dynamic=dynamic)
    assert dict(zip(INTERLEAVED, heads, strict=True)) == dict.fromkeys(INTERLEAVED, (2, 2))
    assert stripped == len(repeats)
    names = {str(node.target) for node in gm.graph.nodes}
    assert not any(word in name for name in names for word in ("repeat", "stack", "flatten", "expand"))


def test_any_other_repeat_is_left_as_it_is(capture):
    _, stripped, heads = run([(repeat, repeat) for repeat in OTHER_ORDER.values()], capture)
    assert dict(zip(OTHER_ORDER, heads, strict=True)) == dict.fromkeys(OTHER_ORDER, (4, 4))
    assert stripped == 0


def test_keys_and_values_are_stripped_together_or_not_at_all(capture):
    interleaved, tiled = INTERLEAVED["repeat_interleave"], OTHER_ORDER["tiled"]
    _, stripped, heads = run([(interleaved, tiled), (tiled, interleaved)], capture)
    assert (stripped, heads) == (0, [(4, 4), (4, 4)])


def test_one_kv_head_expanded_to_all_query_heads_is_one_kv_head(capture):
    def one_head(x: Tensor) -> Tensor:
        return x[:, :1].expand(-1, 4, -1, -1)

    _, stripped, heads = run([(one_head, one_head)], capture)
    assert (stripped, heads) == (1, [(1, 1)])

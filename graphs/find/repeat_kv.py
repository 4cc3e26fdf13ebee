"""Pass keys and values to attention ops before their repeat to the query heads.

Before::

    rows = k[:, :, None].expand(B, K, G, T, D)      # or repeat_interleave(k, G, dim=1), or any other way
    k_repeated = rows.reshape(B, H, T, D)
    out = kvpass.site(q, k_repeated, v_repeated, scale)

After::

    out = kvpass.site(q, k, v, scale)

The repeat is recognised by evaluating it: query head h must read KV head h // G. A repeat in another order, or one
that cannot be evaluated, stays: the result is correct, but the cache then has H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.graphs.fx_utils import (
    DataFlow,
    Dim,
    erase_dead_nodes,
    recorded,
    shape_of,
    value_inputs,
)
from kvpass.graphs.insert_nodes import insert_method
from kvpass.graphs.rewrite_attention import Site, find_sites
from kvpass.graphs.verify.examples import (
    EXAMPLE_LENGTHS,
    EvaluationError,
    concrete,
    evaluate,
    example_sizes,
    random_like,
)


@dataclass(frozen=True)
class _Base:
    """A tensor before the repeat: ``[B, K, T, D]``, or ``[B, T, K, D]`` when ``tokens_first``."""

    node: Node
    kv_heads: int
    tokens_first: bool


def strip_repeat_kv_pass(gm: GraphModule) -> int:
    """Remove the repeat of keys and values; return how many attention ops changed."""
    flow = DataFlow(gm)
    found: list[tuple[Site, _Base, _Base]] = []
    for site in find_sites(gm):
        k, v = _find_base(gm, flow, site, site.k), _find_base(gm, flow, site, site.v)
        if k is not None and v is not None and k.kv_heads == v.kv_heads:
            found.append((site, k, v))
    replaced = flow.needed([node for site, _, _ in found for node in (site.k, site.v)])
    for site, k, v in found:
        with gm.graph.inserting_before(site.node):
            site.node.update_arg(1, _heads_first(gm, k))
            site.node.update_arg(2, _heads_first(gm, v))
    erase_dead_nodes(gm, replaced)
    return len(found)


def _heads_first(gm: GraphModule, base: _Base) -> Node:
    if not base.tokens_first:
        return base.node
    return insert_method(gm, "transpose", base.node, 1, 2)


def _find_base(gm: GraphModule, flow: DataFlow, site: Site, repeated: Node) -> _Base | None:
    """Return the nearest tensor that ``repeated`` is a head repeat of.

    Only calls with one tensor operand are followed.
    """
    shape = shape_of(repeated)
    if shape is None or len(shape) != 4:
        return None
    chain = [repeated]
    while len(inputs := value_inputs(chain[0])) == 1 and chain[0].op.startswith("call_"):
        (node,) = inputs
        writes = [write for part in (node, *chain) for write in flow.writes_to(part, before=site.node)]
        if any(flow.order[write] > flow.order[chain[0]] for write in writes):
            return None
        for base in _candidates(node, shape):
            if all(_is_repeat(gm, base, chain, shape, length) for length in EXAMPLE_LENGTHS):
                return base
        chain.insert(0, node)
    return None


def _candidates(node: Node, shape: tuple[Dim, ...]) -> list[_Base]:
    batch, heads, tokens, dim = shape
    found = shape_of(node)
    if found is None or len(found) != 4 or not isinstance(heads, int):
        return []
    layouts = [(found[1], (batch, found[1], tokens, dim), False), (found[2], (batch, tokens, found[2], dim), True)]
    return [
        _Base(node, kv_heads, tokens_first)
        for kv_heads, expected, tokens_first in layouts
        if found == expected and isinstance(kv_heads, int) and kv_heads < heads and heads % kv_heads == 0
    ]


def _is_repeat(gm: GraphModule, base: _Base, chain: list[Node], shape: tuple[Dim, ...], length: int) -> bool:
    """Check on a random example that ``chain`` repeats each head of ``base`` in order."""
    sizes = example_sizes(shape[:1], shape[2:3], length)
    try:
        example = random_like(recorded(base.node), sizes)
        got = evaluate(gm, chain[-1], chain, {base.node: example}, sizes)
    except EvaluationError:
        return False
    heads_first = example.transpose(1, 2) if base.tokens_first else example
    expected = heads_first.repeat_interleave(concrete(shape[1], sizes) // base.kv_heads, dim=1)
    return isinstance(got, Tensor) and got.dtype == expected.dtype and torch.equal(got, expected)

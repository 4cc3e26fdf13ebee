"""Find ``scaled_dot_product_attention`` calls and replace them by ``kvpass::site``.

Before::

    mask = ...                                      # any sub-graph
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)

After, when the mask is proved causal (its sub-graph is removed)::

    out = kvpass.site(q, k, v, scale)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from kvpass.graphs.canonical import find_sites
from kvpass.graphs.fx_utils import (
    DataFlow,
    Dim,
    arguments_of,
    erase_dead_nodes,
    recorded,
    refuse,
    replace_node,
    shape_of,
)
from kvpass.graphs.insert_nodes import emit_site
from kvpass.graphs.verify.causal_mask import Band, MaskPart, prove_causal
from kvpass.graphs.verify.examples import NotCausalError

_ATEN = torch.ops.aten.scaled_dot_product_attention
_TARGETS = {F.scaled_dot_product_attention, _ATEN, _ATEN.default}


def is_raw_attention(node: Node) -> bool:
    """Return whether the node calls ``scaled_dot_product_attention``."""
    return node.op == "call_function" and node.target in _TARGETS


def find_attention_pass(gm: GraphModule) -> int:
    """Replace ``scaled_dot_product_attention`` by ``kvpass::site``, refused if not proved causal; return how many."""
    raw = [node for node in gm.graph.nodes if is_raw_attention(node)]
    if not raw:
        return 0
    if find_sites(gm):
        reason = (
            "it calls scaled_dot_product_attention, and other attention of the model goes through the attention "
            "interface or kvpass.attention: kvpass does not know whether this call relates tokens of the text"
        )
        raise refuse(raw[0], reason)
    flow = DataFlow(gm)
    proofs: dict[tuple[Any, ...], Band] = {}
    bands = [_check(flow, node, proofs) for node in raw]
    masks = [mask for mask in (arguments_of(node)["attn_mask"] for node in raw) if mask is not None]
    mask_nodes = flow.needed(masks)
    for node, band in zip(raw, bands, strict=True):
        call = arguments_of(node)
        q, scale = call["query"], call["scale"]
        scale = int(recorded(q).shape[3]) ** -0.5 if scale is None else float(scale)
        with gm.graph.inserting_before(node):
            site = emit_site(node, q, call["key"], call["value"], scale, band)
        replace_node(node, site)
    erase_dead_nodes(gm, mask_nodes)
    return len(raw)


def _check(flow: DataFlow, node: Node, proofs: dict[tuple[Any, ...], Band]) -> Band:
    """Prove that a call is causal self-attention and return what its mask does.

    ``proofs`` has earlier results: layers share masks. A key holds all calls that make the mask, in-place writes too.
    """
    call = arguments_of(node)
    q = check_heads(node, call["query"], call["key"], call["value"], call["enable_gqa"])
    heads = q[1]
    assert isinstance(heads, int)
    if call["dropout_p"] != 0.0:
        raise refuse(node, f"dropout_p={call['dropout_p']}; only 0.0 is possible in a compressed cache")
    if not (call["scale"] is None or isinstance(call["scale"], int | float)):
        raise refuse(
            node,
            f"its scale (node {call['scale']}) depends on a size or a number that the call gives, and would be another "
            "one for a piece of the text: make it of numbers that the module holds",
        )
    mask, is_causal = call["attn_mask"], call["is_causal"]
    if not isinstance(is_causal, bool):
        raise refuse(node, f"is_causal is computed by node {is_causal}, not a constant")
    if mask is None:
        if is_causal or q[2] == 1:
            return Band(None)
        raise refuse(node, "it is not causal: no mask and is_causal=False")
    if is_causal:
        raise refuse(node, "both attn_mask and is_causal=True are given")
    try:
        part = MaskPart(flow, mask, before=node, batch=q[0], tokens=q[2])
        key = (mask, q, tuple(part.calls))
        if key not in proofs:
            proofs[key] = prove_causal(part, heads)
        return proofs[key]
    except NotCausalError as error:
        raise refuse(node, str(error)) from error


def check_heads(node: Node, query: Any, key: Any, value: Any, enable_gqa: Any) -> tuple[Dim, ...]:
    """Return the shape of the queries of self-attention with grouped or equal heads; raise for other tensors."""
    shapes = []
    for name, operand in (("query", query), ("key", key), ("value", value)):
        shape = shape_of(operand) if isinstance(operand, Node) else None
        if shape is None or len(shape) != 4:
            raise refuse(node, f"{name} has shape {shape}; [batch, heads, tokens, head_dim] is needed")
        shapes.append(shape)
    q, k, v = shapes
    if k[0] != q[0] or v[0] != q[0]:
        raise refuse(node, f"batch sizes differ: query {q}, key {k}, value {v}")
    if k[2] != q[2] or v[2] != q[2]:
        raise refuse(
            node,
            f"{q[2]} queries read {k[2]} keys and {v[2]} values: cross-attention, or a decoder with a cache of its "
            "own, which must be built or called without it",
        )
    if k[3] != q[3] or not isinstance(q[3], int) or not isinstance(v[3], int):
        raise refuse(node, f"head dims must be static, and of query {q[3]} and key {k[3]} equal; of value {v[3]}")
    heads, kv_heads = q[1], k[1]
    if not (isinstance(heads, int) and isinstance(kv_heads, int)) or v[1] != kv_heads or heads % kv_heads:
        raise refuse(node, f"{heads} query heads cannot share {kv_heads} key heads and {v[1]} value heads")
    if kv_heads not in (1, heads) and enable_gqa is not True:
        raise refuse(node, f"{heads} query heads on {kv_heads} key heads without enable_gqa=True")
    return q

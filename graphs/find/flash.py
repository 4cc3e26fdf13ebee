"""Find calls of the flash-attn library and replace them by ``kvpass::site``.

Before (``[B, T, H, D]``; the graph has the library's function or, as Dynamo traces it, its operator)::

    out = flash_attn_func(q, k, v, causal=True, softmax_scale=scale, window_size=(left, 0))
    out, lse, _, _ = flash_attn._flash_attn_forward(q, k, v, 0.0, scale, True, left, 0, 0.0, None, False)

After::

    out = kvpass.site(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, left + 1).transpose(1, 2)

Calls on packed sequences (of flash-attn and of ``torch.nn.attention.varlen``) are unsupported and raise.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kvpass.graphs.find.sdpa import check_heads
from kvpass.graphs.fx_utils import arguments_of, refuse
from kvpass.graphs.insert_nodes import emit_site, insert_method, replace_output
from kvpass.graphs.verify.causal_mask import Band

_OPERATOR = re.compile(r"flash_?attn::_flash_attn_forward")
_PACKED = re.compile(
    r"(flash_?attn::_flash_attn_varlen_forward|torch_attn::_varlen_attn)|flash_attn_varlen\w*|varlen_attn"
)
_KNOWN = set(
    "dropout_p softmax_scale causal window_size window_size_left window_size_right softcap deterministic".split()
)
"""Parameters besides the tensors; all others must be None or False."""


def find_flash_attention_pass(gm: GraphModule) -> int:
    """Replace calls of flash-attn by ``kvpass::site``, refused if not causal, or with dropout; return how many."""
    changed = 0
    for node in list(gm.graph.nodes):
        name = _called(node)
        if _PACKED.fullmatch(name):
            reason = f"{name} attends over packed sequences, whose bounds are data; give it a batch of equal lengths"
            raise refuse(node, reason)
        if _OPERATOR.fullmatch(name) or name == "flash_attn_func":
            _replace(node, arguments_of(node))
            changed += 1
    return changed


def _called(node: Node) -> str:
    """Return ``namespace::name`` of an operator, the name of a flash-attn or torch function, or ""."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name
    if node.op != "call_function":
        return ""
    module = getattr(target, "__module__", None) or ""
    of_library = module.split(".")[0] == "flash_attn" or module == "torch.nn.attention.varlen"
    return str(getattr(target, "__name__", "")) if of_library else ""


def _replace(node: Node, call: dict[str, Any]) -> None:
    operands = [call.pop(name) for name in ("q", "k", "v")]
    for name, value in call.items():
        if name not in _KNOWN and value is not None and value is not False:
            raise refuse(node, f"{name}={value} is not understood")
    left, right = call.get("window_size", (call.get("window_size_left", -1), call.get("window_size_right", -1)))
    if not isinstance(left, int) or not isinstance(right, int):
        raise refuse(node, f"window_size=({left}, {right}) is no pair of ints")
    dropout, scale, softcap = call.get("dropout_p", 0.0), call.get("softmax_scale"), call.get("softcap", 0.0)
    if dropout != 0.0:
        raise refuse(node, f"dropout_p={dropout}; only 0.0 is possible in a compressed cache")
    if not (scale is None or isinstance(scale, int | float)) or not isinstance(softcap, int | float):
        raise refuse(node, "softmax_scale or softcap is computed in the graph, not a number")
    with node.graph.inserting_before(node):
        q, k, v = (insert_method(operand, "transpose", 1, 2) for operand in operands)
        shape = check_heads(node, q, k, v, True)
        if call.get("causal") is not True and shape[2] != 1:
            raise refuse(node, "it is not causal")
        scale = int(shape[3]) ** -0.5 if scale is None else float(scale)
        site = emit_site(node, q, k, v, scale, Band(None if left < 0 else left + 1), float(softcap) or None)
        out = insert_method(site, "transpose", 1, 2)
    replace_output(node, out)

"""Raise if tokens mix outside of the attention ops: no cache would keep that between steps."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from torch.fx import GraphModule, Node

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.find.emit_site import SLOPES
from kvpass.graphs.fx_utils import (
    MATMULS,
    SOFTMAX,
    DataFlow,
    Dim,
    is_module_tensor,
    refuse,
    shape_of,
    submodule_of,
    symbols_of,
    target_name,
    token_sizes,
    value_inputs,
)
from kvpass.graphs.rewrite_attention import SITE, find_sites

_ATTENTION_NAME = re.compile(r"attn|attention", re.IGNORECASE)
_RECURRENT = re.compile(r"lstm|gru|rnn_(tanh|relu)|(.*_)?scan(_.*)?|causal_conv1d.*", re.IGNORECASE)
_MATMUL = {*MATMULS, "baddbmm"}


def check_no_raw_attention_pass(gm: GraphModule) -> int:
    """Raise if tokens depend on other tokens outside of the attention ops; the graph is not changed.

    Ops marked unsupported while tracing raise first. Then, among nodes that reach the output: a call named like
    attention; a recurrence, or a convolution along the tokens; a tensor with two token axes, as attention weights and
    masks have; in a capture of fixed length, where sizes cannot tell tokens from heads, a softmax whose square result
    is multiplied with something.

    Raises:
        UnsupportedAttentionError: naming the node and the reason.
    """
    for site in find_sites(gm):
        if site.refusal is not None:
            raise refuse(site.node, site.refusal)
        if site.node.meta.get(SLOPES) is not None:
            raise refuse(site.node, "its logits grow with the position of the key, and nothing has folded that")
    flow = DataFlow(gm)
    live = flow.sources([gm.graph.output_node()])
    batch, tokens = _batch_and_tokens(gm, live)
    for node in live:
        reason = (
            _named_attention(gm, node)
            or _carries_state(node)
            or _attention_in_subgraph(gm, node)
            or _couples_tokens(node, batch, tokens)
            or _softmax_matmul(node, tokens)
            or _token_product(flow, node, tokens)
        )
        if reason is not None:
            raise refuse(node, reason)
    return 0


def _batch_and_tokens(gm: GraphModule, live: Collection[Node]) -> tuple[Dim | None, set[Dim]]:
    """Return batch size and token sizes of the attention ops; without ops, token sizes of the inputs."""
    sites = find_sites(gm)
    if sites:
        shapes = [shape for site in sites if (shape := shape_of(site.q)) is not None]
        return shapes[0][0], {shape[2] for shape in shapes}
    return None, token_sizes(live)


def _named_attention(gm: GraphModule, node: Node) -> str | None:
    if not node.op.startswith("call_") or node.target is SITE:
        return None
    module = submodule_of(gm, node)
    name = target_name(node) if module is None else type(module).__name__
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target.name()
    return f"{name} is not a canonical attention site" if _ATTENTION_NAME.search(name) else None


def _carries_state(node: Node) -> str | None:
    """Return the reason for recurrent layers, and convolutions whose kernel reaches other tokens."""
    name = target_name(node)
    if node.op not in ("call_function", "call_method"):
        return None
    if _RECURRENT.fullmatch(name):
        return f"{name} carries a state from token to token that no attention site holds"
    weight = node.kwargs.get("weight", node.args[1] if len(node.args) > 1 else None)
    shape = shape_of(weight) if name == "conv1d" and isinstance(weight, Node) else None
    if shape is not None and shape[-1] != 1:
        return f"conv1d with a kernel of {shape[-1]} mixes neighbouring tokens outside of an attention site"
    return None


def _attention_in_subgraph(gm: GraphModule, node: Node) -> str | None:
    """Check graphs inside higher-order operators (activation checkpointing, cond, ...)."""
    body = submodule_of(gm, node)
    if not isinstance(body, GraphModule):
        return None
    if find_sites(body):
        return f"an attention site inside the sub-graph {node.target}"
    try:
        check_no_raw_attention_pass(body)
    except UnsupportedAttentionError as error:
        return f"inside the sub-graph {node.target}, node {error.node}: {error.reason}"
    return None


def _couples_tokens(node: Node, batch: Dim | None, tokens: set[Dim]) -> str | None:
    shape = shape_of(node)
    symbols = symbols_of(tokens)
    if shape is None or node.op == "placeholder":
        return None
    axes = shape[1:] if batch is not None and shape[:1] == (batch,) else shape
    if sum(bool(symbols_of([dim]) & symbols) for dim in axes) < 2:
        return None
    return f"its result {shape} relates tokens to tokens outside of an attention site"


def _softmax_matmul(node: Node, tokens: set[Dim]) -> str | None:
    shape = shape_of(node)
    if target_name(node) not in SOFTMAX or not shape or len(shape) < 2 or node.op == "placeholder":
        return None
    seen, stack = {node}, [node]
    while stack:
        weights = stack.pop()
        for user in weights.users:
            if target_name(user) in _MATMUL:
                if _is_square(weights, tokens):
                    return f"its result feeds {user.name}: attention that is written out, not a canonical site"
            elif user not in seen and _keeps_rows(user, shape):
                seen.add(user)
                stack.append(user)
    return None


def _token_product(flow: DataFlow, node: Node, tokens: set[Dim]) -> str | None:
    """Find a square product of two input-dependent tensors, in a capture of fixed length."""
    shape = shape_of(node)
    if target_name(node) not in MATMULS or not shape or len(shape) < 2 or shape[-1] != shape[-2]:
        return None
    if shape[-1] not in tokens or shape[-1] == 1:
        return None
    for operand in value_inputs(node):
        inputs = [source for source in flow.sources([operand]) if source.op == "placeholder"]
        if all(is_module_tensor(source) for source in inputs):
            return None
    return f"its result {shape} relates tokens to tokens outside of an attention site"


def _keeps_rows(node: Node, shape: tuple[Dim, ...]) -> bool:
    found = shape_of(node)
    return found is not None and len(found) >= 2 and found[-2] == shape[-2]


def _is_square(node: Node, tokens: set[Dim]) -> bool:
    shape = shape_of(node)
    assert shape is not None
    return shape[-1] == shape[-2] and (not tokens or shape[-1] in tokens)

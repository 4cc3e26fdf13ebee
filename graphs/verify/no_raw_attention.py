"""Raise if tokens mix outside of the attention ops, where names or shapes tell.

``self_check`` finds what else mixes them. What is found here is named better, and whatever the weights are, zeros too.
A capture of one length is refused there.
"""

from __future__ import annotations

import re
from operator import attrgetter

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import GraphModule, Node

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.canonical import SITE, batch_and_tokens, find_sites, results_of
from kvpass.graphs.fx_utils import DataFlow, Dim, refuse, shape_of, symbols_of, target_name, token_sizes

_ATTENTION_NAME = re.compile(r"attn|attention", re.IGNORECASE)
_RECURRENT = re.compile(r"lstm|gru|rnn_(tanh|relu)|(.*_)?scan(_.*)?|causal_conv1d.*", re.IGNORECASE)


def check_no_raw_attention_pass(gm: GraphModule) -> int:
    """Raise if tokens depend on other tokens outside of the attention ops; the graph is not changed.

    Ops marked unsupported while tracing raise first. Then, among nodes that reach the output: a call named like
    attention; a recurrence, or a convolution along the tokens; a tensor with two token axes, as attention weights and
    masks have.
    """
    for site in find_sites(gm):
        if site.refusal is not None:
            raise refuse(site.node, site.refusal)
    live = DataFlow(gm).sources(results_of(gm))
    batch, tokens = batch_and_tokens(gm) if find_sites(gm) else (None, None)
    symbols = symbols_of(token_sizes(live) if tokens is None else [tokens])
    for node in live:
        reason = _mixes_tokens(node) or _attention_in_subgraph(node) or _couples_tokens(node, batch, symbols)
        if reason is not None:
            raise refuse(node, reason)
    return 0


def _mixes_tokens(node: Node) -> str | None:
    """Return the reason for other attention, recurrent layers, dropout, and convolutions that reach other tokens."""
    if not node.op.startswith("call_") or node.target is SITE:
        return None
    name = node.target.name() if isinstance(node.target, torch._ops.OpOverload) else target_name(node)
    if _ATTENTION_NAME.search(name):
        return f"{name} is not a canonical attention site"
    if node.op == "call_module":
        return None
    name = target_name(node)
    if _RECURRENT.fullmatch(name):
        return f"{name} carries a state from token to token that no attention site holds"
    if name.endswith("dropout"):
        arguments = dict(zip(("p", "training"), node.args[1:3], strict=False)) | node.kwargs
        if arguments.get("training") is not False and arguments.get("p", 0.5):
            return "dropout in training mode: call eval() on the module"
    weight = node.kwargs.get("weight", node.args[1] if len(node.args) > 1 else None)
    shape = shape_of(weight) if name == "conv1d" and isinstance(weight, Node) else None
    if shape is not None and shape[-1] != 1:
        return f"conv1d with a kernel of {shape[-1]} mixes neighbouring tokens outside of an attention site"
    return None


def _attention_in_subgraph(node: Node) -> str | None:
    """Check graphs inside higher-order operators (activation checkpointing, cond, ...)."""
    body = attrgetter(str(node.target))(node.graph.owning_module) if node.op == "get_attr" else None
    if not isinstance(body, GraphModule):
        return None
    if find_sites(body):
        return f"an attention site inside the sub-graph {node.target}"
    try:
        check_no_raw_attention_pass(body)
    except UnsupportedAttentionError as error:
        return f"inside the sub-graph {node.target}, node {error.node}: {error.reason}"
    return None


def _couples_tokens(node: Node, batch: Dim | None, tokens: set[sympy.Symbol]) -> str | None:
    shape = shape_of(node)
    if shape is None or node.op == "placeholder":
        return None
    axes = shape[1:] if batch is not None and shape[:1] == (batch,) else shape
    if sum(bool(symbols_of([dim]) & tokens) for dim in axes) < 2:
        return None
    return f"its result {shape} relates tokens to tokens outside of an attention site"

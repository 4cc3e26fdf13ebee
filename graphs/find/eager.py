"""Find attention written as matmul, softmax, matmul, and replace it by ``kvpass::site``.

Before::

    logits = matmul(q, k.transpose(-1, -2)) * scale         # any product, any order of scaling, capping and masking
    weights = softmax(logits + mask, dim=-1)
    out = matmul(dropout(weights, training=False), v)

After, when the logits are proved to be scaled products in a causal mask and the weights their softmax::

    out = kvpass.site(q, k, v, scale)

A walk of the graph finds the products before and after a softmax. What lies between them is evaluated on examples
(``prove_logits``); its spelling does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from kvpass.graphs.find.operands import Product, insert_heads, insert_result, product_of
from kvpass.graphs.find.sdpa import check_heads
from kvpass.graphs.fx_utils import (
    MATMULS,
    SOFTMAX,
    DataFlow,
    Dim,
    erase_dead_nodes,
    is_module_tensor,
    reached,
    recorded,
    refuse,
    replace_node,
    shape_of,
    target_name,
    token_sizes,
    value_inputs,
)
from kvpass.graphs.insert_nodes import emit_site, insert_function
from kvpass.graphs.verify.causal_mask import MaskPart
from kvpass.graphs.verify.examples import NotCausalError
from kvpass.graphs.verify.logits import LogitRule, prove_logits, snap


@dataclass(frozen=True)
class _Match:
    """``scores = q k^T`` becomes ``logits``; their ``softmax`` is multiplied with the values in ``out``."""

    scores: Product
    softmax: Node
    logits: Node
    out: Product


def find_eager_attention_pass(gm: GraphModule) -> int:
    """Replace written-out attention by ``kvpass::site``, refused if it is not proved causal; return how many."""
    _split_baddbmm(gm)
    tokens = token_sizes(gm.graph.nodes)
    changed = 0
    proofs: dict[str, LogitRule] = {}
    for softmax in [node for node in gm.graph.nodes if target_name(node) in SOFTMAX]:
        flow = DataFlow(gm)
        try:
            match = _match(flow, softmax, tokens)
            if match is None:
                continue
            with gm.graph.inserting_before(match.out.node):
                heads = insert_heads(flow, match.scores, match.out)
            check_heads(softmax, *heads, enable_gqa=True)
            rule = _prove(flow, match, int(recorded(heads[0]).shape[1]), proofs)
        except NotCausalError as error:
            raise refuse(softmax, str(error)) from error
        out, scale = match.out.node, snap(rule.scale, int(recorded(heads[0]).shape[3]))
        between = flow.needed([match.out.left.node])
        with gm.graph.inserting_before(out):
            result = insert_result(emit_site(out, *heads, scale, rule.band, rule.softcap), match.out)
        replace_node(out, result)
        erase_dead_nodes(gm, between)
        changed += 1
    return changed


def _split_baddbmm(gm: GraphModule) -> None:
    """Rewrite ``baddbmm(bias, q, k)`` as ``bmm(q, k) * alpha + bias * beta``, with the product as a node."""
    for node in [node for node in gm.graph.nodes if target_name(node) == "baddbmm"]:
        call: dict[str, Any] = {"beta": 1, "alpha": 1, **node.kwargs}
        call.update(zip(("input", "batch1", "batch2"), node.args, strict=False))
        insert = partial(insert_function, node)
        with gm.graph.inserting_before(node):
            scaled = insert(torch.mul, insert(torch.bmm, call["batch1"], call["batch2"]), call["alpha"])
            total = insert(torch.add, insert(torch.mul, call["input"], call["beta"]), scaled)
        replace_node(node, total)


def _match(flow: DataFlow, softmax: Node, tokens: set[Dim]) -> _Match | None:
    logits = softmax.args[0] if softmax.args else softmax.kwargs.get("input")
    shape = shape_of(softmax)
    dim = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    if not isinstance(logits, Node) or shape is None or len(shape) < 3 or dim not in (-1, len(shape) - 1):
        return None
    if shape[-1] != shape[-2] or shape[-1] not in tokens:
        return None
    before, after = _product_before(flow, logits, softmax), _product_after(softmax)
    if before is None or after is None:
        return None
    scores, out = product_of(before), product_of(*after)
    if scores is None or out is None:
        return None
    sources = flow.sources([scores.right.node])
    if not any(source.op == "placeholder" and not is_module_tensor(source) for source in sources):
        return None
    return _Match(scores, softmax, logits, out)


def _product_before(flow: DataFlow, logits: Node, softmax: Node) -> Node | None:
    """Return the product that the logits are computed from, if there is exactly one."""

    def reads(node: Node) -> list[Node]:
        inputs = [] if target_name(node) in MATMULS else value_inputs(node)
        return [*inputs, *flow.writes_to(node, before=softmax)]

    products = [node for node in reached([logits], reads) if target_name(node) in MATMULS]
    return products[0] if len(products) == 1 else None


def _product_after(softmax: Node) -> tuple[Node, Node] | None:
    """Return the only product that uses the weights, perhaps behind calls of one operand, and the weights in it."""

    def unary(node: Node) -> list[Node]:
        return [user for user in node.users if target_name(user) not in MATMULS and len(value_inputs(user)) == 1]

    passed = reached([softmax], unary)
    products = [(user, weights) for weights in passed for user in weights.users if target_name(user) in MATMULS]
    return products[0] if len(products) == 1 else None


def _prove(flow: DataFlow, match: _Match, heads: int, proofs: dict[str, LogitRule]) -> LogitRule:
    """Return the proved rule from products to logits; ``proofs`` has earlier ones by the text of what was evaluated."""
    scores, shape = match.scores.node, shape_of(match.scores.node)
    assert shape is not None

    def part_of(result: Node, before: Node) -> MaskPart:
        return MaskPart(flow, result, before=before, batch=shape[0], tokens=shape[-1], given=[scores])

    part, weights = part_of(match.logits, match.softmax), part_of(match.out.left.node, match.out.node)
    key = _text(weights, scores)
    if key not in proofs:
        proofs[key] = prove_logits(part, weights, scores, heads)
    return proofs[key]


def _text(part: MaskPart, scores: Node) -> str:
    """Return the calls of a part as text, equal for layers that share their mask."""
    names = {scores: "scores"}
    lines = []
    for index, node in enumerate(part.calls):
        if any(operand in names for operand in node.all_input_nodes):
            names[node] = f"step{index - len(part.calls)}"
            arguments = map_arg((node.args, node.kwargs), lambda operand: names.get(operand, operand.name))
            lines.append(f"{names[node]} = {node.op} {node.target} {arguments}")
        else:
            lines.append(node.name)
    return "\n".join([f"{shape_of(scores)} {recorded(scores).dtype}", *lines])

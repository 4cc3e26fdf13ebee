"""Find FlexAttention calls and replace them by ``kvpass::site``.

Before (``score_mod`` and ``mask_mod`` are sub-graphs; the block mask is the tuple that ``create_block_mask`` makes)::

    out, lse, _ = flex_attention(q, k, v, score_mod, (T, T, kv_num_blocks, kv_indices, ..., mask_mod), scale, ...)

After, when mask, blocks and scores together are proved causal::

    out = kvpass.site(q, k, v, scale)

Both functions and the block tables are evaluated on small examples. A block table that is an input is unsupported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.graphs.bind_state import placeholders
from kvpass.graphs.find.sdpa import check_heads, computed_scale
from kvpass.graphs.fx_utils import (
    DataFlow,
    Dim,
    erase_dead_nodes,
    is_module_tensor,
    is_scalar,
    recorded,
    refuse,
    shape_of,
    submodule_of,
    target_name,
)
from kvpass.graphs.insert_nodes import emit_site, replace_output
from kvpass.graphs.verify.causal_mask import COST_OF_LOGITS, MaskPart
from kvpass.graphs.verify.examples import (
    NotCausalError,
    NotEvaluatedError,
    SizeMap,
    concrete,
    example_lengths,
    example_sizes,
    numbers_of,
)
from kvpass.graphs.verify.logits import LogitRule, prove_logits, snap

_LARGEST_BLOCK = 1024
_MAX_PRODUCTS = 2**26
"""Most products of an example; one per pair of tokens, and per head or row where these make a difference."""

_NAMES = ("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options", "score_other", "mask_other")


def find_flex_attention_pass(gm: GraphModule) -> int:
    """Replace FlexAttention calls by ``kvpass::site``; return how many.

    Raises:
        UnsupportedAttentionError: a call is not proved to be causal self-attention.
    """
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and target_name(node) == "flex_attention"]
    for node in calls:
        flow = DataFlow(gm)
        call = dict(zip(_NAMES, node.args, strict=True))
        shape = check_heads(node, call["query"], call["key"], call["value"], True)
        try:
            if not isinstance(call["scale"], int | float):
                raise NotCausalError(computed_scale(call["scale"]))
            rule = _Flex(gm, flow, node, call, shape).prove(float(call["scale"]))
        except NotCausalError as error:
            raise refuse(node, str(error)) from error
        _replace(gm, flow, node, call, rule)
    return len(calls)


class _Flex:
    """One FlexAttention call, ready to be evaluated."""

    def __init__(
        self, gm: GraphModule, flow: DataFlow, node: Node, call: dict[str, Any], shape: tuple[Dim, ...]
    ) -> None:
        """
        Raises:
            NotCausalError: the block mask is an input, or depends on a tensor whose content cannot be read.
        """
        self.gm, self.flow, self.node, self.shape = gm, flow, node, shape
        self.score_mod, self.mask_mod = (_function(gm, call["score_mod"]), _function(gm, call["block_mask"][-1]))
        tables, self.blocks = call["block_mask"][2:6], tuple(call["block_mask"][-3:-1])
        inputs = [table for table in tables if isinstance(table, Node) and table.op == "placeholder"]
        if not all(map(is_module_tensor, inputs)):
            raise NotCausalError(
                "its block mask is an input of the decoder, and says nothing of the next call's: make it in forward, "
                "with create_block_mask"
            )
        self.score_other = [self._part(value) for value in call["score_other"]]
        self.mask_other = [self._part(value) for value in call["mask_other"]]
        self.tables = [self._part(value) for value in tables]
        self.like: Tensor = recorded(call["query"])

    def _part(self, value: Any) -> Any:
        if not isinstance(value, Node) or is_scalar(value):
            return value
        return MaskPart(self.gm, self.flow, value, before=self.node, batch=self.shape[0], tokens=self.shape[2])

    def prove(self, scale: float) -> LogitRule:
        q_block, kv_block = self.blocks
        parts = [part for part in (*self.score_other, *self.mask_other, *self.tables) if isinstance(part, MaskPart)]
        numbers = {number for part in parts for number in part.numbers(scaled=False)}
        numbers -= {q_block * kv_block, q_block, kv_block}  # used by the code that makes the blocks
        for function in (self.score_mod, self.mask_mod):
            numbers |= numbers_of(list(function.graph.nodes), _made_from_score(self.score_mod))
        if not isinstance(self.shape[2], int):
            numbers |= {2 * block for block in self.blocks if block <= _LARGEST_BLOCK}
        heads = self.shape[1]
        assert isinstance(heads, int)
        tensors = [tensor for part in parts for tensor in part.tensors.values()]

        each = self._varies()

        def product_shape(length: int) -> tuple[int, ...]:
            b, h, t, _ = concrete(self.shape, self._sizes(length))
            return b if each[0] else 1, h if each[1] else 1, t, t

        def logits(length: int, start: int, products: Tensor, odd: Node | None = None) -> Tensor:
            return self._logits(length, start, products * scale, odd)

        lengths = example_lengths(self.shape[2], tensors, numbers, COST_OF_LOGITS * math.prod(product_shape(1)))
        largest = math.prod(product_shape(lengths.longest[0]))
        if largest > _MAX_PRODUCTS:
            raise NotCausalError(
                f"its mask or scores are made by head or row, and an example that shows what they do needs {largest} "
                f"products, more than {_MAX_PRODUCTS}"
            )
        rule = prove_logits(
            logits, lengths, lambda length: product_shape(length)[-1], product_shape, heads, self.node.name, self.like
        )
        shortest = (*lengths.longest, *lengths.short)[-1]
        zeros = torch.zeros(product_shape(shortest), dtype=torch.float64, device=self.like.device)
        for part in parts:
            part.check_content(lambda odd: logits(shortest, 0, zeros, odd=odd))
        return rule

    def _varies(self) -> tuple[bool, bool]:
        """Return whether the functions or tables depend on the batch row, and on the head."""
        arguments = [
            placeholders(function)[first : first + 2] for function, first in ((self.score_mod, 1), (self.mask_mod, 0))
        ]
        shapes = [shape_of(part.result) or () for part in self.tables if isinstance(part, MaskPart)]
        row, head = (
            any(pair[axis].users for pair in arguments) or any(shape[axis] != 1 for shape in shapes) for axis in (0, 1)
        )
        return row, head

    def _logits(self, length: int, start: int, scores: Tensor, odd: Node | None) -> Tensor:
        index = [torch.arange(size, dtype=torch.int32, device=scores.device) for size in scores.shape]
        score_other = [self._value(part, length, start, odd) for part in self.score_other]
        mask_other = [self._value(part, length, start, odd) for part in self.mask_other]
        changed = _over_grid(lambda s, *at: self.score_mod(s, *at, *score_other), index, scores)
        allowed = _over_grid(lambda *at: self.mask_mod(*at, *mask_other), index)
        listed, full = self._listed(length, start, scores, odd)
        return torch.where(full | (listed & allowed), changed, -torch.inf)

    def _listed(self, length: int, start: int, scores: Tensor, odd: Node | None) -> tuple[Tensor, Tensor]:
        """Return masks of the entries in visited blocks, and in blocks visited without ``mask_mod``."""
        tables = [self._value(part, length, start, odd) for part in self.tables]
        shape = scores.shape
        found = []
        for count, indices in (tables[:2], tables[2:]):
            if count is None:
                found.append(torch.zeros(shape, dtype=torch.bool, device=scores.device))
                continue
            columns, device = indices.shape[-1], indices.device
            listed = torch.arange(columns, device=device) < count[..., None]
            dense = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=device)
            dense = dense.scatter(-1, torch.where(listed, indices.long(), columns), True)[..., :columns]
            rows, keys = (
                torch.arange(size, device=device) // block for size, block in zip(shape[-2:], self.blocks, strict=True)
            )
            found.append(dense[..., rows, :][..., keys].expand(shape))
        return found[0], found[1]

    def _value(self, part: Any, length: int, start: int, odd: Node | None) -> Any:
        if isinstance(part, MaskPart):
            return part.run(length, start, odd=odd)
        return concrete(recorded(part), self._sizes(length)) if isinstance(part, Node) else part

    def _sizes(self, length: int) -> SizeMap:
        return example_sizes(self.shape[:1], self.shape[2:3], length)


def _function(gm: GraphModule, node: Node) -> GraphModule:
    function = submodule_of(gm, node)
    if not isinstance(function, GraphModule):
        raise NotCausalError(f"its function {node.name} is no sub-graph")
    return function


def _made_from_score(score_mod: GraphModule) -> set[Node]:
    found = set(placeholders(score_mod)[:1])
    found.update(node for node in score_mod.graph.nodes if not found.isdisjoint(node.all_input_nodes))
    return found


def _over_grid(function: Callable[..., Tensor], index: list[Tensor], *first: Tensor) -> Tensor:
    """Evaluate ``function(*first, b, h, i, j)`` for all of ``index``; ``first`` has these four axes too."""
    for axis in (3, 2, 1, 0):
        dims = [0 if place == axis else None for place in range(4)]
        function = torch.vmap(function, in_dims=(*(0 for _ in first), *dims))
    try:
        return function(*first, *index)
    except Exception as error:
        raise NotEvaluatedError(f"its mask or score function cannot be evaluated: {error}") from error


def _replace(gm: GraphModule, flow: DataFlow, node: Node, call: dict[str, Any], rule: LogitRule) -> None:
    q, k, v = call["query"], call["key"], call["value"]
    between = flow.needed([part for part in node.all_input_nodes if part not in (q, k, v)])
    with gm.graph.inserting_before(node):
        site = emit_site(gm, node, q, k, v, replace(rule, scale=snap(rule.scale, int(recorded(q).shape[3]))))
    replace_output(gm, node, site)
    erase_dead_nodes(gm, between)

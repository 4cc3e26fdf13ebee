"""Find FlexAttention and make each call a canonical site.

Before (``score_mod`` and ``mask_mod`` are sub-graphs; the block mask is the tuple that ``create_block_mask`` makes)::

    out, lse, _ = flex_attention(q, k, v, score_mod, (T, T, kv_num_blocks, kv_indices, ..., mask_mod), scale, ...)

After, when mask, blocks and scores together are proved causal::

    out = kvpass.site(q, k, v, scale, layer)

Both functions and the tables of the blocks are evaluated on small examples; a table that is an input proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.emit_site import emit_site
from kvpass.graphs.find_attention import check_heads
from kvpass.graphs.find_flash_attention import replace_output
from kvpass.graphs.fx_utils import (
    DataFlow,
    Dim,
    SizeMap,
    concrete,
    erase_dead_nodes,
    example_sizes,
    is_scalar,
    literals_of,
    module_path_of,
    recorded,
    submodule_of,
    target_name,
)
from kvpass.graphs.prove_causal import MaskPart, NotCausalError, example_lengths, settle
from kvpass.graphs.prove_logits import LogitRule, prove_logits, snap

_LARGEST_BLOCK = 1024
_NAMES = ("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options", "score_other", "mask_other")


def find_flex_attention_pass(gm: GraphModule) -> int:
    """Replace FlexAttention by ``kvpass::site``; returns how many.

    Raises:
        UnsupportedAttentionError: a call that is not proved causal self-attention.
    """
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and target_name(node) == "flex_attention"]
    for node in calls:
        flow = DataFlow(gm)
        call = dict(zip(_NAMES, node.args, strict=True))
        shape = check_heads(node, call["query"], call["key"], call["value"], True)
        try:
            if not isinstance(call["scale"], int | float):
                raise NotCausalError("its scale is computed in the graph, not a number")
            rule = _Flex(gm, flow, node, call, shape).prove(float(call["scale"]))
        except NotCausalError as error:
            raise UnsupportedAttentionError(module_path_of(node), node.name, str(error)) from error
        _replace(gm, flow, node, call, rule)
    return len(calls)


class _Flex:
    """One call, ready to be evaluated."""

    def __init__(
        self, gm: GraphModule, flow: DataFlow, node: Node, call: dict[str, Any], shape: tuple[Dim, ...]
    ) -> None:
        self.gm, self.flow, self.node, self.shape = gm, flow, node, shape
        self.score_mod, self.mask_mod = (_function(gm, call["score_mod"]), _function(gm, call["block_mask"][-1]))
        self.score_other = [self._part(value) for value in call["score_other"]]
        self.mask_other = [self._part(value) for value in call["mask_other"]]
        self.tables = [self._part(value) for value in call["block_mask"][2:6]]
        self.blocks = tuple(call["block_mask"][-3:-1])
        self.like: Tensor = recorded(call["query"])

    def _part(self, value: Any) -> Any:
        if not isinstance(value, Node) or is_scalar(value):
            return value
        return MaskPart(self.gm, self.flow, value, before=self.node, batch=self.shape[0], tokens=self.shape[2])

    def prove(self, scale: float) -> LogitRule:
        q_block, kv_block = self.blocks
        parts = [part for part in (*self.score_other, *self.mask_other, *self.tables) if isinstance(part, MaskPart)]
        literals = {literal for part in parts for literal in part.literals()}
        literals -= {q_block * kv_block, q_block, kv_block}  # of the code that makes the blocks
        for function in (self.score_mod, self.mask_mod):
            literals |= literals_of(function.graph.nodes)
        if not isinstance(self.shape[2], int):
            literals |= {2 * block for block in self.blocks if block <= _LARGEST_BLOCK}
        heads = self.shape[1]
        assert isinstance(heads, int)
        tensors = [tensor for part in parts for tensor in part.tensors.values()]

        def product_shape(length: int) -> tuple[int, ...]:
            b, h, t, _ = concrete(self.shape, self._sizes(length))
            return b, h, t, t

        def logits(length: int, start: int, products: Tensor) -> Tensor:
            return self._logits(length, start, products * scale)

        rule = prove_logits(
            logits,
            example_lengths(self.shape[2], tensors, literals),
            lambda length: product_shape(length)[-1],
            product_shape,
            heads,
            self.node.name,
            self.like,
        )
        band = settle(rule.band, self.node, heads, self.shape[2], tensors, literals)
        return replace(rule, band=band)

    def _logits(self, length: int, start: int, scores: Tensor) -> Tensor:
        index = [torch.arange(size, dtype=torch.int32, device=scores.device) for size in scores.shape]
        score_other = [self._value(part, length, start) for part in self.score_other]
        mask_other = [self._value(part, length, start) for part in self.mask_other]
        changed = _over_grid(lambda s, *at: self.score_mod(s, *at, *score_other), index, scores)
        allowed = _over_grid(lambda *at: self.mask_mod(*at, *mask_other), index)
        listed, full = self._listed(length, start, scores.shape)
        return torch.where(full | (listed & allowed), changed, -torch.inf)

    def _listed(self, length: int, start: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Entries in the blocks that the kernel visits, and those in blocks in which it asks no mask."""
        tables = [self._value(part, length, start) for part in self.tables]
        found = []
        for count, indices in (tables[:2], tables[2:]):
            if count is None:
                found.append(torch.zeros(shape, dtype=torch.bool))
                continue
            listed = torch.arange(indices.shape[-1]) < count[..., None]
            columns = indices.shape[-1]
            dense = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool)
            dense = dense.scatter(-1, torch.where(listed, indices.long(), columns), True)[..., :columns]
            rows, keys = (torch.arange(size) // block for size, block in zip(shape[-2:], self.blocks, strict=True))
            found.append(dense[..., rows, :][..., keys].expand(shape))
        return found[0], found[1]

    def _value(self, part: Any, length: int, start: int) -> Any:
        if isinstance(part, MaskPart):
            return part.run(length, start)
        return concrete(recorded(part), self._sizes(length)) if isinstance(part, Node) else part

    def _sizes(self, length: int) -> SizeMap:
        return example_sizes(self.shape[:1], self.shape[2:3], length)


def _function(gm: GraphModule, node: Node) -> GraphModule:
    function = submodule_of(gm, node)
    if not isinstance(function, GraphModule):
        raise NotCausalError(f"its function {node.name} is no sub-graph")
    return function


def _over_grid(function: Callable[..., Tensor], index: list[Tensor], *first: Tensor) -> Tensor:
    """``function(*first, b, h, i, j)`` for all of ``index``; ``first`` has these four axes too."""
    for axis in (3, 2, 1, 0):
        dims = [0 if place == axis else None for place in range(4)]
        function = torch.vmap(function, in_dims=(*(0 for _ in first), *dims))
    try:
        return function(*first, *index)
    except Exception as error:
        raise NotCausalError(f"its mask or score function cannot be evaluated: {error}") from error


def _replace(gm: GraphModule, flow: DataFlow, node: Node, call: dict[str, Any], rule: LogitRule) -> None:
    q, k, v = call["query"], call["key"], call["value"]
    between = flow.needed([part for part in node.all_input_nodes if part not in (q, k, v)])
    with gm.graph.inserting_before(node):
        site = emit_site(gm, node, q, k, v, replace(rule, scale=snap(rule.scale, int(recorded(q).shape[3]))))

    def refuse(reason: str) -> UnsupportedAttentionError:
        return UnsupportedAttentionError(module_path_of(node), node.name, reason)

    replace_output(gm, node, site, refuse)
    erase_dead_nodes(gm, between)

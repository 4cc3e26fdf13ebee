"""The live part of a graph run on a few tokens, every site replaced by a call that keeps its tokens apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from kvpass.graphs.fx_utils import (
    DataFlow,
    Dim,
    is_module_tensor,
    is_scalar,
    module_tensor,
    recorded,
    shape_of,
    symbols_of,
    value_inputs,
)
from kvpass.graphs.rewrite_attention import SITE, Site, find_sites
from kvpass.graphs.verify.examples import (
    EXAMPLE_LENGTHS,
    EvaluationError,
    concrete,
    evaluate,
    example_sizes,
    hinted_sizes,
)

Seen: TypeAlias = list[tuple[Node, Tensor]]
"""What a run gave: at each site queries, keys and values, then the tensors of the output; by node."""

_RANGES = (2 * EXAMPLE_LENGTHS[0], 8, 4, 2, 1)
"""How many whole numbers an input is tried with: it may look up a small table, such as one of token types."""


class ApartExample:
    """Runs of the live part of a graph on so many tokens.

    Attributes:
        rows, length: how many rows and tokens. live: the nodes that reach the output, in execution order.
        fed: those of them whose elements come from the inputs of the decoder.
        before: what a run with the inputs as they are gave.
    Raises:
        EvaluationError: it cannot be run.
    """

    def __init__(self, gm: GraphModule, flow: DataFlow, live: Sequence[Node], batch: Dim, tokens: Dim, length: int):
        self.gm, self.flow, self.batch, self.tokens, self.live = gm, flow, batch, tokens, live
        self.sizes = hinted_sizes(gm) | example_sizes([batch], [tokens], length)
        self.rows, self.length = int(concrete(batch, self.sizes)), int(concrete(tokens, self.sizes))
        self.fed = fed_by_inputs(live)
        self._output = gm.graph.output_node()
        self._inputs = [node for node in live if node.op == "placeholder" and not is_scalar(node)]
        self._inputs += [node for node in live if node.op == "get_attr" and flow.writes_to(node)]
        self._calls = [node for node in live if node.op != "placeholder"]
        self._sites = [site for site in find_sites(gm) if site.node in set(live)]
        whole = [node for node in self._inputs if not is_module_tensor(node) and _is_whole(node)]
        self._ranges = dict.fromkeys(whole, max(self.length, _RANGES[0]))
        self.before = self._first_run()

    def _first_run(self) -> Seen:
        """A run with whole numbers as large as the graph takes them, up to the token count, as positions are."""
        try:
            return self.run(None)
        except EvaluationError:
            largest = self._ranges
            self._ranges = dict.fromkeys(largest, 1)
        before = self.run(None)
        for node in largest:
            for numbers in sorted({largest[node], *_RANGES[:-1]}, reverse=True):
                self._ranges[node] = numbers
                try:
                    before = self.run(None)
                    break
                except EvaluationError:
                    self._ranges[node] = 1
        return before

    def run(self, changed: Tensor | None, after: Callable[[Node, Any], Any] | None = None) -> Seen:
        """One run.

        Args:
            changed: bool ``[T]``, the tokens to be given other inputs. after: see :func:`evaluate`.
        """
        return self._run({node: self._feed(node, changed) for node in self._inputs}, after)

    def run_alike(self, after: Callable[[Node, Any], Any]) -> Seen:
        """A run in which all tokens are given the same."""
        feeds = {node: self._feed(node, None) for node in self._inputs}
        for node in self._inputs:
            for axis in () if is_module_tensor(node) else self._axes(node):
                value = feeds[node]
                feeds[node] = value.narrow(axis, self.length // 2, 1).expand_as(value).contiguous()
        return self._run(feeds, after)

    def by_token(self, node: Node, value: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Views of a value with an axis that holds the tokens of a row, and that axis; of ``[B * T]`` too."""
        symbolic = bool(symbols_of([self.tokens]))
        for axis, dim in enumerate(shape_of(node) or ()):
            if dim == self.tokens:
                yield value, axis
            elif symbolic and dim == self.batch * self.tokens:
                yield value.unflatten(axis, (self.rows, self.length)), axis + 1

    def _run(self, feeds: dict[Node, Tensor], after: Callable[[Node, Any], Any] | None) -> Seen:
        values: Seen = []
        order = iter(self._sites)

        def apart(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
            site: Site = next(order)
            values.extend((node, value.clone()) for node, value in ((site.q, q), (site.k, k), (site.v, v)))
            return _apart(q, k, v)

        result = evaluate(self.gm, self._output, self._calls, feeds, self.sizes, instead={SITE: apart}, after=after)
        outputs = zip(tree_leaves(self._output.args[0]), tree_leaves(result), strict=True)
        values.extend((node, value) for node, value in outputs if isinstance(value, Tensor) and isinstance(node, Node))
        return values

    def _feed(self, node: Node, changed: Tensor | None) -> Tensor:
        if is_module_tensor(node):
            weight = module_tensor(self.gm, node)
            if weight is None:
                raise EvaluationError(f"the content of {node.name} is out of reach")
            return weight.clone() if self.flow.writes_to(node) else weight
        like, shape = recorded(node), shape_of(node)
        if not isinstance(like, Tensor) or shape is None:
            raise EvaluationError(f"the input {node.name} is no tensor")
        axes = self._axes(node)
        if len(axes) > 1:
            raise EvaluationError(f"the input {node.name} has several axes of tokens")
        size = concrete(shape, self.sizes)
        last = (*size[: axes[0]], *size[axes[0] + 1 :], self.length) if axes else size
        numbers = self._ranges.get(node, 1)
        value = _example(last, like, bool(axes), 0, numbers)
        if axes and changed is not None:
            value = torch.where(changed.to(like.device), _example(last, like, True, 1, numbers), value)
        return value.movedim(-1, axes[0]).contiguous() if axes else value

    def _axes(self, node: Node) -> list[int]:
        axes = [axis for axis, dim in enumerate(shape_of(node) or ()) if dim == self.tokens]
        return [1] if len(axes) > 1 and isinstance(self.tokens, int) and 1 in axes else axes


def fed_by_inputs(live: Sequence[Node]) -> set[Node]:
    """Nodes whose elements come from the inputs of the decoder."""
    fed: set[Node] = set()
    for node in live:
        if node.op == "placeholder":
            inside = not is_module_tensor(node)
        else:
            inside = any(operand in fed for operand in value_inputs(node))
        if inside:
            fed.add(node)
    return fed


def _is_whole(node: Node) -> bool:
    value = recorded(node)
    return isinstance(value, Tensor) and not value.dtype.is_floating_point and value.dtype != torch.bool


def _apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What stands for attention: ``[B, H, T, Dv]``, each token made of its own query, key and value."""
    group = q.shape[1] // k.shape[1]
    gate = torch.sigmoid((q * k.repeat_interleave(group, 1)).mean(-1, keepdim=True))
    rows = v.repeat_interleave(group, 1) * (0.5 + gate)
    return rows.transpose(1, 2).contiguous().transpose(1, 2)


def _example(shape: tuple[int, ...], like: Tensor, by_token: bool, variant: int, numbers: int) -> Tensor:
    """An input: numbers that differ from token to token, on the last axis, and between variants.

    Args:
        numbers: how many whole numbers, from 0 on; the first and the last are among them.
    """
    if like.is_floating_point():
        value = torch.randn(shape, generator=torch.Generator().manual_seed(variant))
    elif like.dtype == torch.bool:
        value = torch.full(shape, variant == 0)
    elif by_token:
        spread = torch.arange(shape[-1]) * (numbers - 1) // max(shape[-1] - 1, 1)
        value = ((spread + variant * max(numbers // 2, 1)) % numbers).expand(shape).contiguous()
    else:
        value = torch.zeros(shape)
    return value.to(dtype=like.dtype, device=like.device)

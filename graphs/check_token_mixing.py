"""Fail closed on tokens that see other tokens outside of the canonical sites: no cache would carry that along.

The graph runs on a few tokens, every site replaced by a call that keeps its tokens apart. Some tokens are then given
other inputs: what the others bring to the sites and to the output must stay as it was. This takes the weights and one
forward pass of few tokens per pattern; where it cannot be done, shapes and arguments of the calls are read instead.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from kvpass.graphs.example_lengths import lengths_about, numbers_of, size_numbers
from kvpass.graphs.examples import EXAMPLE_LENGTHS, EvaluationError, concrete, evaluate, example_sizes, hinted_sizes
from kvpass.graphs.fx_utils import (
    DataFlow,
    Dim,
    is_module_tensor,
    is_scalar,
    module_tensor,
    recorded,
    refuse,
    shape_of,
    symbols_of,
    target_name,
    value_inputs,
)
from kvpass.graphs.read_token_mixing import counting_calls, mixing_call, mixing_reduction
from kvpass.graphs.rewrite_attention import SITE, Site, find_sites

log = logging.getLogger(__name__)

_MAX_FIXED_TOKENS = 4096
"""Longest capture of fixed length that is evaluated; a symbolic length is evaluated for few tokens."""

_TOLERANCE = 1e-4
"""Of the largest change: rounding of experts whose rows are grouped in another way."""

_REASON = "relates tokens to tokens outside of an attention site"


def check_token_mixing_pass(gm: GraphModule) -> int:
    """Refuse a graph in which something but its sites relates tokens to tokens; changes nothing.

    Raises:
        UnsupportedAttentionError: naming the call, where it is known, or else the site or output it reaches.
    """
    sites = find_sites(gm)
    if not sites:
        return 0
    shape = shape_of(sites[0].q)
    assert shape is not None
    batch, tokens = shape[0], shape[2]
    flow = DataFlow(gm)
    live = flow.sources([gm.graph.output_node()])
    fed = _fed(live)
    for node in live:
        if node in fed and (reason := mixing_call(node, fed, batch, tokens)) is not None:
            raise refuse(node, reason)
    if tokens == 1:
        return 0
    unread = ""
    try:
        if isinstance(tokens, int) and tokens > _MAX_FIXED_TOKENS:
            raise EvaluationError(f"an example of {tokens} tokens is too long")
        for length in _lengths(live, tokens):
            culprit = _Trial(gm, flow, live, batch, tokens, length).culprit()
            if culprit is not None:
                break
    except EvaluationError as error:
        log.info("whether tokens are kept apart is read from the calls: %s", error)
        unread = f" (read from the call, because no example shows it: {error})"
        culprit = next((node for node in live if node in fed and mixing_reduction(node, fed, tokens)), None)
    if culprit is not None:
        raise refuse(culprit, f"its result {shape_of(culprit) or ''} {_REASON}{unread}".replace("  ", " "))
    return 0


def check_reduced_positions_pass(gm: GraphModule) -> int:
    """Refuse a graph in which ids or positions that are given make a number for all tokens; changes nothing.

    No example shows what it does beyond: ``positions.amax()`` may be held against any length.

    Raises:
        UnsupportedAttentionError: naming the call.
    """
    sites = find_sites(gm)
    shape = shape_of(sites[0].q) if sites else None
    if shape is None or shape[2] == 1:
        return 0
    live = DataFlow(gm).sources([gm.graph.output_node()])
    fed = _fed(live)
    for node in counting_calls(live, shape[2])[1]:
        if node in fed:
            raise refuse(
                node, f"{target_name(node)} makes one number of the ids or positions of all tokens: it {_REASON}"
            )
    return 0


def _lengths(live: Sequence[Node], tokens: Dim) -> list[int]:
    """Token counts of examples: a few, and beyond every number that positions or lengths are held against."""
    symbols = symbols_of([tokens])
    if not symbols:
        return [0]
    numbers = numbers_of(counting_calls(live, tokens)[0], scaled=False) | size_numbers(live, symbols)
    beyond = lengths_about(number for number in numbers if number < _MAX_FIXED_TOKENS)[-1]
    return [EXAMPLE_LENGTHS[0], *([beyond] if beyond > EXAMPLE_LENGTHS[-1] else [])]


def _fed(live: Sequence[Node]) -> set[Node]:
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


@dataclass(frozen=True)
class _Seen:
    """What a run gave: at each site queries, keys and values, then the tensors of the output; by node."""

    values: list[tuple[Node, Tensor]]


class _Trial:
    """The live part of a graph, run on examples with its sites keeping tokens apart."""

    def __init__(
        self, gm: GraphModule, flow: DataFlow, live: Sequence[Node], batch: Dim, tokens: Dim, length: int
    ) -> None:
        self.gm, self.flow, self.batch, self.tokens = gm, flow, batch, tokens
        self.sizes = hinted_sizes(gm) | example_sizes([batch], [tokens], length)
        self.rows, self.length = int(concrete(batch, self.sizes)), int(concrete(tokens, self.sizes))
        self.output = gm.graph.output_node()
        self.inputs = [node for node in live if node.op == "placeholder" and not is_scalar(node)]
        self.inputs += [node for node in live if node.op == "get_attr" and flow.writes_to(node)]
        self.calls = [node for node in live if node.op != "placeholder"]
        self.sites = [site for site in find_sites(gm) if site.node in set(live)]
        self.patterns = _patterns(self.length)
        self.large: set[Node] = set()
        if symbols_of([tokens]) and length > EXAMPLE_LENGTHS[0]:
            self._enlarge()

    def _enlarge(self) -> None:
        """Give inputs that can hold them numbers as large as the token count, as positions are."""
        for node in self.inputs:
            if is_module_tensor(node):
                continue
            self.large.add(node)
            try:
                self._run(None)
            except EvaluationError:
                self.large.remove(node)

    def culprit(self) -> Node | None:
        """The first call whose tokens are not kept apart, None when all are."""
        before = self._run(None)
        if any(value.is_floating_point() and bool(value.isnan().any()) for _, value in before.values):
            raise EvaluationError("the example gives NaN")
        after = [self._run(pattern) for pattern in self.patterns]
        for index, (node, value) in enumerate(before.values):
            if self._mixes(node, value, [run.values[index][1] for run in after]):
                return self._first(node)
        return None

    def _first(self, found: Node) -> Node:
        """The first call that mixes tokens, of those that have them as they came; ``found`` if there is none."""
        runs: list[list[tuple[Node, Tensor]]] = []
        for pattern in (None, *self.patterns):
            runs.append([])
            self._run(pattern, runs[-1])
        for index, (node, value) in enumerate(runs[0]):
            if self._mixes(node, value, [run[index][1] for run in runs[1:]]):
                return node
        return found

    def _run(self, changed: Tensor | None, watched: list[tuple[Node, Tensor]] | None = None) -> _Seen:
        feeds = {node: self._feed(node, changed) for node in self.inputs}
        values: list[tuple[Node, Tensor]] = []
        order = iter(self.sites)

        def apart(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
            site: Site = next(order)
            values.extend((node, value.clone()) for node, value in ((site.q, q), (site.k, k), (site.v, v)))
            return _apart(q, k, v)

        def watch(node: Node, value: Any) -> None:
            if watched is not None and isinstance(value, Tensor) and self._axes(node):
                watched.append((node, value.clone()))

        result = evaluate(self.gm, self.output, self.calls, feeds, self.sizes, instead={SITE: apart}, watch=watch)
        outputs = zip(tree_leaves(self.output.args[0]), tree_leaves(result), strict=True)
        values.extend((node, value) for node, value in outputs if isinstance(value, Tensor) and isinstance(node, Node))
        return _Seen(values)

    def _feed(self, node: Node, changed: Tensor | None) -> Tensor:
        if is_module_tensor(node):
            weight = module_tensor(self.gm, node)
            if weight is None:
                raise EvaluationError(f"the content of {node.name} is out of reach")
            return weight.clone() if self.flow.writes_to(node) else weight
        like, shape = recorded(node), shape_of(node)
        if not isinstance(like, Tensor) or shape is None:
            raise EvaluationError(f"the input {node.name} is no tensor")
        axes = [axis for axis, dim in enumerate(shape) if dim == self.tokens]
        if len(axes) > 1 and isinstance(self.tokens, int) and 1 in axes:
            axes = [1]
        if len(axes) > 1:
            raise EvaluationError(f"the input {node.name} has several axes of tokens")
        size = concrete(shape, self.sizes)
        last = (*size[: axes[0]], *size[axes[0] + 1 :], self.length) if axes else size
        large = node in self.large
        value = _example(last, like, bool(axes), 0, large)
        if axes and changed is not None:
            value = torch.where(changed.to(like.device), _example(last, like, True, 1, large), value)
        return value.movedim(-1, axes[0]).contiguous() if axes else value

    def _axes(self, node: Node) -> list[int]:
        shape = shape_of(node) or ()
        return [axis for axis, dim in enumerate(shape) if dim == self.tokens]

    def _mixes(self, node: Node, before: Tensor, after: list[Tensor]) -> bool:
        """Whether what a token has in ``before`` changes when other tokens do; ``after``: by pattern."""
        changes = [torch.where(value == before, 0.0, (value.double() - before.double()).abs()) for value in after]
        largest = max(float(change.nan_to_num(posinf=0.0).max()) for change in changes) if before.numel() else 0.0
        scale = float(before.double().abs().nan_to_num(posinf=0.0).max()) if before.numel() else 0.0
        eps = torch.finfo(before.dtype).eps if before.is_floating_point() else 0.0
        moved = [change > max(max(_TOLERANCE, 8 * eps) * largest, 8 * eps * scale) for change in changes]
        shape = shape_of(node) or ()
        for axis, dim in enumerate(shape):
            flat = bool(symbols_of([self.tokens])) and dim == self.batch * self.tokens and dim != self.tokens
            if dim != self.tokens and not flat:
                continue
            split = [value.unflatten(axis, (self.rows, self.length)) if flat else value for value in moved]
            rows = [value.movedim(axis + flat, -1).reshape(-1, self.length).any(0).cpu() for value in split]
            if not any(bool((row & ~pattern).any()) for row, pattern in zip(rows, self.patterns, strict=True)):
                return False
        if any(dim == self.tokens for dim in shape):
            return True
        return not any(self._one_token_each(moved, axis) for axis in range(max(before.ndim, 1)))

    def _one_token_each(self, moved: list[Tensor], axis: int) -> bool:
        """Whether each place on an axis, as that of the last few tokens, may come from a single token."""
        patterns = torch.stack(self.patterns)
        places = [torch.atleast_1d(value).movedim(axis, 0)[..., None].flatten(1) for value in moved]
        touched = torch.stack([place.any(1).cpu() for place in places])
        return bool((patterns[:, None] | ~touched[..., None]).all(0).any(-1).all())


def _apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What stands for attention: ``[B, H, T, Dv]``, each token made of its own query, key and value."""
    group = q.shape[1] // k.shape[1]
    gate = torch.sigmoid((q * k.repeat_interleave(group, 1)).mean(-1, keepdim=True))
    rows = v.repeat_interleave(group, 1) * (0.5 + gate)
    return rows.transpose(1, 2).contiguous().transpose(1, 2)


def _patterns(tokens: int) -> list[Tensor]:
    """Sets of tokens to change, bool ``[T]``, such that each pair of tokens is told apart (of many tokens, most)."""
    if tokens <= 10:
        codes = list(itertools.islice(itertools.combinations(range(5), 2), tokens))
        table = torch.tensor([[part in code for code in codes] for part in range(5)])
        return list(table[table.any(1)])
    half = torch.rand(2, tokens, generator=torch.Generator().manual_seed(0)) < 0.5
    return [half[0], ~half[0], half[1], ~half[1]]


def _example(shape: tuple[int, ...], like: Tensor, by_token: bool, variant: int, large: bool = False) -> Tensor:
    """An input: numbers that differ from token to token, on the last axis, and between variants.

    Whole numbers are small, as they may look up tables, or ``large``: as many as there are tokens.
    """
    if like.is_floating_point():
        value = torch.randn(shape, generator=torch.Generator().manual_seed(variant))
    elif like.dtype == torch.bool:
        value = torch.full(shape, variant == 0)
    elif by_token:
        order, step = torch.arange(shape[-1]), variant * EXAMPLE_LENGTHS[0]
        numbers = (order + step) % shape[-1] if large else order % EXAMPLE_LENGTHS[0] + step
        value = numbers.expand(shape).contiguous()
    else:
        value = torch.full(shape, variant * EXAMPLE_LENGTHS[0])
    return value.to(dtype=like.dtype, device=like.device)

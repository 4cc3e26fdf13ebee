"""Fail closed on tokens that see other tokens outside of the canonical sites: no cache would carry that along.

The graph runs on a few tokens, every site replaced by a call that keeps its tokens apart. Some tokens are then given
other inputs: what the others bring to the sites and to the output must stay as it was. This takes the weights and one
forward pass of few tokens per pattern.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.graphs.fx_utils import (
    DataFlow,
    Dim,
    is_module_tensor,
    literals_of,
    module_tensor,
    refuse,
    shape_of,
    symbols_of,
    target_name,
)
from kvpass.graphs.rewrite_attention import find_sites
from kvpass.graphs.verify.apart import ApartExample, Seen, fed_by_inputs
from kvpass.graphs.verify.example_lengths import lengths_about, numbers_of, size_numbers, stored_numbers, windows_of
from kvpass.graphs.verify.examples import EXAMPLE_LENGTHS, EvaluationError
from kvpass.graphs.verify.read_token_mixing import counting_calls, mixing_call

_MAX_TOKENS = 4096
"""Longest capture of fixed length that is evaluated, and longest example of a symbolic one."""

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
    fed = fed_by_inputs(live)
    for node in live:
        if node in fed and (reason := mixing_call(node, fed, batch, tokens)) is not None:
            raise refuse(node, reason)
    if tokens == 1:
        return 0
    try:
        if isinstance(tokens, int) and tokens > _MAX_TOKENS:
            raise EvaluationError(f"an example of {tokens} tokens is too long; capture with a dynamic length")
        for length in mixing_lengths(gm, live, tokens):
            culprit = _culprit(ApartExample(gm, flow, live, batch, tokens, length))
            if culprit is not None:
                raise refuse(culprit, f"its result {shape_of(culprit) or ''} {_REASON}".replace("  ", " "))
    except EvaluationError as error:
        reason = f"no example shows whether anything but attention relates tokens to tokens: {error}"
        raise refuse(sites[0].node, reason) from error
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
    fed = fed_by_inputs(live)
    for node in counting_calls(live, shape[2])[1]:
        if node in fed:
            raise refuse(
                node, f"{target_name(node)} makes one number of the ids or positions of all tokens: it {_REASON}"
            )
    return 0


def mixing_lengths(gm: GraphModule, live: Sequence[Node], tokens: Dim) -> list[int]:
    """Token counts of examples: a few, and beyond every number that positions or lengths are held against."""
    symbols = symbols_of([tokens])
    if not symbols:
        return [0]
    contents = (module_tensor(gm, node) for node in live if is_module_tensor(node))
    calls = counting_calls(live, tokens)[0]
    numbers = numbers_of(calls) | size_numbers(live, symbols)
    numbers |= stored_numbers(content for content in contents if content is not None)
    fractions = [abs(value) for value in literals_of(calls, floats=True) if 1 / _MAX_TOKENS < abs(value) < 1]
    numbers |= windows_of(number / fraction for fraction in fractions for number in numbers)
    beyond = lengths_about(number for number in numbers if number < _MAX_TOKENS)[-1]
    return [EXAMPLE_LENGTHS[0], *([beyond] if beyond > EXAMPLE_LENGTHS[-1] else [])]


def _culprit(example: ApartExample) -> Node | None:
    """The first call whose tokens are not kept apart, None when all are."""
    patterns = _patterns(example.length)
    if any(value.is_floating_point() and bool(value.isnan().any()) for _, value in example.before):
        raise EvaluationError("the example gives NaN")
    found = _first_mixing(example, patterns, example.before, [example.run(pattern) for pattern in patterns])
    if found is None:
        return None
    watched = [_watched(example, pattern) for pattern in (None, *patterns)]
    return _first_mixing(example, patterns, watched[0], watched[1:]) or found


def _watched(example: ApartExample, changed: Tensor | None) -> Seen:
    """What every call by token gives."""
    values: Seen = []

    def watch(node: Node, value: Any) -> Any:
        if isinstance(value, Tensor) and example.tokens in (shape_of(node) or ()):
            values.append((node, value.clone()))
        return value

    example.run(changed, watch)
    return values


def _first_mixing(example: ApartExample, patterns: list[Tensor], before: Seen, after: list[Seen]) -> Node | None:
    """The first node of which tokens change when others do; ``after``: by pattern."""
    for index, (node, value) in enumerate(before):
        if _mixes(example, patterns, node, value, [run[index][1] for run in after]):
            return node
    return None


def _mixes(example: ApartExample, patterns: list[Tensor], node: Node, before: Tensor, after: list[Tensor]) -> bool:
    """Whether what a token has in ``before`` changes when other tokens do."""
    wide = torch.complex128 if before.is_complex() else torch.float64
    changes = [torch.where(value == before, 0.0, (value.to(wide) - before.to(wide)).abs()) for value in after]
    largest = max(float(change.nan_to_num(posinf=0.0).max()) for change in changes) if before.numel() else 0.0
    scale = float(before.to(wide).abs().nan_to_num(posinf=0.0).max()) if before.numel() else 0.0
    eps = torch.finfo(before.dtype).eps if before.is_floating_point() or before.is_complex() else 0.0
    moved = [change > max(max(_TOLERANCE, 8 * eps) * largest, 8 * eps * scale) for change in changes]
    for views in zip(*(example.by_token(node, value) for value in moved), strict=True):
        rows = [view.movedim(axis, -1).reshape(-1, example.length).any(0).cpu() for view, axis in views]
        if not any(bool((row & ~pattern).any()) for row, pattern in zip(rows, patterns, strict=True)):
            return False
    if example.tokens in (shape_of(node) or ()):
        return True
    return not any(_one_token_each(patterns, moved, axis) for axis in range(max(before.ndim, 1)))


def _one_token_each(patterns: list[Tensor], moved: list[Tensor], axis: int) -> bool:
    """Whether each place on an axis, as that of the last few tokens, may come from a single token."""
    places = [torch.atleast_1d(value).movedim(axis, 0)[..., None].flatten(1) for value in moved]
    touched = torch.stack([place.any(1).cpu() for place in places])
    return bool((torch.stack(patterns)[:, None] | ~touched[..., None]).all(0).any(-1).all())


def _patterns(tokens: int) -> list[Tensor]:
    """Sets of tokens to change, bool ``[T]``, such that each pair of tokens is told apart (of many tokens, most)."""
    if tokens <= 10:
        codes = list(itertools.islice(itertools.combinations(range(5), 2), tokens))
        table = torch.tensor([[part in code for code in codes] for part in range(5)])
        return list(table[table.any(1)])
    half = torch.rand(2, tokens, generator=torch.Generator().manual_seed(0)) < 0.5
    return [half[0], ~half[0], half[1], ~half[1]]

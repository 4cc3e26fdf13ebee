"""Prove that an attention call's mask is causal, by evaluating it on small examples.

How the mask is written does not matter. The graph that makes it runs for a few token counts with contiguous positions.
The result must equal the causal mask, or the causal mask of one sliding window. An additive mask must add nothing to
visible entries, or a slope per head times the position of the key (ALiBi: "Train short, test long", Press et al. 2022,
section 3).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from kvpass.graphs.fx_utils import (
    DataFlow,
    Dim,
    dim_of,
    is_module_tensor,
    is_scalar,
    made_of,
    module_tensor,
    recorded,
    shape_of,
)
from kvpass.graphs.verify.examples import (
    EXAMPLE_LENGTHS,
    MARGIN,
    EvaluationError,
    NotCausalError,
    NotEvaluatedError,
    SizeMap,
    concrete,
    evaluate,
    example_sizes,
    numbers_of,
    stored_numbers,
)
from kvpass.graphs.verify.length_guards import longest_length
from kvpass.torch_compat import FakeTensor

_OFFSET = 5

_MAX_EXAMPLE_TOKENS = 8192  # longest example that is evaluated; a window that cannot be seen within it is not decided
_FLOOR = 2048
_MAX_FLOOR_ELEMENTS = 2**22
"""The longest example has 2048 tokens even where no number asks for that, or fewer to have no more elements."""

_COST_OF_LOGITS = 8  # cost of evaluating logits several times in float64, relative to a mask once
_ODD_ROW = (0, 0, 1, 1, 1, 0)
_LEAVE_OUT = (
    "Leave that argument out: a causal mask of the decoder's own is found, and kvpass.session takes the padding"
)
NEGLIGIBLE_LOGIT = -1e9  # an additive mask at or below this value hides an entry
_BIAS = "its mask adds a bias to the logits, or hides tokens by a small number only, such as -10000"


@dataclass(frozen=True)
class Band:
    """What a mask does."""

    window: int | None  # most keys that a query attends, itself included
    slopes: tuple[float, ...] | None = None  # what each query head adds per position of the key


class MaskPart:
    """The nodes that make a mask, or logits, ready to run on examples; ``tokens`` is the size of its two token axes."""

    def __init__(
        self, flow: DataFlow, result: Node, *, before: Node, batch: Dim, tokens: Dim, given: Collection[Node] = ()
    ) -> None:
        """Select the nodes that make ``result`` from inputs and ``given`` nodes, as of ``before``.

        ``result`` is a mask, bool (True = attend) or additive, broadcastable to ``[B, H, T, T]``, or logits.
        NotCausalError is raised where it is an input, or depends on a tensor that cannot be read.
        """
        writes = [write for node in given for write in flow.writes_to(node, before=before)]
        sources = flow.sources([result, *writes], before=before, stop=given)
        self.gm, self.result, self.name = flow.gm, result, result.name
        self.batch, self.tokens = batch, tokens
        self.inputs = [node for node in sources if node.op in ("placeholder", "get_attr") and node not in given]
        self.calls = [node for node in sources if node not in self.inputs and node not in given]
        if not self.calls and not given:
            raise NotCausalError(f"its mask is the input {self.name}, whose content is unknown. {_LEAVE_OUT}")
        self.products = made_of([*given, *self.calls], given.__contains__)
        self.tensors: dict[Node, Tensor] = {}
        for node in filter(is_module_tensor, self.inputs):
            value = module_tensor(node)
            if value is None:
                raise NotCausalError(f"its mask depends on {node.name}, whose content is out of reach")
            self.tensors[node] = value

    def sizes(self, length: int) -> SizeMap:
        """Return values of the symbols when the token symbol is ``length``."""
        return example_sizes(self.batch, self.tokens, length)

    def count(self, length: int) -> int:
        """Return the number of tokens when the token symbol is ``length``."""
        return int(concrete(self.tokens, self.sizes(length)))

    def run(self, length: int, start: int, given: Mapping[Node, Tensor] | None = None) -> Tensor:
        """Return the result, a tensor, for positions ``start``, ``start + 1``..., from ``given`` values of nodes."""
        sizes = self.sizes(length)
        feeds = {node: self._feed(node, start, sizes) for node in self.inputs if not is_scalar(node)}
        feeds |= {node: value.clone() for node, value in (given or {}).items()}
        try:
            value = evaluate(self.result, self.calls, feeds, sizes)
        except EvaluationError as error:
            raise NotEvaluatedError(f"its mask cannot be evaluated: {error}") from error
        if not isinstance(value, Tensor):
            raise NotCausalError(f"its mask is a {type(value).__name__}")
        return value

    def _feed(self, node: Node, start: int, sizes: SizeMap) -> Tensor:
        if node in self.tensors:
            return self.tensors[node]
        value, shape = recorded(node), shape_of(node)
        if not shape or shape[-1] != self.tokens or value.is_floating_point() or value.dtype == torch.bool:
            raise NotCausalError(
                f"its mask depends on the input {node.name}, which is no row of positions. {_LEAVE_OUT}"
            )
        size = concrete(shape, sizes)
        return torch.arange(start, start + size[-1], device="cpu").to(value).expand(size).contiguous()

    def lengths(self) -> tuple[list[int], str | None]:
        """Return values for the token symbol, by preference, and why a mask that fits them may still have a window.

        A window is a number in the graph or the shape of a stored mask, so the longest example goes beyond the former
        or to the end of the latter. It also tells positions from token ids: its row 0, 1, 2... holds every number that
        the graph could compare an id with. The most tokens that the capture holds for come last: what can be evaluated
        beyond them shows more.
        """
        if isinstance(self.tokens, int):  # such a capture is compared with another one, or refused in the end
            return [self.tokens], None
        least, shapes = EXAMPLE_LENGTHS[-1], [value.shape for value in self.tensors.values()]
        reach = max(numbers_of(self.calls, self.products) | stored_numbers(self.tensors.values()), default=0)
        needed = max(reach + MARGIN, least)
        squares = (shape[-1] for shape in shapes if len(shape) > 1 and shape[-1] == shape[-2] > least)
        stored = max(squares, default=0)
        planes = max(math.prod(concrete(shape_of(self.result) or (), self.sizes(1))), 1)
        planes *= _COST_OF_LOGITS if self.products else 1
        floor = min(_FLOOR, math.isqrt(_MAX_FLOOR_ELEMENTS // planes))
        tables = {size for shape in shapes for size in shape if size > least}
        beyond = [max(needed, floor), *sorted(tables, reverse=True), needed]
        longest = [stored] if stored and stored >= reach else beyond
        sizes = [size for size in recorded(self.result).shape if isinstance(size, torch.SymInt)]
        size = next((size for size in sizes if dim_of(size) == self.tokens), 0)
        most = longest_length(self.gm, size, sys.maxsize)
        longest += [most] if most is not None and most < min(longest) else []
        if longest[0] > _MAX_EXAMPLE_TOKENS:
            needs = f"deciding whether its mask has a sliding window needs an example of {longest[0]} tokens"
            return [least], f"{needs}, more than {_MAX_EXAMPLE_TOKENS}"
        return list(dict.fromkeys(length for length in longest if length <= longest[0])), None

    def check_content(self, length: int, given: Mapping[Node, Tensor] | None = None) -> None:
        """Raise NotCausalError if the result depends on an input that does not hold the tokens' positions."""
        for node in self.inputs:
            if self.tokens == 1 or is_scalar(node) or node in self.tensors:
                continue
            row = self._feed(node, 0, self.sizes(length))
            odd = torch.tensor(_ODD_ROW, device="cpu").repeat(row.shape[-1])[: row.shape[-1]].to(row).expand_as(row)
            same = torch.equal(self.run(length, 0, given), self.run(length, 0, {**(given or {}), node: odd}))
            if not same and not _holds_positions(node):
                raise NotCausalError(
                    f"its mask depends on what the input {node.name} holds, which is no row of positions when captured"
                )


def _holds_positions(node: Node) -> bool:
    """Return whether rows of a captured input count tokens, some possibly after left padding."""
    example = getattr(node.meta.get("grapharg"), "example", None)
    if not isinstance(example, Tensor) or isinstance(example, FakeTensor) or example.ndim == 0:
        return False
    rows = example.reshape(-1, example.shape[-1])
    steps = rows.diff(dim=1) == 1
    padded = (~steps).long().flip(1).cumsum(1).flip(1) > 0
    constant = (rows[:, :-1] == rows[:, :1]) | ~padded
    return bool(steps.all(1).any() and constant.all())


def starts_of(length: int) -> tuple[int, ...]:
    """Return first positions to try; a nonzero one tells positions from indices."""
    return (0,) if length > EXAMPLE_LENGTHS[-1] else (0, _OFFSET)


def prove_causal(part: MaskPart, heads: int) -> Band:
    """Return what a mask does; raise NotCausalError where it is not proved causal."""
    proved, lengths = prove_band(part, part.run, heads, NEGLIGIBLE_LOGIT)
    part.check_content(lengths[0])
    return proved


def prove_band(part: MaskPart, mask: Callable[[int, int], Tensor], heads: int, floor: float) -> tuple[Band, list[int]]:
    """Return window and slopes of a mask ``[..., T, T]``, and the values of the token symbol that showed it, ascending.

    Args:
        part: of the mask, or of logits. mask: called with token symbol and first position. heads: query heads.
        floor: an additive mask at or below this hides the entry.
    """
    candidates, undecided = part.lengths()
    longest, value = _longest(mask, candidates, part.count)
    short = [length for length in EXAMPLE_LENGTHS if length < longest and part.tokens != longest]
    tokens, row = part.count(longest), attended_of(value, floor).reshape(-1, value.shape[-1])[-1]
    seen = int(row.expand(tokens).sum()) if row.shape[0] in (1, tokens) else tokens  # by the last query
    window = None if seen in (0, tokens) else seen
    slopes: list[tuple[tuple[float, ...] | None, float]] = []  # with their tolerances
    for length in (longest, *short):
        rounding = torch.finfo(torch.bfloat16).eps if length > EXAMPLE_LENGTHS[-1] else 0.0
        tokens = part.count(length)
        for start in starts_of(length):
            value = value if (length, start) == (longest, 0) else mask(length, start)
            attended = attended_of(value, floor)
            slopes.append((_slopes(value, attended, tokens, heads, rounding), max(2 * rounding, 1e-5)))
            check_band(attended, window, tokens, start, part.name)
    of_last = slopes[-1][0]
    if not all(_are_close(of_last or (), other or (), tolerance) for other, tolerance in slopes):
        raise NotCausalError(_BIAS)
    if undecided is not None:
        raise NotCausalError(undecided)
    return Band(window, of_last), [*short, longest]


def _are_close(slopes: Sequence[float], others: Sequence[float], tolerance: float) -> bool:
    pairs = zip(slopes, others, strict=False)
    return len(slopes) == len(others) and all(math.isclose(a, b, rel_tol=tolerance) for a, b in pairs)


def _longest(
    mask: Callable[[int, int], Tensor], candidates: list[int], count: Callable[[int], int]
) -> tuple[int, Tensor]:
    """Return the first length for which the mask can be evaluated, and the mask."""
    *preferred, last = candidates
    for length in preferred:
        with suppress(NotEvaluatedError):
            value = mask(length, 0)
            if all(size in (1, count(length)) for size in value.shape[-2:]):
                return length, value
    return last, mask(last, 0)


def band(length: int, window: int | None, device: torch.device | None = None) -> Tensor:
    """Return the causal mask ``[length, length]`` bool of a sliding window, True = attend."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal if window is None else causal.triu(1 - window)


def attended_of(mask: Tensor, floor: float) -> Tensor:
    """Convert a bool or additive mask to bool, True = attend; raise NotCausalError if it is neither."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise NotCausalError(f"its mask has dtype {mask.dtype}")
    if bool(mask.isnan().any()):
        raise NotCausalError(_BIAS)
    return mask > max(floor, torch.finfo(mask.dtype).min) / 2


def _slopes(mask: Tensor, attended: Tensor, tokens: int, heads: int, rounding: float) -> tuple[float, ...] | None:
    """Return what an additive mask adds per position of the key, by query head; raise where it adds something else.

    ``rounding`` is a relative tolerance: models that make the mask in 16 bits (Falcon) round it at later positions.
    """
    if mask.dtype == torch.bool or not bool((mask[attended] != 0).any()):
        return None
    shape = (*mask.shape[:-2], tokens, tokens)
    rows = mask.expand(shape).reshape(-1, tokens, tokens).double()
    seen = attended.expand(shape).reshape(-1, tokens, tokens)
    if len(rows) not in (1, heads) and len(rows) % heads:
        raise NotCausalError(_BIAS)
    first = int(seen[0, -1].int().argmax())
    slopes = (rows[:, -1, -1] - rows[:, -1, first]) / max(tokens - 1 - first, 1)
    rest = rows - slopes[:, None, None] * torch.arange(tokens, device=rows.device)
    rest = (rest - rest.diagonal(dim1=1, dim2=2)[:, :, None])[seen].abs()
    by_row = slopes.expand(heads) if len(rows) == 1 else slopes.view(-1, heads)
    exact = 4 * torch.finfo(mask.dtype if mask.dtype != torch.float64 else torch.float32).eps
    tolerance = max(exact, rounding)
    even = bool((rest <= tolerance * rows[seen].abs().max()).all())
    if not even or tokens == 1 or not torch.allclose(by_row, slopes[:heads].expand(by_row.shape), rtol=1e-5, atol=0):
        raise NotCausalError(_BIAS)
    return tuple(by_row.reshape(-1, heads)[0].tolist())


def check_band(attended: Tensor, window: int | None, length: int, start: int, name: str) -> None:
    """Raise NotCausalError, naming the node ``name``, unless the mask is the causal mask of that window."""
    sizes = attended.shape[-2:] if attended.ndim >= 2 else (1, *attended.shape)
    fits = attended.ndim <= 5 and all(size in (1, length) for size in sizes)
    if not fits or not bool((attended == band(length, window, attended.device)).all()):
        raise NotCausalError(f"its mask {name} is not causal (evaluated for {length} tokens at positions from {start})")

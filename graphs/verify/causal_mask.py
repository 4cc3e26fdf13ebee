"""Prove that an attention call's mask is causal, by evaluating it on small examples.

How the mask is written does not matter. The graph that makes it runs for a few token counts with contiguous positions.
The result must equal the causal mask, or the causal mask of one sliding window. An additive mask must add nothing to
visible entries, or a slope per head times the position of the key (ALiBi: "Train short, test long", Press et al. 2022,
section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.graphs.fx_utils import (
    DataFlow,
    Dim,
    is_module_tensor,
    is_scalar,
    module_tensor,
    recorded,
    shape_of,
    value_inputs,
)
from kvpass.graphs.verify.examples import (
    EXAMPLE_LENGTHS,
    EvaluationError,
    NotCausalError,
    NotEvaluatedError,
    SizeMap,
    concrete,
    evaluate,
    example_lengths,
    example_sizes,
    numbers_of,
    stored_numbers,
)
from kvpass.graphs.verify.length_guards import most_tokens
from kvpass.torch_compat import FakeTensor

_OFFSET = 5

_COST_OF_LOGITS = 8
"""Cost of evaluating logits several times in float64, relative to a mask once."""

_ODD_ROW = (0, 0, 1, 1, 1, 0)
_LEAVE_OUT = (
    "Leave that argument out: a causal mask of the decoder's own is found, and kvpass.session takes the padding"
)
NEGLIGIBLE_LOGIT = -1e9
"""An additive mask at or below this value hides an entry."""
_BIAS = "its mask adds a bias to the logits, or hides tokens by a small number only, such as -10000"


@dataclass(frozen=True)
class Band:
    """What a mask does.

    Attributes:
        window: most keys that a query attends, itself included; None when there is no limit.
        slopes: what each query head adds per position of the key; None when nothing.
    """

    window: int | None
    slopes: tuple[float, ...] | None = None

    def is_close(self, other: Band, tolerance: float) -> bool:
        """Return whether two bands are equal up to rounding of the slopes."""
        mine, theirs = self.slopes or (), other.slopes or ()
        same = self.window == other.window and len(mine) == len(theirs)
        return same and all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(mine, theirs, strict=True))


class MaskPart:
    """The nodes that make a mask, or logits, ready to run on examples.

    Attributes:
        name: of the node that holds the result. tokens: size of its two token axes.
        calls: the nodes to run, in order.
    """

    def __init__(
        self,
        gm: GraphModule,
        flow: DataFlow,
        result: Node,
        *,
        before: Node,
        batch: Dim,
        tokens: Dim,
        given: Collection[Node] = (),
    ) -> None:
        """Select the nodes that make ``result`` from inputs and ``given`` nodes, as of ``before``.

        Raises:
            NotCausalError: it depends on a tensor of a module whose content cannot be read.
        """
        writes = [write for node in given for write in flow.writes_to(node, before=before)]
        sources = flow.sources([result, *writes], before=before, stop=given)
        self.gm, self.result, self.name = gm, result, result.name
        self.batch, self.tokens = batch, tokens
        self.inputs = [node for node in sources if node.op in ("placeholder", "get_attr") and node not in given]
        self.calls = [node for node in sources if node not in self.inputs and node not in given]
        self.tensors = {node: self._content(node) for node in self.inputs if is_module_tensor(node)}
        self.products = set(given)
        self.products.update(node for node in self.calls if not self.products.isdisjoint(value_inputs(node)))

    def _content(self, node: Node) -> Tensor:
        value = module_tensor(self.gm, node)
        if value is None:
            raise NotCausalError(f"its mask depends on {node.name}, whose content is out of reach")
        return value

    def sizes(self, length: int) -> SizeMap:
        """Return values of the symbols when the token symbol is ``length``."""
        return example_sizes([self.batch], [self.tokens], length)

    def count(self, length: int) -> int:
        """Return the number of tokens when the token symbol is ``length``."""
        return int(concrete(self.tokens, self.sizes(length)))

    def run(
        self, length: int, start: int, given: Mapping[Node, Tensor] | None = None, odd: Node | None = None
    ) -> Tensor:
        """Return the result for positions ``start``, ``start + 1``...; ``odd`` is an input that gets other numbers.

        Raises:
            NotCausalError: it cannot be evaluated, or is no tensor.
        """
        sizes = self.sizes(length)
        feeds = {node: self._feed(node, start, sizes, odd) for node in self.inputs if not is_scalar(node)}
        try:
            value = evaluate(self.gm, self.result, self.calls, {**feeds, **(given or {})}, sizes)
        except EvaluationError as error:
            raise NotEvaluatedError(f"its mask cannot be evaluated: {error}") from error
        if not isinstance(value, Tensor):
            raise NotCausalError(f"its mask is a {type(value).__name__}")
        return value

    def _feed(self, node: Node, start: int, sizes: SizeMap, odd: Node | None) -> Tensor:
        if node in self.tensors:
            return self.tensors[node]
        value, shape = recorded(node), shape_of(node)
        if not shape or shape[-1] != self.tokens or value.is_floating_point() or value.dtype == torch.bool:
            raise NotCausalError(
                f"its mask depends on the input {node.name}, which is no row of positions. {_LEAVE_OUT}"
            )
        size = concrete(shape, sizes)
        row = torch.arange(start, start + size[-1], device="cpu")
        if node is odd:
            row = torch.tensor(_ODD_ROW, device="cpu").repeat(size[-1] // len(_ODD_ROW) + 1)[: size[-1]]
        return row.to(value).expand(size).contiguous()

    def lengths(self) -> tuple[list[int], str | None]:
        """Values for the token symbol to try, see :func:`example_lengths`."""
        planes = max(math.prod(concrete(shape_of(self.result) or (), self.sizes(1))), 1)
        planes *= _COST_OF_LOGITS if self.products else 1
        most = most_tokens(self.gm, self.result, self.tokens)
        numbers = numbers_of(self.calls, self.products) | stored_numbers(self.tensors.values())
        return example_lengths(self.tokens, self.tensors.values(), numbers - {self.tokens}, planes, most)

    def check_content(self, run: Callable[[Node | None], Tensor]) -> None:
        """Check that the result depends on an input only if it holds the tokens' positions.

        Args:
            run: returns the result; the input passed to it holds no positions.
        Raises:
            NotCausalError: the result depends on other content.
        """
        for node in self.inputs:
            if self.tokens == 1 or is_scalar(node) or node in self.tensors:
                continue
            if not torch.equal(run(None), run(node)) and not _holds_positions(node):
                raise NotCausalError(
                    f"its mask depends on what the input {node.name} holds, which is no row of positions when captured"
                )


def _holds_positions(node: Node) -> bool:
    """Return whether rows of a captured input count tokens, some possibly after left padding."""
    given = getattr(node.meta.get("grapharg"), "example", None)
    if not isinstance(given, Tensor) or isinstance(given, FakeTensor) or given.ndim == 0:
        return False
    rows = given.reshape(-1, given.shape[-1])
    steps = rows.diff(dim=1) == 1
    padded = (~steps).long().flip(1).cumsum(1).flip(1) > 0
    constant = (rows[:, :-1] == rows[:, :1]) | ~padded
    return bool(steps.all(1).any() and constant.all())


def starts_of(length: int) -> tuple[int, ...]:
    """Return first positions to try; a nonzero one tells positions from indices."""
    return (0,) if length > EXAMPLE_LENGTHS[-1] else (0, _OFFSET)


def mask_part(gm: GraphModule, flow: DataFlow, site: Node, mask: Node, q: Node) -> MaskPart:
    """Return the part that makes the mask of an attention call.

    Args:
        flow: data flow of ``gm``. site: the attention call. mask: its mask, bool (True = attend) or additive,
            broadcastable to ``[B, H, T, T]``. q: its queries, ``[B, H, T, D]``.
    Raises:
        NotCausalError: its content cannot be read.
    """
    shape = shape_of(q)
    assert shape is not None and len(shape) == 4
    part = MaskPart(gm, flow, mask, before=site, batch=shape[0], tokens=shape[2])
    if not part.calls:
        raise NotCausalError(f"its mask is the input {mask.name}, whose content is unknown. {_LEAVE_OUT}")
    return part


def prove_causal(part: MaskPart, heads: int) -> Band:
    """Prove a mask causal and return what it does.

    Raises:
        NotCausalError: with the reason.
    """
    found, lengths = prove_band(part, part.run, heads, NEGLIGIBLE_LOGIT)
    part.check_content(lambda odd: part.run(lengths[0], 0, odd=odd))
    return found


def prove_band(part: MaskPart, mask: Callable[[int, int], Tensor], heads: int, floor: float) -> tuple[Band, list[int]]:
    """Return window and slopes of a mask ``[..., T, T]``, and the values of the token symbol that showed it, ascending.

    Args:
        part: of the mask, or of logits. mask: called with token symbol and first position. heads: query heads.
        floor: an additive mask at or below this hides the entry.
    Raises:
        NotCausalError: with the reason.
    """
    candidates, undecided = part.lengths()
    longest, value = _longest(mask, candidates, part.count)
    short = [length for length in EXAMPLE_LENGTHS if length < longest and part.tokens != longest]
    window = window_of(attended_of(value, floor), part.count(longest))
    slopes: list[tuple[tuple[float, ...] | None, float]] = []
    for length in (longest, *short):
        rounding = torch.finfo(torch.bfloat16).eps if length > EXAMPLE_LENGTHS[-1] else 0.0
        tokens = part.count(length)
        for start in starts_of(length):
            value = value if (length, start) == (longest, 0) else mask(length, start)
            attended = attended_of(value, floor)
            slopes.append((_slopes(value, attended, tokens, heads, rounding), max(2 * rounding, 1e-5)))
            check_band(attended, window, tokens, start, part.name)
    first = Band(window, slopes[-1][0])
    if not all(first.is_close(Band(window, other), tolerance) for other, tolerance in slopes):
        raise NotCausalError(_BIAS)
    if undecided is not None:
        raise NotCausalError(undecided)
    return first, [*short, longest]


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
    """Convert a bool or additive mask to bool, True = attend.

    Raises:
        NotCausalError: it is neither.
    """
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise NotCausalError(f"its mask has dtype {mask.dtype}")
    if bool(mask.isnan().any()):
        raise NotCausalError(_BIAS)
    return mask > max(floor, torch.finfo(mask.dtype).min) / 2


def _slopes(mask: Tensor, attended: Tensor, tokens: int, heads: int, rounding: float) -> tuple[float, ...] | None:
    """Return what an additive mask adds per position of the key, by query head.

    Args:
        rounding: relative tolerance: models that make the mask in 16 bits (Falcon) round it at later positions.
    Raises:
        NotCausalError: it adds something else.
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


def window_of(attended: Tensor, length: int) -> int | None:
    """Return the window of a banded mask, read from its last row."""
    row = attended.reshape(-1, attended.shape[-1])[-1]
    seen = int(row.expand(length).sum()) if row.shape[0] in (1, length) else length
    return None if seen in (0, length) else seen


def check_band(attended: Tensor, window: int | None, length: int, start: int, name: str) -> None:
    """Raise unless the mask is the causal mask of that window.

    Raises:
        NotCausalError: naming the node ``name``.
    """
    sizes = attended.shape[-2:] if attended.ndim >= 2 else (1, *attended.shape)
    fits = attended.ndim <= 5 and all(size in (1, length) for size in sizes)
    if not fits or not bool((attended == band(length, window, attended.device)).all()):
        raise NotCausalError(f"its mask {name} is not causal (evaluated for {length} tokens at positions from {start})")

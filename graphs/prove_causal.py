"""Prove that the mask of an attention call is causal, by evaluating the graph that makes it on small examples.

The mask is taken for what it does, not for how it is written: its ancestors run for a few token counts with ordinary
contiguous positions, and the result must equal the causal mask, or the causal mask of one sliding window. What an
additive mask adds to the entries it shows must be nothing, or a slope per head times the position of the key (ALiBi:
"Train short, test long", Press et al. 2022, section 3).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.graphs.fx_utils import (
    DataFlow,
    Dim,
    EvaluationError,
    SizeMap,
    concrete,
    evaluate,
    is_module_tensor,
    is_scalar,
    literals_of,
    module_path_of,
    module_tensor,
    recorded,
    shape_of,
    symbols_of,
)

_SHORT_LENGTHS = (7, 13)
_BATCH = 2
_OFFSET = 5
_MARGIN = 5

MAX_EXAMPLE_TOKENS = 8192
"""Longest example that is evaluated; a window that cannot be seen within it is not decided."""

NEGLIGIBLE_LOGIT = -1e9
"""An additive mask at or below this leaves nothing of an entry."""


@dataclass(frozen=True)
class Band:
    """What a mask does.

    Attributes:
        window: how many keys a query sees at most, itself included; None when all before it.
        slopes: what each query head adds per position of the key; None when nothing.
    """

    window: int | None
    slopes: tuple[float, ...] | None = None

    def is_close(self, other: Band) -> bool:
        """Equal but for rounding of the slopes."""
        mine, theirs = self.slopes or (), other.slopes or ()
        same = self.window == other.window and len(mine) == len(theirs)
        return same and all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(mine, theirs, strict=True))


_BANDS: defaultdict[str, list[Band]] = defaultdict(list)
"""What captures of several tokens have shown, by line of code, module path and heads."""


class NotCausalError(Exception):
    """The mask is not causal, or cannot be shown to be; the message is the reason."""


class MaskPart:
    """The part of a graph that makes a mask, or logits, ready to run on examples.

    Attributes:
        name: of the node that holds the result. tokens: size of its two token axes.
        calls: what runs, in order.
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
        """The part that makes ``result`` from the inputs and the ``given`` nodes, as it stands ahead of ``before``.

        Raises:
            NotCausalError: it depends on a tensor of a module whose content is out of reach.
        """
        writes = [write for node in given for write in flow.writes_to(node, before=before)]
        sources = flow.sources([result, *writes], before=before, stop=given)
        self.gm, self.result, self.name = gm, result, result.name
        self.batch, self.tokens = batch, tokens
        self.inputs = [node for node in sources if node.op in ("placeholder", "get_attr") and node not in given]
        self.calls = [node for node in sources if node not in self.inputs and node not in given]
        self.tensors = {node: self._content(node) for node in self.inputs if is_module_tensor(node)}

    def _content(self, node: Node) -> Tensor:
        value = module_tensor(self.gm, node)
        if value is None:
            raise NotCausalError(f"its mask depends on {node.name}, whose content is out of reach")
        return value

    def sizes(self, length: int) -> SizeMap:
        """Values of the symbols when the token symbol is ``length``."""
        return dict.fromkeys(symbols_of([self.batch]), _BATCH) | dict.fromkeys(symbols_of([self.tokens]), length)

    def count(self, length: int) -> int:
        """Tokens when the token symbol is ``length``."""
        return int(concrete(self.tokens, self.sizes(length)))

    def run(self, length: int, start: int, given: Mapping[Node, Tensor] | None = None) -> Tensor:
        """The result for positions ``start``, ``start + 1``...

        Raises:
            NotCausalError: it cannot be evaluated, or is no tensor.
        """
        sizes = self.sizes(length)
        feeds = {node: self._feed(node, start, sizes) for node in self.inputs if not is_scalar(node)}
        try:
            value = evaluate(self.gm, self.result, self.calls, {**feeds, **(given or {})}, sizes)
        except EvaluationError as error:
            raise NotCausalError(f"its mask cannot be evaluated: {error}") from error
        if not isinstance(value, Tensor):
            raise NotCausalError(f"its mask is a {type(value).__name__}")
        return value

    def _feed(self, node: Node, start: int, sizes: SizeMap) -> Tensor:
        if node in self.tensors:
            return self.tensors[node]
        value, shape = recorded(node), shape_of(node)
        if not shape or shape[-1] != self.tokens or value.is_floating_point() or value.dtype == torch.bool:
            raise NotCausalError(f"its mask depends on the input {node.name}, which is no row of positions")
        size = concrete(shape, sizes)
        row = torch.arange(start, start + size[-1], dtype=value.dtype, device=value.device)
        return row.expand(size).contiguous()

    def lengths(self) -> list[int]:
        """Values for the token symbol, see :func:`example_lengths`."""
        return example_lengths(self.tokens, self.tensors.values(), self.literals())

    def literals(self) -> set[int]:
        """Ints that the mask may compare positions with."""
        scalars = [value for value in self.tensors.values() if value.numel() == 1 and not value.is_floating_point()]
        numbers = literals_of(self.calls) | {int(value) for value in scalars}
        return {number for number in numbers if NEGLIGIBLE_LOGIT < number < 2**31} - {self.tokens}


def example_lengths(tokens: Dim, tensors: Collection[Tensor], literals: Collection[int]) -> list[int]:
    """Values for the token symbol, the longest first; it decides the window.

    A window is a number in the graph or the shape of a stored mask, so the longest example goes beyond the former or to
    the end of the latter. It also tells positions from token ids: its row 0, 1, 2... holds every number that the graph
    could compare an id with.

    Args:
        tensors: what the graph reads from modules. literals: ints it may compare positions with.
    Raises:
        NotCausalError: the window cannot be decided.
    """
    if isinstance(tokens, int):
        beyond = _beyond(tokens, tensors, literals)
        if beyond and tokens > 1:
            raise NotCausalError(_undecided(tokens, beyond))
        return [tokens]
    stored = max((dim for value in tensors if value.ndim >= 2 for dim in value.shape), default=0)
    reach = max((abs(literal) for literal in literals), default=0)
    longest = stored if stored and stored >= reach else max(reach + _MARGIN, _SHORT_LENGTHS[-1])
    if longest > MAX_EXAMPLE_TOKENS:
        raise NotCausalError(
            f"deciding whether its mask has a sliding window needs an example of {longest} tokens, "
            f"more than {MAX_EXAMPLE_TOKENS}"
        )
    return [longest, *(length for length in _SHORT_LENGTHS if length < longest)]


def settle(
    band: Band,
    node: Node,
    heads: int,
    tokens: Dim,
    tensors: Collection[Tensor] = (),
    literals: Collection[int] = (),
) -> Band:
    """What a capture shows of a mask; for a capture of one token, which shows little, what a longer one did.

    Args:
        node: the attention call. tokens, tensors, literals: as for :func:`example_lengths`.
    Raises:
        NotCausalError: one token, a mask that may have a window, and no longer capture of that line of code, or
            longer ones that differ.
    """
    known = _BANDS[f"{node.stack_trace}\n{module_path_of(node)}\n{heads}"]
    if tokens != 1:
        if not any(band.is_close(other) for other in known):
            known.append(band)
        return band
    beyond = _beyond(1, tensors, literals)
    fitting = known if len(known) < 2 else [other for other in known if (other.window is not None) == bool(beyond)]
    if len(fitting) == 1:
        return fitting[0]
    if beyond or fitting:
        raise NotCausalError(_undecided(1, beyond))
    return band


def _beyond(tokens: int, tensors: Collection[Tensor], literals: Collection[int]) -> int:
    """The largest number in a mask that may be a window longer than the capture; 0 when there is none."""
    tables = [value for value in tensors if value.ndim >= 2]
    stored = 0 if all(_is_causal_table(value) for value in tables) else max(max(value.shape) for value in tables)
    largest = max([stored, *(abs(literal) for literal in literals)])
    return largest if largest > tokens else 0


def _undecided(tokens: int, mentioned: int) -> str:
    return (
        f"its mask mentions {mentioned} but was captured for exactly {tokens} tokens, so a sliding window cannot be "
        "ruled out; capture with a dynamic length"
    )


def starts_of(length: int) -> tuple[int, ...]:
    """First positions of the rows to try, 0 first; later ones tell positions from indices."""
    return (0,) if length > _SHORT_LENGTHS[-1] else (0, _OFFSET)


def prove_causal(gm: GraphModule, flow: DataFlow, site: Node, mask: Node, q: Node) -> tuple[Band, MaskPart]:
    """What a causal mask does, and the graph that makes it.

    Args:
        flow: data flow of ``gm``. site: the attention call. mask: its mask, bool (True = attend) or additive,
            broadcastable to ``[B, H, T, T]``. q: its queries, ``[B, H, T, D]``.
    Raises:
        NotCausalError: with the reason.
    """
    shape = shape_of(q)
    assert shape is not None and len(shape) == 4 and isinstance(shape[1], int)
    part = MaskPart(gm, flow, mask, before=site, batch=shape[0], tokens=shape[2])
    if not part.calls:
        raise NotCausalError(f"the mask is the input {mask.name}, whose content is unknown")
    return prove_band(part.run, part.lengths(), part.count, shape[1], part.name, NEGLIGIBLE_LOGIT), part


def prove_band(
    mask: Callable[[int, int], Tensor],
    lengths: list[int],
    count: Callable[[int], int],
    heads: int,
    name: str,
    floor: float,
) -> Band:
    """Window and slopes of a mask ``[..., T, T]``, from token symbol and first position.

    Args:
        lengths: values of the token symbol to try, the longest first; it decides the window.
        count: tokens at such a value. heads: query heads. name: of the node, for messages.
        floor: what is added to a logit at or below this hides the entry.
    Raises:
        NotCausalError: with the reason.
    """
    window: int | None = None
    slopes: list[tuple[float, ...] | None] = []
    for length in lengths:
        tokens = count(length)
        for start in starts_of(length):
            value = mask(length, start)
            attended = attended_of(value, floor)
            if length == lengths[0] and start == 0:
                window = window_of(attended, tokens)
            slopes.append(_slopes(value, attended, tokens, heads))
            check_band(attended, window, tokens, start, name)
    first = Band(window, slopes[-1])
    if not all(first.is_close(Band(window, other)) for other in slopes):
        raise NotCausalError("its mask adds a bias to the logits")
    return first


def band(length: int, window: int | None, device: torch.device | None = None) -> Tensor:
    """Causal mask ``[length, length]`` bool of a sliding window, True = attend."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal if window is None else causal.triu(1 - window)


def attended_of(mask: Tensor, floor: float) -> Tensor:
    """Bool mask, True = attend, of a bool or additive mask.

    Raises:
        NotCausalError: it is neither.
    """
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise NotCausalError(f"its mask has dtype {mask.dtype}")
    if bool(mask.isnan().any()):
        raise NotCausalError("its mask adds a bias to the logits")
    return mask > max(floor, torch.finfo(mask.dtype).min) / 2


def _slopes(mask: Tensor, attended: Tensor, tokens: int, heads: int) -> tuple[float, ...] | None:
    """What an additive mask adds per position of the key, by query head.

    Raises:
        NotCausalError: it adds something else.
    """
    if mask.dtype == torch.bool or not bool((mask[attended] != 0).any()):
        return None
    shape = (*mask.shape[:-2], tokens, tokens)
    rows = mask.expand(shape).reshape(-1, tokens, tokens).double()
    seen = attended.expand(shape).reshape(-1, tokens, tokens)
    if len(rows) not in (1, heads) and len(rows) % heads:
        raise NotCausalError("its mask adds a bias to the logits")
    first = int(seen[0, -1].int().argmax())
    slopes = (rows[:, -1, -1] - rows[:, -1, first]) / max(tokens - 1 - first, 1)
    rest = rows - slopes[:, None, None] * torch.arange(tokens, device=rows.device)
    rest = (rest - rest.diagonal(dim1=1, dim2=2)[:, :, None])[seen].abs()
    by_row = slopes.expand(heads) if len(rows) == 1 else slopes.view(-1, heads)
    tolerance = 4 * torch.finfo(mask.dtype if mask.dtype != torch.float64 else torch.float32).eps
    even = bool((rest <= tolerance * rows[seen].abs().max()).all())
    if not even or tokens == 1 or not torch.allclose(by_row, slopes[:heads].expand(by_row.shape), rtol=1e-5, atol=0):
        raise NotCausalError("its mask adds a bias to the logits")
    return tuple(by_row.reshape(-1, heads)[0].tolist())


def window_of(attended: Tensor, length: int) -> int | None:
    """Window of a banded mask, read off its last row."""
    row = attended.reshape(-1, attended.shape[-1])[-1]
    seen = int(row.expand(length).sum()) if row.shape[0] in (1, length) else length
    return None if seen in (0, length) else seen


def check_band(attended: Tensor, window: int | None, length: int, start: int, name: str) -> None:
    """Refuse what is not the causal mask of that window.

    Raises:
        NotCausalError: naming the node ``name``.
    """
    sizes = attended.shape[-2:] if attended.ndim >= 2 else (1, *attended.shape)
    fits = attended.ndim <= 5 and all(size in (1, length) for size in sizes)
    if not fits or not bool((attended == band(length, window, attended.device)).all()):
        raise NotCausalError(f"its mask {name} is not causal (evaluated for {length} tokens at positions from {start})")


def _is_causal_table(table: Tensor) -> bool:
    """Whether a stored mask is causal as a whole: one value on and below the diagonal, another one above."""
    n = table.shape[-1]
    if table.shape[-2] != n or n < 2:
        return False
    below, above = table[(0,) * table.ndim], table[(0,) * (table.ndim - 1) + (n - 1,)]
    expected = torch.where(band(n, None, table.device), below, above)
    return bool(below != above) and bool((table == expected).all())

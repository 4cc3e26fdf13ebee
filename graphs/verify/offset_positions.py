"""Let a decoder that counts its own positions go on counting from the tokens a cache has seen.

Before::

    order = arange(T)
    x = embed(ids) + table[:T] + learned(order)

After, in extend and decode, ``seen`` being the tokens before this call::

    order = arange(T) + seen
    x = embed(ids) + table.index_select(0, arange(T) + seen) + learned(order)

The counters are found by their form and the result is proved by evaluation: what enters the hidden state must be, for
token i of a call after ``seen`` tokens, what the decoder itself gives to token ``seen + i`` of a longer input. A
capture of one token shows too little for that; it must repeat what a longer capture of the same line of code was seen
to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from kvpass.graphs.find.alibi import RELATIVE
from kvpass.graphs.fx_utils import (
    DataFlow,
    recorded,
    refuse,
    shape_of,
    symbols_of,
)
from kvpass.graphs.verify.examples import EXAMPLE_LENGTHS, EvaluationError
from kvpass.graphs.verify.find_positions import Entry, Search, example_of, find_positions, refuse_positions
from kvpass.graphs.verify.longer_captures import Shown
from kvpass.graphs.verify.shift_positions import MARK, shift

_PLACES = "kvpass_positions_counted"
_ROWS = 13
_TOLERANCE = 1e-5


_WITNESSES: Shown[_Witness] = Shown()


def check_positions_pass(gm: GraphModule) -> int:
    """Mark the positions that the decoder counts by itself for :func:`offset_positions_pass`; returns how many.

    With any, rows of a batch must be at the same position: left padding is not possible. Positions of which only
    differences count (``fold_alibi``) are marked but not counted.

    Raises:
        UnsupportedAttentionError: naming the node at which positions enter that cannot be offset, and their origin.
    """
    search = find_positions(gm)
    if search is None:
        return 0
    places: dict[str, int] = defaultdict(int)
    trials: dict[tuple[Node, ...], _Trial] = {}
    for entry in search.entries:
        sources = search.flow.sources([entry.operand], before=entry.user)
        key = (entry.operand, *sources)
        if key not in trials:
            trials[key] = _Trial(search, entry, sources)
        place = _place(entry, sources)
        places[place] += 1
        refusal = _prove(trials[key], entry, f"{place}\n{places[place]}")
        marks = entry.user.meta.get(MARK, ())
        entry.user.meta[MARK] = (*marks, (entry.user.all_input_nodes.index(entry.operand), refusal))
        entry.user.meta[_PLACES] = entry.user.meta.get(_PLACES, 0) + (RELATIVE not in entry.origin.meta)
    return sum(node.meta.get(_PLACES, 0) for node in gm.graph.nodes)


def counts_positions(gm: GraphModule) -> bool:
    """Whether :func:`check_positions_pass` counted positions in this graph, or in the one it is a copy of."""
    return any(node.meta.get(_PLACES, 0) for node in gm.graph.nodes)


def marked_operands(gm: GraphModule) -> set[Node]:
    """Nodes in which :func:`check_positions_pass` found positions, whether or not they count."""
    return {node.all_input_nodes[index] for node in gm.graph.nodes for index, _ in node.meta.get(MARK, ())}


def offset_positions_pass(gm: GraphModule, *, seen: Node) -> int:
    """Offset the marked positions by the tokens seen; returns how many.

    Args:
        seen: int64 tensor without axes.
    Raises:
        UnsupportedAttentionError: a capture of one token whose positions no longer capture has shown.
    """
    flow = DataFlow(gm)
    marked = [node for node in flow.nodes if node.meta.get(MARK)]
    tokens = Search(gm).tokens if marked else 0
    done: dict[tuple[Node, ...], Node | None] = {}
    changed = 0
    for node in marked:
        operands = node.all_input_nodes
        for index, refusal in node.meta.pop(MARK):
            if refusal is not None:
                raise refuse(node, refusal)
            sources = flow.sources([operands[index]], before=node)
            key = (operands[index], *sources)
            if key not in done:
                done[key] = shift(gm.graph, sources, node, seen, tokens).get(operands[index])
            shifted = done[key]
            assert shifted is not None, "check_positions_pass proved that there is an offset"
            node.replace_input_with(operands[index], shifted)
            changed += 1
    return changed


def _prove(trial: _Trial, entry: Entry, place: str) -> str | None:
    """Prove that the offset gives every token its position; the reason why that could not be seen, for later.

    Raises:
        UnsupportedAttentionError: the offset does not.
    """
    if not trial.search.symbols and trial.search.tokens == 1:
        return _check_one_token(trial, entry, place)
    if trial.witness is None:
        raise refuse_positions(entry.user, entry.origin, "kvpass cannot offset them")
    _witness(entry, place, trial.witness)
    return None


def _goes_on(trial: _Trial, axis: int, lengths: tuple[int, ...]) -> Tensor | None:
    """What the longest input gets, if shorter ones get the same from wherever they start in it."""
    full = trial.original(lengths[-1])
    if full.shape[axis] != lengths[-1]:
        return None
    for length in lengths[:-1]:
        part, last = full.narrow(axis, 0, length), lengths[-1] - length
        if not _same(trial.original(length), part) or not _same(trial.run(length, 0), part):
            return None
        starts = {last, *(max(min(number - 3, last), 0) for number in lengths)}
        for start in starts if length == EXAMPLE_LENGTHS[0] else {last}:
            if not _same(trial.run(length, start), full.narrow(axis, start, length)):
                return None
    return full


def _goes_on_by_one(trial: _Trial, axis: int) -> Tensor | None:
    """What a capture of fixed length gets, if after one token it gets the same from there on, its last token aside."""
    full, later = trial.original(0), trial.run(0, 1)
    rest = full.shape[axis] - 1
    goes_on = _same(trial.run(0, 0), full) and _same(later.narrow(axis, 0, rest), full.narrow(axis, 1, rest))
    return full if goes_on else None


@dataclass(frozen=True)
class _Witness:
    """What a capture gave to some tokens: a row each, of size 1 along axes where all is equal, as the batch."""

    axis: int
    tokens: tuple[int, ...]
    rows: Tensor

    @classmethod
    def of(cls, value: Tensor, axis: int, lengths: tuple[int, ...]) -> _Witness:
        """Of the first tokens, and of those at the end of an input of one of the lengths."""
        chosen = sorted({*range(_ROWS), *(length - 1 for length in lengths)})
        tokens = tuple(token for token in chosen if token < value.shape[axis])
        rows = value.movedim(axis, 0)[list(tokens)].cpu()
        for other in range(1, rows.ndim):
            one = rows.narrow(other, 0, 1)
            rows = one if torch.equal(one.expand_as(rows), rows) else rows
        return cls(axis, tokens, rows)

    def gives(self, value: Tensor, place: int) -> bool:
        """Whether the first row of ``value`` is that of the token at a place of ``tokens``."""
        if value.ndim != self.rows.ndim:
            return False
        got, expected = value.movedim(self.axis, 0)[0].cpu(), self.rows[place]
        fits = all(size in (1, extent) for size, extent in zip(expected.shape, got.shape, strict=True))
        return fits and _same(got, expected.expand_as(got))


def _witness(entry: Entry, place: str, witness: _Witness) -> None:
    """Record what tokens get at a place."""
    known = _WITNESSES.at(entry.user, place)
    first = witness.rows.movedim(0, witness.axis)
    if known and not any(other.gives(first, 0) for other in known):
        raise refuse_positions(entry.user, entry.origin, "they start elsewhere than in an earlier capture")
    if not any(witness.tokens == other.tokens and _same(witness.rows, other.rows) for other in known):
        known.append(witness)


def _check_one_token(trial: _Trial, entry: Entry, place: str) -> str | None:
    """Whether a capture of one token does what a longer one did at that place; the reason when none was seen."""
    known = _WITNESSES.at(entry.user, place)
    if not known:
        return (
            "positions are made in the graph from the length of the input, captured for one token only, and no longer "
            "capture has shown what they count. Run a prompt of several tokens first"
        )
    for witness in known:
        if all(witness.gives(trial.one_after(seen), row) for row, seen in enumerate(witness.tokens)):
            return None
    raise refuse_positions(entry.user, entry.origin, "they start elsewhere than in an earlier capture")


class _Trial:
    """What makes the operand of an entry and the offset of it, in a small graph of their own."""

    def __init__(self, search: Search, entry: Entry, sources: Sequence[Node]) -> None:
        self.search, self.entry = search, entry
        self._after: dict[int, Tensor] = {}
        graph = Graph()
        self.seen = graph.placeholder("kvpass_seen")
        copies: dict[Node, Node] = {}
        for node in search.flow.needed(sources):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node]._dynamo_source = getattr(node, "_dynamo_source", None)
        self.operand = copies[entry.operand]
        self.user = graph.output(self.operand)
        self.gm = GraphModule(search.gm, graph)
        shifted = shift(graph, [copies[node] for node in sources], self.user, self.seen, search.tokens)
        self.flow = DataFlow(self.gm)
        if self.operand not in shifted:
            raise refuse_positions(entry.user, entry.origin, "they are written into a tensor that is kept")
        self.shifted = shifted[self.operand]

    @cached_property
    def witness(self) -> _Witness | None:
        """What the decoder gives to tokens, proved to be what the offset gives them; None when it is not."""
        search, entry = self.search, self.entry
        lengths = search.lengths(entry.operand, entry.user) if search.symbols else ()
        for axis in _token_axes(search, entry):
            full = _goes_on(self, axis, lengths) if search.symbols else _goes_on_by_one(self, axis)
            if full is not None:
                return _Witness.of(full, axis, lengths)
        return None

    def one_after(self, seen: int) -> Tensor:
        """What the offset gives to the only token of a capture."""
        if seen not in self._after:
            self._after[seen] = self.run(0, seen)
        return self._after[seen]

    def original(self, length: int) -> Tensor:
        """What the decoder gives to the tokens of an input of that length."""
        return self._run(self.operand, length, 0)

    def run(self, length: int, seen: int) -> Tensor:
        """What the offset gives to so many tokens after ``seen`` others."""
        return self._run(self.shifted, length, seen)

    def _run(self, node: Node, length: int, seen: int) -> Tensor:
        feeds = {self.seen: torch.tensor(seen)}
        try:
            return example_of(self.gm, self.flow, node, self.user, self.search.sizes(length), feeds)
        except EvaluationError as error:
            raise refuse(self.entry.user, str(error)) from error


def _token_axes(search: Search, entry: Entry) -> list[int]:
    shape = shape_of(entry.operand) or ()
    if search.symbols and sum(bool(symbols_of([dim]) & search.symbols) for dim in shape) > 1:
        return []
    return [axis for axis, dim in enumerate(shape) if dim == search.tokens]


def _same(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    return torch.allclose(got.cpu(), expected.cpu(), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)


def _place(entry: Entry, sources: Sequence[Node]) -> str:
    """Line of code at which positions are made and enter, with their dtype and the sizes of what they are made of."""
    weights = [shape_of(node) for node in sources if node.op in ("placeholder", "get_attr")]
    dtype = recorded(entry.operand).dtype
    return f"{entry.operand.stack_trace}\n{entry.user.stack_trace}\n{entry.user.target}\n{weights}\n{dtype}"

"""Raise if a graph computes something else for a text in pieces than for the same text at once.

The graph runs on an example of N tokens and, call by call beside it, on the same tokens in three pieces: as prefill,
extend and decode would have them. Attention ops are replaced by a call that computes each token from its own query, key
and value, because what an attention op does with a cache is known. A piece reads the states that the piece before it
writes (``read_state``, ``write_state``), and the first one zeros. Positions that the decoder counts itself continue
from the tokens of earlier pieces where this gives the right result; ``offset_positions`` finds them marked.

Where a call gives a piece the values of the whole text up to rounding, the piece continues with exactly these values:
rounding errors do not grow, and a router chooses the same experts. The operands of attention ops and the output must
be equal in the end; the error names the first call that differed. This finds token shifts, convolutions, means over
tokens, special treatment of the first or last token of a call, and positions that start again at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.bind_state import copy_graph
from kvpass.graphs.canonical import READ_STATE, SITE, WRITE_STATE, batch_and_tokens, find_sites, results_of, state_of
from kvpass.graphs.fx_utils import (
    DataFlow,
    Dim,
    is_integral,
    is_module_tensor,
    is_scalar,
    mutated_inputs,
    numbers_given,
    reached,
    refuse,
    shape_of,
    symbols_in,
    symbols_of,
    target_name,
    token_sizes,
    value_inputs,
)
from kvpass.graphs.inline_layers import DistinctLayers
from kvpass.graphs.verify.examples import (
    EvaluationError,
    ExampleRun,
    LookupsInRange,
    SizeMap,
    concrete,
    counting_calls,
    evaluate,
    example_sizes,
    hinted_sizes,
    input_dependent_nodes,
    text_inputs,
    text_length,
    token_wise_site,
)
from kvpass.graphs.verify.offset_positions import COUNTED, MARK, shift
from kvpass.torch_compat import tree_leaves

PIECES = (9, 5, 1)  # tokens of the first, the further and the last piece of the short example
_TOLERANCE = 2e-5  # of the largest number a call gives: rounding differs between the rows of a matrix product


def self_check_pass(gm: GraphModule, *, distinct: DistinctLayers | None = None) -> int:
    """Mark the positions that the decoder counts by itself; return how many of them count.

    Where ``distinct`` has one of each of the layers, the text is run through that. A capture of one token is not looked
    at. Where positions are counted, rows of a batch must be at the same one: left padding is not possible.
    """
    if not find_sites(gm) or batch_and_tokens(gm)[1] == 1:
        return 0
    if distinct is not None:
        self_check_pass(distinct.gm)
        distinct.copy_meta(gm, (MARK, COUNTED))
        return sum(node.meta.get(COUNTED, 0) for node in gm.graph.nodes)
    first, (batch, tokens) = find_sites(gm)[0].node, batch_and_tokens(gm)
    if isinstance(tokens, int):
        raise refuse(
            first,
            f"the decoder was captured for exactly {tokens} tokens and no other number: something makes a constant "
            "of it, or a table of positions ends there",
        )
    live = DataFlow(gm).sources(results_of(gm))
    lengths = symbols_of(token_sizes(gm.graph.nodes)) - symbols_of([batch])
    _check_length_as_number(live, symbols_of([tokens]) | lengths)
    _check_reduced(live, tokens, of_inputs=False)
    offsets = _Offsets(gm)
    shortest, longest = sum(PIECES), text_length(live, tokens)
    try:
        _check_text(offsets, shortest)
    except EvaluationError as error:
        raise _no_example(first, str(error)) from error
    tables = {size for node in live if is_module_tensor(node) for size in shape_of(node) or () if isinstance(size, int)}
    shorter = sorted((size for size in tables if shortest < size < longest), reverse=True)
    for length in [longest, *shorter] if longest > shortest else []:
        with suppress(EvaluationError):  # a table ends before
            _check_text(offsets, length)
            break
    return offsets.mark()


def _no_example(node: Node, why: str) -> UnsupportedAttentionError:
    return refuse(node, f"no example shows whether a text in pieces is what the whole text is: {why}")


def _check_length_as_number(live: Sequence[Node], lengths: Set[object]) -> None:
    """Refuse an input's length as a number that a tensor is made of: a piece of the text has another one."""
    for node in live:
        for operand in numbers_given(node) if node.op.startswith("call_") and not is_scalar(node) else ():
            if symbols_in(operand) & lengths:
                raise refuse(
                    node,
                    f"it computes with {operand.name}, a number made from the length of the input; against a cache "
                    "that would be the length of a piece of the text",
                )


def check_reduced_inputs_pass(gm: GraphModule) -> int:
    """Refuse a graph in which ids or positions that are inputs make a number for all tokens; changes nothing.

    No example shows what it does beyond: ``positions.amax()`` may be held against any length.
    """
    tokens = batch_and_tokens(gm)[1]
    if tokens != 1:
        _check_reduced(DataFlow(gm).sources(results_of(gm)), tokens, of_inputs=True)
    return 0


def _check_reduced(live: Sequence[Node], tokens: Dim, *, of_inputs: bool) -> None:
    """Refuse one number for all tokens, of ids or positions that are inputs, or of those that are made in the graph."""
    dependent = input_dependent_nodes(live)
    for node in counting_calls(live, tokens)[1]:
        if (node in dependent) == of_inputs:
            raise refuse(
                node,
                f"{target_name(node)} makes one number of the ids or positions of all tokens: it relates tokens to "
                f"tokens outside of an attention site{'' if of_inputs else ' (positions are made in the graph)'}",
            )


def _check_text(offsets: _Offsets, tokens: int) -> None:
    """Compare a text of so many tokens with two ways to cut it; EvaluationError: the graph does not take so many."""
    first, further, last = tokens - PIECES[1] - PIECES[2], PIECES[1], PIECES[2]
    calls = [node for node in offsets.live if node not in offsets.inserted]
    text = text_inputs(offsets.flow, calls, offsets.tokens, offsets.sizes(tokens))
    for pieces in ((first, further, last), (further, first, last)):
        try:
            _Lockstep(offsets, text, pieces).run()
        except _DiffersError as error:
            result = f"its result {shape_of(error.node) or ''}".strip()
            raise refuse(
                error.node,
                f"{result} for {tokens} tokens at once is not that for pieces of {pieces} against a cache: it relates "
                "tokens to tokens outside of an attention site, or depends on a token's place in the input, as the "
                "first or the last, or positions are made in the graph that kvpass cannot offset. Pass positions in as "
                "an input of the decoder",
            ) from None


class _DiffersError(Exception):
    """A node gives a piece something else than the text."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.name)
        self.node = node


class _Offsets:
    """A copy of a graph in which operands that may be positions also exist shifted: counted from the tokens seen.

    Attributes:
        seen: input of the copy that is the number of tokens seen.
        shifted: by call and operand, the shifted operand. shifted_match: by call, whether its result was right with
            them in all examples so far. changed: calls and operands that had another value when shifted.
        live: nodes that reach the output or a state, in execution order, and what makes the shifted operands.
        inserted: the latter. input_dependent: those of the former whose elements come from the inputs of the decoder.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.gm = copy_graph(gm)
        self._originals = dict(zip(self.gm.graph.nodes, gm.graph.nodes, strict=True))
        self.batch, self.tokens = batch_and_tokens(self.gm)
        self._flat = self.batch * self.tokens
        flow = DataFlow(self.gm)
        live = flow.sources(results_of(self.gm))
        self.input_dependent = input_dependent_nodes(live)
        with self.gm.graph.inserting_before(flow.nodes[0]):
            self.seen = self.gm.graph.placeholder("kvpass_seen")
        self.shifted: dict[Node, dict[Node, Node]] = {}
        self.shifted_match: dict[Node, bool] = {}
        self.changed: set[tuple[Node, Node]] = set()
        shifts: dict[tuple[Node, ...], Node | None] = {}
        for user in (node for node in live if node in self.input_dependent):
            for operand in filter(self._may_count, value_inputs(user)):
                sources = flow.sources([operand], before=user)
                key = (operand, *sources)
                if key not in shifts and self.input_dependent.isdisjoint(sources):
                    before = len(self.seen.users)
                    shifted = shift(sources, user, self.seen, self.tokens).get(operand)
                    shifts[key] = shifted if len(self.seen.users) > before else None
                if (shifted := shifts.get(key)) is not None:
                    self.shifted.setdefault(user, {})[operand] = shifted
        self._axes: dict[Node, tuple[int, bool] | None] = {}
        self.flow = DataFlow(self.gm)
        self.inserted = {node for node in self.flow.nodes if node not in self._originals}
        self.writes = [node for node in live if node.target is WRITE_STATE]
        wanted = {*live, *self.flow.sources([node for shifted in self.shifted.values() for node in shifted.values()])}
        self.live = [node for node in self.flow.nodes if node in wanted]

    def _may_count(self, operand: Node) -> bool:
        """Whether an operand is made by token, and not of the inputs of the decoder."""
        if operand in self.input_dependent or operand.op in ("placeholder", "get_attr"):
            return False
        return bool(symbols_of(shape_of(operand) or ()) & symbols_of([self.tokens]))

    def _is_input_number(self, operand: Node) -> bool:
        """Whether an operand is made of nothing but whole numbers of inputs that are the same for all tokens."""
        leaves = [node for node in self.flow.sources([operand]) if node.op in ("placeholder", "get_attr")]
        tokens = symbols_of([self.tokens])
        return operand in self.input_dependent and all(
            is_integral(node) and not is_module_tensor(node) and symbols_of(shape_of(node) or ()).isdisjoint(tokens)
            for node in leaves
        )

    def axis(self, node: Node) -> tuple[int, bool] | None:
        """The axis of a result that holds the tokens, and whether it holds those of all rows; None of any other."""
        if node not in self._axes:
            shape = shape_of(node) or ()
            axes = [(axis, False) for axis, dim in enumerate(shape) if dim == self.tokens]
            axes += [(axis, True) for axis, dim in enumerate(shape) if dim == self._flat != self.tokens]
            self._axes[node] = axes[0] if len(axes) == 1 else None
        return self._axes[node]

    def sizes(self, length: int) -> SizeMap:
        return hinted_sizes(self.gm) | example_sizes(self.batch, self.tokens, length)

    def mark(self) -> int:
        """Mark what is to be offset in the original graph; return how many operands count tokens."""
        counted = 0
        for user in (user for user, match in self.shifted_match.items() if match):
            for operand in self.shifted[user]:
                counts = (user, operand) in self.changed
                if counts and (number := next(filter(self._is_input_number, value_inputs(user)), None)) is not None:
                    raise refuse(
                        user,
                        f"positions that the decoder counts meet {number.name}, a number that is given for all tokens: "
                        "as a first position it would be added to the tokens seen, which kvpass adds. Pass positions "
                        "in as an input of the decoder",
                    )
                meta = self._originals[user].meta
                meta[MARK] = (*meta.get(MARK, ()), user.all_input_nodes.index(operand))
                meta[COUNTED] = meta.get(COUNTED, 0) + counts
                counted += counts
        return counted


class _Run(ExampleRun):
    """A run of ``length`` tokens of a text; ``seen`` tokens went before them, the last of these in ``before``."""

    def __init__(
        self, offsets: _Offsets, text: Mapping[Node, Tensor], length: int, seen: int = 0, before: _Run | None = None
    ) -> None:
        feeds = {offsets.seen: torch.tensor(seen, device="cpu")}
        for node, value in text.items():
            for axis, dim in () if is_module_tensor(node) else enumerate(shape_of(node) or ()):
                value = value.narrow(axis, seen, length) if dim == offsets.tokens else value
            feeds[node] = value.clone() if offsets.flow.writes_to(node) else value.contiguous()
        instead: dict[Any, Callable[..., Any]] = {SITE: token_wise_site}
        if before is not None:
            instead[READ_STATE] = before.state
        super().__init__(offsets.gm, offsets.sizes(length), feeds, instead)
        self.offsets, self.seen, self.length = offsets, seen, length

    def state(self, like: Tensor, layer: int, name: str, *_: Any) -> Tensor:
        """Return what this run writes for the next one; what it needs is run ahead, without a change of this run."""
        (write,) = (node for node in self.offsets.writes if state_of(node) == (layer, name))
        (target,) = write.all_input_nodes
        needed = self.offsets.flow.needed([target], stop=self.env)
        missing = [node for node in needed if node not in self.env and node.op != "placeholder"]
        for place, node in enumerate(missing):
            if not set(missing[:place]).issuperset(mutated_inputs(node)):
                raise _no_example(node, "it writes into a tensor that was made before a state is read")
        return evaluate(target, missing, self.env, self.sizes, instead=self.instead)


class _Lockstep:
    """One run of a whole text, whose inputs are ``text``, and one of each of its pieces."""

    def __init__(self, offsets: _Offsets, text: Mapping[Node, Tensor], pieces: Sequence[int]) -> None:
        self.offsets = offsets
        self.mismatched: set[Node] = set()
        self.matched: set[Node] = set()
        self.whole = _Run(offsets, text, sum(pieces))
        self.parts: list[_Run] = []
        for place, length in enumerate(pieces):
            self.parts.append(_Run(offsets, text, length, sum(pieces[:place]), *self.parts[-1:]))

    def run(self) -> None:
        """Compare what enters sites and the output; raise _DiffersError with the first call that differs."""
        shifted, live = self.offsets.shifted, [node for node in self.offsets.live if node.op != "placeholder"]
        operands = {node: [*node.all_input_nodes, *shifted.get(node, {}).values()] for node in live}
        last_user = {operand: node for node in live for operand in operands[node]}
        with torch.no_grad(), LookupsInRange():
            for node in live:
                if node.op == "output":
                    self._check_output(node)
                    return
                if node.target is SITE:
                    self._check(node.args[:3])
                if node in self.offsets.inserted:
                    for run in self.parts:
                        run.env.pop(node, None)
                        with suppress(EvaluationError):  # no value where a table has no such row
                            run.call(node)
                elif node not in self.whole.env:
                    self._call(node)
                for operand in operands[node]:
                    for run in (self.whole, *self.parts) if last_user[operand] is node else ():
                        run.env.pop(operand, None)

    def _call(self, node: Node) -> None:
        whole = self.whole.call(node)
        shifted = self.offsets.shifted.get(node)
        if not shifted or not self._matches_with_shifted(node, whole, shifted):
            for run in self.parts:
                try:
                    run.call(node)
                except EvaluationError:  # what the whole text does not
                    raise _DiffersError(node) from None
        if node not in self.offsets.input_dependent:
            return
        views = [self._views(node, whole, run) for run in self.parts]
        if not all(map(_agree, views)):
            self.mismatched.add(node)
        elif isinstance(whole, Tensor) and whole.is_floating_point() and self.offsets.axis(node) is not None:
            self.matched.add(node)
            for exact, part in filter(None, views):
                if 0 not in part.stride():
                    part.copy_(exact)

    def _matches_with_shifted(self, node: Node, whole: Any, shifted: Mapping[Node, Node]) -> bool:
        """Whether all pieces are right when positions go on from the tokens seen; else nothing has happened.

        The offset is preferred where an example shows no difference: another length may.
        """
        if self.offsets.axis(node) is None or not self.offsets.shifted_match.get(node, True):
            return False
        written = mutated_inputs(node)
        before = [[run.env[operand].clone() for operand in written] for run in self.parts]
        matches = all(self._call_with_shifted(node, whole, shifted, run) for run in self.parts)
        self.offsets.shifted_match[node] = matches
        if not matches:
            for run, values in zip(self.parts, before, strict=True):
                for operand, value in zip(written, values, strict=True):
                    run.env[operand].copy_(value)
        return matches

    def _call_with_shifted(self, node: Node, whole: Any, shifted: Mapping[Node, Node], run: _Run) -> bool:
        if any(value not in run.env for value in shifted.values()):
            return False
        unshifted = {operand: run.env[operand] for operand in shifted}
        values = {operand: run.env[value] for operand, value in shifted.items()}
        changed = (operand for operand in shifted if not torch.equal(unshifted[operand], values[operand]))
        self.offsets.changed.update((node, operand) for operand in changed)
        run.env.update(values)
        try:
            run.call(node)
            return _agree(self._views(node, whole, run))
        except EvaluationError:
            return False
        finally:
            run.env.update(unshifted)

    def _views(self, node: Node, whole: Any, run: _Run) -> tuple[Tensor, Tensor] | None:
        """What the whole text has for the tokens of a piece, and what the piece has; None where it has no tokens."""
        token_axis = self.offsets.axis(node) if isinstance(whole, Tensor) else None
        if token_axis is None:
            return None
        (axis, flat), part = token_axis, run.env[node]
        if flat:
            rows = int(concrete(self.offsets.batch, run.sizes))
            whole, part, axis = whole.unflatten(axis, (rows, -1)), part.unflatten(axis, (rows, -1)), axis + 1
        if whole.shape[axis] != self.whole.length or part.shape[axis] != run.length:
            return None
        return whole.narrow(axis, run.seen, run.length), part

    def _check(self, nodes: Iterable[Any]) -> None:
        for node in nodes:
            whole = self.whole.env[node]
            if whole.is_floating_point() and bool(whole.isnan().any()):
                raise _no_example(node, "the example gives NaN")
            if not all(_agree(self._views(node, whole, run)) for run in self.parts):
                raise _DiffersError(self._origin(node))

    def _check_output(self, output: Node) -> None:
        for node in dict.fromkeys(leaf for leaf in tree_leaves(output.args[0]) if isinstance(leaf, Node)):
            if node in self.offsets.input_dependent and isinstance(self.whole.env[node], Tensor):
                self._check([node])
                if self.offsets.axis(node) is None and not self._holds_some_tokens(node):
                    raise _DiffersError(self._origin(node))

    def _holds_some_tokens(self, node: Node) -> bool:
        """Whether an output holds something of the last few tokens of a call, or of the first few."""
        whole, first, last = (run.env[node] for run in (self.whole, self.parts[0], self.parts[-1]))
        ends, starts = (whole, last), (whole, first)
        for axis in range(whole.ndim):
            rows = min(value.shape[axis] for value in ends)
            ends = tuple(value.narrow(axis, value.shape[axis] - rows, rows) for value in ends)
            rows = min(value.shape[axis] for value in starts)
            starts = tuple(value.narrow(axis, 0, rows) for value in starts)
        return _is_close(*ends) or _is_close(*starts)

    def _origin(self, node: Node) -> Node:
        """The first mismatched call that what is wrong here is made of, through calls that did not match."""
        flow = self.offsets.flow

        def unmatched(node: Node) -> list[Node]:
            operands = (*node.all_input_nodes, *flow.writes_to(node, before=node))
            return [x for x in operands if x in self.offsets.input_dependent and x not in self.matched]

        return min(reached([node], unmatched) & {node, *self.mismatched}, key=flow.order.__getitem__)


def _agree(views: tuple[Tensor, Tensor] | None) -> bool:
    """Whether a piece has what the whole text has there, as far as that can be compared."""
    return views is None or _is_close(*views)


def _is_close(expected: Tensor, value: Tensor) -> bool:
    if torch.equal(expected, value):
        return True
    if expected.shape != value.shape or not (expected.is_floating_point() or expected.is_complex()):
        return False
    largest = float(expected.abs().nan_to_num(nan=0.0, posinf=0.0).max())
    tolerance = max(_TOLERANCE, 4 * torch.finfo(expected.dtype).eps) * largest
    wide = torch.complex128 if expected.is_complex() else torch.float64
    return torch.allclose(value.to(wide), expected.to(wide), rtol=0.0, atol=tolerance, equal_nan=True)

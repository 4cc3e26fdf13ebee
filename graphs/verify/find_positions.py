"""Find where a decoder numbers its own tokens, and fail closed on what cannot be told from such numbering.

Such a decoder counts from the length of its input, which is the position only while there is no cache: against a cache
every new token would be number 0. Positions are found by what they do: a tensor made of sizes and weights alone, that
differs from token to token or with the token count, and reaches a site.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.fx_utils import (
    DataFlow,
    Dim,
    is_integral,
    is_module_tensor,
    is_scalar,
    module_tensor,
    mutated_inputs,
    numbers_given,
    recorded,
    refuse,
    shape_of,
    storage_of,
    symbols_in,
    symbols_of,
    target_name,
    token_sizes,
    value_inputs,
)
from kvpass.graphs.rewrite_attention import find_sites
from kvpass.graphs.verify.example_lengths import lengths_about, numbers_of, size_numbers, stored_numbers
from kvpass.graphs.verify.examples import EXAMPLE_LENGTHS, EvaluationError, SizeMap, concrete, evaluate, example_sizes

_MAX_EXAMPLE = 2**26
"""Elements of the largest weight that an example replaces by random numbers; a larger one is not evaluated."""

_COUNTERS = {"arange", "range", "linspace"}
_RUNNING = {"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"}
LOOKUPS = set(
    "getitem index_select gather take take_along_dim index index_add index_copy index_put scatter "
    "scatter_add scatter_reduce".split()
)
"""Calls that pick rows by an index, embeddings aside."""

_FLAT = {
    *"zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full empty empty_like new_empty".split(),
    *"expand expand_as broadcast_to view view_as reshape unsqueeze squeeze flatten unflatten contiguous clone".split(),
    *"to type_as float double half bfloat16 long int bool add sub mul neg embedding setitem".split(),
}
"""Calls that give every token the same, however many there are, when their operands do."""


@dataclass(frozen=True)
class Entry:
    """``operand``, made of sizes and weights alone, numbers tokens and enters the hidden state at ``user``.

    Attributes:
        origin: the first node of the operand that depends on the token count.
    """

    user: Node
    operand: Node
    origin: Node


def find_positions(gm: GraphModule) -> Search | None:
    """The search for every place where positions that the decoder counts by itself enter the hidden state.

    Returns:
        None when the graph has no sites.
    Raises:
        UnsupportedAttentionError: the token count or such positions enter in a way that no offset makes right.
    """
    sites = find_sites(gm)
    if not sites:
        return None
    search = Search(gm)
    search.run([node for site in sites for node in (site.q, site.k, site.v)])
    return search


def refuse_positions(node: Node, origin: Node, why: str) -> UnsupportedAttentionError:
    """The error for positions made by ``origin`` that enter at ``node``."""
    reason = (
        f"positions are made in the graph, by {origin.name} from the length of the input; against a cache they "
        f"would start at 0 again, and {why}. Pass positions in as an input of the decoder"
    )
    return refuse(node, reason)


class Search:
    """One walk over the graph in execution order.

    Attributes:
        batch, tokens: sizes of these axes of the first site. symbols: those of the token count.
        lengths_given: those of the lengths of all inputs.
        entries: what was found.
        fed: nodes whose elements come from the inputs of the decoder, not from sizes and weights alone.
        sized: other nodes, that depend on the token count.
        counted: origin of the positions that an int or bool node holds.
    """

    def __init__(self, gm: GraphModule) -> None:
        shape = shape_of(find_sites(gm)[0].q)
        assert shape is not None
        self.gm = gm
        self.flow = DataFlow(gm)
        self.batch, self.tokens = shape[0], shape[2]
        self.symbols = symbols_of([self.tokens])
        self.lengths_given = self.symbols | (symbols_of(token_sizes(gm.graph.nodes)) - symbols_of([self.batch]))
        self.entries: list[Entry] = []
        self.fed: set[object] = set()
        self.sized: set[object] = set()
        self.counted: dict[object, Node] = {}

    def run(self, targets: list[Node]) -> None:
        for node in self.flow.sources([*targets, self.gm.graph.output_node()]):
            if node.op == "placeholder":
                if not is_module_tensor(node):
                    self.fed.add(node)
            elif node.op != "get_attr":
                self._visit(node)

    def _visit(self, node: Node) -> None:
        inputs = value_inputs(node)
        if not any(self._is_fed(operand) for operand in inputs):
            if self._is_sized(node, inputs):
                self.sized.update([node, *(storage_of(operand) for operand in mutated_inputs(node))])
            if node.op == "output":
                return
        else:
            self.fed.add(node)
            self.fed.update(storage_of(operand) for operand in mutated_inputs(node))
            self._check_sizes(node)
            for operand in inputs:
                if self._is_counted(operand) and self._numbers_tokens(operand, node):
                    sources = self.flow.sources([operand], before=node)
                    sized = [source for source in sources if source in self.sized]
                    for source in sized:
                        self._check_sizes(source)
                        self._check_reduced(source)
                    self._enter(node, operand, sized[0])
            if target_name(node) in _RUNNING and self._runs_over_tokens(node):
                self._enter(node, node, node)
        for operand in inputs:
            held = self.counted.get(operand) or self.counted.get(storage_of(operand))
            if held is not None:
                self._enter(node, operand, held)

    def _is_fed(self, node: Node) -> bool:
        return node in self.fed or storage_of(node) in self.fed

    def _is_counted(self, operand: Node) -> bool:
        return (operand in self.sized or storage_of(operand) in self.sized) and not self._is_fed(operand)

    def _is_sized(self, node: Node, inputs: list[Node]) -> bool:
        """Whether a node made of sizes and weights alone depends on the token count."""
        if any(operand in self.sized or storage_of(operand) in self.sized for operand in inputs):
            return True
        shape = shape_of(node)
        if shape is None:
            return False
        if self.symbols:
            return any(self._depends(operand) for operand in node.all_input_nodes) or self._has_tokens(shape)
        if not inputs or target_name(node) in _RUNNING:
            return self.tokens in shape and target_name(node) in _COUNTERS | _RUNNING
        return len(inputs) == 1 and self._is_slice(shape, shape_of(inputs[0]))

    def _is_slice(self, shape: tuple[Dim, ...], of: tuple[Dim, ...] | None) -> bool:
        """Whether a capture of fixed length cut as many rows as it has tokens."""
        if of is None:
            return False
        if shape.count(self.tokens) <= of.count(self.tokens):
            return False
        rows = self.sizes(1)  # of a symbolic batch
        return math.prod(concrete(shape, rows)) < math.prod(concrete(of, rows))

    def _depends(self, node: Node) -> bool:
        return not self.symbols.isdisjoint(symbols_in(node))

    def _has_tokens(self, shape: tuple[Dim, ...]) -> bool:
        return bool(symbols_of(shape) & self.symbols)

    def _check_sizes(self, node: Node) -> None:
        """A length as a number that a tensor is made of."""
        if is_scalar(node):
            return
        for operand in numbers_given(node):
            if not self.lengths_given.isdisjoint(symbols_in(operand)):
                reason = (
                    f"it computes with {operand.name}, a number made from the length of the input; against a cache "
                    "that would be the length of a piece of the text"
                )
                raise refuse(node, reason)

    def _check_reduced(self, node: Node) -> None:
        """One number for all tokens: no example shows what lengths it may be held against."""
        shapes = [shape_of(operand) or () for operand in value_inputs(node)]
        shape = shape_of(node)
        if shape is not None and not self._has_tokens(shape) and any(map(self._has_tokens, shapes)):
            raise refuse_positions(node, node, "they make a number for all tokens")

    def _runs_over_tokens(self, node: Node) -> bool:
        operand = value_inputs(node)[0]
        shape = shape_of(operand)
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        if shape is None or not isinstance(dim, int):
            return True
        size = shape[dim]
        return size == self.tokens or self._has_tokens((size,))

    def _enter(self, node: Node, operand: Node, origin: Node) -> None:
        """Positions in ``operand`` reach ``node``: harmless as an index that picks tokens, else carried or refused."""
        if is_integral(node):
            self._carry(node, origin)
            return
        written = mutated_inputs(node)
        if operand is not node and self._picks_tokens(node, operand):
            return
        if written and all(is_integral(target) for target in written):
            for target in written:
                self._carry(target, origin)
            return
        if isinstance(recorded(node), (tuple, list)) and is_integral(operand):
            self._carry(node, origin)
            return
        if self._is_counted(operand):
            self.entries.append(Entry(node, operand, origin))
            return
        raise refuse_positions(node, origin, "they are mixed with inputs before they enter")

    def _carry(self, node: Node, origin: Node) -> None:
        self.counted.setdefault(node, origin)
        self.counted.setdefault(storage_of(node), origin)

    def _picks_tokens(self, node: Node, index: Node) -> bool:
        """Whether ``index`` only says which rows of something computed from the inputs are read or written."""
        operands = value_inputs(node)
        if target_name(node).rstrip("_") not in LOOKUPS or not is_integral(index) or node.args[:1] == (index,):
            return False
        return any(self._is_fed(operand) and not is_integral(operand) for operand in operands)

    def _numbers_tokens(self, node: Node, user: Node) -> bool:
        """Whether a node made of sizes and weights alone differs between tokens or with the token count."""
        if target_name(node).startswith(("empty", "new_empty")):
            return False
        if not self.symbols:
            return self.tokens == 1 or not self._is_uniform(node, self.example(node, user, {}))
        sources = self.flow.sources([node], before=user)
        if not all(self._is_flat(source) for source in sources if source in self.sized):
            return True
        examples = [self.example(node, user, self.sizes(length)) for length in self.lengths(node, user)]
        first = self._first_rows(node, examples[0])
        return not all(
            self._is_uniform(node, value) and torch.equal(self._first_rows(node, value), first) for value in examples
        )

    def _is_flat(self, node: Node) -> bool:
        """Whether a call depends on the token count by its shape alone, if its operands do."""
        return target_name(node).rstrip("_") in _FLAT and not any(map(self._depends, numbers_given(node)))

    def lengths(self, node: Node, user: Node) -> tuple[int, ...]:
        """Token counts, ascending, at which examples show what a node made of sizes and weights alone does.

        Those on both sides of every number it may hold the count to; none at which a table of positions has ended.

        Raises:
            UnsupportedAttentionError: a number makes the example too large.
        """
        sources = self.flow.sources([node], before=user)
        numbers = numbers_of([source for source in sources if source in self.sized], scaled=False)
        numbers |= size_numbers(self.flow.needed(sources), self.symbols)
        contents = [module_tensor(self.gm, source) for source in sources if is_module_tensor(source)]
        numbers |= stored_numbers(content for content in contents if content is not None)
        lengths = lengths_about(numbers)
        largest = max(math.prod(concrete(shape_of(source) or (), self.sizes(lengths[-1]))) for source in sources)
        if largest > _MAX_EXAMPLE:
            reason = f"{node.name} depends on the token count and on {max(numbers)}, too many tokens for an example"
            raise refuse(user, reason)
        tables = {size for content in contents if content is not None for size in content.shape}
        ends = (size for size in sorted({*lengths, *tables}, reverse=True) if size <= lengths[-1])
        longest = next(end for end in ends if end <= EXAMPLE_LENGTHS[-1] or self._takes(node, user, end))
        return (*(length for length in lengths if length < longest), longest)

    def _takes(self, node: Node, user: Node, length: int) -> bool:
        """Whether a node has a row for each of so many tokens."""
        try:
            value = example_of(self.gm, self.flow, node, user, self.sizes(length), {})
        except EvaluationError:
            return False
        return all(value.shape[axis] == length for axis in self._token_axes(node))

    def sizes(self, length: int) -> SizeMap:
        """Values of the symbols for an example of so many tokens."""
        return example_sizes([self.batch], [self.tokens], length)

    def example(self, node: Node, user: Node, sizes: SizeMap) -> Tensor:
        """See :func:`example_of`.

        Raises:
            UnsupportedAttentionError: it cannot be evaluated.
        """
        try:
            return example_of(self.gm, self.flow, node, user, sizes, {})
        except EvaluationError as error:
            raise refuse(user, str(error)) from error

    def _token_axes(self, node: Node) -> list[int]:
        shape = shape_of(node)
        assert shape is not None
        return [axis for axis, dim in enumerate(shape) if dim == self.tokens or self._has_tokens((dim,))]

    def _first_rows(self, node: Node, value: Tensor) -> Tensor:
        for axis in self._token_axes(node):
            value = value.narrow(axis, 0, 1)
        return value

    def _is_uniform(self, node: Node, value: Tensor) -> bool:
        return bool((value == self._first_rows(node, value)).all())


def example_of(
    gm: GraphModule, flow: DataFlow, node: Node, user: Node, sizes: SizeMap, feeds: Mapping[Node, Tensor]
) -> Tensor:
    """What a node made of sizes and weights holds when ``user`` reads it, floating-point weights being random.

    Args:
        feeds: values of other inputs.
    Raises:
        EvaluationError: it cannot be evaluated.
    """
    sources = flow.sources([node], before=user)
    generator = torch.Generator().manual_seed(0)
    known = dict(feeds)
    try:
        for source in sources:
            if source.op in ("placeholder", "get_attr") and source not in known:
                known[source] = _weight(gm, source, sizes, generator)
        value = evaluate(gm, node, [source for source in sources if source not in known], known, sizes)
    except EvaluationError as error:
        raise EvaluationError(f"{node.name} depends on the token count and cannot be evaluated: {error}") from error
    return value


def _weight(gm: GraphModule, node: Node, sizes: SizeMap, generator: torch.Generator) -> Tensor:
    """Random numbers in place of a weight; the content of one that may hold positions, or be what they are held to."""
    content = module_tensor(gm, node)
    like = recorded(node) if recorded(node) is not None else content
    if like is None or like.numel() > _MAX_EXAMPLE:
        size = "an unknown number of" if like is None else like.numel()
        raise EvaluationError(f"{node.name} has {size} elements, too many for an example")
    if (like.dtype.is_floating_point or like.dtype.is_complex) and (content is None or content.numel() > 1):
        shape = concrete(tuple(like.shape), sizes)
        return torch.rand(shape, generator=generator).to(dtype=like.dtype, device=like.device)
    if content is None:
        raise EvaluationError(f"the content of {node.name} is out of reach")
    return content

"""Fail closed on a decoder that numbers its own tokens.

Such a decoder counts from the length of its input, which is the position only while there is no cache: against a cache
every new token would be number 0. Positions must come in from outside. They are found by what they do: a tensor made
of sizes and weights alone, that differs from token to token or with the token count, and reaches a site.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.fx_utils import (
    DataFlow,
    Dim,
    EvaluationError,
    SizeMap,
    concrete,
    evaluate,
    is_module_tensor,
    is_scalar,
    module_path_of,
    mutated_inputs,
    recorded,
    shape_of,
    storage_of,
    symbols_of,
    target_name,
    value_inputs,
)
from kvpass.graphs.rewrite_attention import find_sites

_LENGTHS = (7, 13)
_BATCH = 2
_MAX_EXAMPLE = 2**26
"""Elements of the largest weight that an example replaces by random numbers; a larger one is not evaluated."""

_COUNTERS = {"arange", "range", "linspace"}
_RUNNING = {"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"}
_LOOKUPS = set(
    "getitem index_select gather take take_along_dim index index_add index_copy index_put scatter "
    "scatter_add scatter_reduce".split()
)
_ARITHMETIC = {"add", "sub", "rsub", "mul", "truediv", "div", "floordiv", "pow", "iadd", "isub", "imul", "itruediv"}


def check_positions_pass(gm: GraphModule) -> int:
    """Refuse a graph that makes token positions from its input length; changes nothing.

    Raises:
        UnsupportedAttentionError: naming the node at which positions enter the hidden state, and their origin.
    """
    sites = find_sites(gm)
    if sites:
        shape = shape_of(sites[0].q)
        assert shape is not None
        _Search(gm, shape[0], shape[2]).run([node for site in sites for node in (site.q, site.k, site.v)])
    return 0


class _Search:
    """One walk over the graph in execution order.

    Attributes:
        fed: nodes whose elements come from the inputs of the decoder, not from sizes and weights alone.
        sized: other nodes, that depend on the token count.
        counted: origin of the positions that an int or bool node holds.
    """

    def __init__(self, gm: GraphModule, batch: Dim, tokens: Dim) -> None:
        self.gm = gm
        self.flow = DataFlow(gm)
        self.batch_symbols = symbols_of([batch])
        self.tokens = tokens
        self.symbols = symbols_of([tokens])
        self.fed: set[object] = set()
        self.sized: set[Node] = set()
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
                self.sized.add(node)
            if node.op == "output":
                return
        else:
            self.fed.add(node)
            self.fed.update(storage_of(operand) for operand in mutated_inputs(node))
            self._check_sizes(node)
            for operand in inputs:
                if operand in self.sized and not self._is_fed(operand) and self._numbers_tokens(operand, node):
                    origin = next(
                        source for source in self.flow.sources([operand], before=node) if source in self.sized
                    )
                    self._enter(node, operand, origin)
            if target_name(node) in _RUNNING and self._runs_over_tokens(node):
                self._enter(node, node, node)
        for operand in inputs:
            held = self.counted.get(operand) or self.counted.get(storage_of(operand))
            if held is not None:
                self._enter(node, operand, held)

    def _is_fed(self, node: Node) -> bool:
        return node in self.fed or storage_of(node) in self.fed

    def _is_sized(self, node: Node, inputs: list[Node]) -> bool:
        """Whether a node made of sizes and weights alone depends on the token count."""
        if any(operand in self.sized for operand in inputs):
            return True
        shape = shape_of(node)
        if shape is None:
            return False
        if self.symbols:
            return any(self._depends(operand) for operand in node.all_input_nodes) or self._has_tokens(shape)
        if not inputs:
            return self.tokens in shape and target_name(node) in _COUNTERS
        return any(self._is_slice(shape, shape_of(operand)) for operand in inputs)

    def _is_slice(self, shape: tuple[Dim, ...], of: tuple[Dim, ...] | None) -> bool:
        """Whether a capture of fixed length cut as many rows as it has tokens."""
        if of is None:
            return False
        return shape.count(self.tokens) > of.count(self.tokens) and math.prod(shape) < math.prod(of)

    def _depends(self, node: Node) -> bool:
        return is_scalar(node) and any(
            bool(part.node.expr.free_symbols & self.symbols)
            for part in _parts(recorded(node))
            if isinstance(part, (torch.SymInt, torch.SymFloat, torch.SymBool))
        )

    def _has_tokens(self, shape: tuple[Dim, ...]) -> bool:
        return bool(symbols_of(shape) & self.symbols)

    def _check_sizes(self, node: Node) -> None:
        """The token count as a number in arithmetic on tensors."""
        if not isinstance(recorded(node), Tensor):
            return
        for operand in node.all_input_nodes:
            value = recorded(operand)
            if not self._depends(operand):
                continue
            if isinstance(value, torch.SymFloat) or (
                isinstance(value, torch.SymInt) and target_name(node) in _ARITHMETIC
            ):
                raise self._refuse(node, operand)

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
        value = recorded(node)
        if isinstance(value, Tensor) and not value.dtype.is_floating_point and not value.dtype.is_complex:
            self._carry(node, origin)
            return
        written = mutated_inputs(node)
        if operand is not node and self._picks_tokens(node, operand):
            return
        if written and all(_is_integral(target) for target in written):
            for target in written:
                self._carry(target, origin)
            return
        if isinstance(value, (tuple, list)) and _is_integral(operand):
            self._carry(node, origin)
            return
        raise self._refuse(node, origin)

    def _carry(self, node: Node, origin: Node) -> None:
        self.counted.setdefault(node, origin)
        self.counted.setdefault(storage_of(node), origin)

    def _picks_tokens(self, node: Node, index: Node) -> bool:
        """Whether ``index`` only says which rows of something computed from the inputs are read or written."""
        operands = value_inputs(node)
        if target_name(node).rstrip("_") not in _LOOKUPS or not _is_integral(index) or node.args[:1] == (index,):
            return False
        return any(self._is_fed(operand) and not _is_integral(operand) for operand in operands)

    def _numbers_tokens(self, node: Node, user: Node) -> bool:
        """Whether a node made of sizes and weights alone differs between tokens or with the token count."""
        if target_name(node).startswith(("empty", "new_empty")):
            return False
        if not self.symbols:
            return self.tokens == 1 or not self._is_uniform(node, self._example(node, user, {}))
        first, second = (self._example(node, user, self._sizes(length)) for length in _LENGTHS)
        if not (self._is_uniform(node, first) and self._is_uniform(node, second)):
            return True
        return not torch.equal(self._first_rows(node, first), self._first_rows(node, second))

    def _sizes(self, length: int) -> SizeMap:
        return dict.fromkeys(self.batch_symbols, _BATCH) | dict.fromkeys(self.symbols, length)

    def _example(self, node: Node, user: Node, sizes: SizeMap) -> Tensor:
        sources = self.flow.sources([node], before=user)
        generator = torch.Generator().manual_seed(0)
        feeds = {}
        try:
            for source in sources:
                if source.op in ("placeholder", "get_attr"):
                    like = recorded(source)
                    if like is None:
                        like = operator.attrgetter(str(source.target))(self.gm)
                    shape = concrete(tuple(like.shape), sizes)
                    if like.numel() > _MAX_EXAMPLE:
                        raise EvaluationError(f"{source.name} has {like.numel()} elements, too many for an example")
                    feeds[source] = torch.rand(shape, generator=generator).to(dtype=like.dtype, device=like.device)
            value = evaluate(self.gm, node, [source for source in sources if source not in feeds], feeds, sizes)
        except EvaluationError as error:
            reason = f"{node.name} depends on the token count and cannot be evaluated: {error}"
            raise UnsupportedAttentionError(module_path_of(user), user.name, reason) from error
        return value

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

    def _refuse(self, node: Node, origin: Node) -> UnsupportedAttentionError:
        reason = (
            f"positions are made in the graph, by {origin.name} from the length of the input; against a cache they "
            "would start at 0 again. Pass positions in as an input of the decoder"
        )
        return UnsupportedAttentionError(module_path_of(node), node.name, reason)


def _is_integral(node: Node) -> bool:
    value = recorded(node)
    return isinstance(value, Tensor) and not value.dtype.is_floating_point and not value.dtype.is_complex


def _parts(value: object) -> list[object]:
    return list(value) if isinstance(value, (tuple, list)) else [value]

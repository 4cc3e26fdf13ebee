"""Queries, keys and values of written-out attention, in any layout of its products.

A product of queries and keys has leading axes (batch and heads, batch and groups of heads, or both flattened into
one), then query rows, then key columns. ``insert_heads`` converts them to ``[B, H, T, D]``, and ``insert_result`` the
output of the attention op back to the layout that the graph expects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from kvpass.graphs.fx_utils import DataFlow, Dim, recorded, shape_of, target_name, token_sizes, value_inputs
from kvpass.graphs.insert_nodes import insert_method
from kvpass.graphs.verify.examples import (
    EXAMPLE_LENGTHS,
    EvaluationError,
    NotCausalError,
    SizeMap,
    evaluate,
    example_sizes,
    random_like,
)

Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class Operand:
    """A tensor read as ``[lead..., tokens, features]``: the tensor's axis for each, None where it is missing."""

    node: Node
    axes: Axes

    @property
    def shape(self) -> tuple[Dim, ...]:
        shape = shape_of(self.node)
        assert shape is not None
        return tuple(1 if axis is None else shape[axis] for axis in self.axes)

    def read(self, tensor: Tensor) -> Tensor:
        """Return a tensor for the node in that layout, without missing axes."""
        return tensor.permute([axis for axis in self.axes if axis is not None])

    def emit(self) -> Node:
        """Insert the node in that layout; missing axes have size 1."""
        node, axes = self.node, [axis for axis in self.axes if axis is not None]
        if axes != sorted(axes):
            node = insert_method(node, "permute", *axes)
        for position, axis in enumerate(self.axes):
            if axis is None:
                node = insert_method(node, "unsqueeze", position)
        return node


@dataclass(frozen=True)
class Product:
    """A product of two tensors."""

    node: Node
    left: Operand  # [lead..., query tokens, features], or the weights [lead..., query tokens, key tokens]
    right: Operand  # [lead..., key tokens, features]
    result: tuple[int, ...]  # for each axis of the node, its axis in [lead..., query tokens, last]


def product_of(node: Node, weights: Node | None = None) -> Product | None:
    """Read a node as a product of queries and keys, or of ``weights`` and values; None if neither."""
    if target_name(node) == "einsum":
        return _einsum(node, weights)
    operands = [operand for operand in (*node.args, *node.kwargs.values()) if isinstance(operand, Node)]
    if len(operands) != 2 or (weights is not None and operands[0] is not weights):
        return None
    left, right = operands
    n, m = (len(shape) if (shape := shape_of(operand)) is not None else 0 for operand in (left, right))
    if n < 3 or m < 2 or m > n:
        return None
    last = (m - 1, m - 2) if weights is None else (m - 2, m - 1)
    axes = (*(None for _ in range(n - m)), *range(m - 2), *last)
    return Product(node, Operand(left, tuple(range(n))), Operand(right, axes), tuple(range(n)))


def _einsum(node: Node, weights: Node | None) -> Product | None:
    labels = _labels(node)
    if labels is None:
        return None
    (first, a), (second, b), out = labels
    if (second is weights) if weights is not None else (len(out) > 1 and out[-2] in b):
        (first, a), (second, b) = (second, b), (first, a)
    if weights is None:
        lead, row, column = out[:-2], out[-2:-1], out[-1:]
        inner = [label for label in a if label in b and label not in out]
        left, right, result = lead + row + inner, lead + column + inner, out
    else:
        lead, row, column = a[:-2], a[-2:-1], a[-1:]
        inner = [label for label in b if label in out and label not in a]
        left, right, result = a, lead + column + inner, lead + row + inner
        if first is not weights or set(column) & set(out) or set(row) & set(b):
            return None
    if len(lead) < 1 or len(inner) != 1 or set(a) != set(left) or not set(right[-2:]) <= set(b) <= set(right):
        return None
    if sorted(out) != sorted(result) or any(len(set(part)) != len(part) for part in (a, b, out)):
        return None
    return Product(
        node,
        Operand(first, tuple(a.index(label) for label in left)),
        Operand(second, tuple(b.index(label) if label in b else None for label in right)),
        tuple(result.index(label) for label in out),
    )


def _labels(node: Node) -> tuple[tuple[Node, list[str]], tuple[Node, list[str]], list[str]] | None:
    """Return an einsum's two operands, each with its labels per axis, and the result's labels."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2:
        return None
    first, second = operands
    if not isinstance(first, Node) or not isinstance(second, Node):
        return None
    inputs, out = equation.replace(" ", "").split("->")
    texts, ndims = inputs.split(","), [len(shape_of(operand) or ()) for operand in (first, second)]
    spare = "".join(letter for letter in "ZYXWVU" if letter not in inputs)
    rests = [spare[: ndim - len(text) + 3] if "..." in text else "" for text, ndim in zip(texts, ndims, strict=True)]
    a, b, result = (list(text.replace("...", rests[0])) for text in (*texts, out))
    return ((first, a), (second, b), result) if rests[0] == rests[1] and [len(a), len(b)] == ndims else None


def insert_heads(flow: DataFlow, scores: Product, out: Product) -> tuple[Node, Node, Node]:
    """Insert queries, keys and values ``[B, heads, T, D]`` of products around a softmax, or raise NotCausalError."""
    dtype = recorded(out.right.node).dtype
    q = _in_dtype(flow, scores.left, _rows(flow, scores.left, scores.left), dtype)
    k = _in_dtype(flow, scores.right, _rows(flow, scores.right, scores.left), dtype)
    return q, k, _rows(flow, out.right, out.left)


def insert_result(site: Node, out: Product) -> Node:
    """Insert calls that give the output ``[B, H, T, Dv]`` of an attention op the layout of the original product."""
    node, lead = site, out.left.shape[:-2]
    if len(lead) == 3:
        node = insert_method(node, "unflatten", 1, lead[1:])
    elif len(lead) == 1:
        single = recorded(site).shape[1] == 1
        node = insert_method(node, "squeeze", 1) if single else insert_method(node, "flatten", 0, 1)
    if out.result != tuple(range(len(out.result))):
        node = insert_method(node, "permute", *out.result)
    if node is site and not all(target_name(user) in ("transpose", "permute") for user in out.node.users):
        node = insert_method(node, "contiguous")
    return node


def _rows(flow: DataFlow, operand: Operand, left: Operand) -> Node:
    """Insert the operand as ``[B, heads, T, D]``; ``left`` is the left side of its product."""
    lead, full = operand.shape[:-2], left.shape[:-2]
    if lead[0] != full[0]:
        raise NotCausalError(f"its products have leading axes {full} and {lead}")
    if len(lead) == 2 and lead[1] in (full[1], 1):
        return operand.emit()
    if len(lead) == 3 and lead[1:] == full[1:]:
        return insert_method(operand.emit(), "flatten", 1, 2)
    if len(lead) == 3 and lead[2] == 1 and lead[1] in (full[1], 1):
        return insert_method(operand.emit(), "squeeze", 2)
    if len(lead) == 1:
        split = _split_heads(flow, operand)
        if split is not None:
            return split.emit()
        tokens = token_sizes(flow.nodes)
        inputs = [shape for node in flow.nodes if node.op == "placeholder" and (shape := shape_of(node))]
        if lead[0] in {shape[0] for shape in inputs if len(shape) > 1 and shape[1] in tokens}:  # a head, no heads axis
            return insert_method(operand.emit(), "unsqueeze", 1)
    raise NotCausalError(f"its products have leading axes {full} and {lead}, which are not batch and heads")


def _in_dtype(flow: DataFlow, operand: Operand, rows: Node, dtype: torch.dtype) -> Node:
    """Insert queries or keys in the dtype of the values, without the product's upcast."""
    if recorded(rows).dtype == dtype:
        return rows
    sizes = example_sizes(operand.shape[0], operand.shape[-2], EXAMPLE_LENGTHS[0])
    for base, chain in chains_to(flow, operand.node):
        if recorded(base).dtype == dtype and (example := run_chain(base, chain, sizes)) is not None:
            before, after = example
            if torch.equal(after.flatten().sort().values, before.to(after.dtype).flatten().sort().values):
                return insert_method(rows, "to", dtype)  # elements are moved and cast, nothing else
    raise NotCausalError(f"{operand.node.name} has dtype {recorded(operand.node).dtype} beside values of {dtype}")


def chains_to(flow: DataFlow, node: Node) -> Iterator[tuple[Node, list[Node]]]:
    """Yield tensors that a node is made of by calls with one tensor operand, the nearest first, each with these calls.

    It ends at a tensor that is written into after its use.
    """
    chain = [node]
    while len(inputs := value_inputs(chain[0])) == 1 and chain[0].op.startswith("call_"):
        (base,) = inputs
        writes = [write for part in (base, *chain) for write in flow.writes_to(part)]
        if shape_of(base) is None or any(flow.order[write] > flow.order[chain[0]] for write in writes):
            return
        yield base, chain
        chain = [base, *chain]


def run_chain(base: Node, chain: Sequence[Node], sizes: SizeMap) -> tuple[Tensor, Tensor] | None:
    """Return random numbers for ``base``, and what ``chain`` makes of them; None when it cannot be run."""
    try:
        example = random_like(recorded(base), sizes)
        return example, evaluate(chain[-1], chain, {base: example}, sizes)
    except EvaluationError:
        return None


def holds_for_examples(base: Operand, chain: Sequence[Node], is_right: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether a statement is true of random ``base`` ``[B, heads, T, D]`` and of what ``chain`` makes of it."""
    batch, _, tokens, _ = base.shape
    sizes = (example_sizes(batch, tokens, length) for length in EXAMPLE_LENGTHS)
    examples = (run_chain(base.node, chain, size) for size in sizes)
    return all(example is not None and is_right(base.read(example[0]), example[1]) for example in examples)


def base_of(
    flow: DataFlow, result: Node, orders: Sequence[Axes], is_base: Callable[[Operand, Sequence[Node]], bool]
) -> Operand | None:
    """Return the nearest 4-D tensor, its axes in one of these orders, of which ``is_base`` says that it is the base."""
    for node, chain in chains_to(flow, result):
        for axes in orders if len(shape_of(node) or ()) == 4 else ():
            if is_base(Operand(node, axes), chain):
                return Operand(node, axes)
    return None


def _split_heads(flow: DataFlow, operand: Operand) -> Operand | None:
    """Return the tensor ``[B, heads, T, D]`` of which ``operand``, ``[B * heads, T, D]``, is a reshape."""

    def is_split(base: Operand, chain: Sequence[Node]) -> bool:
        batch, heads, tokens, dim = base.shape
        if not isinstance(heads, int) or operand.shape != (batch * heads, tokens, dim):
            return False
        return holds_for_examples(base, chain, lambda x, y: torch.equal(operand.read(y), x.flatten(0, 1)))

    return base_of(flow, operand.node, [*itertools.permutations(range(4))], is_split)

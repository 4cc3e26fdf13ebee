"""The rotary embedding of an attention op: the inverse frequencies by which its queries were rotated.

Found, where all D channels are rotated, channel j with channel ``j + D / 2``::

    angles = positions[..., None] * frequencies          # or frequencies[:, None] @ positions[None], transposed
    angles = cat([angles, angles], -1)
    cos, sin = angles.cos() * s, angles.sin() * s        # s a number
    q = x * cos + cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin
    out = kvpass.site(q, k, v)

with any changes of dtype, device and axes of one element between. positions are integers, an input or ``arange``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from torch.fx import Node

from kvpass.graphs.fx_utils import is_integral, is_module_tensor, is_scalar, shape_of, target_name

_CASTS = ("to", "float", "type_as", "contiguous")
_OF_ONE_ELEMENT = ("unsqueeze", "expand")
_PRODUCTS = ("mul", "matmul")


def rotary_frequencies(q: Node) -> Node | None:
    """Return the module's tensor ``[D / 2]`` of inverse frequencies by which queries ``[B, H, T, D]`` were rotated.

    None where they are not rotated in the form above.
    """
    shape = shape_of(q)
    if shape is None or not isinstance(shape[-1], int):
        return None
    for cos, sin in _factors(_through(q, _CASTS), shape[-1]):
        of_cos, of_sin = _angles(cos, "cos"), _angles(sin, "sin")
        if of_cos is not None and of_cos == of_sin:
            return _frequencies(of_cos[0], shape[-1] // 2)
    return None


def _factors(q: Node, dim: int) -> Iterator[tuple[Node, Node]]:
    """Yield cos and sin if the node is ``x * cos + cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * sin``."""
    if target_name(q) != "add" or q.kwargs:
        return
    for straight, turned in permutations(_operands(q)):
        if target_name(straight) != "mul" or target_name(turned) != "mul":
            continue
        for x, cos in permutations(_operands(straight)):
            for half, sin in permutations(_operands(turned)):
                if _is_half_turn(half, x, dim):
                    yield cos, sin


def _is_half_turn(node: Node, x: Node, dim: int) -> bool:
    """Return whether a node is ``cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)``."""
    parts = _concatenated(node)
    if len(parts) != 2 or target_name(parts[0]) != "neg" or len(parts[0].args) != 1:
        return False
    half = dim // 2
    upper, lower = (..., slice(half, None, None)), (..., slice(None, half, None))
    wanted = [(parts[0].args[0], upper), (parts[1], lower)]
    return all(
        isinstance(part, Node) and target_name(part) == "getitem" and part.args == (x, columns)
        for part, columns in wanted
    )


def _angles(node: Node, function: str) -> tuple[Node, float] | None:
    """Return angles and factor if the node is ``angles.cos() * factor``, or of sin."""
    factor = 1.0
    while True:
        node = _through(node, (*_CASTS, *_OF_ONE_ELEMENT))
        numbers = [operand for operand in node.args if isinstance(operand, (int, float))]
        if target_name(node) != "mul" or len(numbers) != 1:
            break
        factor *= numbers[0]
        node = node.all_input_nodes[0]
    return (node.all_input_nodes[0], factor) if target_name(node) == function else None


def _frequencies(angles: Node, half: int) -> Node | None:
    """Return the frequencies if the node is ``cat([a, a], -1)`` of their products with positions."""
    parts = _concatenated(angles)
    if len(parts) != 2 or parts[0] is not parts[1]:
        return None
    product = parts[0]
    swapped = target_name(product) == "transpose" and product.args[1:] in ((1, 2), (2, 1), (-1, -2), (-2, -1))
    if swapped:
        product = product.all_input_nodes[0]
    if target_name(product) not in _PRODUCTS or (target_name(product) == "matmul") != swapped:
        return None
    for factor, positions in permutations(_operands(product)):
        frequencies, counted = _source(factor), _source(positions)
        if is_module_tensor(frequencies) and shape_of(frequencies) == (half,) and _counts(counted):
            return frequencies
    return None


def _counts(node: Node) -> bool:
    """Return whether a node holds positions."""
    given = node.op == "placeholder" and not is_module_tensor(node)
    return is_integral(node) and (given or target_name(node) == "arange")


def _source(node: Node) -> Node:
    """Return what the node is the same as, but for dtype, device and axes of one element."""
    while True:
        node = _through(node, (*_CASTS, *_OF_ONE_ELEMENT))
        if target_name(node) != "getitem" or not _adds_axes(node.args[1]):
            return node
        node = node.all_input_nodes[0]


def _adds_axes(index: object) -> bool:
    """Return whether an index keeps all elements, in their order."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or part == slice(None, None, None) for part in parts)


def _through(node: Node, names: tuple[str, ...]) -> Node:
    """Return the node before all calls of these names."""
    while node.op.startswith("call_") and target_name(node) in names:
        node = node.all_input_nodes[0]
    return node


def _operands(node: Node) -> list[Node]:
    """Return the two operands of a call that has two tensors and nothing else."""
    tensors = [operand for operand in node.args if isinstance(operand, Node) and not is_scalar(operand)]
    return tensors if len(tensors) == 2 == len(node.args) and not node.kwargs else []


def _concatenated(node: Node) -> list[Node]:
    """Return what a call of ``cat`` joins along the last axis."""
    if target_name(node) != "cat":
        return []
    axis = node.kwargs["dim"] if "dim" in node.kwargs else (*node.args, 0)[1]
    parts = node.args[0] if node.args else None
    return list(parts) if axis == -1 and isinstance(parts, (tuple, list)) else []

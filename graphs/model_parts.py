"""What policies read of the model, found in the graph around an attention op ``out = kvpass.site(q, k, v)``.

Output projection: the linear layer that reads the output, and nothing else does, with any number of reshapes that keep
the order::

    x = out.transpose(1, 2).reshape(B, T, H * Dv)    # out is [B, H, T, Dv]
    y = linear(x, weight, bias)                      # or addmm(bias, x, weight), x @ weight, x @ weight.T

So the columns ``h * Dv .. (h + 1) * Dv`` of the weight ``[hidden, H * Dv]`` read query head h. Between them may stand a
gate, ``x * sigmoid(g)`` or ``x * silu(g)``, which changes no order either. As nothing else reads the output, g does not
depend on it. The gate is not part of the weight.

Input: the tensor that the linear layers of queries, keys and values read, with anything but linear layers between::

    q, k, v = f(linear(x, W_q)), g(linear(x, W_k)), h(linear(x, W_v))    # or parts of one linear(x, W)

Rotary embedding: the inverse frequencies by which queries were rotated, where all D channels are, channel j with
``j + D / 2``, with any changes of dtype, device and axes of one element between::

    angles = positions[..., None] * frequencies          # or frequencies[:, None] @ positions[None], transposed
    angles = cat([angles, angles], -1)                   # positions are integers, an input or arange
    cos, sin = angles.cos() * s, angles.sin() * s        # s a number
    q = x * cos + cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from torch.fx import Node

from kvpass.graphs.fx_utils import is_integral, is_module_tensor, is_scalar, reached, shape_of, target_name

_RESHAPES = ("view", "reshape", "flatten", "_unsafe_view", "unflatten")
_COPIES = ("contiguous", "clone")
_SWAPS = ("transpose", "swapaxes", "permute")
_GATES = ("sigmoid", "silu")
_CASTS = ("to", "float", "type_as", "contiguous")
_OF_ONE_ELEMENT = ("unsqueeze", "expand")
_PRODUCTS = ("mul", "matmul")


@dataclass(frozen=True)
class OutputProjection:
    """Weight of the linear layer that reads an attention op's output.

    Attributes:
        weight: parameter ``[hidden, H * Dv]``; ``[H * Dv, hidden]`` where ``inputs_first``.
    """

    weight: Node
    inputs_first: bool


def output_projection(site: Node) -> OutputProjection | None:
    """Return the output projection of a ``kvpass::site`` node; None where there is none of this form."""
    shape = shape_of(site)
    if shape is None or not (isinstance(shape[1], int) and isinstance(shape[3], int)):
        return None
    heads, dim, tokens_first = shape[1], shape[3], False
    node = site
    while True:
        users = [user for user in node.users if not is_scalar(user)]
        if len(users) != 1:
            return None
        user, name = users[0], target_name(users[0])
        sizes = shape_of(user)
        if sizes is None:
            return None
        if name in _SWAPS and not tokens_first and shape_of(node) == shape and _order(user) == (0, 2, 1, 3):
            tokens_first = True
        elif name in _RESHAPES and tokens_first and not (sizes[-1] == heads * dim or sizes[-2:] == (heads, dim)):
            return None
        elif name not in (*_RESHAPES, *_COPIES) and not _is_gated(user, node):  # these leave elements in their order
            product = _product_with_weight(user) if tokens_first else None
            if product is None or product[0] is not node or (shape_of(node) or ())[-1:] != (heads * dim,):
                return None
            return OutputProjection(*product[1:])
        node = user


def _is_gated(product: Node, x: Node) -> bool:
    """Whether the node is ``x`` times a gate of its shape: a sigmoid or SiLU, perhaps reshaped or of another dtype."""
    if target_name(product) not in ("mul", "mul_") or shape_of(product) != shape_of(x):
        return False
    factors = (factor for factor in product.args if factor is not x and isinstance(factor, Node))
    return any(target_name(_through(gate, (*_RESHAPES, *_COPIES, "to", "type_as"))) in _GATES for gate in factors)


def _order(node: Node) -> tuple[int, ...] | None:
    """Return the axes of its operand, of 4, in the order in which ``transpose`` or ``permute`` gives them."""
    axes = node.args[1:] if len(node.args) != 2 else node.args[1]
    if node.kwargs or not isinstance(axes, (tuple, list)) or not all(isinstance(axis, int) for axis in axes):
        return None
    given = [int(axis) % 4 for axis in axes]
    if target_name(node) == "permute":
        return tuple(given)
    order = list(range(4))
    if len(given) != 2:
        return None
    order[given[0]], order[given[1]] = order[given[1]], order[given[0]]
    return tuple(order)


def _product_with_weight(call: Node) -> tuple[Node, Node, bool] | None:
    """Return x, the weight and whether its inputs come first, if the call multiplies x ``[..., in]`` by a parameter."""
    operands = [operand for operand in call.args if isinstance(operand, Node)]
    name = target_name(call)
    place = 1 if name == "addmm" else 0
    if name not in ("linear", "addmm", "mm", "matmul") or call.kwargs.keys() - {"bias"} or len(operands) < place + 2:
        return None
    x, weight, inputs_first = operands[place], operands[place + 1], name != "linear"
    if inputs_first and (target_name(weight) == "t" or weight.args[1:] == ("T",)):
        weight, inputs_first = weight.all_input_nodes[0], False
    features, shape = (shape_of(x) or (None,))[-1], shape_of(weight) or ()
    if len(shape) != 2 or shape[0 if inputs_first else 1] != features or not is_module_tensor(weight):
        return None
    return x, weight, inputs_first


def attention_input(q: Node, k: Node, v: Node) -> Node | None:
    """Return ``x``, ``[B, T, hidden]`` or ``[B * T, hidden]``; None where they are not made of one tensor so."""
    found: set[Node] = set()
    for node in (q, k, v):
        read = _read_by_linear_layers(node)
        if len(read) != 1:
            return None
        found |= read
    return found.pop() if len(found) == 1 else None


def _read_by_linear_layers(node: Node) -> set[Node]:
    """Return what the last linear layers before a node read."""

    def reads(node: Node) -> list[Node]:
        return node.all_input_nodes if _product_with_weight(node) is None else []

    return {product[0] for made in reached([node], reads) if (product := _product_with_weight(made)) is not None}


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

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
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from kvpass.graphs.fx_utils import is_module_tensor, is_scalar, reached, shape_of, target_name, through

_RESHAPES = ("view", "reshape", "flatten", "_unsafe_view", "unflatten")
_COPIES = ("contiguous", "clone")
_SWAPS = ("transpose", "swapaxes", "permute")
_GATES = ("sigmoid", "silu")


@dataclass(frozen=True)
class OutputProjection:
    """Weight ``[hidden, H * Dv]`` of the linear layer that reads an attention op's output.

    Its shape is ``[H * Dv, hidden]`` where ``inputs_first``.
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
        if name in _SWAPS and not tokens_first and shape_of(node) == shape and _swaps_heads_and_tokens(user):
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
    return any(target_name(through(gate, (*_RESHAPES, *_COPIES, "to", "type_as"))) in _GATES for gate in factors)


def _swaps_heads_and_tokens(call: Node) -> bool:
    example = torch.empty(2, 3, 5, 7, device="meta")
    return bool(getattr(example, target_name(call))(*call.args[1:], **call.kwargs).shape == (2, 5, 3, 7))


def _product_with_weight(call: Node) -> tuple[Node, Node, bool] | None:
    """Return x, the weight and whether its inputs come first, if the call multiplies x ``[..., in]`` by a parameter."""
    operands = [operand for operand in call.args if isinstance(operand, Node)]
    name = target_name(call)
    place = 1 if name == "addmm" else 0
    if name not in ("linear", "addmm", "mm", "matmul") or call.kwargs.keys() - {"bias"} or len(operands) < place + 2:
        return None
    x, weight, inputs_first = operands[place], operands[place + 1], name != "linear"
    # weight.T is a getattr in the graphs of torch before 2.15
    if inputs_first and (target_name(weight) in ("t", "numpy_T") or weight.args[1:] == ("T",)):
        weight, inputs_first = weight.all_input_nodes[0], False
    features, shape = (shape_of(x) or (None,))[-1], shape_of(weight) or ()
    if len(shape) != 2 or shape[0 if inputs_first else 1] != features or not is_module_tensor(weight):
        return None
    return x, weight, inputs_first


def attention_input(q: Node, k: Node, v: Node) -> Node | None:
    """Return ``x``, ``[B, T, hidden]`` or ``[B * T, hidden]``; None where they are not made of one tensor so."""

    def before(node: Node) -> list[Node]:
        return node.all_input_nodes if _product_with_weight(node) is None else []

    inputs: set[Node] = set()
    for node in (q, k, v):
        products = map(_product_with_weight, reached([node], before))
        read = {product[0] for product in products if product is not None}
        if len(read) != 1:
            return None
        inputs |= read
    return inputs.pop() if len(inputs) == 1 else None

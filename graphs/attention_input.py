"""What enters an attention op: the tensor that the linear layers of its queries, keys and values read.

Found, with anything but linear layers between::

    q, k, v = f(linear(x, W_q)), g(linear(x, W_k)), h(linear(x, W_v))    # or parts of one linear(x, W)
    out = kvpass.site(q, k, v)
"""

from __future__ import annotations

from torch.fx import Node

from kvpass.graphs.output_projection import product_with_weight


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
    found, seen, left = set[Node](), set[Node](), [node]
    while left:
        node = left.pop()
        product = product_with_weight(node)
        if product is not None:
            found.add(product[0])
        elif node not in seen:
            seen.add(node)
            left += node.all_input_nodes
    return found

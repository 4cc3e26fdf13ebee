"""Compute the logits of the last tokens alone: one capture, made of all, serves every ``logits_to_keep``.

Before::

    x = hidden[:, slice(0, None), :]        # as models write it for logits_to_keep=0
    logits = linear(x, weight)              # [B, T, vocabulary]

After, for one token::

    x = hidden[:, slice(0, None), :]
    last = x[:, slice(-1, None)]
    logits = linear(last, weight)           # [B, 1, vocabulary]

The slice stands where the model's own one would. Behind it there is no attention and no state of a recurrent layer, and
nothing else relates tokens to tokens, as ``self_check`` showed. Where a graph has no such place, the logits are cut.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from kvpass.graphs.canonical import READ_STATE, SITE, batch_and_tokens
from kvpass.graphs.fx_utils import DataFlow, is_module_tensor, reached, recorded, shape_of
from kvpass.graphs.insert_nodes import insert_function
from kvpass.torch_compat import enable_python_dispatcher


def keep_logits_pass(gm: GraphModule, *, logits: int) -> int:
    """Compute so many last logits, of more; return 1, or 0 where all are computed and then cut."""
    (result,) = gm.graph.output_node().all_input_nodes
    place = _before_head(gm, result)
    cut = result if place is None else place
    with recorded(cut).fake_mode, enable_python_dispatcher(), torch.no_grad():
        with gm.graph.inserting_after(cut):
            last = insert_function(cut, operator.getitem, cut, (slice(None), slice(-logits, None)))
        cut.replace_all_uses_with(last, lambda user: user is not last)
        behind = reached([last], lambda node: [user for user in node.users if user.op != "output"]) - {last}
        for node in gm.graph.nodes:
            if node in behind:
                args, kwargs = map_arg((node.args, node.kwargs), recorded)
                function = node.target if node.op == "call_function" else getattr(type(args[0]), node.target)
                node.meta["example_value"] = function(*args, **kwargs)
    return int(place is not None)


def _before_head(gm: GraphModule, result: Node) -> Node | None:
    """Return the slice of all tokens, ``[B, T, hidden]``, from which alone the logits come; None if there is none."""
    tokens, flow = batch_and_tokens(gm)[1], DataFlow(gm)
    for node in reversed(flow.needed([result])):
        if node.target is operator.getitem and _takes_all(node) and (shape_of(node) or ())[1] == tokens:
            behind = [other for other in flow.needed([result], stop=[node]) if other is not node]
            relates = any(other.target in (SITE, READ_STATE) for other in behind)
            if not relates and all(other.op != "placeholder" or is_module_tensor(other) for other in behind):
                return node
    return None


def _takes_all(node: Node) -> bool:
    """Whether a call takes the slice of everything, of a tensor of three axes."""
    operand, index = node.args
    if not isinstance(operand, Node) or not isinstance(index, tuple) or len(shape_of(operand) or ()) != 3:
        return False
    whole = (isinstance(part, slice) and part.start in (None, 0) and part.stop is None for part in index)
    return all(whole) and shape_of(node) == shape_of(operand)

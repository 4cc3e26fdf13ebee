"""Find the rotary embedding of the queries of an attention op, by running on an example what stands before it.

With D channels, channel j turns with ``j + D / 2``; the factor s is a number::

    angles = cat([positions * frequencies] * 2, -1)
    q = s * (x * angles.cos() + cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * angles.sin())

How that is written does not matter. In the example what the layers before give is the same for all tokens. Then a
query at position p must be that at position 0, turned by p times the only tensor ``[D / 2]`` of the model in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from kvpass.graphs.canonical import Site
from kvpass.graphs.fx_utils import DataFlow, is_integral, is_module_tensor, is_scalar, made_of, recorded, shape_of
from kvpass.graphs.verify.examples import EvaluationError, concrete, evaluate, example_sizes

_POSITIONS = (0, 1, 5, 40, 1000, 30000, 1000000)
"""Those of the example, where they are an input."""
_TOLERANCE = 1e-3
_FOUND = "kvpass_rotary_frequencies"
"""Note of an attention op: what was found for it."""


def rotary_frequencies(site: Site) -> Node:
    """Return the module's tensor ``[D / 2]`` of inverse frequencies by which the queries were rotated.

    Raises:
        UnsupportedAttentionError: they were not, or not all channels, or in another form.
    """
    found = site.node.meta.get(_FOUND)
    if found is None or found.graph is not site.node.graph:  # copies of a graph share their notes
        try:
            found = site.node.meta[_FOUND] = _found(site.q)
        except EvaluationError:
            found = None
    return site.needed(
        found,
        "the rotary embedding of the queries, which must turn all channels, each of the first half with one of the "
        "second, by position_ids times a tensor of the model",
    )


def _found(q: Node) -> Node | None:
    """Return the frequencies that turn queries ``[B, H, T, D]``; None where they are not turned so.

    Raises:
        EvaluationError: the example cannot be run.
    """
    gm, (batch, _, tokens, dim) = q.graph.owning_module, shape_of(q) or (None,) * 4
    if gm is None or batch is None or tokens is None or not isinstance(dim, int) or dim % 2:
        return None
    flow = DataFlow(gm)
    of_matrices = made_of(flow.nodes, lambda node: is_module_tensor(node) and len(shape_of(node) or ()) > 1)
    layers = {node for node in of_matrices if len(shape_of(node) or (0,) * 4) != 4}  # no queries yet
    sources = flow.sources([q], stop=layers)
    given = layers & {*sources}
    inputs = [node for node in sources if node.op in ("placeholder", "get_attr") and not is_scalar(node)]
    weights = [node for node in inputs if is_module_tensor(node) and not is_integral(node)]
    counted = [node for node in inputs if is_integral(node) and (shape_of(node) or ())[-1:] == (tokens,)]
    found = [node for node in weights if shape_of(node) == (dim // 2,)]
    if not given or len(found) != 1 or len(weights) + len(counted) < len(inputs) or any(map(is_module_tensor, counted)):
        return None
    sizes = example_sizes(batch, tokens, len(_POSITIONS))

    def feed(node: Node, positions: Sequence[int]) -> Tensor:
        size = concrete(shape_of(node), sizes)
        if node in counted:
            values = torch.tensor(positions, device="cpu")
        elif node in found:
            values = torch.logspace(-6, -2, dim // 2, device="cpu")
        else:
            values = torch.rand(size[-1:], generator=torch.Generator().manual_seed(0), device="cpu") + 0.5
        return values.to(recorded(node)).expand(size)

    def queries(positions: Sequence[int]) -> Tensor:
        feeds = {node: feed(node, positions) for node in (*inputs, *given)}
        calls = [node for node in sources if node not in feeds and not is_scalar(node)]
        return evaluate(q, calls, feeds, sizes)

    positions = _POSITIONS if counted else tuple(range(len(_POSITIONS)))
    made, first, half = queries(positions), queries((0,) * len(positions))[:, :, :1].double(), dim // 2
    frequencies = feed(found[0], ()).double()
    angles = torch.tensor(positions, device=made.device)[:, None] * torch.cat([frequencies, frequencies])
    turned = first * angles.cos() + torch.cat([-first[..., half:], first[..., :half]], -1) * angles.sin()
    tolerance = max(_TOLERANCE, 8 * torch.finfo(made.dtype).eps) * float(first.abs().max())
    return found[0] if torch.allclose(made.double(), turned, rtol=0.0, atol=tolerance) else None

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

_POSITIONS = (0, 1, 5, 40, 1000, 30000, 1000000)  # those of the example, where they are an input
_TOLERANCE = 1e-3
_FREQUENCIES = "kvpass_rotary_frequencies"  # note of an attention op: its frequencies


def rotary_frequencies(site: Site) -> Node:
    """Return the module's tensor ``[D / 2]`` of inverse frequencies by which the queries were rotated; else raise."""
    frequencies = site.node.meta.get(_FREQUENCIES)
    if frequencies is None or frequencies.graph is not site.node.graph:  # copies of a graph share their notes
        frequencies = site.node.meta[_FREQUENCIES] = _frequencies_of(site.q)
    return site.needed(
        frequencies,
        "the rotary embedding of the queries, which must turn all channels, each of the first half with one of the "
        "second, by position_ids times a tensor of the model",
    )


def _frequencies_of(q: Node) -> Node | None:
    """Return the frequencies that turn queries ``[B, H, T, D]``; None where they are not turned so."""
    gm, (batch, _, tokens, dim) = q.graph.owning_module, shape_of(q) or (None,) * 4
    if gm is None or batch is None or tokens is None or not isinstance(dim, int) or dim % 2:
        return None
    flow = DataFlow(gm)
    of_matrices = made_of(flow.nodes, lambda node: is_module_tensor(node) and len(shape_of(node) or ()) > 1)
    layers = {node for node in of_matrices if len(shape_of(node) or (0,) * 4) != 4}  # no queries yet
    sources = flow.sources([q], stop=layers)
    hidden = layers & {*sources}
    inputs = [node for node in sources if node.op in ("placeholder", "get_attr") and not is_scalar(node)]
    weights = [node for node in inputs if is_module_tensor(node) and not is_integral(node)]
    counted = [node for node in inputs if is_integral(node) and (shape_of(node) or ())[-1:] == (tokens,)]
    candidates = [node for node in weights if shape_of(node) == (dim // 2,)]
    if not hidden or len(candidates) != 1 or len(weights) + len(counted) < len(inputs):
        return None
    if any(map(is_module_tensor, counted)):
        return None
    sizes = example_sizes(batch, tokens, len(_POSITIONS))

    def feed(node: Node, positions: Sequence[int]) -> Tensor:
        size = concrete(shape_of(node), sizes)
        if node in counted:
            values = torch.tensor(positions, device="cpu")
        elif node in candidates:
            values = torch.logspace(-6, -2, dim // 2, device="cpu")
        else:
            values = torch.rand(size[-1:], generator=torch.Generator().manual_seed(0), device="cpu") + 0.5
        return values.to(recorded(node)).expand(size)

    def queries(positions: Sequence[int]) -> Tensor:
        feeds = {node: feed(node, positions) for node in (*inputs, *hidden)}
        calls = [node for node in sources if node not in feeds and not is_scalar(node)]
        return evaluate(q, calls, feeds, sizes)

    positions = _POSITIONS if counted else tuple(range(len(_POSITIONS)))
    try:
        rotated, first = queries(positions), queries((0,) * len(positions))[:, :, :1].double()
    except EvaluationError:
        return None
    half, frequencies = dim // 2, feed(candidates[0], ()).double()
    angles = torch.tensor(positions, device=rotated.device)[:, None] * torch.cat([frequencies, frequencies])
    turned = first * angles.cos() + torch.cat([-first[..., half:], first[..., :half]], -1) * angles.sin()
    tolerance = max(_TOLERANCE, 8 * torch.finfo(rotated.dtype).eps) * float(first.abs().max())
    return candidates[0] if torch.allclose(rotated.double(), turned, rtol=0.0, atol=tolerance) else None

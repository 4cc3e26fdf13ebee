"""Check that two captures are of the same decoder: run both on one example, compare attention operands and output.

Dynamo captures a module again if an argument has another layout, which changes nothing, and if an attribute of the
module has changed, which may change the result. Another capture continues a text only if it computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from kvpass.graphs.bind_state import placeholders
from kvpass.graphs.canonical import SITE
from kvpass.graphs.fx_utils import DataFlow
from kvpass.graphs.verify.examples import EvaluationError, evaluate
from kvpass.torch_compat import Source, TensorProperty, TensorPropertySource, tree_leaves

_TOLERANCE = 1e-4


def value_of(source: Source, given: Mapping[str, Any]) -> Any:
    """The value at a place, where those at others are given by name; None when that does not say it."""
    if isinstance(source, TensorPropertySource) and source.name not in given and source.base.name in given:
        tensor = given[source.base.name]
        return (tensor.shape if source.prop is TensorProperty.SIZE else tensor.stride())[source.idx]
    return given.get(source.name)


def is_same_decoder(one: GraphModule, inputs: Sequence[Any], other: GraphModule, others: Sequence[Any]) -> bool:
    """Whether two canonical graphs give the same for the inputs of a call, those of one and of the other."""
    try:
        found, expected = _values(one, inputs), _values(other, others)
    except EvaluationError:
        return False
    return len(found) == len(expected) and all(map(_is_same, found, expected))


def _values(gm: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """What every site is given, then the output."""
    output = gm.graph.output_node()
    feeds = dict(zip(placeholders(gm), inputs, strict=True))
    found: list[Any] = []

    def site(
        q: Tensor, k: Tensor, v: Tensor, scale: float, window: Any = None, softcap: Any = None, *rest: Any, **named: Any
    ) -> Tensor:
        found.extend((q, k, v, scale, named.get("softcap", softcap)))  # one token alone shows no window
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    result = evaluate(output, DataFlow(gm).needed([output]), feeds, {}, instead={SITE: site})
    return [*found, *tree_leaves(result)]


def _is_same(found: Any, expected: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return bool(found == expected)
    if found.ndim == 4:  # nor slopes, which are further columns
        columns = min(found.shape[-1], expected.shape[-1])
        found, expected = found[..., :columns], expected[..., :columns]
    return found.shape == expected.shape and torch.allclose(
        found.double(), expected.double(), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True
    )

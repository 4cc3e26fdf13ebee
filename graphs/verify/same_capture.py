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


def value_of(source: Source, values: Mapping[str, Any]) -> Any:
    """Return the value at a place from those at others, by name; None when they do not say it."""
    if isinstance(source, TensorPropertySource) and source.name not in values and source.base.name in values:
        tensor = values[source.base.name]
        return (tensor.shape if source.prop is TensorProperty.SIZE else tensor.stride())[source.idx]
    return values.get(source.name)


def is_same_decoder(one: GraphModule, inputs: Sequence[Any], other: GraphModule, others: Sequence[Any]) -> bool:
    """Return whether two canonical graphs compute the same from the inputs of a call."""
    try:
        values, expected = _values(one, inputs), _values(other, others)
    except EvaluationError:
        return False
    return len(values) == len(expected) and all(map(_is_same, values, expected))


def _values(gm: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Return the operands of every attention op, then the output."""
    output = gm.graph.output_node()
    feeds = dict(zip(placeholders(gm), inputs, strict=True))
    operands: list[Any] = []

    def site(
        q: Tensor, k: Tensor, v: Tensor, scale: float, window: Any = None, softcap: Any = None, *rest: Any, **named: Any
    ) -> Tensor:
        operands.extend((q, k, v, scale, named.get("softcap", softcap)))  # one token alone shows no window
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    result = evaluate(output, DataFlow(gm).needed([output]), feeds, {}, instead={SITE: site})
    return [*operands, *tree_leaves(result)]


def _is_same(value: Any, expected: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(expected, Tensor):
        return bool(value == expected)
    if value.ndim == 4:  # nor slopes, which are further columns
        columns = min(value.shape[-1], expected.shape[-1])
        value, expected = value[..., :columns], expected[..., :columns]
    return value.shape == expected.shape and torch.allclose(
        value.double(), expected.double(), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True
    )

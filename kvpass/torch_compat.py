"""Private parts of torch that kvpass stands on, each in one place: what another version of torch calls otherwise."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import sympy  # type: ignore[import-untyped]
from torch._dynamo.source import TensorPropertySource
from torch._guards import ShapeGuard
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges


def symbol_bounds(shapes: ShapeEnv, symbol: sympy.Symbol) -> ValueRanges:
    """What a symbol of a capture may be."""
    return shapes.var_to_range[symbol]


def set_symbol_bounds(shapes: ShapeEnv, symbol: sympy.Symbol, bounds: ValueRanges) -> None:
    """Let a symbol be within other bounds."""
    shapes.var_to_range[symbol] = bounds


def sizes_of_inputs(shapes: ShapeEnv) -> dict[sympy.Symbol, list[TensorPropertySource]]:
    """Symbols of a capture, with the sizes and strides of inputs that they are."""
    found = {
        symbol: [source for source in sources if isinstance(source, TensorPropertySource)]
        for symbol, sources in shapes.var_to_sources.items()
    }
    return {symbol: sources for symbol, sources in found.items() if sources}


def shape_guards(shapes: ShapeEnv) -> Iterable[ShapeGuard]:
    """What the capture so far takes for granted of its sizes."""
    return shapes.guards


def drop_shape_guards(shapes: ShapeEnv, dropped: Collection[ShapeGuard]) -> None:
    """Take less for granted. Before Dynamo writes the guards of its capture."""
    shapes.guards[:] = [guard for guard in shapes.guards if guard not in dropped]

"""The graph of one token, from a capture of several: one capture serves every number of tokens.

Before, captured for ``s0`` tokens, where Dynamo takes 2 or more for granted::

    q = x.view(1, s0, 4, 8)     # example_value [1, s0, 4, 8]

After ``one_token_pass`` the calls are the same and their values are recorded anew::

    q = x.view(1, 1, 4, 8)      # example_value [1, 1, 4, 8]

The graph calls functions of torch, so what depends on a size of 1 (views, broadcasts) is settled again. A branch of the
decoder on one token is the one that it takes for several: that is what the token gets at the end of the whole text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kvpass.graphs.bind_state import STATE_PREFIX, placeholders
from kvpass.graphs.fx_utils import Dim, dim_of, recorded, symbols_of
from kvpass.graphs.record_values import record_values
from kvpass.torch_compat import FakeTensorMode, TensorProperty, ValueRanges, sizes_of_inputs

_LENGTHS = (2, 3, 4, 7, 64, 1021, 99991)  # lengths for which a guard that excludes one token only must hold


def admit_one_token(shapes: ShapeEnv, tokens: Dim) -> None:
    """Let Dynamo call a capture of several tokens with one token too. To be called last in the trace.

    Symbols of the cache's state stay as they are: to widen them would give guards that Python checks in every step.
    """
    symbols = symbols_of([tokens])
    for symbol, sources in sizes_of_inputs(shapes).items():
        # an input that the graph does not use has a symbol of its own
        given = [source for source in sources if STATE_PREFIX not in source.name]
        if symbol in symbols or any((source.prop, source.idx) == (TensorProperty.SIZE, 1) for source in given):
            bounds = shapes.bound_sympy(symbol)
            if bounds.lower == 2:
                shapes.var_to_range[symbol] = ValueRanges(1, bounds.upper)
    shapes.guards[:] = [guard for guard in shapes.guards if not _excludes_only_one(guard.expr, symbols)]


def _excludes_only_one(guard: sympy.Basic, symbols: Set[sympy.Symbol]) -> bool:
    """Whether a guard says that the one symbol is not 1, and nothing else."""
    if guard.free_symbols != symbols:
        return False
    (symbol,) = symbols
    of_one, *others = (guard.xreplace({symbol: sympy.Integer(length)}) for length in (1, *_LENGTHS))
    return isinstance(guard, sympy.Ne) and of_one == sympy.false and all(other == sympy.true for other in others)


@contextmanager
def several_tokens(shapes: ShapeEnv, tokens: Dim, fewest: int = 2) -> Iterator[None]:
    """What is compiled inside may take so many tokens or more for granted; the graph of one has none of the symbol."""
    before = {symbol: shapes.bound_sympy(symbol) for symbol in symbols_of([tokens])}
    for symbol, bounds in before.items():
        shapes.var_to_range[symbol] = ValueRanges(max(bounds.lower, fewest), bounds.upper)
    try:
        yield
    finally:
        for symbol, bounds in before.items():
            shapes.var_to_range[symbol] = ValueRanges(bounds.lower, shapes.bound_sympy(symbol).upper)


def one_token_inputs(inputs: Sequence[Any], tokens: Dim, mode: FakeTensorMode) -> list[Any]:
    """Fake inputs of a capture of several tokens, for one token."""
    symbols = symbols_of([tokens])

    def of_one_token(size: Any) -> Any:
        dim = dim_of(size)
        if isinstance(dim, int) or not symbols & dim.free_symbols:
            return size
        return int(dim.xreplace(dict.fromkeys(symbols, sympy.Integer(1))))

    def resized(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return of_one_token(value)
        if not isinstance(value, Tensor) or not symbols & symbols_of(map(dim_of, (*value.shape, *value.stride()))):
            return value
        shape, stride = (list(map(of_one_token, sizes)) for sizes in (value.shape, value.stride()))
        with mode:
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)

    return [resized(value) for value in inputs]


def one_token_pass(gm: GraphModule, *, inputs: Sequence[Any], mode: FakeTensorMode) -> int:
    """Record values from the inputs of :func:`one_token_inputs`; return how many calls were recorded."""
    for node, value in zip(placeholders(gm), inputs, strict=True):
        if isinstance(value, int) and isinstance(recorded(node), torch.SymInt):
            node.replace_all_uses_with(value)  # type: ignore[arg-type]
    record_values(gm, inputs, mode)
    return sum(node.op.startswith("call_") for node in gm.graph.nodes)

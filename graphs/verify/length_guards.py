"""Check the guards of a capture on its length.

Dynamo follows one side of every branch on the length, and guards that later calls take it too. Decoding with a cache
passes one token at a time and would always take the side of short inputs, so a branch raises. A maximum length, such as
the end of a table of positions, is allowed: decoding ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import GraphModule

from kvpass.graphs.fx_utils import dim_of, shape_of, symbols_of
from kvpass.torch_compat import ShapeGuard, int_oo

_SHORT = range(2, 130)  # lengths tried for a guard of no simple form, besides those near its numbers


def longest_length(gm: GraphModule, tokens: int | torch.SymInt, shortest: int = 2) -> int | None:
    """Return the most tokens the capture holds for; None when unlimited or captured for one length.

    Call it before the graph is compiled: Inductor has guards on lengths too, and compiles again where they fail.
    ``shortest``: tokens for which the capture must hold; one token is let in later, see ``one_token``.
    ValueError: it holds for some lengths and not for shorter ones, or for even ones...: the decoder branches.
    """
    if isinstance(tokens, int) or isinstance(dim_of(tokens), int):
        return None
    environment, symbol = tokens.node.shape_env, tokens.node.expr
    sizes = symbols_of(dim for node in gm.graph.find_nodes(op="placeholder") for dim in shape_of(node) or ())
    bounds = environment.bound_sympy(symbol)
    numbers: dict[Any, dict[Any, str]] = {sympy.Ge: {bounds.lower: ""}, sympy.Le: {bounds.upper: ""}, sympy.Ne: {}}
    for recorded in environment.guards:
        guard, line = environment.replace(recorded.expr), _line_of(recorded)
        equates = isinstance(guard, sympy.Eq) and bool(guard.lhs.is_Symbol and guard.rhs.is_Symbol)
        if not symbol.free_symbols & guard.free_symbols or not guard.free_symbols <= sizes or equates:
            continue
        relation, number = _bound(guard, symbol)
        if relation is None:
            relation, number = sympy.Le, _end(guard, symbol, line)
        numbers[relation][number] = line
    lower, longest = max(numbers[sympy.Ge]), min(numbers[sympy.Le])
    if lower > shortest:
        raise _refusal(sympy.Ge(symbol, lower), symbol, numbers[sympy.Ge][lower])
    for number, line in numbers[sympy.Ne].items():
        if shortest < number < longest:
            raise _refusal(sympy.Ne(symbol, number), symbol, line)
    if longest == int_oo:
        return None
    # at its ends a slice is a whole or contiguous view; torch branches on that, not the decoder
    return int(longest) + (longest + 1 in numbers[sympy.Le] or longest + 1 in numbers[sympy.Ne])


def fixed_length(length: int, guards: Sequence[ShapeGuard]) -> ValueError:
    """Return the error for a capture of several tokens that holds for no other length."""
    equal = (guard for guard in guards if isinstance(guard.expr, sympy.Eq) and length in guard.expr.args)
    line = next(filter(None, map(_line_of, equal)), "")
    cause = f"`{line}` makes a constant of it" if line else "say torch.compile(..., dynamic=True)"
    return ValueError(
        f"captured for {length} tokens and no other length: {cause}. What a decoder computes from it is a number like "
        "any other then, and wrong for the next token"
    )


def _line_of(guard: ShapeGuard) -> str:
    """Return the line of code that a guard comes from; "" if not recorded."""
    return guard.sloc.maybe_user_loc or ""


def _bound(guard: sympy.Basic, symbol: sympy.Symbol) -> tuple[type[sympy.Rel] | None, sympy.Basic]:
    """Return relation and n of a guard ``tokens <= n``, ``>= n`` or ``!= n``; None for others."""
    gap = guard.lhs - guard.rhs if isinstance(guard, sympy.Rel) else sympy.nan
    factor, rest = gap.coeff(symbol), gap.subs(symbol, 0)
    if isinstance(guard, sympy.Eq) or not factor.is_Integer or not rest.is_Integer or gap != factor * symbol + rest:
        return None, sympy.nan
    number = -rest / factor
    if isinstance(guard, sympy.Ne):
        return sympy.Ne, number
    strict = isinstance(guard, (sympy.Lt, sympy.Gt))
    if isinstance(guard, (sympy.Le, sympy.Lt)) == (factor > 0):
        return sympy.Le, sympy.ceiling(number) - 1 if strict else sympy.floor(number)
    return sympy.Ge, sympy.floor(number) + 1 if strict else sympy.ceiling(number)


def _end(guard: sympy.Basic, symbol: sympy.Symbol, line: str) -> int:
    """Return the last length, from short ones on, for which a guard holds, as where mpt cuts its biases."""
    numbers = {int(abs(number)) for number in guard.atoms(sympy.Integer)}
    tried = sorted({*_SHORT, *(near for number in numbers for near in range(number - 2, number + 3) if near > 1)})
    holds = [guard.xreplace({symbol: sympy.Integer(length)}) == sympy.true for length in tried]
    last = holds.index(False) - 1 if False in holds else len(tried)
    if last in (-1, len(tried)) or any(holds[last + 1 :]) or tried[last] + 1 != tried[last + 1]:
        raise _refusal(guard, symbol, line)
    return tried[last]


def _refusal(guard: sympy.Basic, symbol: sympy.Basic, line: str) -> ValueError:
    holds = str(guard.xreplace({symbol: sympy.Symbol("tokens")}))
    return ValueError(
        f"the decoder branches on the length of its input{line and f', in `{line}`'}: what was captured is what it "
        f"does where {holds}; the next token, decoded against a cache, would take another side than it takes at the "
        "end of the whole text"
    )

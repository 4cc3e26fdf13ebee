"""Schemas, fake implementations and device dispatch of the ``kvpass::`` operators; imports no kernel.

Legend (as everywhere): B batch, T new tokens, N prompt, H query heads, K KV heads, D head dim, L layers,
E pool entries, C tail capacity.

=====================  ==============================================================================================
operator               what it does
=====================  ==============================================================================================
``site``               the canonical attention op: causal attention over the tokens of this call only; ``refusal`` is
                       the reason why a traced call is unsupported; graphs with such a call are not compiled
``absorbed_query``     queries of latent rows for those of expanded heads; traced through by Inductor
``expanded_output``    outputs of expanded heads for those of latent rows; traced through by Inductor
``attend_cache``       append new tokens to the tail, attend pool + tail
``attend_evict``       append and attend, for policies that evict while decoding: the evicted entry's slot is reused
``observe_held``       scores, attention mass and layer weight of pool + tail, for recompression after an append
``columns_held``       the column in each slot of a ring, once a step for all layers of the ring
``attend_ring``        attend ring + new tokens inside the window or chunk, put the new tokens into the ring
``read_state``         the state of a recurrent layer before the tokens of this call; zeros where no cache is bound
``write_state``        its state after them; no cache is bound, so it is dropped
``store_state``        its state after them, into a buffer of the cache
``delta_rule``         a gated delta rule over the tokens of this call, from a state to the state after them
``mamba2``             the same, of the selective state space of Mamba 2
``mamba``              the same, of the selective scan of Mamba
``real_tokens``        1 for tokens, 0 for padding, of which a call without a cache knows none
=====================  ==============================================================================================
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from types import ModuleType
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from kvpass.operands import AppendBuffers, Attention, EvictBuffers, Expansion, RingBuffers, written_in
from kvpass.ops import evict, latents, recompress, recurrent, sliding
from kvpass.ops.entry_formats import centred
from kvpass.policies import from_spec
from kvpass.policies.base import Policy
from kvpass.ranks import Ranks

_LIBRARY = torch.library.Library("kvpass", "DEF")


_MOST_TOKENS_IN_CPP = 8
"""Above so many new tokens the work is matrix-matrix, and the per-head reference on BLAS is faster."""


@cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"kvpass.{name}")


def implementation(tensor: Tensor, impl: str = "eager") -> ModuleType:
    """Return the module that computes operators on ``tensor``: ``ops.cuda``, ``kernels.cpu`` or ``ops.reference``.

    Args:
        impl: "cpp" or "eager", for tensors on a CPU; decided when a graph is compiled.
    """
    if tensor.is_cuda:
        return _module("ops.cuda")
    return _module("kernels.cpu" if impl == "cpp" and tensor.is_cpu else "ops.reference")


# -- implementations --------------------------------------------------------------------------------------------------


def _site(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    refusal: str | None = None,
    chunked: bool = False,
    up: Tensor | None = None,
    nope: int = 0,
) -> Tensor:
    call, expansion = Attention(q, k, v, scale, softcap, sinks), None if up is None else Expansion(up, nope)
    start = torch.zeros(len(q), dtype=torch.int64, device="cpu")
    return latents.attend_prompt(call, expansion, start, implementation(q), sliding_window, chunked)[0]


def _attend_cache(call: Attention, held: AppendBuffers, layer: int, impl: str) -> Tensor:
    few = call.q.shape[2] <= _MOST_TOKENS_IN_CPP
    if held.key_mean is not None:
        call = centred(call, held.key_mean, layer if held.row_index is None else (layer, held.row_index))
    return implementation(call.q, impl if few else "eager").attend_cache(call, held, layer)


def _attend_evict(
    call: Attention, held: EvictBuffers, layer: int, policy: Policy, impl: str, ranks: Ranks, entering: Tensor | None
) -> Tensor:
    return evict.attend_evict(call, held, layer, policy, implementation(call.q, impl), ranks, entering)


def _attend_ring(
    call: Attention, ring: RingBuffers, held: Tensor, seen: Tensor, layer: int, first: Tensor | None, impl: str
) -> Tensor:
    if call.q.shape[2] == 1 and (call.q.is_cuda or impl == "cpp"):
        return sliding.attend_ring_once(call, ring, held, layer, implementation(call.q, impl))
    return sliding.attend_ring(call, ring, held, seen, layer, first)


def _read_state(like: Tensor, layer: int, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return like.new_zeros(like.shape[0], *shape, dtype=dtype)


def _write_state(state: Tensor, layer: int, name: str) -> None:
    return None


def _store_state(state: Tensor, made: Tensor) -> None:
    made.copy_(state)


def _real_tokens(ids: Tensor) -> Tensor:
    return torch.ones_like(ids)


# -- fake implementations, for tracing --------------------------------------------------------------------------------


def _fake_output(call: Attention, *rest: Any) -> Tensor:
    """Return the output of an attention operator: ``[B, H, T, Dv]`` stored as ``[B, T, H, Dv]``."""
    b, h, t, _ = call.q.shape
    return call.q.new_empty(b, t, h, call.v.shape[3]).transpose(1, 2)


def _fake_site(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    (b, h, t, _), (up, nope) = q.shape, rest[-2:]
    return q.new_empty(b, t, h, v.shape[3] if up is None else len(up) // h - nope).transpose(1, 2)


def _fake_columns(seen: Tensor, first: Tensor, slots: int, chunked: bool) -> Tensor:
    return first.new_empty(first.shape[0], slots, dtype=torch.int32)


def _fake_nothing(*args: Any) -> None:
    return None


# -- schemas ----------------------------------------------------------------------------------------------------------

_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    float | None: "float?",
    int: "int",
    int | None: "int?",
    Sequence[int]: "int[]",
    str: "str",
    str | None: "str?",
    bool: "bool",
    torch.dtype: "ScalarType",
    Policy: "str",
    Ranks: "str",
}
"""Schema text of operand types; policies and ranks are passed as their specs."""
_REQUIRED = inspect.Parameter.empty


def _operands(parameters: Iterable[inspect.Parameter]) -> Iterator[tuple[str, Any, str]]:
    """Yield names, types and defaults (" = ..." or "") of operands; a tuple of operands stands for its fields."""
    for parameter in parameters:
        name, kind, default = parameter.name, parameter.annotation, parameter.default
        if hasattr(kind, "_fields"):
            yield from ((field, hint, "") for field, hint in get_type_hints(kind).items())
        else:
            yield name, kind, "" if default is _REQUIRED else f" = {default}"


def _define(
    run: Callable[..., Any], fake: Callable[..., Any], *, returns: str = "Tensor", written: Collection[str] = ()
) -> None:
    """Define the operator named after ``run``, with its parameters and ``fake`` as fake implementation.

    Args:
        written: names of the operands that it writes.
    """
    parameters = inspect.signature(run, eval_str=True).parameters.values()
    texts: list[str] = []
    for name, kind, default in _operands(parameters):
        alias = f"Tensor({chr(ord('a') + len(texts))}!)"
        text = _TYPES[kind].replace("Tensor", alias) if name in written else _TYPES[kind]
        texts.append(f"{text} {name}{default}")
    name = run.__name__.removeprefix("_")
    _LIBRARY.define(f"{name}({', '.join(texts)}) -> {returns}")
    _LIBRARY.impl(name, _packed(run, parameters), "CompositeExplicitAutograd")
    torch.library.register_fake(f"kvpass::{name}", _packed(fake, parameters))


def _packed(run: Callable[..., Any], parameters: Iterable[inspect.Parameter]) -> Callable[..., Any]:
    """Return ``run`` as a function of single operands, as the dispatcher passes them: without defaults at the end."""
    takers = [_taker(parameter.annotation, parameter.default) for parameter in parameters]

    def flat(*operands: Any) -> Any:
        left = iter(operands)
        return run(*[take(left) for take in takers])

    return flat


def _taker(kind: Any, default: Any) -> Callable[[Iterator[Any]], Any]:
    """Return what takes one parameter of ``kind`` from the operands; decided once, not in each call."""
    if hasattr(kind, "_fields"):
        count = len(kind._fields)
        return lambda left: kind(*islice(left, count))
    if kind is Ranks:
        return lambda left: Ranks.from_spec(next(left))
    if kind is Policy:
        return lambda left: from_spec(next(left))
    return next if default is _REQUIRED else lambda left: next(left, default)


_define(_site, _fake_site)
for _name, _operand in (("absorbed_query", "q"), ("expanded_output", "out")):
    _LIBRARY.define(f"{_name}(Tensor {_operand}, Tensor up, int nope) -> Tensor")
    _LIBRARY.impl(_name, getattr(latents, _name), "CompositeImplicitAutograd")
_define(_attend_cache, _fake_output, written=written_in("append"))
_define(_attend_evict, _fake_output, written=written_in("evict"))
_define(
    recompress.observe_held,
    _fake_nothing,
    returns="()",
    written={"recompress_scores", "recompress_masses", "recompress_weights"},
)
_define(sliding.columns_held, _fake_columns)
_define(_attend_ring, _fake_output, written=written_in("append"))
_define(recurrent.delta_rule, recurrent.fake_delta_rule, returns="(Tensor, Tensor)")
_define(recurrent.mamba2, recurrent.fake_scan, returns="(Tensor, Tensor)")
_define(recurrent.mamba, recurrent.fake_scan, returns="(Tensor, Tensor)")
_define(_read_state, _read_state)
_define(_write_state, _fake_nothing, returns="()")
_define(_store_state, _fake_nothing, returns="()", written={"made"})
_define(_real_tokens, torch.empty_like)
has_side_effect(torch.ops.kvpass.write_state.default)  # its value reaches no output of a capture

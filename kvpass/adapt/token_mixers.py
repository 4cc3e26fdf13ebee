"""Functions of recurrent layers of transformers, in a form that one graph of any length and batch can hold.

The compiled copy of a model calls these in place of the functions that its layers name: its layers get a class of their
own whose methods have the same code and other globals. Modules of transformers and the user's model stay as they are.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from kvpass.compiler.capture import in_captures

Function = Callable[..., Any]


def causal_conv1d(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Depthwise convolution over columns ``[B, C, T]`` with a kernel ``[C, W]``, which reaches W - 1 columns back.

    A sum of shifted columns: ``conv1d`` of torch asks for the number of rows while it is traced.
    """
    width, columns = weight.shape[-1], hidden_states.shape[-1]
    padded = F.pad(hidden_states.to(weight.dtype), (width - 1, 0))
    out = sum(padded[..., shift : shift + columns] * weight[:, shift, None] for shift in range(width))
    assert isinstance(out, Tensor)
    if bias is not None:
        out = out + bias[:, None]
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def _convolution(module: str, layer: int | None) -> Function:
    return causal_conv1d


def _delta_rule(chunked: str, step: str) -> Callable[[str, int | None], Function]:
    """Return what makes the function of a module from the names of its form in chunks and its step."""

    def of(module: str, layer: int | None) -> Function:
        def function(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            g: Tensor,
            beta: Tensor,
            initial_state: Tensor,
            output_final_state: bool,
            use_qk_l2norm_in_kernel: bool = False,
            **_: Any,
        ) -> tuple[Tensor, Tensor]:
            return torch.ops.kvpass.delta_rule.default(
                query, key, value, g, beta, initial_state, module, chunked, step, use_qk_l2norm_in_kernel
            )

        return function

    return of


def _mamba2(module: str, layer: int | None) -> Function:
    def function(
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        chunk_size: int,
        D: Tensor,
        dt_bias: Tensor,
        initial_states: Tensor,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        low, high = (float(bound) for bound in dt_limit)
        return torch.ops.kvpass.mamba2.default(
            x, dt, a, b, c, initial_states, D, dt_bias, module, chunk_size, low, high
        )

    return function


def _mamba(module: str, layer: int | None) -> Function:
    """The layer's call has no state, since transformers begins a call of several tokens with zeros: it is read here."""

    def function(
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        D: Tensor,
        z: Tensor,
        delta_bias: Tensor,
        return_last_state: bool,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        shape = (x.shape[1], a.shape[1])
        state = torch.ops.kvpass.read_state.default(x, layer, "recurrent0", shape, torch.float32)
        return torch.ops.kvpass.mamba.default(x, dt, a, b, c, state, D, z, delta_bias, module)

    return function


FUNCTIONS: Mapping[str, Callable[[str, int | None], Function]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    "chunk_kimi_delta_attention": _delta_rule("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
}
"""By the names that layers of transformers call: what makes the function for a layer's module and its number."""


def replace_token_mixers(model: nn.Module) -> None:
    """Let the layers of a compiled copy call :data:`FUNCTIONS`."""
    known: dict[tuple[type[nn.Module], Any], type[nn.Module]] = {}
    for module in model.modules():
        kind, layer = type(module), getattr(module, "layer_idx", None)
        if (kind, layer) not in known:
            known[kind, layer] = _with_functions(kind, layer)
        if known[kind, layer] is not kind:
            module.__class__ = known[kind, layer]


def methods_of(kind: type) -> dict[str, types.FunctionType]:
    """Return the methods of a class by name, without decorators."""
    return {name: inspect.unwrap(method) for name, method in inspect.getmembers(kind, inspect.isfunction)}


def _with_functions(kind: type[nn.Module], layer: int | None) -> type[nn.Module]:
    """Return a class whose methods call :data:`FUNCTIONS`; the same class where they call none."""
    changed = {
        name: in_captures(_twin(method, layer), getattr(kind, name))
        for name, method in methods_of(kind).items()
        if any(known in FUNCTIONS and known in method.__globals__ for known in method.__code__.co_names)
    }
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **changed}) if changed else kind


def _twin(method: types.FunctionType, layer: int | None) -> types.FunctionType:
    """Return a method of the same code, with globals in which other functions take the place of some."""
    # without a name of their module Dynamo reads these globals, and not those of the module
    own = {name: value for name, value in method.__globals__.items() if name != "__name__"}
    own |= {name: make(method.__module__, layer) for name, make in FUNCTIONS.items() if name in own}
    twin = types.FunctionType(method.__code__, own, method.__name__, method.__defaults__, method.__closure__)
    twin.__kwdefaults__ = method.__kwdefaults__
    return twin

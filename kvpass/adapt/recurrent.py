"""Decoders with recurrent layers beside attention: the cache they are captured with, and the functions they call.

A recurrent layer of transformers asks its cache for the state of the tokens before, and gives it the state after its
own. Here it gets what the operator ``kvpass::read_state`` returns, and ``kvpass::write_state`` takes what it gives; the
graph then has the states at these nodes. Attention layers get their keys and values back as they are.

The functions that such layers name loop over tokens, or fix a length. The compiled copy of a model calls others in
their place, of which one graph holds any length and batch: its layers get a class of their own whose methods have the
same code and other globals. Modules of transformers and the user's model stay as they are.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.activations import ACT2FN

import kvpass.ops.schemas  # noqa: F401 (registers the operators)
from kvpass.adapt.changed_class import changed_class, in_captures, once
from kvpass.config import StateShape
from kvpass.errors import UnsupportedAttentionError
from kvpass.transformers_compat import CACHE

_RECURRENT = {"conv", "linear_attention", "mamba", "mamba2", "recurrent"}
"""Kinds of layers in ``config.layer_types`` without attention."""
_BOTH = {"hybrid", "hybrid_sliding"}
_NEITHER = {"mlp", "moe", "dummy"}
_GIVES_STATES = {"update_conv_state", "update_recurrent_state"}
"""Methods of a cache by which recurrent layers give it their states."""

_States = Mapping[tuple[int, str], tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, kw_only=True)
class RecurrentLayers:
    """The recurrent layers of a decoder that also has attention."""

    states: tuple[StateShape, ...]
    attention: tuple[int, ...]  # numbers of the layers with attention, in the model's own count

    @property
    def arguments(self) -> Callable[[Tensor], dict[str, Any]]:
        """Return a function of the positions: further arguments of ``forward`` to capture it with."""
        states = {(state.layer, state.name): (state.shape, getattr(torch, state.dtype)) for state in self.states}

        def arguments(positions: Tensor) -> dict[str, Any]:
            real = torch.ops.kvpass.real_tokens.default(positions)
            return {"attention_mask": real, CACHE: _Traced(states, real)}

        return arguments


def recurrent_layers(model: PreTrainedModel, *, divided: bool) -> RecurrentLayers | None:
    """Return the recurrent layers of a model, None if it has none beside attention.

    The model is run on two tokens: only so it is known which states it has.
    """
    kinds = list(getattr(model.config.get_text_config(), "layer_types", None) or ())
    attention = tuple(layer for layer, kind in enumerate(kinds) if kind not in _RECURRENT | _NEITHER)
    if not _is_hybrid(model, kinds):
        return None
    name, reason = type(model).__name__, None
    classes = {*map(type, model.modules())}
    called = [{*method.__code__.co_names} for module_class in classes for method in _methods_of(module_class).values()]
    if kinds and not attention:
        reason = "it has recurrent layers and no attention, so no KV cache that could be compressed"
    elif not hasattr(Cache, "get_conv_state"):
        reason = (
            "it has recurrent layers beside attention, for which kvpass needs transformers >= 5.22; here is "
            f"{transformers.__version__}"
        )
    elif _GIVES_STATES.isdisjoint(set().union(*called)):
        reason = (
            "its recurrent layers do not give their states to a cache (update_conv_state, update_recurrent_state): "
            "they keep them in themselves, or in a cache class of their own"
        )
    elif any("update_conv_state" in names and "causal_conv1d_fn" not in names for names in called):
        reason = (
            "a layer gives the cache columns for its convolution (update_conv_state) but does not call "
            "causal_conv1d_fn, by which kvpass continues convolutions from call to call"
        )
    if reason is not None:
        raise UnsupportedAttentionError("", name, reason)
    if divided:
        raise ValueError(f"{name} has recurrent layers, whose states several processes cannot share yet")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
        model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})
    states = tuple(
        StateShape.of(number, f"{state}{index}", value)
        for number, layer in enumerate(cache.layers)
        for state in ("conv", "recurrent")
        for index, value in getattr(layer, f"{state}_states", {}).items()
        if value is not None
    )
    return RecurrentLayers(states=states, attention=attention)


def _is_hybrid(model: PreTrainedModel, kinds: Sequence[str]) -> bool:
    """Return whether a model has recurrent layers, and perhaps attention."""
    if not _RECURRENT.isdisjoint(kinds):
        return True
    if hasattr(Cache, "get_conv_state"):
        return not _BOTH.isdisjoint(kinds)
    # older versions do not name these kinds
    stateful = getattr(model, "_is_stateful", False) and hasattr(model.config.get_text_config(), "num_attention_heads")
    return bool(stateful) and (not kinds or not _BOTH.isdisjoint(kinds))


class _Traced(Cache):
    """The cache of a capture: ``states`` of a row, by layer and name; ``real`` is 1 for tokens, 0 for padding."""

    def __init__(self, states: _States, real: Tensor) -> None:
        super().__init__(layers=[])
        self.states, self.real = states, real

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: one token then takes the way of several."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: :meth:`update_conv_state` joins the columns before and the new ones."""

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Return the columns before and, without what padding left there, the new ones; the last are kept."""
        name = f"conv{state_idx}"
        before = self._read(layer_idx, name)
        joined = torch.cat([before, conv_states * self.real[:, None, :].to(conv_states.dtype)], dim=-1)
        self._write(joined[..., -before.shape[-1] :], layer_idx, name)
        return joined

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        name = f"recurrent{state_idx}"
        return self._read(layer_idx, name) if (layer_idx, name) in self.states else None

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self._write(recurrent_states, layer_idx, f"recurrent{state_idx}")
        return recurrent_states

    def _read(self, layer: int, name: str) -> Tensor:
        shape, dtype = self.states[layer, name]
        return torch.ops.kvpass.read_state.default(self.real, layer, name, shape, dtype)

    def _write(self, state: Tensor, layer: int, name: str) -> None:
        torch.ops.kvpass.write_state.default(state.to(self.states[layer, name][1]), layer, name)


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


def _delta_rule(
    chunked: str,
    step: str,
    module: str,
    layer: int | None,
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
    """``chunked``, ``step``: names of the functions of the module, for several tokens and for one."""
    return torch.ops.kvpass.delta_rule.default(
        query, key, value, g, beta, initial_state, module, chunked, step, use_qk_l2norm_in_kernel
    )


def _mamba2(
    module: str,
    layer: int | None,
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
    return torch.ops.kvpass.mamba2.default(x, dt, a, b, c, initial_states, D, dt_bias, module, chunk_size, low, high)


def _mamba(
    module: str,
    layer: int | None,
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
    """The layer's call has no state, since transformers begins a call of several tokens with zeros: it is read here."""
    shape = (x.shape[1], a.shape[1])
    state = torch.ops.kvpass.read_state.default(x, layer, "recurrent0", shape, torch.float32)
    return torch.ops.kvpass.mamba.default(x, dt, a, b, c, state, D, z, delta_bias, module)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": lambda module, layer, *given, **named: causal_conv1d(*given, **named),
    "torch_chunk_gated_delta_rule": partial(
        _delta_rule, "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
    ),
    "chunk_kimi_delta_attention": partial(_delta_rule, "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
}
"""By the names that layers of transformers call; each takes the layer's module and number, then what it is given."""


def replace_token_mixers(model: nn.Module) -> None:
    """Let the layers of a compiled copy call :data:`FUNCTIONS`."""
    with_functions = once(_with_functions)  # for each model anew: functions may have been patched since the last
    for module in model.modules():
        module.__class__ = with_functions(type(module), getattr(module, "layer_idx", None))


def _methods_of(kind: type) -> dict[str, types.FunctionType]:
    """Return the methods of a class by name, without decorators."""
    return {name: inspect.unwrap(method) for name, method in inspect.getmembers(kind, inspect.isfunction)}


def _with_functions(kind: type[nn.Module], layer: int | None) -> Any:
    """Return a class whose methods call :data:`FUNCTIONS`; the same class where they call none."""
    changed = {
        name: in_captures(_twin(method, layer), getattr(kind, name))
        for name, method in _methods_of(kind).items()
        if any(known in FUNCTIONS and known in method.__globals__ for known in method.__code__.co_names)
    }
    return changed_class(kind, **changed) if changed else kind


def _twin(method: types.FunctionType, layer: int | None) -> types.FunctionType:
    """Return a method of the same code, with globals in which other functions take the place of some."""
    # without a name of their module Dynamo reads these globals, and not those of the module
    names = {name: value for name, value in method.__globals__.items() if name != "__name__"}
    functions = {name: function for name, function in FUNCTIONS.items() if name in names}
    names |= {name: partial(function, method.__module__, layer) for name, function in functions.items()}
    twin = types.FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
    twin.__kwdefaults__ = method.__kwdefaults__
    return twin

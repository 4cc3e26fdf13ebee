"""Attention functions that emit ``kvpass::site``: ``kvpass.attention``, and one for transformers' attention interface.

No mask function is registered for the interface. So transformers builds no mask and does not read gapped
``position_ids`` as packed sequences; the operators get left padding as a start column per row. A sliding window must
be an argument of the call: layers that have it only in the mask raise.

A compiled copy names the function while kvpass captures it, and only then: called alone (``model.model(...)``, a reward
head around the body), its modules compute what the user's own do.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

import kvpass.ops.schemas  # noqa: F401 (registers the operators)
from kvpass.adapt.changed_class import changed_class, once
from kvpass.adapt.latent_attention import cannot_absorb
from kvpass.adapt.positions import tuned_query, tunes_by_column
from kvpass.tracing import capturing

if TYPE_CHECKING:
    _Base = PreTrainedConfig
else:
    _Base = object

ATTENTION_NAME = "kvpass"

_HARMLESS = set(
    "position_ids use_cache cache_position output_attentions output_hidden_states output_router_logits return_dict "
    "num_items_in_batch position_embeddings logits_to_keep".split()
)

_UNLIMITED = {"full_attention", "attention", "hybrid"}
_SLIDING = {"sliding_attention", "hybrid_sliding"}
"""Kinds of layers in ``config.layer_types``; those in ``_SLIDING`` pass the window as an argument."""
_CHUNKED = "chunked_attention"


def _refusal(
    module: nn.Module,
    attention_mask: Tensor | None,
    dropout: float,
    sliding_window: int | None,
    is_causal: bool | None,
    extra: dict[str, Any],
) -> str | None:
    if attention_mask is not None:
        return "the model passes a mask of its own"
    if (limited := _limited_by_mask(module, sliding_window)) is not None:
        return limited
    if tunes_by_column(module):
        return "it scales queries by their columns, in a layer that was not there in kvpass.compile"
    if is_causal is False or getattr(module, "is_causal", True) is False:
        if getattr(getattr(module, "config", None), "is_decoder", None) is False:
            return "it is not causal: config.is_decoder=False, and a model trained as a decoder needs is_decoder=True"
        return "it is not causal"
    if dropout:
        return f"dropout={dropout} in attention"
    unknown = sorted(name for name, value in extra.items() if value is not None and name not in _HARMLESS)
    if unknown:
        return f"attention argument {unknown[0]!r} is not understood"
    return None


def _limited_by_mask(module: nn.Module, sliding_window: int | None) -> str | None:
    """Return why a mask may hide earlier tokens from a layer; None if it does not."""
    config, kind = getattr(module, "config", None), _kind(module)
    if kind is not None and kind not in {_CHUNKED, *_UNLIMITED, *_SLIDING}:
        return f"a layer of kind {kind!r} is not understood"
    if sliding_window is not None:
        return None
    window = getattr(config, "sliding_window", None)
    if kind in _SLIDING or (kind is None and window):
        return f"its sliding window of {window} is in a mask only, not among the arguments"
    if kind is None and (chunk := getattr(config, "attention_chunk_size", None)):
        return f"its attention in chunks of {chunk} is in a mask only"
    return None


def _kind(module: nn.Module) -> str | None:
    """Return the layer's kind in ``config.layer_types``; where all are of one, its number is not read."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if not kinds or (layer := getattr(module, "layer_idx", None)) is None:
        return None
    return kinds[0] if kinds.count(kinds[0]) == len(kinds) else kinds[layer]


def kvpass_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Emit ``kvpass::site`` for an attention call of a transformers model.

    Args:
        query: ``[B, H, T, D]``. key, value: ``[B, K, T, D]``, not repeated.
        softcap, s_aux: logit soft-capping and sink logits ``[H]`` of the models that have them.
    Returns:
        output ``[B, T, H, Dv]`` and no attention weights.
    """
    layer: Any = module
    query = tuned_query(module, query, extra)
    chunked = _kind(module) == _CHUNKED
    if chunked:
        sliding_window = layer.config.attention_chunk_size
    refusal = _refusal(module, attention_mask, dropout, sliding_window, is_causal, extra)
    if query.shape[2] != key.shape[2]:
        refusal = "not every token of the prompt has a query here: the model leaves out those whose logits are not kept"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    latent = getattr(layer, "attends_latents", False)
    if latent and (reason := cannot_absorb(module)) is not None:
        refusal = f"{reason}, since kvpass.compile: compile the changed model"
    up, nope = (layer.kv_b_proj.weight, layer.qk_nope_head_dim) if latent else (None, 0)
    if torch.is_autocast_enabled(query.device.type):  # as scaled_dot_product_attention does
        lower = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(lower), key.to(lower), value.to(lower)
        up = None if up is None else up.to(lower)
    if latent:
        value = key[..., : value.shape[-1]]  # so written that the pass which lays out the cache sees it
        query = torch.ops.kvpass.absorbed_query.default(query, up, nope)
    out = torch.ops.kvpass.site.default(query, key, value, scale, sliding_window, softcap, s_aux, refusal, chunked)
    if latent:
        out = torch.ops.kvpass.expanded_output.default(out, up, nope)
    return out.transpose(1, 2), None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal self-attention for your own modules; kvpass uses this call without searching or proving.

    Inference only; without kvpass it computes the same in eager mode.

    Args:
        query: ``[B, H, T, D]``, RoPE applied. key: ``[B, K, T, D]``, value: ``[B, K, T, Dv]``; K divides H. One dtype.
        scale: factor of the logits, ``D ** -0.5`` by default. sliding_window: token i attends token j only if
            ``i - j < sliding_window``. softcap: logits become ``softcap * tanh(logits / softcap)``. sinks: ``[H]``, one
            more logit per query head, in the denominator only.
    Returns:
        ``[B, H, T, Dv]`` in the dtype of the query.
    Raises:
        ValueError: shapes or dtypes do not match, or the window is below 1.
    """
    shapes = [tuple(x.shape) for x in (query, key, value)]
    q, k, v = shapes
    if any(len(shape) != 4 for shape in shapes) or (q[0], q[2], q[3]) != (k[0], k[2], k[3]) or k[:3] != v[:3]:
        raise ValueError(f"query {q}, key {k}, value {v}: must be [B, H, T, D], [B, K, T, D], [B, K, T, Dv]")
    if q[1] % k[1]:
        raise ValueError(f"{q[1]} query heads: must be a multiple of the {k[1]} KV heads")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query {query.dtype}, key {key.dtype}, value {value.dtype}: must be of one dtype")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window}: must be at least 1")
    scale = q[3] ** -0.5 if scale is None else scale
    out: Tensor = torch.ops.kvpass.site.default(query, key, value, scale, sliding_window, softcap, sinks)
    return out


class _CapturedConfig(_Base):
    """Base class before a configuration's own class: names kvpass's attention to captures, the user's to others."""

    @property
    def _attn_implementation(self) -> Any:
        return ATTENTION_NAME if capturing() else self._attn_implementation_internal

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        PreTrainedConfig._attn_implementation.fset(self, value)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self)] = object.__new__(type(self))
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain, (self._original_class, vars(self))  # pickle finds a class by its name


def _plain(kind: type[PreTrainedConfig], settings: dict[str, Any]) -> PreTrainedConfig:
    config = object.__new__(kind)
    vars(config).update(settings)
    return config


@once
def _captured(kind: type[PreTrainedConfig]) -> Any:
    return changed_class(kind, _CapturedConfig)


def attend_in_captures(model: nn.Module) -> None:
    """Let the configurations of a compiled copy name kvpass's attention to captures."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and not isinstance(config, _CapturedConfig):
            config.__class__ = _captured(type(config))


AttentionInterface.register(ATTENTION_NAME, kvpass_attention)

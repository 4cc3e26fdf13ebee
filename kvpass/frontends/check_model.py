"""Raise for models that ``kvpass.compile`` does not support."""

from __future__ import annotations

import inspect
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from kvpass.errors import UnsupportedAttentionError
from kvpass.frontends.arguments import ONLY_LOGITS, OUTPUTS

_FROM_PRETRAINED = "load it with transformers.AutoModelForCausalLM.from_pretrained"


def check_model(model: object) -> None:
    """Raise for models that ``kvpass.compile`` does not support, as far as known without tracing."""
    if isinstance(model, str | Path):
        raise ValueError(f"model={str(model)!r} is a name: {_FROM_PRETRAINED}({str(model)!r}) and give what it returns")
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        inside = model.named_modules() if isinstance(model, nn.Module) else ()
        for path, wrapped in inside:
            if isinstance(wrapped, PreTrainedModel):
                instead = f"model.{path}"
                if hasattr(model, "get_base_model"):
                    instead = "model.merge_and_unload() or model.get_base_model(), which has the adapter in its layers"
                raise ValueError(f"model of type {kind} is around a {type(wrapped).__name__}: compile {instead}")
        raise ValueError(
            f"model of type {kind}: kvpass.compile takes a transformers model; "
            'for any other decoder use torch.compile(module, backend="kvpass", ...) in a session'
        )
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    for wish in OUTPUTS:
        if getattr(model.config, wish, None):
            raise ValueError(f"config.{wish}=True: {ONLY_LOGITS}, or set it to False")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{kind} is an encoder-decoder; kvpass compresses decoders only")
    if not model.can_generate():
        raise ValueError(
            f"{kind} is no causal language model: it has no head that predicts the next token; if its checkpoint is "
            f"of a decoder, {_FROM_PRETRAINED}; if it is a part of a model that has one, compile that"
        )
    if "logits_to_keep" not in inspect.signature(type(model).forward).parameters:
        raise ValueError(
            f"{kind} is not supported: its forward has no argument logits_to_keep, by which kvpass asks for the last "
            'logits only; a decoder inside it may work with torch.compile(module, backend="kvpass", ...)'
        )
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise ValueError(f"{kind} counts positions from its padding token on; kvpass counts them from 0")
    if getattr(model.config.get_text_config(), "recurrent_kv_cache_mode", None) == "last_loop":  # Dory
        raise ValueError(
            f"{kind} with recurrent_kv_cache_mode='last_loop' attends to other keys with a cache than without one, and "
            "kvpass makes its cache from the decoder without one"
        )
    for path, _ in model.named_modules():
        if path.endswith(".indexer"):
            raise UnsupportedAttentionError(
                path.removesuffix(".indexer"),
                "indexer",
                "it is sparse: an indexer with keys of its own, which no cache of kvpass holds, chooses what each "
                "token attends to",
            )

"""Layers that attend to keys and values of an earlier layer (Gemma 4 E2B and E4B).

transformers runs them only over the last tokens of a prompt, whose logits are kept. A capture serves prompts in blocks
and any number of logits, so there they run over all tokens, as they do without ``logits_to_keep``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from kvpass.adapt.changed_class import captured_class

_SLICE = "_maybe_slice_kv_shared_inputs"


def keep_all_tokens(model: nn.Module) -> None:
    """Let the layers of a compiled copy that share keys and values run over all tokens in captures."""
    for module in model.modules():
        if hasattr(type(module), _SLICE):
            module.__class__ = captured_class(type(module), _SLICE, _unsliced)


def _unsliced(_: Any, hidden: Any, per_layer: Any, rotary: Any, masks: Any, *__: Any, **___: Any) -> tuple[Any, ...]:
    """Pass the inputs of shared layers on as they are."""
    return hidden, per_layer, rotary, masks

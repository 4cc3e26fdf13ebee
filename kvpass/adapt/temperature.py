"""Temperature tuning of Llama 4: layers without RoPE scale queries by their true positions.

transformers counts positions of these layers in columns of the batch, from the length of a cache. Here they are the
``position_ids``, so that a padded row is scaled as alone, and a token after a prompt by where it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvpass.compiler.capture import capturing

_TUNING = "attn_temperature_tuning"
_POSITIONS = "token_positions"


def tunes_by_column(module: Any) -> bool:
    """Return whether the layer itself scales queries, by their columns."""
    return bool(getattr(module, _TUNING, False)) and not getattr(module, "use_rope", True)


def tune_by_position(model: nn.Module) -> None:
    """Let the layers of a compiled copy leave the scale of queries to :func:`tuned_query`."""
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for layer in model.modules():
        tuned = [child for child in layer.children() if tunes_by_column(child)]
        if tuned:
            kind = type(layer)
            layer.__class__ = kinds.setdefault(kind, _passing_positions(kind))
        for child in tuned:
            vars(child).update({"tunes_by_position": vars(child).pop(_TUNING)})
            child.__class__ = kinds.setdefault(type(child), _tuning_elsewhere(type(child)))


def _tuning_elsewhere(kind: Any) -> type[nn.Module]:
    """Return a class of layers that scale their queries except in captures."""
    tuning = property(lambda layer: layer.tunes_by_position and not capturing())
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, _TUNING: tuning})


def _passing_positions(kind: Any) -> type[nn.Module]:
    """Return a class of layers which pass ``position_ids`` on to the arguments of attention."""

    def forward(self: Any, hidden_states: Tensor, *given: Any, position_ids: Tensor, **named: Any) -> Any:
        passed = {_POSITIONS: position_ids} if capturing() else {}
        return kind.forward(self, hidden_states, *given, position_ids=position_ids, **passed, **named)

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": forward})


def tuned_query(module: Any, query: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Return ``query`` ``[B, H, T, D]``, scaled if the layer tunes its temperature (2501.19399).

    Args:
        arguments: of attention; the positions int64 ``[B or 1, T]`` are taken out.
    """
    positions = arguments.pop(_POSITIONS, None)
    if not getattr(module, "tunes_by_position", False):
        return query
    steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
    scale = torch.log1p(steps) * module.attn_scale + 1.0
    return (query * scale[:, None, :, None]).to(query.dtype)

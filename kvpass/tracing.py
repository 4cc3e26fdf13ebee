"""Whether this thread captures a model, as the modules of compiled models ask while Dynamo traces them."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch

CALL: ContextVar[Any] = ContextVar("kvpass_call")
"""The :class:`kvpass.compiler.step.Call` that captured functions are called for: Dynamo hands on nothing of ours."""


@torch.compiler.assume_constant_result
def capturing() -> bool:
    """Return whether this thread captures a compiled model; everywhere else the model's modules are plain ones."""
    return CALL.get(None) is not None


@torch.compiler.assume_constant_result
def repeats_layers() -> bool:
    """Return whether this thread captures a compiled model by tracing layers of equal code once."""
    call = CALL.get(None)
    return call is not None and bool(call.layers_once)

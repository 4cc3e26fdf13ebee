"""Handle ``forward`` attributes that were replaced on an instance of a model.

Such a ``forward`` hides the one of the class, so kvpass would never be called. Accepted, and removed from the copy, are
a compiled forward, and accelerate hooks that move no weights. All others raise.
"""

from __future__ import annotations

import types
from typing import Any

from torch import nn


def check_wrappers(model: nn.Module) -> None:
    """Raise if the weights are not on one device, or an unknown function replaces ``forward``.

    Raises:
        ValueError: with the module, the hook or function, and what to do.
    """
    devices = sorted({str(tensor.device) for tensor in (*model.parameters(), *model.buffers())})
    if devices == ["meta"] or len(devices) > 1:
        raise ValueError(
            f"the weights of {type(model).__name__} are on {', '.join(devices)}: kvpass runs a model on one device, "
            "without offloading; load it without offload and with one device in device_map"
        )
    for path, module in model.named_modules():
        hook = module.__dict__.get("_hf_hook")
        if hook is not None and not _moves_nothing(hook, devices):
            raise ValueError(
                f"{path or type(model).__name__} has the accelerate hook {type(hook).__name__}: a compiled graph "
                "cannot run it; remove it with accelerate.hooks.remove_hook_from_submodules(model)"
            )
    replaced = model.__dict__.get("forward")
    if replaced is not None and "_hf_hook" not in model.__dict__ and not _is_own(replaced, model):
        raise ValueError(
            f"the forward of this {type(model).__name__} was replaced on the instance by {replaced!r}: kvpass calls "
            "the forward of its class; say `del model.forward` first, or override forward in a subclass"
        )


def remove_wrappers(copied: nn.Module, model: nn.Module) -> None:
    """Remove from a copy of ``model`` what :func:`check_wrappers` accepted; the model keeps it."""
    for twin, module in zip(copied.modules(), model.modules(), strict=True):
        hooked = twin.__dict__.pop("_hf_hook", None) is not None
        twin.__dict__.pop("_old_forward", None)
        replaced = module.__dict__.get("forward")
        if hooked or (replaced is not None and _is_own(replaced, module)):
            del twin.forward


def _moves_nothing(hook: Any, devices: list[str]) -> bool:
    """Return whether an accelerate hook only moves tensors to the device they are on."""
    if type(hook).__name__ != "AlignDevicesHook" or hook.offload:
        return False
    target = hook.execution_device
    return target is None or str(target) in devices or f"cuda:{target}" in devices


def _is_own(forward: Any, module: nn.Module) -> bool:
    """Return whether ``forward`` is the module's own method, compiled or not."""
    while hasattr(forward, "_torchdynamo_orig_callable"):
        forward = forward._torchdynamo_orig_callable
    own = isinstance(forward, types.MethodType) and forward.__self__ is module
    return own and forward.__func__ is type(module).forward

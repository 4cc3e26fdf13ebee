"""Models of which accelerate keeps weights on the host: ``from_pretrained(..., device_map={"": 0, "lm_head": "cpu"})``.

The compiled copy holds these weights as they are on the host. Its modules read them as ``kvpass::to_device``, by a
property of their class, so that a capture shows what is to be copied before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kvpass.adapt.changed_class import changed_class, once
from kvpass.host_weights import to_device


def offload_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield modules whose weights accelerate keeps elsewhere and copies for each call, with their hooks."""
    for module in model.modules():
        hook: Any = module.__dict__.get("_hf_hook")
        if type(hook).__name__ == "AlignDevicesHook" and hook.offload:
            yield module, hook


def offload_device(model: nn.Module) -> torch.device | None:
    """Return the device on which a model computes that has weights on the host; None if it has none there."""
    hooks, name = [hook for _, hook in offload_hooks(model)], type(model).__name__
    if not hooks:
        return None
    if any(getattr(getattr(hook.weights_map, "dataset", hook.weights_map), "index", None) for hook in hooks):
        raise ValueError(
            f"weights of {name} are offloaded to disk: kvpass copies weights from host memory only; have 'cpu' in "
            "device_map where it has 'disk', or load the model quantised or divided among processes"
        )
    devices = {torch.empty(0, device=hook.execution_device).device for hook in hooks}
    devices |= {tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta}
    if len(devices) > 1:
        raise ValueError(
            f"{name} computes on {', '.join(sorted(map(str, devices)))}: kvpass runs a model on one device; name one "
            "device and 'cpu' in device_map, or divide the model among processes with DistributedConfig(tp_size=...)"
        )
    return devices.pop()


def hold_host_weights(compiled: nn.Module, model: nn.Module, device: torch.device) -> int:
    """Give a copy of ``model`` the weights that accelerate keeps on the host; return their bytes.

    Vectors (norms, biases) and buffers are small: they are moved to the device for good.
    """
    twins = dict(zip(model.modules(), compiled.modules(), strict=True))
    held: dict[tuple[int, torch.Size], nn.Parameter] = {}
    for module, hook in offload_hooks(model):
        for path, inner in module.named_modules() if hook.place_submodules else [("", module)]:
            twin = twins[inner]
            for name, weight in inner.named_parameters(recurse=False):
                if weight.is_meta:
                    host = hook.weights_map[f"{path}.{name}".lstrip(".")]
                    if not host.is_floating_point():
                        raise ValueError(
                            f"{name} of a {type(inner).__name__}: weights of {host.dtype} cannot stay on the host"
                        )
                    key = (host.data_ptr(), host.shape)  # tied weights are one
                    if key not in held:
                        own = host if host.ndim > 1 and twin is not compiled else host.to(device)
                        held[key] = nn.Parameter(own, requires_grad=False)
                    twin._parameters[name] = held[key]
            for name, buffer in inner.named_buffers(recurse=False):
                if buffer.is_meta:
                    twin._buffers[name] = hook.weights_map[f"{path}.{name}".lstrip(".")].to(device)
            streamed = tuple(
                name for name, weight in twin._parameters.items() if weight is not None and weight.ndim > 1
            )
            if streamed and twin is not compiled:
                twin.__class__ = _reading_from_host(type(twin), streamed, device)
    lost = [name for name, tensor in (*compiled.named_parameters(), *compiled.named_buffers()) if tensor.is_meta]
    if lost:
        raise ValueError(f"{lost[0]} of {type(model).__name__} has no content: it is on the device 'meta'")
    return sum(weight.numel() * weight.itemsize for weight in held.values() if weight.ndim > 1)


@once
def _reading_from_host(cls: type[nn.Module], names: tuple[str, ...], device: torch.device) -> Any:
    """Return a subclass of the same name whose parameters of these names are read as copies on the device."""

    def copied(name: str) -> property:
        return property(lambda module: to_device(module._parameters[name], device))

    return changed_class(cls, **{name: copied(name) for name in names})

"""Handle ``forward`` attributes that were replaced on an instance of a model, and layers of other libraries.

Such a ``forward`` hides the one of the class, so kvpass would never be called. Accepted, and removed from the copy, are
a compiled forward, and accelerate hooks that move nothing. Others raise.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kvpass.config import Compiler


def check_wrappers(model: nn.Module) -> None:
    """Raise if the weights are not on one device, a CPU or of CUDA, or an unknown function replaces ``forward``."""
    device = _check_devices(model)
    for path, module in model.named_modules():
        hook = module.__dict__.get("_hf_hook")
        if hook is not None and not _moves_nothing(hook, device):
            raise ValueError(
                f"{path or type(model).__name__} has the accelerate hook {type(hook).__name__}: a compiled graph "
                "cannot run it; remove it with accelerate.hooks.remove_hook_from_submodules(model)"
            )
    replaced = model.__dict__.get("forward")
    if replaced is not None and "_hf_hook" not in model.__dict__ and not _is_own(replaced, model):
        raise ValueError(
            f"the forward of this {type(model).__name__} was replaced on the instance by {_name(replaced)}: kvpass "
            "calls the forward of its class; say `del model.forward` first, or override forward in a subclass"
        )


def _name(function: Any) -> str:
    """Return the name of a function; what Python prints of a method has the whole model in it."""
    return str(getattr(function, "__qualname__", type(function).__name__))


def _check_devices(model: nn.Module) -> str:
    """Return the device of the weights of a model; raise if they are on several, or on another than a CPU or CUDA."""
    where = {name: str(tensor.device) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    hooks = (vars(module)["_hf_hook"] for module in model.modules() if "_hf_hook" in vars(module))
    # where accelerate offloads weights, which are then empty, the hook says where they are needed
    offload = (hook for hook in hooks if type(hook).__name__ == "AlignDevicesHook" and hook.offload)
    targets = (str(torch.empty(0, device=hook.execution_device).device) for hook in offload)
    device = next(targets, None) or next((place for place in where.values() if place not in ("cpu", "meta")), "cpu")
    elsewhere = [name for name, place in where.items() if place != device]
    if elsewhere:
        first = elsewhere[0]
        raise ValueError(
            f"the weights of {type(model).__name__} are on {', '.join(sorted({device, *where.values()}))}: "
            f"{len(elsewhere)} of {len(where)} are not on {device}, the first is {first} on {where[first]} (meta: not "
            "loaded, or offloaded by accelerate), and kvpass runs a model on one device. Load it with one device in "
            "device_map; if it does not fit there, quantised (load_in_4bit of bitsandbytes, or torchao), or divided "
            "among processes (docs/tensor-parallel.md)"
        )
    if torch.device(device).type not in ("cpu", "cuda"):
        raise ValueError(
            f"the weights of {type(model).__name__} are on {device}: kvpass runs on CPUs and CUDA devices; "
            "move the model to one of them"
        )
    return device


def check_weights(model: nn.Module, compiler: Compiler) -> None:
    """Raise for adapters and quantised weights that are known not to work, by their library's name."""
    for path, module in model.named_modules():
        dora = getattr(module, "use_dora", None)
        if isinstance(dora, dict) and any(dora.values()) and not getattr(module, "merged", False):
            raise ValueError(
                f"{path} has an adapter of DoRA, whose code Dynamo cannot capture: call merge_and_unload()"
            )
        if type(module).__name__ == "Linear8bitLt":
            raise ValueError(
                f"{path} is an 8-bit layer of bitsandbytes, which sets its weights anew in every call: load the model "
                "in 4 bits, or quantise it with torchao"
            )
        if getattr(module, "quantization_status", None) is not None:
            raise ValueError(
                f"{path} is a layer of compressed-tensors, which unpacks its weights in the model's first call: load "
                "the model with quantization_config=CompressedTensorsConfig(run_compressed=False)"
            )
    for path, weight in model.named_parameters():
        dynamic = getattr(weight, "act_quant_kwargs", None) is not None
        if dynamic and compiler == "inductor" and weight.device.type == "cpu":
            raise ValueError(
                f"{path} of torchao quantises what it is multiplied with, which Inductor computes wrongly on a CPU for "
                'one token: give backend="eager", or quantise weights only'
            )


def remove_wrappers(copied: nn.Module, model: nn.Module) -> None:
    """Remove from a copy of ``model`` what :func:`check_wrappers` accepted; the model keeps it."""
    for twin, module in zip(copied.modules(), model.modules(), strict=True):
        hooked = twin.__dict__.pop("_hf_hook", None) is not None
        twin.__dict__.pop("_old_forward", None)
        replaced = module.__dict__.get("forward")
        if hooked or (replaced is not None and _is_own(replaced, module)):
            del twin.forward


def bind_to_copy(copied: nn.Module, model: nn.Module) -> None:
    """Let functions that were set on modules of ``model``, and are on the copy too, call the copy.

    A deep copy takes functions as they are, so a wrapper of ``model.generate`` would call the original. ValueError: a
    function reaches the model in another way than by its closure.
    """
    bound: dict[int, Any] = dict(zip(map(id, model.modules()), copied.modules(), strict=True))
    originals = [*bound]
    bound |= {id(twin): twin for twin in copied.modules()}
    for path, twin in copied.named_modules():
        for name, value in [*vars(twin).items()]:
            if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
                vars(twin)[name] = function = _bound(value, bound)
                reachable = _reachable(function)
                reached = (by for by, value in reachable if id(getattr(value, "__self__", value)) in originals)
                if (by := next(reached, None)) is not None:
                    raise ValueError(
                        f"{path or type(model).__name__}.{name} was replaced on the instance by {_name(value)}, which "
                        f"calls this model by {by!r}, not the copy that kvpass makes: delete it, and set it on what "
                        "kvpass.compile returns"
                    )


def _bound(value: Any, bound: dict[int, Any]) -> Any:
    """Return what takes the place of a value: of a module its twin, of a function one whose closure has twins.

    ``bound`` has them by the id of the value; functions are added.
    """
    if id(value) in bound:
        return bound[id(value)]
    if isinstance(value, types.MethodType) and id(value.__self__) in bound:
        twin, name = bound[id(value.__self__)], getattr(value.__func__, "__name__", "")
        of_class = any(vars(kind).get(name) is value.__func__ for kind in type(twin).__mro__)
        return types.MethodType(getattr(type(twin), name) if of_class else value.__func__, twin)
    if isinstance(value, functools.partial):
        function, *args = (_bound(part, bound) for part in (value.func, *value.args))
        return functools.partial(
            function, *args, **{name: _bound(part, bound) for name, part in value.keywords.items()}
        )
    if not isinstance(value, types.FunctionType):
        return value
    bound[id(value)] = value  # it may be in its own closure
    cells = [cell for cell in value.__closure__ or () if cell != types.CellType()]
    twins = {id(cell): _bound(cell.cell_contents, bound) for cell in cells}
    changed = {id(cell) for cell in cells if twins[id(cell)] is not cell.cell_contents}
    if changed:
        closure = (types.CellType(twins[id(x)]) if id(x) in changed else x for x in value.__closure__ or ())
        function = types.FunctionType(value.__code__, value.__globals__, None, value.__defaults__, tuple(closure))
        function.__kwdefaults__ = value.__kwdefaults__
        bound[id(value)] = functools.update_wrapper(function, value)
        vars(function).clear()  # of __wrapped__, which is the value
        vars(function).update({name: _bound(part, bound) for name, part in vars(value).items()})
    return bound[id(value)]


def _reachable(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function reads by a name, in its globals or its closure, and the attributes of that."""
    code = getattr(function, "__code__", None)
    if code is not None:
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        named = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        named |= {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
        for name, value in named.items():
            yield from ((name, part) for part in (value, *getattr(value, "__dict__", {}).values()))


def _moves_nothing(hook: Any, device: str) -> bool:
    """Return whether an accelerate hook only moves tensors to the device they are on."""
    if type(hook).__name__ != "AlignDevicesHook":
        return False
    target = hook.execution_device
    return target is None or str(torch.empty(0, device=target).device) == device


def _is_own(forward: Any, module: nn.Module) -> bool:
    """Return whether ``forward`` is the module's own method, compiled or not."""
    while hasattr(forward, "_torchdynamo_orig_callable"):
        forward = forward._torchdynamo_orig_callable
    is_method = isinstance(forward, types.MethodType) and forward.__self__ is module
    return is_method and forward.__func__ is type(module).forward

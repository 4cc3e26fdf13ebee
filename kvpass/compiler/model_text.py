"""What a capture of a model depends on, as exact text: equal texts mean that Dynamo would trace the same graph.

Modules with their classes, attributes, configurations and tensors, and the modules of Python whose code was traced.
Weights are part of it, since the checks of a capture run on them.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from kvpass.graphs.passes import DISABLE, DUMP
from kvpass.graphs.verify.graph_text import NoTextError, content_text
from kvpass.remembered import digest_of, keeps_results
from kvpass.torch_compat import TracingContext, dynamo_runs, modes_are_active

_LOG = logging.getLogger(__name__)
_LIBRARIES = {"torch", "transformers", "kvpass"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout)
_OF_EVERY_MODULE = vars(nn.Module())
_APART = {"_parameters", "_buffers", "_modules", "_kvpass", "generation_config"}  # no forward reads the last two
_GROWING = {"_CAN_RECORD_REGISTRY", "RemovableHandle"}
"""What transformers has copied of the classes of all models made so far (those of a model are in its own text); a class
that counts the hooks registered so far."""


@dataclass(frozen=True)
class ModelText:
    """By what a capture of a model is known: a digest of all but traced code; the paths of its tensors, by their id."""

    digest: str
    paths: Mapping[int, str]

    @classmethod
    def of(cls, model: nn.Module, *more: object) -> ModelText | None:
        """Return that of a model as it is; None where a capture is not to be kept, nor taken from an earlier process.

        Args:
            more: what else the capture depends on; each has an exact text.
        """
        is_debugged = DUMP in os.environ or DISABLE in os.environ
        if is_debugged or not keeps_results() or modes_are_active() or not dynamo_runs():
            return None
        try:
            digest = digest_of((*more, transformers.__version__, *_settings(), *_model_lines(model)))
        except NoTextError as reason:
            _LOG.debug("the capture is not kept for later processes: %s", reason)
            return None
        tensors = (*model.named_parameters(), *model.named_buffers())
        return cls(digest, {id(tensor): path for path, tensor in tensors})


def _settings() -> Iterator[object]:
    yield from (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.version.cuda)
    yield from (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32)
    for device in ("cpu", "cuda"):
        yield from (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))


def _model_lines(model: nn.Module) -> Iterator[str]:
    places = {id(module): path for path, module in model.named_modules()}
    classes: dict[type, str] = {}
    tensors: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if places[id(module)] != path:
            yield f"{path} is {places[id(module)]}"
            continue
        cls = type(module)
        if cls not in classes:
            classes[cls] = _class_text(cls)
        yield f"{path} {classes[cls]}"
        for name, value in vars(module).items():
            if name not in _APART and not (name in _OF_EVERY_MODULE and value == _OF_EVERY_MODULE[name]):
                yield f"{path}.{name} {_value_text(value, places)}"
                if isinstance(value, PretrainedConfig):  # most modules hold the same
                    places.setdefault(id(value), f"{path}.{name}")
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            yield f"{path}.{name} {_tensor_text(tensor, f'{path}.{name}', tensors)}"


def _tensor_text(tensor: Tensor | None, name: str, known: dict[int, str]) -> str:
    if tensor is None or id(tensor) in known:
        return "None" if tensor is None else f"is {known[id(tensor)]}"
    known[id(tensor)] = name
    form = tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.requires_grad
    return f"{type(tensor).__name__} {form} {content_text(tensor)}"


def _value_text(value: Any, places: Mapping[int, str]) -> str:
    """The exact text of an attribute; ``places``: paths of modules, and of configurations seen before, by their id."""
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, PretrainedConfig) and id(value) in places:
        return f"is {places[id(value)]}"
    if isinstance(value, PretrainedConfig):
        return f"{_class_text(type(value))} {_value_text(vars(value), places)}"
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({','.join(_value_text(part, places) for part in value)})"
    if type(value) in (set, frozenset):
        return f"set({','.join(sorted(_value_text(part, places) for part in value))})"
    if isinstance(value, dict):
        parts = (f"{_value_text(name, places)}:{_value_text(part, places)}" for name, part in value.items())
        return f"{type(value).__name__}({','.join(parts)})"
    if isinstance(value, nn.Module) and id(value) in places:
        return f"module {places[id(value)]}"
    if isinstance(value, types.MethodType) and id(value.__self__) in places:
        return f"method of {places[id(value.__self__)]} {_value_text(value.__func__, places)}"
    if isinstance(value, types.FunctionType) and not value.__closure__:
        defaults = _value_text((value.__defaults__, value.__kwdefaults__), places)
        return f"{value.__module__}.{value.__qualname__} {_code_text(value.__code__)} {defaults}"
    if isinstance(value, (types.BuiltinFunctionType, type)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, functools.partial):
        return f"partial {_value_text((value.func, value.args, value.keywords), places)}"
    raise NoTextError(f"a {type(value).__name__} has no text")


def _class_text(cls: type) -> str:
    """A class with its methods and plain attributes, those of its bases included."""
    bases = (base for base in cls.__mro__ if _of_library(base) and base is not nn.Module)
    held = (f"{base.__qualname__}.{name} {_held_text(x)}" for base in bases for name, x in sorted(vars(base).items()))
    return f"{cls.__module__}.{cls.__qualname__} {digest_of(held)}"


def _of_library(value: Any) -> bool:
    """Whether it is a class of torch, transformers or kvpass."""
    return isinstance(value, type) and value.__module__.split(".")[0] in _LIBRARIES


def _held_text(value: Any) -> str:
    """The text of what a class or module of Python holds; of objects of other classes, the name of their class."""
    if functions := _functions_in(value):
        return str([_code_text(function.__code__) for function in functions])
    if isinstance(value, (type, types.ModuleType)):
        return value.__name__
    if isinstance(value, MutableMapping):
        return str([(_held_text(name), _held_text(part)) for name, part in _registered(value).items()])
    return repr(value) if type(value) in _PLAIN else type(value).__qualname__


def _functions_in(value: Any) -> list[types.FunctionType]:
    """Return the functions of an attribute of a class or module: of a decorated one also those inside."""
    found: list[types.FunctionType] = []
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, types.FunctionType) and one not in found:
            found.append(one)
            for cell in one.__closure__ or ():
                with suppress(ValueError):  # an empty cell
                    left.append(cell.cell_contents)
        elif isinstance(one, property):
            left += [one.fget, one.fset]
        elif isinstance(one, (staticmethod, classmethod)):
            left.append(one.__func__)
    return found


def _registered(registry: MutableMapping[Any, Any]) -> dict[Any, Any]:
    """What a registry of functions holds, without loading what it would load when asked."""
    held = registry if isinstance(registry, dict) else vars(registry)
    return dict(dict.items(held))


@functools.cache
def _code_text(code: types.CodeType) -> str:
    """A digest of what a function does, the same in every process of one Python."""

    def constant(value: Any) -> str:
        if isinstance(value, types.CodeType):
            return _code_text(value)
        return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)

    parts = code.co_qualname, code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_flags
    return digest_of([str(parts), *map(constant, code.co_consts)])


def traced_modules() -> list[str]:
    """Return the names of the modules of Python whose code the current trace has followed; without those of kvpass."""
    files = {code.co_filename for code in TracingContext.get_traced_code() or ()}
    known = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
    found = {"torch.nn.functional"}  # often patched from outside
    for file in files:
        if file.startswith("<frozen ") or file == "<string>":  # of Python itself, and methods of dataclasses
            continue
        name = known.get(file, "")
        if name.split(".")[0] not in _LIBRARIES:
            raise NoTextError(f"{file} is traced")
        found.add(name)
    return sorted(name for name in found if not name.startswith("kvpass."))


def _held_by(module: types.ModuleType) -> list[tuple[str, Any]]:
    """Names and values of a module of Python, as they are now."""
    return [(name, value) for name, value in list(vars(module).items()) if name not in _GROWING]


def code_digest(modules: Iterable[str]) -> str:
    """Return a digest of modules of Python: of their files, and of what they hold now.

    Raises:
        KeyError: one is not imported. OSError: a file cannot be read.
    """

    def lines() -> Iterator[str]:
        for name in modules:
            module = sys.modules[name]
            yield hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()
            for key, value in sorted(_held_by(module)):
                yield f"{name}.{key} {_class_text(value) if _of_library(value) else _held_text(value)}"

    return digest_of(lines())


def code_objects(modules: Iterable[str]) -> list[object]:
    """Return what modules of Python and their classes hold now: another list means that something was replaced."""
    found: list[object] = []
    for name in modules:
        for _, value in _held_by(sys.modules[name]):
            found.append(value)
            if _of_library(value):
                found += vars(value).values()
            elif isinstance(value, MutableMapping):
                found += _registered(value).values()
    return found

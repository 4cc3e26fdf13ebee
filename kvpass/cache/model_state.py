"""What captures of a model depend on besides the arguments of a call, and whether it was written to.

Objects that are nothing but attributes (modules, configurations) are compared by class and attributes, their classes by
attributes too, containers by elements, tensors by what Dynamo guards of them, all else by identity.
"""

from __future__ import annotations

import gc
import operator
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kvpass.torch_compat import dict_version, wrapped_tensors

_MAPPINGS = (dict, OrderedDict)
_CONTAINERS = (*_MAPPINGS, list, tuple, set, frozenset)
PLAIN = (int, float, complex, str, bytes, Enum, torch.Size, torch.dtype, torch.device, type(None))
_HOOKS = {name for name in vars(nn.Module()) if "hooks" in name}
_HOOKS_THAT_RUN = {"_forward_hooks", "_forward_pre_hooks"}

Global = tuple[ModuleType, str]
"""A module and the name of a global of it."""


class _Attributes:
    """An object of a class without slots, that extends no class written in C."""


@dataclass(frozen=True, eq=False)
class _Same:
    """Equal for the same object only."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


class ModelState:
    """Values of the attributes that have certain names, of an object and of all that these attributes lead to.

    Args:
        root: the object. Its own hooks are left out: they run around its forward. names: of attributes, and globals
            besides, which are compared by identity.
    Attributes:
        value: equal for states that are captured alike.
    """

    def __init__(self, root: Any, names: Collection[str | Global]) -> None:
        self._root, self._names = root, names
        self._numbers: dict[int, int] = {}  # of objects and classes, by id
        self._tensor_numbers: dict[int, int] = {}
        self._classes: dict[type, Any] = {}
        self._objects: list[Any] = []
        self._tensors: list[Tensor] = []
        self._dicts: list[dict[Any, Any]] = []
        self._versions: list[int] = []
        self._elements: list[tuple[Any, list[Any]]] = []
        self._globals = [(*name, getattr(*name, None)) for name in names if isinstance(name, tuple)]
        self._modules = [vars(module) for module in {module for module, *_ in self._globals}]
        self._module_versions: list[int] = []
        self.value = self._value(root), self._classes, {key[:2]: self._value(key[2]) for key in self._globals}
        self._empty = [x for x in self._dicts if not x]  # the most of them; asking these is cheaper
        self._versions = [version for x, version in zip(self._dicts, self._versions, strict=True) if x]
        self._dicts = [x for x in self._dicts if x]
        self._types = list(map(type, self._objects))
        self._addresses = list(map(Tensor.data_ptr, self._tensors))

    def holds(self) -> bool:
        """Whether nothing was written since then. What was written may be equal to what was there."""
        return (
            list(map(dict_version, self._dicts)) == self._versions
            and not any(self._empty)
            and list(map(type, self._objects)) == self._types
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses  # "tensor.data = other"
            and all(len(x) == len(elements) and all(map(operator.is_, x, elements)) for x, elements in self._elements)
            and self._globals_hold()
        )

    def _globals_hold(self) -> bool:
        versions = list(map(dict_version, self._modules))
        if versions != self._module_versions:  # a module gains and loses others all the time
            if not all(getattr(module, name, None) is x for module, name, x in self._globals):
                return False
            self._module_versions = versions
        return True

    def covers(self, x: Any) -> bool:
        """Whether attributes or elements of an object are in the value, where they have one of the names."""
        return type(x) in _CONTAINERS or id(x) in self._numbers

    def _value(self, x: Any) -> Any:
        if isinstance(x, PLAIN):
            return type(x), x
        if isinstance(x, Tensor):
            return self._tensor(x)
        if type(x) in _MAPPINGS:
            self._watch(x)
            return type(x), [(key, self._value(value)) for key, value in x.items()]
        if type(x) in (set, frozenset):
            self._elements.append((x, [*x]))
            return type(x), frozenset(x)
        if type(x) in _CONTAINERS:
            self._elements.append((x, [*x]))
            return type(x), [self._value(value) for value in x]
        if id(x) in self._numbers:
            return self._numbers[id(x)]
        if _layout(type(x)) != _layout(_Attributes):
            return _Same(x)
        self._numbers[id(x)] = len(self._numbers)
        self._objects.append(x)
        for kind in type(x).__mro__[:-1]:  # object, the last, cannot be written to
            if id(kind) not in self._numbers:
                self._numbers[id(kind)] = len(self._numbers)
                (attributes,) = gc.get_referents(kind.__dict__)  # of which that is a read-only view
                self._classes[kind] = self._named(attributes)
        return type(x), self._named(vars(x), _HOOKS if x is self._root else _HOOKS - _HOOKS_THAT_RUN)

    def _named(self, attributes: dict[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
        self._watch(attributes)
        names = [name for name in attributes if name in self._names and name not in without]
        return {name: self._value(attributes[name]) for name in names}

    def _watch(self, x: dict[Any, Any]) -> None:
        self._dicts.append(x)
        self._versions.append(dict_version(x))

    def _tensor(self, x: Tensor) -> Any:
        number = self._tensor_numbers.setdefault(id(x), len(self._tensor_numbers))
        strides = x.stride() if x.layout is torch.strided else None
        parts = list(map(self._tensor, wrapped_tensors(x)))
        if parts:
            self._watch(vars(x))
        else:
            self._tensors.append(x)
        return number, type(x), x.dtype, x.device, x.shape, strides, x.requires_grad, parts


def _layout(kind: type) -> tuple[int, ...]:
    return kind.__basicsize__, kind.__dictoffset__, kind.__weakrefoffset__

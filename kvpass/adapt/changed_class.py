"""Classes of a compiled copy's modules: the model's own under the same name, with something changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kvpass.tracing import capturing


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes one result for each class; mypy takes no class for hashable."""
    return functools.cache(make)


def changed_class(module_class: Any, *first: type, **attributes: Any) -> Any:
    """Return a subclass of the same name, with the bases ``first`` before the class, ``_original_class`` in it."""
    attributes = {"__doc__": module_class.__doc__, "_original_class": module_class, **attributes}
    attributes["__module__"] = module_class.__module__
    return type(module_class.__name__, (*first, module_class), attributes)


def in_captures(captured: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that is ``captured`` in captures and ``plain`` everywhere else."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return captured(self, *args, **kwargs) if capturing() else plain(self, *args, **kwargs)

    return method

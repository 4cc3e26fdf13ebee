"""Classes of a compiled copy's modules: the model's own under the same name, with something changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kvpass.tracing import capturing


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes one result for each class; mypy takes no class for hashable."""
    return functools.cache(make)


def changed_class(kind: Any, *first: type, **changed: Any) -> Any:
    """Return a subclass of the same name: with the bases ``first`` before ``kind``, and these attributes."""
    return type(kind.__name__, (*first, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__, **changed})


def in_captures(own: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that is ``own`` in captures and ``plain`` everywhere else."""

    def method(self: Any, *given: Any, **named: Any) -> Any:
        return own(self, *given, **named) if capturing() else plain(self, *given, **named)

    return method

"""Guards of a capture: Dynamo's on arguments, globals and the state of torch; on the model, a ``ModelState``.

Dynamo would ask about 30 guards for each layer in every call, one millisecond for 32 layers.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from kvpass.cache.model_state import ModelState
from kvpass.torch_compat import ChainedSource, Guard, Source, TracingContext


def take_over_guards(forward: types.MethodType, watch: Callable[[frozenset[str]], ModelState]) -> None:
    """Drop the guards on all that a state of the model compares. To be called in the trace.

    Those that remain lead through something else: the closure of a function, an object with slots. Dropped is also the
    guard on what classes of transformers can record beside logits. That table grows with every class of which a model
    is loaded: all captures made before would be made again.

    Args:
        forward: the model's, a local variable of this name in the captured function. watch: returns the state of
            attributes with certain names.
    """
    guards = TracingContext.get().guards_context.dynamo_guards
    state = watch(names_in(filter(_is_on_model, guards)))
    scope = {"L": {"forward": forward}}
    value = cache(lambda name: eval(name, scope))

    def is_needed(guard: Guard) -> bool:
        base, name = _base(guard.originating_source), guard.originating_source.name
        if base is None or not _is_on_model(guard):
            return "_CAN_RECORD_REGISTRY" not in name
        if _is_of_object(name) and not _name_beside(guard):
            return True  # on all attributes of an object
        while (further := _base(base)) is not None:
            try:
                if not state.covers(value(base.name)):
                    return True
            except NameError:  # of a function of Dynamo's
                return True
            base = further
        return False

    guards.inner = type(guards.inner)(filter(is_needed, guards.inner))


def _is_on_model(guard: Guard) -> bool:
    return "L['forward']" in guard.originating_source.name


def names_in(guards: Iterable[Guard]) -> frozenset[str]:
    """Names of the attributes that guards are on."""
    texts = [text for guard in guards for text in (guard.originating_source.name, _name_beside(guard))]
    return frozenset(re.findall(r"\w+", " ".join(texts)))


def _name_beside(guard: Guard) -> str:
    """The attribute that a guard asks for beside its source: whether it is there. Keys of other containers are not."""
    keywords = getattr(guard.create_fn, "keywords", {})
    return str(keywords.get("attr", keywords.get("key", "") if _is_of_object(guard.originating_source.name) else ""))


def _is_of_object(name: str) -> bool:
    return name.endswith(("__dict__", "__dict__)"))


def _base(source: Source) -> Source | None:
    return source.base if isinstance(source, ChainedSource) else None


def are_alike(layers: Iterable[Any], guards: Iterable[Guard]) -> bool:
    """Whether guards on one of the layers hold for all."""
    names = names_in(guards)
    values = [ModelState(layer, names).value for layer in layers]
    return all(value == values[0] for value in values)

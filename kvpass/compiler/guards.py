"""Guards of a capture: Dynamo's on arguments and the state of torch; on the model and on globals, a ``ModelState``.

Dynamo would ask about 30 guards for each layer and 150 on globals in every call, over a millisecond for 32 layers.
"""

from __future__ import annotations

import builtins
import re
import types
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from typing import Any

from kvpass.cache.model_state import PLAIN, Global, ModelState
from kvpass.torch_compat import ChainedSource, Guard, Source, TracingContext

_IMMUTABLE = (*PLAIN, tuple, frozenset, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def take_over_guards(scope: dict[str, Any], watch: Callable[[frozenset[str | Global]], ModelState]) -> None:
    """Drop the guards on all that a state of the model compares. To be called in the trace.

    Those that remain lead through something else: the closure of a function, an object with slots or of a module.
    Dropped is also the guard on what classes of transformers can record beside logits. That table grows with every
    class of which a model is loaded: all captures made before would be made again.

    Args:
        scope: of the captured function: "G", its globals, and "L" with the model's forward, a local variable of this
            name. watch: returns the state of attributes with certain names, and of globals.
    """
    guards = TracingContext.get().guards_context.dynamo_guards
    state = watch(names_in(filter(_is_on_model, guards)))
    value = cache(lambda name: eval(name, scope))
    read: set[Global] = set()

    def is_needed(guard: Guard) -> bool:
        (*bases, name), beside = _chain(guard.originating_source), _name_beside(guard)
        if "_CAN_RECORD_REGISTRY" in name:
            return False
        if not bases:
            return not name.startswith("G['__import_")  # Dynamo's own name for a module
        try:
            holders = list(map(value, bases))
        except (KeyError, NameError):  # an argument, a function of Dynamo's
            return True
        if _is_on_model(guard):
            everything = _is_of_object(name) and not beside  # all attributes of an object
            return everything or not all(map(state.covers, holders[1:]))
        modules = [builtins if holder is vars(builtins) else holder for holder in holders]
        are_modules = all(isinstance(module, types.ModuleType) for module in modules)
        if beside or not are_modules or not isinstance(value(name), _IMMUTABLE):
            return True
        names = [inner.removeprefix(outer).strip(".[]'") for outer, inner in pairwise([*bases, name])]
        read.update(zip(modules, names, strict=True))
        return False

    guards.inner = type(guards.inner)(filter(is_needed, guards.inner))
    watch(frozenset(read))


def _chain(source: Source) -> list[str]:
    """Names of the sources that lead to one, which is the last."""
    return [*(_chain(source.base) if isinstance(source, ChainedSource) else ()), source.name]


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


def are_alike(layers: Iterable[Any], guards: Iterable[Guard]) -> bool:
    """Whether guards on one of the layers hold for all."""
    names = names_in(guards)
    values = [ModelState(layer, names).value for layer in layers]
    return all(value == values[0] for value in values)

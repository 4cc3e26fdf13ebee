"""What attention operators and modules are called with, and calls that are interrupted."""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn

from kvpass.ops import evict, reference


def recorded_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of every later call of prompts and of policies that evict while decoding, in order."""
    calls = []

    def watch(module: Any, name: str) -> None:
        original = getattr(module, name)

        def recorded(call: Any, *args: Any) -> Any:
            calls.append((call.q.clone(), call.k.clone(), call.v.clone()))
            return original(call, *args)

        monkeypatch.setattr(module, name, recorded)

    watch(reference, "attend_prompt")
    watch(evict, "attend_evict")
    return calls


@contextmanager
def inputs_and_outputs(modules: Iterable[nn.Module]) -> Iterator[list[tuple[Tensor, Any]]]:
    """What enters each module inside, and what it returns, in the order in which their calls end."""
    found: list[tuple[Tensor, Any]] = []

    def note(module: nn.Module, args: Any, given: Any, output: Any) -> None:
        found.append((args[0] if args else given["hidden_states"], output))

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    yield found
    for hook in hooks:
        hook.remove()


def interrupt(
    patch: pytest.MonkeyPatch, target: Any, name: str, call: int = 1, error: type[BaseException] = KeyboardInterrupt
) -> None:
    """Have the n-th call of a function raise an error."""
    original, calls = getattr(target, name), itertools.count(1)

    def counted(*args: Any, **given: Any) -> Any:
        if next(calls) == call:
            raise error
        return original(*args, **given)

    patch.setattr(target, name, counted)

"""What the attention operators of a compiled model are called with."""

from __future__ import annotations

import pytest
from torch import Tensor

from kvpass.ops import evict, reference


def recorded_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of every later call of prompts and of policies that evict while decoding, in order."""
    calls = []

    def watch(module, name):
        original = getattr(module, name)

        def recorded(call, *args):
            calls.append((call.q.clone(), call.k.clone(), call.v.clone()))
            return original(call, *args)

        monkeypatch.setattr(module, name, recorded)

    watch(reference, "attend_prompt")
    watch(evict, "attend_evict")
    return calls

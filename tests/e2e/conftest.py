"""A small model, and its compressed copy with room for everything, or with little; all shared with other tests."""

import pytest

from kvpass.compiler.capture import CaptureCache
from tiny_models import compiled_once

SMALL = {"layers": 2, "backend": "eager", "policy": "lava", "window": 8}


@pytest.fixture
def model():
    return compiled_once(budget=10**6, **SMALL)[0]


@pytest.fixture
def fast():
    return compiled_once(budget=10**6, **SMALL)[1]


@pytest.fixture
def calls(monkeypatch):
    """Tokens of each call of a kvpass model."""
    counted, run = [], CaptureCache.run

    def counting(self, call, forward, ids, *rest):
        counted.append(ids.shape[1])
        return run(self, call, forward, ids, *rest)

    monkeypatch.setattr(CaptureCache, "run", counting)
    return counted


@pytest.fixture
def tight():
    return compiled_once(budget=16, **SMALL)[1]

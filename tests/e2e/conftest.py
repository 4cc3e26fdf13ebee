"""A small model, and its compressed copy with room for everything, or with little; all shared with other tests."""

import pytest

from compiled_models import UNLIMITED, two_layers
from kvpass.compiler.capture import CaptureCache


@pytest.fixture
def model():
    return two_layers(budget=UNLIMITED)[0]


@pytest.fixture
def fast():
    return two_layers(budget=UNLIMITED)[1]


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
    return two_layers(budget=16)[1]

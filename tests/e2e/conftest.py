"""A small model, and its compressed copy with room for everything, or with little; all shared with other tests."""

import pytest

from tiny_models import compiled_once

SMALL = {"layers": 2, "backend": "eager", "policy": "lava", "window": 8}


@pytest.fixture
def model():
    return compiled_once(budget=10**6, **SMALL)[0]


@pytest.fixture
def fast():
    return compiled_once(budget=10**6, **SMALL)[1]


@pytest.fixture
def tight():
    return compiled_once(budget=16, **SMALL)[1]

"""A small model, and two compressed copies: one with room for everything, one with little."""

from __future__ import annotations

import pytest

import kvpass
from tiny_models import tiny_model


@pytest.fixture(scope="session")
def model():
    return tiny_model("llama", layers=2)


@pytest.fixture(scope="session")
def fast(model):
    return kvpass.compile(model, budget=10**6, window=8, backend="eager")


@pytest.fixture(scope="session")
def tight(model):
    return kvpass.compile(model, budget=16, window=8, backend="eager")

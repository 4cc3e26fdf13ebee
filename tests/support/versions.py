"""Tests that need a version of transformers, or one before it."""

import pytest
import transformers
from packaging.version import Version


def before(version: str) -> bool:
    """Whether the installed transformers is older than this version."""
    return Version(transformers.__version__) < Version(version)


def needs_transformers(version: str, reason: str) -> pytest.MarkDecorator:
    """Skip a test where transformers is older, and say what it lacks."""
    return pytest.mark.skipif(before(version), reason=reason)


STATES = needs_transformers("5.22", "the states of recurrent layers have no methods")
DIVIDED = needs_transformers("5.17", "transformers divides models otherwise")

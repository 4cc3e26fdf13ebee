"""What the tests of engines and of the server share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for tiny.py, which scenarios.py reads too

from tiny import make_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Folder of the tiny model."""
    path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path

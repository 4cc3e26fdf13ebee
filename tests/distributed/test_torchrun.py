"""What ``torchrun`` starts: a command, and processes of which one fails."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from divided_model import small_builtin
from kvpass.cli.documents import load_document, read_document
from tiny_models import tiny_model
from versions import DIVIDED

pytestmark = [pytest.mark.exhaustive, DIVIDED]
ROOT = Path(__file__).resolve().parents[2]
FAILING = ROOT / "tests" / "distributed" / "failing.py"


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Two processes of ``torchrun``, in a group of their own, which is gone afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, *arguments], env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as running:
        try:
            yield running
        finally:
            running.terminate()  # torchrun then ends its processes, which have sessions of their own
            try:
                running.wait(60)
            except subprocess.TimeoutExpired:
                running.kill()


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    with started(*arguments) as running:
        said = running.communicate(timeout=500)
    return subprocess.CompletedProcess(arguments, running.returncode, *said)


REFUSED = "in process 1 of 2, counted from 0: policy='lavva': did you mean 'lava'?"


def assert_gone(said: Iterable[str]) -> None:
    """The processes that have said when they failed; torchrun gives each a session of its own."""
    for process in {int(line.split()[1]) for line in said if line.startswith("fails: ")}:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_all_processes_refuse_what_one_does_and_end_within_a_minute_when_one_fails(tmp_path):
    tiny_model("llama", layers=2).save_pretrained(tmp_path)
    done = torchrun(str(FAILING), str(tmp_path), "memory")
    ended, lines = time.time(), done.stderr.splitlines()
    assert done.stderr.count(f"refused: {REFUSED}") == 2, done.stderr[-5000:]
    assert done.returncode != 0 and "OutOfMemoryError: out of memory, injected" in done.stderr, done.stderr[-5000:]
    assert ended - max(float(line.split()[2]) for line in lines if line.startswith("fails: ")) < 60
    assert_gone(lines)


def test_ctrl_c_ends_all_processes_within_a_minute(tmp_path):
    tiny_model("llama", layers=1).save_pretrained(tmp_path)
    with started(str(FAILING), str(tmp_path), "goes on") as running:
        lines: list[str] = []
        while sum(line.startswith("fails: ") for line in lines) < 2:
            lines.append(next(running.stderr))
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=60)
        assert running.returncode != 0 and "KeyboardInterrupt" in said
        assert_gone(lines)


def test_a_document_that_two_processes_compress_is_asked_on_one(tmp_path):
    text = "the code of bara dador is 482 913 . " + 20 * "the old farmer carried the lamp near the river . "
    (tmp_path / "document.txt").write_text(text)
    file, question = str(tmp_path / "document.kv"), "question the code of bara dador is"
    model = str(small_builtin(tmp_path / "model"))
    given = [str(tmp_path / "document.txt"), "--output", file, "--model", model, "--policy", "lava", "--budget", "64"]
    done = torchrun("-m", "kvpass", "compress", *given, "--backend", "eager")
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("written:") == 1
    alone = read_document(text, model=model, policy="lava", budget=64, backend="eager")
    documents = load_document(file, backend="eager"), alone
    answer, expected = (document.ask(question, max_new_tokens=3) for document in documents)
    assert answer == expected

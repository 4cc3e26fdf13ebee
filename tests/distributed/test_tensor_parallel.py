"""A model on several processes keeps what it keeps on one device, and gives the same tokens."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version

import kvpass
from kvpass.cli.documents import Document
from tiny_models import HEAD_MAP, tiny_model

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.17"), reason="transformers divides models otherwise"
)
ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "distributed" / "worker.py"
OPTIONS = {
    "cake": {"tau1": 1.0, "tau2": 1.0},
    "duo_attention": {"head_map": HEAD_MAP, "sinks": 3},
    "pyramidkv": {"shape": "entropy"},
}
POLICIES = sorted(kvpass.POLICIES)
FAMILIES = ["phi3", "qwen3", "gemma3", "mixtral", "qwen3_moe", "gpt_oss", "qwen2", "gemma2"]


@contextmanager
def started(processes: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """What ``torchrun`` runs, with its processes in a group of their own, which is gone afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, *arguments], env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as running:
        try:
            yield running
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)


def torchrun(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    with started(processes, *arguments) as running:
        said = running.communicate(timeout=500)
    return subprocess.CompletedProcess(arguments, running.returncode, *said)


def compare(
    folder: Path,
    family: str,
    policies: list[str],
    *,
    processes: int = 2,
    compiler: str = "eager",
    layers: int | None = None,
    **options: Any,
) -> None:
    """Run the worker; ``options`` are of every policy."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4} if processes > 2 else {}
    tiny_model(family, layers=layers, **heads).save_pretrained(folder)
    given = json.dumps([(policy, {**OPTIONS.get(policy, {}), **options}) for policy in policies])
    done = torchrun(processes, str(WORKER), str(folder), compiler, given)
    assert done.returncode == 0, done.stderr[-5000:]


def test_two_processes_keep_what_one_device_keeps(tmp_path):
    compare(tmp_path, "llama", ["tova"], layers=1)


@pytest.mark.exhaustive
def test_scores_are_what_processes_send_each_other(tmp_path):
    compare(tmp_path, "llama", [])


SAID = {
    "raises": "ValueError: out of luck",
    "refuses": "ValueError: in process 1 of 2, counted from 0: policy='lavva': did you mean 'lava'?",
    "memory": "OutOfMemoryError: out of memory, injected",
    "interrupted": "KeyboardInterrupt",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", SAID)
def test_all_processes_end_within_a_minute_when_one_fails(how, tmp_path):
    tiny_model("llama", layers=2).save_pretrained(tmp_path)
    done = torchrun(2, str(WORKER), str(tmp_path), how, "[]")
    ended = time.time()
    failed = [float(line.split()[-1]) for line in done.stderr.splitlines() if line.startswith("fails at ")]
    assert done.returncode != 0 and SAID[how] in done.stderr, done.stderr[-5000:]
    assert ended - max(failed) < 60


@pytest.mark.exhaustive
def test_ctrl_c_ends_all_processes_within_a_minute(tmp_path):
    tiny_model("llama", layers=1).save_pretrained(tmp_path)
    with started(2, str(WORKER), str(tmp_path), "goes on", "[]") as running:
        begun = 0
        while begun < 2:
            begun += next(running.stderr).startswith("fails at ")
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=60)
        assert running.returncode != 0 and "KeyboardInterrupt" in said
        with pytest.raises(ProcessLookupError):
            os.killpg(running.pid, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_phases_as_one_graph_keep_the_same(compiler, tmp_path):
    compare(tmp_path, "gemma3", ["lava", "cake", "layer_defensivekv"], compiler=compiler, compile_regions=False)


@pytest.mark.exhaustive
def test_parts_of_every_phase_keep_the_same(tmp_path):
    compare(tmp_path, "llama", ["lava"], compiler="inductor", compile_regions=True)


@pytest.mark.exhaustive
def test_every_policy_keeps_the_same(tmp_path):
    compare(tmp_path, "llama", POLICIES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_the_same(family, tmp_path):
    compare(tmp_path, family, ["lava", "cake", "h2o"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_four_processes_keep_the_same(family, tmp_path):
    compare(tmp_path, family, ["lava", "snapkv"], processes=4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("entries", ["int8", "fp8"])
def test_entries_in_fewer_bits_are_the_same(entries, tmp_path):
    compare(tmp_path, "llama", ["lava"], layers=1, entries=entries)


@pytest.mark.exhaustive
def test_compiled_code_keeps_the_same(tmp_path):
    compare(tmp_path, "llama", ["lava", "streaming_llm"], compiler="inductor")


@pytest.mark.exhaustive
def test_the_example_prints_what_its_docstring_shows():
    example = ROOT / "examples" / "tensor_parallel.py"
    done = torchrun(2, str(example))
    assert done.returncode == 0, done.stderr[-5000:]
    shown = inspect.cleandoc(example.read_text().split("Prints::\n\n")[1].split('"""')[0])
    assert done.stdout.strip() == shown


@pytest.mark.exhaustive
def test_the_command_answers_on_two_processes_what_it_answers_on_one(tmp_path):
    given = (
        "eval builtin --tasks multi_needle --policies lava,tova --budgets 0.4 --samples 2 --length 150 --backend eager"
    )
    command = ["-m", "kvpass", *given.split(), "--output"]
    done = torchrun(2, *command, str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("written:") == 1
    subprocess.run([sys.executable, *command, str(tmp_path / "one")], check=True, capture_output=True, timeout=300)
    one, two = (
        [json.loads(line) for line in (tmp_path / folder / "samples.jsonl").read_text().splitlines()]
        for folder in ("one", "two")
    )
    for record in (*one, *two):
        record["kept"].pop("cache_bytes")  # tables of each process
    assert one == two


@pytest.mark.exhaustive
def test_a_document_is_asked_on_two_processes(tmp_path):
    text = "the code of bara dador is 482 913 . " + 20 * "the old farmer carried the lamp near the river . "
    made = Document.compress(text, model="builtin", policy="h2o", budget=64, backend="eager")
    made.save(tmp_path / "document.kv")
    question = "question the code of bara dador is"
    command = [
        "-m",
        "kvpass",
        "ask",
        str(tmp_path / "document.kv"),
        question,
        "--new-tokens",
        "3",
        "--backend",
        "eager",
    ]
    done = torchrun(2, *command)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.splitlines() == [made.ask(question, new_tokens=3)]

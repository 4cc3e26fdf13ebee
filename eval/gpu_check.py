"""``make gpu-check``: tests, kernels and the bench on the GPU of this machine.

Every stage is a process of its own with a time limit, its result a file under ``benchmarks/results/<date>-<device>/``
(and, where ``$OUT`` names a folder, in an archive there). A stage whose result is there, complete and made by the
present code is not run again, so a check that ran out of time goes on where it stopped; on another machine, once that
archive is unpacked into ``benchmarks/results``. Stages come in the order of what their figures are worth; one that the
present code has begun in vain comes after those that it has not. What Inductor and Triton compile is kept in
``compiled`` beside the results. Needs torch, triton and transformers; without pytest the tests are left out, and the
kernels are still compared with the eager reference before they are timed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvpass.eval.bench import kernels as kernel_bench
from kvpass.eval.bench import smoke
from kvpass.eval.bench.report import markdown, plot
from kvpass.eval.environment import save_json, source_digest
from kvpass.eval.tables import markdown_table

SECONDS = 530
"""Time for everything: ten minutes, less what it takes to set up and to write."""
LEAST_SECONDS = 30
"""A stage with less than this left, or less than it needs itself, is not begun."""
GRACE_SECONDS = 10
"""A stage that is out of time may take so long to say what it knows."""
_LINES_OF_A_FAILURE = 30
COMPILED = "compiled"
PART_BYTES, MOST_PARTS = 15 * 2**20, 3
"""Of the archive of compiled code: small enough to copy where large files are not."""
ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/e2e/test_gpu.py", "tests/kernels/test_prefill_attention.py", "tests/e2e/test_contracts.py")
GRAPH_TESTS = ("tests/e2e/test_gpu_graphs.py",)
TOGETHER = ("-n", "6", "--dist", "worksteal") if importlib.util.find_spec("xdist") else ()
"""Most of the tests' time is compilation of kernels, on the host."""
FEW_COMPILERS = ("env", "TORCHINDUCTOR_COMPILE_THREADS=3")
"""Of each of those processes: by default it takes as many as there are cores."""


@dataclass(frozen=True)
class Stage:
    """Something to run.

    Attributes:
        name: of its result, ``<name>.json``. command: writes that file itself, its path taking the place of ``{}``;
            if it names none, the exit status is the result. seconds: its limit.
        needs: a module without which it cannot run. least: seconds with less of which it would give no figure.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    needs: str | None = None
    least: int = LEAST_SECONDS


class Outcome(NamedTuple):
    """Status of a stage: ``passed``, ``failed``, ``out of time``, ``not run`` or ``kept``."""

    status: str
    seconds: float = 0.0
    reason: str = ""


def _tests(name: str, files: tuple[str, ...], seconds: int) -> Stage:
    words = "-m pytest -v --tb=short -m gpu -p no:cacheprovider".split()
    return Stage(name, (*FEW_COMPILERS, sys.executable, *words, *TOGETHER, *files), seconds, needs="pytest", least=100)


def _bench(name: str, seconds: int, words: str, least: int = 180) -> Stage:
    program = "from kvpass.cli.main import app; app()"
    usual = "bench --device cuda --model llama-3.1-8b --budget 1024 --policies lava --json {} --warm-cache"
    return Stage(name, (sys.executable, "-c", program, *usual.split(), *words.split()), seconds, least=least)


def _module(name: str, module: str, seconds: int, *words: str, least: int = LEAST_SECONDS) -> Stage:
    return Stage(
        name, (sys.executable, "-m", f"kvpass.eval.bench.{module}", "--json", "{}", *words), seconds, least=least
    )


STAGES = (
    _module("smoke", "smoke", 60),
    _module("kernels", "kernels", 130),
    _bench("decode-128k", 330, "--contexts 131072 --repeats 1 --systems full"),
    _bench("rows-128k", 300, "--contexts 131072 --batches 3 --shared-prompt --repeats 1 --systems full"),
    _tests("tests", TESTS, 200),
    _tests("graph-tests", GRAPH_TESTS, 200),
    _bench("baselines-128k", 500, "--contexts 131072 --repeats 1 --systems hf-eager,hf-static", least=280),
    _bench("decode-8k-32k", 320, "--contexts 8192,32768 --repeats 2 --systems hf-eager,hf-static,full", least=240),
    _bench("batches-32k", 300, "--contexts 32768 --batches 8,32 --shared-prompt --repeats 2 --systems hf-static,full"),
    _bench("evicting-32k", 300, "--contexts 32768 --repeats 2 --systems full --policies cake:tau1=1.6,tau2=0.4,tova"),
    _bench("qwen3-8b", 300, "--model qwen3-8b --contexts 32768 --repeats 2 --systems hf-static,full"),
    _bench("mistral-7b", 300, "--model mistral-7b --contexts 32768 --repeats 2 --systems hf-static,full"),
    _module("kernel-baselines", "kernels", 200, "--baselines", least=60),
)
"""In the order of what their figures are worth. The limits of the first three fit in one call."""


def run_stages(
    stages: Iterable[Stage],
    folder: Path,
    seconds: float,
    after: Callable[[dict[str, Outcome]], None] = lambda outcomes: None,
) -> dict[str, Outcome]:
    """Run stages one after the other until the time is over, those with fewer vain tries of the present code first.

    Args:
        folder: of results and logs. seconds: for all stages together.
        after: called when a stage is done with, with the outcomes so far.
    """
    begun = time.monotonic()
    outcomes: dict[str, Outcome] = {}
    for stage in sorted(stages, key=lambda stage: tries(stage, folder / f"{stage.name}.json")):
        left = seconds - (time.monotonic() - begun)
        result = folder / f"{stage.name}.json"
        if is_current(stage, result):
            outcomes[stage.name] = Outcome("kept")
        elif stage.needs is not None and importlib.util.find_spec(stage.needs) is None:
            outcomes[stage.name] = Outcome("not run", reason=f"{stage.needs} is not installed")
        elif left < stage.least:
            outcomes[stage.name] = Outcome("not run", reason=f"{max(left, 0):.0f} s left of {seconds:.0f}")
        else:
            print(f"gpu-check: {stage.name}, at most {min(stage.seconds, left):.0f} s", flush=True)
            outcomes[stage.name] = run_stage(stage, result, folder / f"{stage.name}.log", min(stage.seconds, left))
        outcome = outcomes[stage.name]
        print(f"gpu-check: {stage.name}: {outcome.status} {outcome.reason}".rstrip(), flush=True)
        after(outcomes)
    return outcomes


def run_stage(stage: Stage, result: Path, log: Path, seconds: float) -> Outcome:
    """Run one stage, log what it prints, and end all its processes.

    When time is over it is interrupted first, at which pytest says what has failed so far.
    """
    begun_before = tries(stage, result)
    if not begun_before:
        result.unlink(missing_ok=True)
    save_json(_stamp(result), {**_made_by(stage), "tries": begun_before + 1})
    limited = ["timeout", "--signal=INT", f"--kill-after={GRACE_SECONDS}", str(seconds)]
    command = [str(result) if word == "{}" else word for word in stage.command]
    begun = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            limited + command,
            cwd=ROOT,
            env={**os.environ, "PYTHONSAFEPATH": "1", **compile_caches(result.parent)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # background jobs of a shell ignore interrupts, and so would what they start
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            code = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    took = time.monotonic() - begun
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = lines[-1].strip() if lines else ""
    if code != 0:
        print("\n".join(lines[-_LINES_OF_A_FAILURE:]), flush=True)
    if code != 0 and took >= seconds:
        return Outcome("out of time", took, f"after {took:.0f} s")
    if "{}" not in stage.command:
        save_json(result, {"complete": code == 0, "exit_status": code, "said": said})
    elif code == 0:
        said = ""
    return Outcome("passed", took, said) if code == 0 else Outcome("failed", took, f"exit status {code}: {said}")


def read(result: Path) -> dict[str, Any] | None:
    """What a stage wrote, None where it wrote nothing or was cut off while writing."""
    try:
        found = json.loads(result.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return found if isinstance(found, dict) else None


def is_current(stage: Stage, result: Path) -> bool:
    """Whether the result is complete and made by the present command and code."""
    found = read(result)
    return found is not None and found.get("complete") is True and tries(stage, result) > 0


def tries(stage: Stage, result: Path) -> int:
    """How often the present command and code have begun this stage."""
    stamp = read(_stamp(result)) or {}
    times = stamp.pop("tries", 0)
    return times if stamp == _made_by(stage) else 0


def compile_caches(folder: Path) -> dict[str, str]:
    """Where stages keep what they compile, as environment variables; the next call reads it back."""
    places = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    return {name: str((folder / COMPILED / place).resolve()) for name, place in places.items()}


def _stamp(result: Path) -> Path:
    return result.with_suffix(".made-by.json")


def _made_by(stage: Stage) -> dict[str, Any]:
    tests = [ROOT / word for word in stage.command if word.endswith(".py")]
    if tests:
        tests += sorted((ROOT / "tests" / "support").glob("*.py"))
    digests = [hashlib.blake2s(path.read_bytes(), digest_size=8).hexdigest() for path in tests]
    return {"source": source_digest(), "command": list(stage.command[1:]), "tests": digests}


def write_report(stages: Iterable[Stage], outcomes: dict[str, Outcome], folder: Path) -> str:
    """Write ``RESULTS.md``, pictures and ``outcomes.json`` from what there is.

    Returns:
        the Markdown.
    """
    results: dict[str, list[dict[str, Any]]] = {}
    rows, tables = [], []
    for stage in stages:
        outcome = outcomes.get(stage.name, Outcome("not run"))
        rows.append([stage.name, outcome.status, f"{outcome.seconds:.0f}", outcome.reason.replace("|", "/")])
        found = read(folder / f"{stage.name}.json") or {}
        partly = "" if found.get("complete") else " (incomplete)"
        if "runs" in found:
            results.setdefault(found["model"]["name"], []).append(found)
            tables += ["", f"## {stage.name}{partly}", "", markdown(found)]
        elif "checks" in found:
            tables += ["", f"## {stage.name}{partly}", "", smoke_markdown(found)]
        elif "decode" in found:
            tables += ["", f"## {stage.name}{partly}", "", *kernel_markdown(found)]
    pictures: list[Path] = []
    for model, of_model in results.items():
        drawn = folder / model if len(results) > 1 else folder
        drawn.mkdir(exist_ok=True)
        pictures += plot(of_model, drawn)
    images = [f"![{path.stem}]({path.relative_to(folder).as_posix()})" for path in pictures]
    outcome_table = markdown_table(["stage", "outcome", "seconds", ""], rows, left=4)
    text = "\n".join(["# gpu-check", "", outcome_table, *tables, "", *images]) + "\n"
    (folder / "RESULTS.md").write_text(text)
    statuses = {name: outcome._asdict() for name, outcome in outcomes.items()}
    save_json(folder / "outcomes.json", statuses)
    return text


def kernel_markdown(found: dict[str, Any]) -> list[str]:
    """The tables of the kernel bench."""
    lines = [markdown_table(header, rows, left=0) for header, rows in kernel_bench.tables(found)]
    for record in found.get("prefill", []):
        if "failure" not in record:
            parts = ", ".join(f"{name[:60]} {ms:.3f}" for name, ms in record["parts_ms"].items())
            lines += [f"{record['policy']}, {record['prompt']} tokens, ms a layer: {parts}", ""]
    return lines


def smoke_markdown(found: dict[str, Any]) -> str:
    """The table of the smoke check."""
    return markdown_table(["check", "error", "allowed", "right"], smoke.rows(found))


def send(folder: Path, out: Path) -> None:
    """Copy the report and an archive of all results, without compiled code, to ``$OUT``."""
    shutil.copy(folder / "RESULTS.md", out / "RESULTS.md")
    with tarfile.open(out / "gpu-check.tar.gz", "w:gz") as archive:
        archive.add(folder, folder.name, filter=lambda item: None if f"/{COMPILED}" in item.name else item)


def send_compiled(folder: Path, out: Path) -> None:
    """Copy the compile caches to ``$OUT``, as an archive in parts that are small enough to copy."""
    if not (folder / COMPILED).is_dir():
        return
    command = ["tar", "-czf", "-", "-C", str(folder.parent), f"{folder.name}/{COMPILED}"]
    packed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    parts = -(-len(packed) // PART_BYTES)
    if parts > MOST_PARTS:
        print(f"gpu-check: {len(packed) / 2**20:.0f} MiB of compiled code stay here, too much to send")
        return
    for part in range(parts):
        (out / f"{COMPILED}.tar.gz.{part}").write_bytes(packed[part * PART_BYTES : (part + 1) * PART_BYTES])


def device_name() -> str:
    """The GPU's name as part of a folder's: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 when nothing failed, 1 otherwise or without a CUDA device."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=str(__doc__).splitlines()[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for everything")
    parser.add_argument("--only", default="", help="names of stages, separated by commas")
    given = parser.parse_args(arguments)
    names = [stage.name for stage in STAGES]
    chosen = [name.strip() for name in given.only.split(",") if name.strip()] or names
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        parser.error(f"--only {unknown[0]}: must be one of {', '.join(names)}")
    if not torch.cuda.is_available():
        print("gpu-check: this machine has no CUDA device, so there is nothing to check", file=sys.stderr)
        return 1
    folder = ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-{device_name()}"
    folder.mkdir(parents=True, exist_ok=True)
    out = os.environ.get("OUT")

    def report(outcomes: dict[str, Outcome]) -> None:
        write_report(STAGES, outcomes, folder)
        if out:
            send(folder, Path(out))

    stages = [stage for stage in STAGES if stage.name in chosen]
    outcomes = run_stages(stages, folder, given.seconds, report)
    if out:
        send_compiled(folder, Path(out))
    print(write_report(STAGES, outcomes, folder))
    print(f"gpu-check: results in {folder}")
    if out:
        print(f"gpu-check: to go on elsewhere, in {out}: tar xzf gpu-check.tar.gz -C benchmarks/results, and the same")
        print(f"gpu-check: with {COMPILED}: cat {COMPILED}.tar.gz.* | tar xz -C benchmarks/results")
    return int(any(outcome.status in ("failed", "out of time") for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())

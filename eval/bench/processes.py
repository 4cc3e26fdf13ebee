"""What only a fresh process shows: seconds of a start, and the most memory that a prompt takes.

``kvpass bench --start`` and ``kvpass bench --prefill-memory``. A process that has compiled once is warm, and the most
memory it ever had hides what came later, so every figure is taken in a process of its own.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import resource
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch._inductor.utils import fresh_cache

from kvpass.compiler.blocks import tokens_of
from kvpass.eval.bench.base import Benchmark, Result, named
from kvpass.eval.bench.measure import Meter, first_line
from kvpass.eval.bench.settings import BenchSettings, build, find_model
from kvpass.eval.bench.systems import Kvpass
from kvpass.eval.environment import conditions
from kvpass.eval.options import numbers
from kvpass.eval.tables import Tables

START_TOKENS = 256
"""Prompt of a start: so short that what it takes to run does not matter beside compilation."""
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MIB = 2**20

START_LEGEND = (
    f"First prompt of {START_TOKENS} tokens and first decode step, from after kvpass.compile to the logits. cold: "
    "Inductor's cache empty; warm: a second process with what the first one left. compile: the report's seconds of "
    "passes and Inductor. capture: the first calls less compile and less the same calls again. parts: compiled for "
    "prefill + decode. Batches: in one process, one after another, first cache empty."
)
MEMORY_LEGEND = (
    "peak: most bytes held at once beyond those before the prompt, in a process of its own that a short prompt has "
    "warmed up: resident on the CPU, allocated on CUDA. needed: residual stream, K and V of one layer, cache, and what "
    "the MLP (2 x intermediate_size) holds of one block. whole: the prompt as one block."
)

_R = TypeVar("_R")


def in_new_process(function: Callable[..., _R], *args: Any) -> _R:
    """Call a function of a module in a fresh Python process, which ends with it; the environment is this one's.

    Raises:
        BrokenProcessPool: the process was killed, mostly for want of memory.
    """
    spawn = multiprocessing.get_context("spawn")
    with (
        mock.patch.dict(os.environ, KVPASS_PROGRESS="0"),  # the bar here says what runs
        ProcessPoolExecutor(1, mp_context=spawn) as pool,
    ):
        return pool.submit(function, *args).result()


# -- in the new process -----------------------------------------------------------------------------------------------


def _system(settings: BenchSettings, layers: int | None = None, **options: Any) -> Kvpass:
    model = build(find_model(settings.model, layers), settings.seed, settings.device, settings.torch_dtype)
    return settings.system(model, settings.specs[0], **options)


@torch.no_grad()
def measure_batches(settings: BenchSettings, layers: int, batches: Sequence[int]) -> list[Result]:
    """Prefill and decode a token of a short prompt, twice, for each number of rows in turn.

    Returns:
        for each, seconds of prefill and step of the first time and of the second (``first_s``, ``again_s``), and every
        graph compiled so far, of the report (``compiled``).
    """
    system, meter = _system(settings, layers), Meter(torch.device(settings.device))
    found = []
    for rows in batches:
        ids = settings.ids(rows, START_TOKENS).to(settings.device)
        taken = [[run.prefill, *run.steps] for run in (system.run(meter, ids, 1) for _ in range(2))]
        compiled = [
            {"phase": record.phase, "rows": record.batch, "parts": record.parts, "seconds": record.seconds}
            for record in system.model.report().compiled
        ]
        found.append({"rows": rows, "first_s": taken[0], "again_s": taken[1], "compiled": compiled})
    return found


@torch.no_grad()
def measure_memory(settings: BenchSettings, tokens: int, rows: int, whole: bool) -> Result:
    """Prefill a prompt of so many tokens with graphs that a short one compiled, and see what memory it took.

    Args:
        whole: the prompt as one block, not in those of the default size.
    """
    system = _system(settings, prefill_block=tokens if whole else "auto")
    device = torch.device(settings.device)
    meter = Meter(device)
    system.prefill(settings.ids(rows, min(tokens, START_TOKENS)).to(device))
    ids, marks = settings.ids(rows, tokens).to(device), []

    def run() -> None:
        marks.append(meter.mark())
        system.prefill(ids)
        marks.append(meter.mark())

    peak = _peak_growth(run, meter)
    report, config = system.model.report(), system.model.config.get_text_config()
    size, block = system.model.dtype.itemsize, min(tokens, tokens_of(system.model.prefill_block, rows, device))
    return {
        "tokens": tokens,
        "rows": rows,
        "block": block,
        "prefill_s": meter.seconds(marks)[0],
        "peak_bytes": peak,
        "needed_bytes": {
            "residual stream": rows * tokens * config.hidden_size * size,
            "K and V of a layer": report.bytes_full // len(report.layer_ids),
            "cache": report.prompt.nbytes,
            "block": rows * block * 2 * config.intermediate_size * size,
        },
    }


def _peak_growth(run: Callable[[], None], meter: Meter) -> int:
    """The most bytes held at once while it runs, beyond those held before: allocated on CUDA, resident on the CPU."""
    meter.release()
    if meter.is_cuda:
        before = meter.allocated()
        meter.reset_peak()
        run()
        return (meter.peak() or 0) - before
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator kept of the short prompt would be taken again unseen
    _CLEAR_REFS.write_text("5")  # the most resident memory so far becomes that of now
    before = _most_resident()
    run()
    return _most_resident() - before


def _most_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- in the process of the command ------------------------------------------------------------------------------------


@dataclass
class Start(Benchmark):
    """Seconds of a start by depth, with Inductor's cache empty and filled, and of the first call of each batch size.

    Args:
        settings: of them model, device, dtype, budget, window, the first policy, backend, seed, repeats (of every
            start), batches and start, the depths, are used; batches have the first one.

    Raises:
        ValueError: a depth below 1, or a model whose config does not take it.
    """

    name = "start"

    def __post_init__(self) -> None:
        self.layers = numbers("start", self.settings.start)
        if not self.layers or min(self.layers) < 1:
            raise ValueError(f"start={self.settings.start}: must be one or more numbers of layers >= 1")
        for depth in self.layers:
            find_model(self.settings.model, depth)

    @property
    def steps(self) -> int:
        return 2 * self.settings.repeats * len(self.layers) + 1

    def measure(self, result: Result) -> Iterator[str]:
        """Add to ``start`` one record a repeat for each depth, cold and warm; then ``batches``."""
        settings, batches = self.settings, self.settings.rows
        starts: list[Result] = [{"layers": depth, "cold": [], "warm": []} for depth in self.layers]
        result |= {"policy": str(settings.specs[0]), "repeats": settings.repeats, "start": starts}
        result["batches"] = {"layers": self.layers[0], "runs": []}
        for _ in range(settings.repeats):
            for start in starts:
                with fresh_cache():
                    for state in ("cold", "warm"):
                        yield f"{start['layers']} layers, {state}"
                        start[state] += in_new_process(measure_batches, settings, start["layers"], (1,))
        yield f"rows {', '.join(map(str, batches))}"
        with fresh_cache():
            result["batches"]["runs"] = in_new_process(measure_batches, settings, self.layers[0], batches)

    @staticmethod
    def shown(result: Result) -> Tables:
        """A result, with what its columns mean."""
        header = ["layers", "parts", "cold s", "capture", "compile", "warm s", "capture", "compile"]
        rows = []
        for start in result["start"]:
            if start["warm"]:
                parts = " + ".join(str(record["parts"]) for record in start["cold"][0]["compiled"])
                rows.append([str(start["layers"]), parts, *_seconds(start["cold"]), *_seconds(start["warm"])])
        title = named(result, result["policy"])
        tables = [(f"{title}: seconds of a start", header, rows)]
        if runs := result["batches"]["runs"]:
            cells = [
                [
                    str(run["rows"]),
                    *(f"{sum(run[name]):.2f}" for name in ("first_s", "again_s")),
                    str(sum(record["parts"] for record in run["compiled"])),
                ]
                for run in runs
            ]
            title += f", {result['batches']['layers']} layers: batch sizes in one process"
            tables.append((title, ["rows", "first calls s", "again s", "parts so far"], cells))
        said = f"{conditions(result)} {result['repeats']} starts of each, medians."
        return Tables(tables, (said, START_LEGEND))


@dataclass
class PrefillMemory(Benchmark):
    """The most memory that prompts of several lengths take beside the model, in blocks and as a whole.

    Args:
        settings: of them model, device, dtype, contexts, batches, budget, window, the first policy, backend and seed
            are used.

    Raises:
        ValueError: the model's config names no size of an MLP, or the CPU's memory cannot be read here.
    """

    name = "prefill_memory"

    def __post_init__(self) -> None:
        config: Any = self.settings.bench_model.config.get_text_config()
        if not hasattr(config, "intermediate_size"):
            raise ValueError(
                f"model={self.settings.model!r}: what a block needs is computed from intermediate_size, which the "
                "config does not have; take a model that has it, such as 'wide-mlp'"
            )
        if self.settings.device == "cpu" and not _CLEAR_REFS.exists():
            raise ValueError(
                f"device='cpu': the peak of resident memory is reset through {_CLEAR_REFS}, which Linux has"
            )

    @property
    def steps(self) -> int:
        return 2 * len(self.settings.rows) * len(self.settings.prompts)

    def measure(self, result: Result) -> Iterator[str]:
        """Add to ``prefill_memory`` a record for every length and batch, in blocks and whole."""
        settings, records = self.settings, list[Result]()
        result |= {"policy": str(settings.specs[0]), "prefill_memory": records}
        for rows, tokens, whole in itertools.product(settings.rows, settings.prompts, (False, True)):
            yield f"{tokens} x {rows}, {'whole' if whole else 'in blocks'}"
            try:
                found = in_new_process(measure_memory, settings, tokens, rows, whole)
            except (BrokenProcessPool, torch.OutOfMemoryError) as error:
                killed = "its process was killed, mostly for want of memory"
                said = killed if isinstance(error, BrokenProcessPool) else first_line(error)
                found = {"tokens": tokens, "rows": rows, "failure": said}
            records.append({"failure": None, "whole": whole, **found})

    @staticmethod
    def shown(result: Result) -> Tables:
        """A result, with what its columns mean."""
        header = ["prompt", "rows", "way", "peak MiB", "needed MiB", "peak / needed", "prefill s"]
        rows = []
        for found in result["prefill_memory"]:
            cells, way = [str(found["tokens"]), str(found["rows"])], "whole" if found["whole"] else "blocks"
            if found["failure"]:
                rows.append([*cells, way, "failed", "-", "-", "-"])
                continue
            way = way if found["whole"] else f"blocks of {found['block']}"
            peak, needed = found["peak_bytes"] / _MIB, sum(found["needed_bytes"].values()) / _MIB
            figures = [f"{peak:.0f}", f"{needed:.0f}", f"{peak / needed:.2f}", f"{found['prefill_s']:.2f}"]
            rows.append([*cells, way, *figures])
        title = f"{named(result, result['policy'])}: memory of a prompt beside the model"
        return Tables([(title, header, rows)], (conditions(result), MEMORY_LEGEND))


def _seconds(starts: Sequence[Result]) -> list[str]:
    """Medians: of all, of capturing, of compiling."""
    totals = [sum(start["first_s"]) for start in starts]
    compiling = [sum(record["seconds"] for record in start["compiled"]) for start in starts]
    capturing = [t - c - sum(start["again_s"]) for t, c, start in zip(totals, compiling, starts, strict=True)]
    return [f"{statistics.median(values):.1f}" for values in (totals, capturing, compiling)]

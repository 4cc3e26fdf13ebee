"""Speed and memory of a model that several processes share: ``kvpass bench --tensor-parallel N``."""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import multiprocessing
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from kvpass.adapt.tensor_parallel import check_heads
from kvpass.eval.bench.base import Benchmark, Result, named
from kvpass.eval.bench.measure import Meter, spread
from kvpass.eval.bench.settings import WARM_UP_STEPS, BenchSettings, build
from kvpass.eval.environment import conditions
from kvpass.eval.policy_spec import PolicySpec
from kvpass.eval.tables import Tables
from kvpass.ranks import Ranks

SHARED_LEGEND = (
    "Medians; of each repeat the slowest process. MiB: storages of each process's cache at the end. fullest: entries "
    "of the process that holds most of a layer after the prompt, over the average; mean of the layers and (most). "
    "tokens: whether the greedy continuation is that of one process. Processes on a CPU share its cores."
)


# -- in each of the processes -----------------------------------------------------------------------------------------


@torch.no_grad()
def measure_one(
    rank: int, processes: int, settings: BenchSettings, spec: PolicySpec, case: tuple[int, int], at: str
) -> None:
    """Prefill and decode as one of several processes; what was measured is written to ``<rank>.json``.

    Args:
        case: tokens of the prompt, and rows. at: a folder with the model in ``model``, for this measurement alone.
    """
    logging.disable_progress_bar()
    torch.set_num_threads(max(torch.get_num_threads() // processes, 1))
    given: dict[str, Any] = {}
    if processes > 1:
        from transformers.distributed import DistributedConfig

        if settings.device == "cuda":
            torch.cuda.set_device(rank)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
        backend = "nccl" if settings.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{at}/met", rank=rank, world_size=processes)
        given["distributed_config"] = DistributedConfig(tp_size=processes)
    model = AutoModelForCausalLM.from_pretrained(f"{at}/model", dtype=settings.torch_dtype, **given).eval()
    if not given:
        model.to(settings.device)
    system, meter, (tokens, rows) = settings.system(model, spec), Meter(model.device), case
    ids, settling = settings.ids(rows, tokens).to(model.device), WARM_UP_STEPS if meter.is_cuda else 0
    found: Result = {"prefill_s": [], "steps_s": []}
    for repeat in range(1 + settings.repeats):  # the first one compiles
        run = system.run(meter, ids, settling + settings.new_tokens)
        if repeat > 0:
            found["prefill_s"].append(run.prefill)
            found["steps_s"] += run.steps[settling:]
    report = system.model.report()
    found |= {"cache_bytes": run.cache.nbytes, "tokens": run.tokens.tolist()}
    found |= {"imbalance": report.imbalance.amax(0).tolist(), "kept_bytes": int(report.bytes_kept.sum())}
    Path(at, f"{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


# -- in the process of the command ------------------------------------------------------------------------------------


@dataclass
class SharedModel(Benchmark):
    """Prefill and decode of a model that several processes share, beside one process.

    The processes are started here, anew for every measurement; the weights, which are random, are written to a
    temporary folder for them.

    Args:
        settings: of them model, device, dtype, contexts, batches, budget, window, policies, new_tokens, repeats,
            backend, seed and whether ``full`` is measured are used; ``tensor_parallel`` processes share the model.

    Raises:
        ValueError: less than two processes, more than there are devices, or heads that they cannot share alike.
    """

    name = "tensor_parallel"

    def __post_init__(self) -> None:
        processes = self.settings.tensor_parallel
        if processes < 2:
            raise ValueError(f"tensor_parallel={processes}: must be at least 2 processes")
        if self.settings.device == "cuda" and torch.cuda.device_count() < processes:
            raise ValueError(f"tensor_parallel={processes}: this machine has {torch.cuda.device_count()} devices")
        check_heads(build(self.settings.bench_model, 0, "meta"), Ranks("", 0, processes))

    @property
    def specs(self) -> tuple[PolicySpec, ...]:
        full = (PolicySpec("full"),) if "full" in self.settings.baselines else ()
        return tuple(dict.fromkeys((*self.settings.specs, *full)))

    @property
    def steps(self) -> int:
        return 2 * len(self.settings.rows) * len(self.settings.prompts) * len(self.specs)

    def measure(self, result: Result) -> Iterator[str]:
        """Add to ``tensor_parallel`` a record for every length, batch, policy and number of processes.

        Raises:
            torch.multiprocessing.ProcessRaisedException: a process raised; the others were ended.
        """
        settings, several = self.settings, self.settings.tensor_parallel
        result |= {"new_tokens": settings.new_tokens, "repeats": settings.repeats, "processes": several}
        result["tensor_parallel"] = records = []
        logging.disable_progress_bar()
        with TemporaryDirectory() as folder:
            build(settings.bench_model, settings.seed, "cpu", settings.torch_dtype).save_pretrained(f"{folder}/model")
            for rows, tokens, spec in itertools.product(settings.rows, settings.prompts, self.specs):
                alone: list[Result] = []
                for processes in (1, several):
                    yield f"{tokens} x {rows}, {spec}, processes: {processes}"
                    found = _measured(processes, settings, spec, (tokens, rows), folder)
                    alone = alone or found
                    records.append(_record(spec, (tokens, rows), found, alone[0]["tokens"]))

    @staticmethod
    def shown(result: Result) -> Tables:
        """A result, with what its columns mean."""
        header = ["system", "processes", "prefill s", "decode ms", "MiB of each", "fullest", "tokens"]
        tables: dict[str, list[list[str]]] = {}
        for found in result["tensor_parallel"]:
            title = (
                f"{named(result)}, budget {result['budget']}: prompt {found['tokens']} tokens, batch {found['rows']}"
            )
            sizes = sorted({f"{size / 2**20:.2f}" for size in found["cache_bytes"]}, key=float)
            fullest = found["imbalance"]
            tables.setdefault(title, []).append(
                [
                    found["policy"],
                    str(found["processes"]),
                    f"{found['prefill_s']['median']:.3g}",
                    f"{found['decode_ms']['median']:.2f}",
                    " to ".join(sizes[:: max(len(sizes) - 1, 1)]),
                    f"{statistics.mean(fullest):.2f} ({max(fullest):.2f})" if found["processes"] > 1 else "-",
                    "same" if found["same_tokens"] else "other",
                ]
            )
        said = f"{conditions(result)} {result['repeats']} repeats x {result['new_tokens']} decode steps."
        return Tables([(title, header, rows) for title, rows in tables.items()], (said, SHARED_LEGEND))


def _measured(
    processes: int, settings: BenchSettings, spec: PolicySpec, case: tuple[int, int], folder: str
) -> list[Result]:
    """What each process measured, in the order of their ranks."""
    with TemporaryDirectory(dir=folder) as at, mock.patch.dict(os.environ, KVPASS_PROGRESS="0"):
        Path(at, "model").symlink_to(Path(folder, "model"))
        multiprocessing.spawn(measure_one, (processes, settings, spec, case, at), processes, daemon=True)
        return [json.loads(Path(at, f"{rank}.json").read_text()) for rank in range(processes)]


def _record(spec: PolicySpec, case: tuple[int, int], found: list[Result], tokens: list[list[int]]) -> Result:
    """The figures of one measurement.

    Args:
        tokens: the continuation of one process.
    """

    def slowest(name: str) -> list[float]:
        return [max(times) for times in zip(*(x[name] for x in found), strict=True)]

    return {
        "policy": str(spec),
        "processes": len(found),
        "tokens": case[0],
        "rows": case[1],
        "prefill_s": spread(slowest("prefill_s")),
        "decode_ms": spread([1e3 * seconds for seconds in slowest("steps_s")]),
        "cache_bytes": [x["cache_bytes"] for x in found],
        "kept_bytes": found[0]["kept_bytes"],
        "imbalance": found[0]["imbalance"],
        "same_tokens": all(x["tokens"] == tokens for x in found),
    }

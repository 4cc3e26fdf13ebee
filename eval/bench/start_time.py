"""Compile seconds of a first start and of the next one: ``python -m kvpass.eval.bench.start_time``.

What Inductor made stays on disk (``TORCHINDUCTOR_CACHE_DIR``). Each start is a process of its own; the first one begins
with an empty folder, the second one with what the first one left there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters

import kvpass
from kvpass.eval.models import build, find_model

_CHILD = (
    "import sys; from kvpass.eval.bench.start_time import _report; _report(sys.argv[1], int(sys.argv[2]), sys.argv[3])"
)


@dataclass(frozen=True)
class Start:
    """One start.

    Attributes:
        seconds: what the first prefill and the first decode step took more than the second ones.
        compiled, reused: graphs that Inductor compiled, and that it found on disk.
    """

    seconds: float
    compiled: int
    reused: int


def measure_starts(model: str, tokens: int, policy: str) -> tuple[Start, Start]:
    """The first start and the next one.

    Args:
        model: a name of the bench, with random weights, on the CPU. tokens: of the prompt.

    Raises:
        subprocess.CalledProcessError: a start failed; its errors are on standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-c", _CHILD, model, str(tokens), policy]
        said = [
            subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
            for _ in range(2)
        ]
    cold, warm = (Start(**json.loads(text.splitlines()[-1])) for text in said)
    return cold, warm


def _report(model: str, tokens: int, policy: str) -> None:
    """One start, in this process; its last line is the :class:`Start` as JSON."""
    fast = kvpass.compile(build(find_model(model), seed=0), policy=policy, budget=0.25)
    ids = torch.zeros(1, tokens, dtype=torch.int64)

    def once() -> float:
        begin = time.perf_counter()
        out = fast(ids, logits_to_keep=1)
        fast(ids[:, :1], past_key_values=out.past_key_values)
        return time.perf_counter() - begin

    first, second = once(), once()
    found = counters["inductor"]
    print(json.dumps(asdict(Start(first - second, found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]))))


def main(
    model: Annotated[str, typer.Option(help="A model of the bench.")] = "small-mha",
    tokens: Annotated[int, typer.Option(min=64, help="Of the prompt.")] = 1024,
    policy: Annotated[str, typer.Option(help="A policy of kvpass.")] = "lava",
) -> None:
    """Print a line for the first start and one for the next."""
    table = Table("start", "compile s", "graphs compiled", "graphs from disk", title=f"{model}, {policy}")
    for name, start in zip(("first", "next"), measure_starts(model, tokens, policy), strict=True):
        table.add_row(name, f"{start.seconds:.1f}", str(start.compiled), str(start.reused))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

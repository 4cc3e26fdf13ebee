"""What a compressed cache saves: prefill, decode, cache bytes and compile time beside transformers' own caches.

Every system prefills the same random prompt and decodes greedily, one token a forward, batch 1, fp32 on the CPU. Each
repeat goes round all systems, so that a drifting machine slows all of them alike. Weights are random: this measures
speed, not quality.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from torch._inductor.utils import fresh_cache
from transformers import DynamicCache, PreTrainedModel

import kvpass
from kvpass.api import resolve_budget
from kvpass.backend import Compiler
from kvpass.config import Budget, Geometry
from kvpass.eval.models import BenchModel, build, find_model
from kvpass.eval.systems import HfEager, HfStatic, Kvpass, System
from kvpass.policies import resolve

_WARM_UP_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """One run of the bench.

    Attributes:
        model: ``tiny``, ``small``, ``small-mha`` or the path of a config.json.
        context: prompt tokens; None takes the model's own.
        budget, window: as in ``kvpass.compile``.
        policies: names of kvpass policies; ``full`` is always measured too.
        new_tokens: decode steps of one repeat. repeats: timed rounds over all systems.
        backend: of every compiled system, ``"inductor"`` or ``"eager"``.
        seed: of weights and prompt.

    Raises:
        ValueError: a number out of range, an unknown model or policy.
    """

    model: str = "small-mha"
    context: int | None = None
    budget: int | float | str = 256
    window: int = 32
    policies: tuple[str, ...] = ("lava", "snapkv")
    new_tokens: int = 32
    repeats: int = 3
    backend: Compiler = "inductor"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("window", "new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be >= 1")
        for name in self.policies:
            policy = resolve(name, window=self.window)
            if policy.needs_budget:
                resolve_budget(policy, self.budget)
        longest = self.bench_model.config.max_position_embeddings - self.new_tokens
        if not self.window < self.prompt_tokens <= longest:
            raise ValueError(
                f"context={self.prompt_tokens}: must be above window={self.window} and at most {longest}, "
                f"the positions of the model less {self.new_tokens} new tokens"
            )

    @property
    def bench_model(self) -> BenchModel:
        return find_model(self.model)

    @property
    def prompt_tokens(self) -> int:
        return self.bench_model.context if self.context is None else self.context


@dataclass
class Measurement:
    """Timings of one system.

    Attributes:
        prefill: seconds, one a repeat. steps: seconds of each decode step, one list a repeat.
        warm_up: seconds of the first prefill and the first decode steps, compilation included.
        tokens: greedy continuation in the last repeat. cache_bytes: at its end.
    """

    system: System
    prefill: list[float] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)
    warm_up: float = 0.0
    tokens: list[int] = field(default_factory=list)
    cache_bytes: int = 0

    @property
    def decode_ms(self) -> list[float]:
        return [1e3 * seconds for repeat in self.steps for seconds in repeat]

    @property
    def compile_seconds(self) -> float | None:
        """First run minus a median run, with Inductor's disk cache empty; None for what is not compiled."""
        if not self.system.compiled:
            return None
        usual = _spread(self.prefill)["median"] + _WARM_UP_STEPS * _spread(self.decode_ms)["median"] / 1e3
        return max(0.0, self.warm_up - usual)


class Bench:
    """A checked run of the bench; ``run`` measures.

    Raises:
        ValueError: the budget cannot hold the window and one more entry of the prompt.
    """

    def __init__(self, settings: BenchSettings) -> None:
        self.settings = settings
        self.model = build(settings.bench_model, settings.seed)
        self.geometry = _geometry(self.model)
        budget = Budget.parse(settings.budget)
        self.budget_entries = budget.check(settings.prompt_tokens, settings.window, self.geometry)

    def run(self, console: Console) -> dict[str, Any]:
        """Measure all systems, showing progress on the console.

        Returns:
            what ``--json`` writes: machine, versions, model, settings and one record a system.
        """
        settings = self.settings
        generator = torch.Generator().manual_seed(settings.seed)
        ids = torch.randint(self.model.config.vocab_size, (1, settings.prompt_tokens), generator=generator)
        makers = self._makers()
        measured: list[Measurement] = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with torch.no_grad(), Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=len(makers) * (1 + settings.repeats))
            for make in makers:
                measurement = Measurement(make())
                measured.append(measurement)
                progress.update(task, description=f"{measurement.system.name}: first run")
                with fresh_cache():
                    seconds, steps = self._once(measurement, ids, _WARM_UP_STEPS)
                measurement.warm_up = seconds + sum(steps)
                progress.advance(task)
            for repeat in range(settings.repeats):
                for measurement in measured:
                    progress.update(task, description=f"{measurement.system.name}: repeat {repeat + 1}")
                    seconds, steps = self._once(measurement, ids, settings.new_tokens)
                    measurement.prefill.append(seconds)
                    measurement.steps.append(steps)
                    progress.advance(task)
        return self._result(measured)

    def _makers(self) -> list[Callable[[], System]]:
        settings = self.settings
        slots = settings.prompt_tokens + max(settings.new_tokens, _WARM_UP_STEPS)
        kvpass_system = partial(
            Kvpass, self.model, budget=settings.budget, window=settings.window, backend=settings.backend
        )
        return [
            partial(HfEager, self.model),
            partial(HfStatic, self.model, slots, settings.backend),
            *(partial(kvpass_system, policy=policy) for policy in dict.fromkeys((*settings.policies, "full"))),
        ]

    @staticmethod
    def _once(measurement: Measurement, ids: Tensor, new_tokens: int) -> tuple[float, list[float]]:
        """Prefill and decode; returns seconds of the prefill and of each step."""
        system = measurement.system
        begin = time.perf_counter()
        logits, cache = system.prefill(ids)
        prefill = time.perf_counter() - begin
        cache = system.decoding_cache(cache)
        steps = []
        token = logits[:, -1].argmax(-1, keepdim=True)
        measurement.tokens = [int(token)]
        for position in range(ids.shape[1], ids.shape[1] + new_tokens):
            begin = time.perf_counter()
            logits = system.step(token, position, cache)
            steps.append(time.perf_counter() - begin)
            token = logits[:, -1].argmax(-1, keepdim=True)
            measurement.tokens.append(int(token))
        measurement.cache_bytes = system.nbytes(cache)
        return prefill, steps

    def _result(self, measured: list[Measurement]) -> dict[str, Any]:
        settings, g = self.settings, self.geometry
        config = self.model.config
        entries = self.budget_entries
        records = [self._record(measurement, measured) for measurement in measured]
        return {
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "machine": {
                "device": "cpu",
                "cpu": _cpu_name(),
                "capability": torch.backends.cpu.get_cpu_capability(),
                "threads": torch.get_num_threads(),
            },
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "kvpass": kvpass.__version__,
            },
            "model": {
                "name": settings.model,
                "type": config.model_type,
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "parameters": self.model.num_parameters(),
                "hidden_size": config.hidden_size,
                "query_heads": config.num_attention_heads,
                "vocabulary": config.vocab_size,
                **asdict(g),
            },
            "batch": 1,
            "context": settings.prompt_tokens,
            "new_tokens": settings.new_tokens,
            "repeats": settings.repeats,
            "seed": settings.seed,
            "backend": settings.backend,
            "window": settings.window,
            "budget": {
                "given": settings.budget,
                "entries": entries,
                "bytes": entries * g.layers * g.kv_heads * g.entry_bytes,
            },
            "systems": records,
        }

    @staticmethod
    def _record(measurement: Measurement, measured: list[Measurement]) -> dict[str, Any]:
        named = {other.system.name: other for other in measured}

        def prefill(name: str) -> float:
            return _spread(named[name].prefill)["median"]

        def decode(name: str) -> float:
            return _spread(named[name].decode_ms)["median"]

        name = measurement.system.name
        return {
            "name": name,
            "prefill_s": _spread(measurement.prefill) | {"all": measurement.prefill},
            "decode_ms": _spread(measurement.decode_ms) | {"all": [[1e3 * s for s in r] for r in measurement.steps]},
            "cache_bytes": measurement.cache_bytes,
            "compile_s": measurement.compile_seconds,
            "decode_speedup": {other: decode(other) / decode(name) for other in ("hf-eager", "hf-static")},
            "prefill_ratio": {other: prefill(name) / prefill(other) for other in ("hf-static", "full")},
            "same_tokens_as_hf_eager": measurement.tokens == named["hf-eager"].tokens,
        }


def table(result: dict[str, Any]) -> Table:
    """The result as users read it: medians, quartiles in parentheses."""
    model, machine, budget, versions = (result[key] for key in ("model", "machine", "budget", "versions"))
    made = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        title=f"{model['name']}: prompt {result['context']} tokens, batch 1, {model['dtype']}; "
        f"budget {budget['entries']} entries per KV head per layer = {budget['bytes'] / 2**20:.2f} MiB",
        caption=(
            f"{machine['cpu']}, {machine['threads']} threads, {machine['capability']}; torch {versions['torch']}, "
            f"transformers {versions['transformers']}. Medians and quartiles: {result['repeats']} interleaved repeats "
            f"x {result['new_tokens']} decode steps. x full: prefill time over that of the compiled full prefill; "
            "over: decode speed over that system; compile: first run minus median run, Inductor's cache empty."
        ),
    )
    made.add_column("system", no_wrap=True)
    for column in (
        "prefill\ns",
        "\nx full",
        "decode\nms/token",
        "over\nhf-eager",
        "over\nhf-static",
        "cache\nMiB",
        "compile\ns",
    ):
        made.add_column(column, justify="right", no_wrap=True)
    for record in result["systems"]:
        prefill, decode, speedup = record["prefill_s"], record["decode_ms"], record["decode_speedup"]
        made.add_row(
            record["name"],
            f"{prefill['median']:.3g}\n{prefill['q1']:.3g}-{prefill['q3']:.3g}",
            f"{record['prefill_ratio']['full']:.2f}",
            f"{decode['median']:.2f}\n{decode['q1']:.1f}-{decode['q3']:.1f}",
            f"{speedup['hf-eager']:.1f}x",
            f"{speedup['hf-static']:.1f}x",
            f"{record['cache_bytes'] / 2**20:.2f}",
            "-" if record["compile_s"] is None else f"{record['compile_s']:.1f}",
        )
    return made


def _spread(values: list[float]) -> dict[str, float]:
    low, q1, median, q3, high = (
        torch.tensor(values, dtype=torch.float64)
        .quantile(torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64))
        .tolist()
    )
    return {"median": median, "q1": q1, "q3": q3, "min": low, "max": high}


def _geometry(model: PreTrainedModel) -> Geometry:
    """Read off a cache that holds one token."""
    cache: Any = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache)
    keys, values = cache.layers[0].keys, cache.layers[0].values
    return Geometry(
        layers=len(cache.layers),
        kv_heads=keys.shape[1],
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
        itemsize=keys.element_size(),
    )


def _cpu_name() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

"""Compare prefill, decode, memory and compile time of caches of equal bytes.

Every system prefills the same random prompt and decodes greedily, one token a forward. Each repeat goes round all
systems, so that a drifting machine slows all of them alike, and a system's cache is gone before the next one's turn.
The first repeat of a system follows its first run, so that its figures are there before the next system compiles.
Prompts are random tokens: this measures speed, not quality.
"""

from __future__ import annotations

import gc
import itertools
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache
from transformers import DynamicCache, PreTrainedModel

from kvpass.config import Budget, Geometry
from kvpass.eval.bench.measure import Meter, PrefillProfile, ceilings, first_line, spread, weight_bytes
from kvpass.eval.bench.settings import BASELINES, WARM_UP_STEPS, WARM_UP_TOKENS, BenchSettings, build
from kvpass.eval.bench.systems import HfEager, HfStatic, Kvpass, System, entries_of
from kvpass.eval.environment import command_line, machine, versions
from kvpass.eval.options import BenchOptions
from kvpass.eval.policy_spec import FULL, PolicySpec, with_format
from kvpass.progress import progress_bar, progress_console
from kvpass.transformers_compat import CACHE

Result = dict[str, Any]

_RECORDED = "device backend seed new_tokens repeats shared_prompt warm_cache".split()
"""Options that a result names."""


@dataclass
class Measurement:
    """What one system does with one context and batch; None where it is not measured."""

    system: System
    options: BenchOptions
    ids: Tensor  # the prompt, int64 [B, N], or [1, N] for all of ``batch`` rows
    batch: int
    prefill: list[float] = field(default_factory=list)  # seconds, one a repeat
    first_steps: list[list[float]] = field(default_factory=list)  # seconds of the decode steps before the timed ones
    steps: list[list[float]] = field(default_factory=list)  # seconds of each timed decode step, a list a repeat
    warm_up: float | None = None  # seconds of the first prefill and decode steps, compilation included
    generate: float | None = None  # seconds a token of ``generate``, on the cache of the last repeat
    cache_bytes: int = 0  # storages of the cache at its end
    attended_bytes: int = 0  # of the entries the last step read
    peak_bytes: int | None = None  # most that was allocated at once, weights included; of what ran for this batch
    profile: PrefillProfile | None = None  # of one prefill, where kvpass compiled it
    failure: str | None = None  # why there are no figures

    def __post_init__(self) -> None:
        self.meter = Meter(self.ids.device)

    @property
    def decode_ms(self) -> list[float]:
        return [1e3 * seconds for repeat in self.steps for seconds in repeat]

    @property
    def compile_seconds(self) -> float | None:
        """First run minus a median run; None where nothing was compiled."""
        if self.warm_up is None:
            return None
        usual = spread(self.prefill)["median"] + WARM_UP_STEPS * spread(self.decode_ms)["median"] / 1e3
        return max(0.0, self.warm_up - usual)

    def _run_first(self) -> None:
        """Compile, and have cuDNN plan for each length; else a short prompt loads libraries as well."""
        ids, several, seen = self.ids, self.batch > 1, self.system.seen
        if not self.system.compiled or {several, ids.shape} <= seen:
            ids = ids[:, :WARM_UP_TOKENS]
        with nullcontext() if self.options.warm_cache else fresh_cache():
            prefill, steps, *_ = self._run(ids, WARM_UP_STEPS)
        if self.system.compiled and several not in seen:
            self.warm_up = prefill + sum(steps)
        seen |= {several, ids.shape}
        gc.collect()  # its cache

    def repeat(self) -> None:
        """Time a prefill, decode steps, and the second of two answers, which finds the room that the first made."""
        if not self.steps:
            self._run_first()
        new = self.options.new_tokens
        settling = WARM_UP_STEPS if self.meter.is_cuda else 0
        prefill, steps, token, cache = self._run(self.ids, settling + new, hold=self.options.shared_prompt)
        if isinstance(self.system, Kvpass):
            self.system.answer(token, cache, new)
            marks = [self.meter.mark()]
            self.system.answer(token, cache, new)
            self.generate = self.meter.seconds([*marks, self.meter.mark()])[0] / new
        self.prefill.append(prefill)
        self.first_steps.append(steps[:settling])
        self.steps.append(steps[settling:])
        del cache
        if isinstance(self.system, Kvpass) and self.system.model.policy.needs_budget:
            with suppress(torch.OutOfMemoryError):  # of the profiler: other timings stay
                self.profile = self.system.profile(self.ids)

    def _prefill(self, ids: Tensor, *, hold: bool) -> tuple[float, Tensor, Any]:
        """Return seconds of a prefill, logits and cache; where kvpass holds those of a smaller batch, a copy of these.

        ``hold``: for further batches.
        """
        system, meter = self.system, self.meter
        held = system.prefilled if isinstance(system, Kvpass) else None
        if held is None or held[0].shape != ids.shape:
            marks = [meter.mark()]
            logits, cache = system.prefill(ids)
            held = ids, meter.seconds([*marks, meter.mark()])[0], logits, cache
            if not (hold and isinstance(system, Kvpass)):
                return held[1:]
            system.prefilled = held
        return held[1], held[2], held[3].clone()

    def _run(self, ids: Tensor, new_tokens: int, *, hold: bool = False) -> tuple[float, list[float], Tensor, Any]:
        """Return seconds of a prefill and of each decode step, the last token, int64 ``[B, 1]``, and the cache."""
        system, meter, prompt = self.system, self.meter, ids.shape[1]
        repeats = self.batch // ids.shape[0]
        meter.reset_peak()
        prefill, logits, cache = self._prefill(ids, hold=hold)
        cache = system.decoding_cache(cache, repeats)
        token = logits[:, -1].argmax(-1, keepdim=True).repeat_interleave(repeats, 0)
        del logits
        steps = [meter.mark()]
        for position in range(prompt, prompt + new_tokens):
            token = system.step(token, position, cache)[:, -1].argmax(-1, keepdim=True)
            steps.append(meter.mark())
        seconds, peak = meter.seconds(steps), meter.peak()
        if peak is not None:  # the most of all runs: replayed steps allocate next to nothing
            self.peak_bytes = max(self.peak_bytes or 0, peak)
        self.cache_bytes = system.nbytes(cache)
        self.attended_bytes = system.attended_bytes(cache, prompt + new_tokens)
        return prefill, seconds, token, cache


class Bench:
    """A checked comparison of systems.

    Raises:
        ValueError: an option is out of range, or the budget cannot hold the window and one more entry of a prompt.
    """

    def __init__(self, options: BenchOptions) -> None:
        self.options = options
        self.settings = settings = BenchSettings(options)
        self.model = build(settings.model, options.seed, options.device, settings.dtype)
        self.geometry = geometry_of(self.model)
        self.step_weight_bytes = weight_bytes(self.model)
        budget = Budget.parse(settings.budget)
        token_bytes = self.geometry.token_bytes()
        self.runs: list[Result] = []  # one for each context and batch
        for batch, context in itertools.product(settings.rows, settings.prompts):
            entries = budget.check(context, settings.window, token_bytes)
            kept = {"entries": entries, "bytes": entries * token_bytes}
            self.runs.append({"context": context, "batch": batch, "budget": kept, "systems": []})
        settings.ids(options, 1, max(settings.prompts))  # a text that is too short is refused now
        wanted = [*itertools.product(settings.specs, settings.formats, settings.prefills)]
        if "full" in settings.baselines:
            wanted.append((PolicySpec("full"), "model", FULL))
        self.kvpass_systems = [  # each serves all contexts and batches
            Kvpass(
                self.model,
                with_format(str(spec), entries, prefill),
                policy=spec.resolve(),
                budget=settings.budget,
                backend=options.backend,
                entries=entries,
                prefill=prefill.resolve() or "full",
            )
            for spec, entries, prefill in dict.fromkeys(wanted)
        ]
        self.failed: list[str] = []

    def run(self, save: Callable[[Result], None] = lambda result: None) -> Result:
        """Measure, showing progress, and return what ``--json`` writes; ``save`` gets it after every turn of a system.

        Raises:
            RuntimeError: a system failed; what the others did is measured and saved.
        """
        result = self._described()
        repeats = range(1, 1 + self.options.repeats)
        with torch.no_grad(), progress_bar(progress_console()) as progress:
            task = progress.add_task("")
            for together in self._runs_together():
                measured = self._measurements(together)  # their compiled code goes with their turns
                result["runs"] += together
                for repeat, system in itertools.product(repeats, range(len(measured[0]))):
                    for run, of_run in zip(together, measured, strict=True):
                        measurement = of_run[system]
                        turn = f"{run['context']} x {run['batch']}, {measurement.system.name}: repeat {repeat}"
                        progress.update(task, description=turn, total=len(self.runs) * len(repeats) * len(of_run))
                        if measurement.failure is None:
                            self._take(measurement)
                        ready = [other for other in of_run if other.steps or other.failure is not None]
                        run["systems"] = [self._record(other, ready) for other in ready]
                        progress.advance(task)
                        result["complete"] = progress.finished and not self.failed
                        save(result)
                    for held in self.kvpass_systems:
                        held.prefilled = None
        if self.failed:
            raise RuntimeError(f"{len(self.failed)} failed, first {self.failed[0]}")
        return result

    def _described(self) -> Result:
        """What is measured and on what, and what the device can do at most."""
        self.ceilings = ceilings(self.model.device, self.settings.dtype)
        Meter(self.model.device).release()
        return {
            "command": command_line(),
            "machine": machine(self.model.device) | self.ceilings,
            "versions": versions(),
            "model": {
                "name": self.options.model,
                "dtype": str(self.settings.dtype).removeprefix("torch."),
                "parameters": self.model.num_parameters(),
                "step_weight_bytes": self.step_weight_bytes,
                **asdict(self.geometry),
            },
            **{name: getattr(self.options, name) for name in _RECORDED},
            "budget": self.settings.budget,
            "complete": False,
            "runs": [],
        }

    def _runs_together(self) -> list[list[Result]]:
        """Runs of one prompt, which all batches decode from; else each run alone."""
        if not self.options.shared_prompt:
            return [[run] for run in self.runs]
        return [
            [run for run in self.runs if run["context"] == context] for context in dict.fromkeys(self.settings.prompts)
        ]

    def _measurements(self, runs: list[Result]) -> list[list[Measurement]]:
        """Those of each run, in the order of their systems; the prompt of a length is one tensor for all of them."""
        rows = 1 if self.options.shared_prompt else runs[0]["batch"]
        ids = self.settings.ids(self.options, rows, runs[0]["context"]).to(self.model.device)
        return [[Measurement(each, self.options, ids, run["batch"]) for each in self._systems(run)] for run in runs]

    def _systems(self, run: Result) -> list[System]:
        settings, options = self.settings, self.options
        systems: list[System] = []
        if "hf-eager" in settings.baselines:
            systems.append(HfEager(self.model))
        if "hf-static" in settings.baselines:
            slots = run["context"] + options.new_tokens + WARM_UP_STEPS
            systems.append(HfStatic(self.model, slots, options.backend))
        return systems + self.kvpass_systems

    def _take(self, measurement: Measurement) -> None:
        """Run a turn; where it fails, the others go on."""
        try:
            measurement.repeat()
        except torch.OutOfMemoryError as error:
            measurement.failure = str(error).splitlines()[0]
        except Exception as error:  # reported again when the others are measured
            traceback.print_exc()
            measurement.failure = first_line(error)
            self.failed.append(f"{measurement.system.name}: {measurement.failure}")
        gc.collect()  # its cache; the allocator keeps the memory, unless a CUDA graph was captured
        if measurement.failure is not None:
            measurement.meter.release()

    def _record(self, measurement: Measurement, measured: list[Measurement]) -> Result:
        """The figures of a system, beside those of all systems with this context and batch."""
        if measurement.failure is not None:
            return {"name": measurement.system.name, "failure": measurement.failure}
        others = {other.system.name: other for other in measured if other.failure is None}
        decodes = {name: spread(other.decode_ms)["median"] for name, other in others.items() if name in BASELINES}
        prefills = {name: spread(others[name].prefill)["median"] for name in decodes if name != "hf-eager"}
        prefill, decode, profile = spread(measurement.prefill), spread(measurement.decode_ms), measurement.profile
        bound = self._bound_ms(measurement)
        return {
            "name": measurement.system.name,
            "failure": None,
            "prefill_s": prefill | {"all": measurement.prefill},
            "decode_ms": decode | {"all": [[1e3 * s for s in steps] for steps in measurement.steps]},
            "first_steps_ms": [[1e3 * s for s in steps] for steps in measurement.first_steps],
            "generate_ms": None if measurement.generate is None else 1e3 * measurement.generate,
            "tokens_per_s": 1e3 * measurement.batch / decode["median"],
            **{name: getattr(measurement, name) for name in ("cache_bytes", "attended_bytes", "peak_bytes")},
            "compile_s": measurement.compile_seconds,
            "scoring": None if profile is None or profile.scoring is None else {"share": profile.scoring},
            "attention": None if profile is None else profile._asdict(),
            "share_of_bound": None if bound is None else bound / decode["median"],
            "decode_speedup": {name: median / decode["median"] for name, median in decodes.items()},
            "prefill_ratio": {name: prefill["median"] / median for name, median in prefills.items()},
        }

    def _bound_ms(self, measurement: Measurement) -> float | None:
        """Least milliseconds of a step: of its weights by their bytes or their products, then of what it attends."""
        if (weights := self.step_weight_bytes) is None:
            return None
        bandwidth, operations = self.ceilings["copy_bandwidth"], self.ceilings["matmul_operations"]
        products = 2 * measurement.batch * weights / self.settings.dtype.itemsize / operations
        return 1e3 * (max(weights / bandwidth, products) + measurement.attended_bytes / bandwidth)


def geometry_of(model: PreTrainedModel) -> Geometry:
    """Geometry of the layers with attention, read off a cache that holds one token.

    Raises:
        ValueError: layers with a sliding window, or of different shapes, share no budget that other systems know.
    """
    cache: Any = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), **{CACHE: cache})
    layers = [layer for layer in cache.layers if entries_of(layer)]
    shapes = {(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in layers}
    if len(shapes) > 1 or any(layer.is_sliding for layer in layers):
        raise ValueError(
            f"a {model.config.model_type} model with sliding windows or layers of different shapes: "
            "the bench compares caches of equal bytes, which these have not"
        )
    ((kv_heads, key_dim, value_dim),) = shapes
    sizes = {"kv_heads": kv_heads, "key_dim": key_dim, "value_dim": value_dim}
    return Geometry(layers=len(layers), itemsize=layers[0].keys.element_size(), **sizes)

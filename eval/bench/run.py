"""Compare prefill, decode, memory and compile time of caches of equal bytes.

Every system prefills the same random prompt and decodes greedily, one token a forward. Each repeat goes round all
systems, so that a drifting machine slows all of them alike, and a system's cache is gone before the next one's turn.
The first repeat of a system follows its first run, so that its figures are there before the next system compiles.
Prompts are random tokens: this measures speed, not quality.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache
from transformers import DynamicCache, PreTrainedModel

from kvpass.config import Budget, EntryFormat, Geometry
from kvpass.eval.bench.measure import Meter, Scoring, copy_bandwidth, first_line, scoring_time, spread, weight_bytes
from kvpass.eval.bench.settings import BASELINES, WARM_UP_STEPS, WARM_UP_TOKENS, BenchSettings, build
from kvpass.eval.bench.systems import KVPRESS_TWINS, HfEager, HfStatic, Kvpass, Kvpress, System, entries_of
from kvpass.eval.environment import command_line, machine, versions
from kvpass.eval.options import BenchOptions
from kvpass.eval.policy_spec import PolicySpec, with_format
from kvpass.progress import progress_bar, progress_console
from kvpass.transformers_compat import CACHE

Result = dict[str, Any]

_RECORDED = "device window backend seed new_tokens repeats shared_prompt warm_cache".split()
"""Options that a result names."""


@dataclass(frozen=True)
class Comparison:
    """One context and batch. ``entries``: the budget, per KV head per layer, of each row."""

    context: int
    batch: int
    entries: int


@dataclass
class Measurement:
    """What one system did with one context and batch; None where it is not measured.

    Attributes:
        prefill: seconds, one a repeat. steps, first_steps: of each timed decode step and of those before, a list a
            repeat. warm_up: seconds of the first prefill and the first decode steps, compilation included.
        generate: seconds a token of ``generate`` on the cache of the last repeat.
        tokens: greedy continuation of the first row, in the last repeat.
        cache_bytes: storages of the cache at its end. attended_bytes: of the entries the last step read.
        peak_bytes: most that was allocated at once, weights included.
        scoring: what compression adds to a prefill. failure: why there are no figures.
    """

    system: System
    prefill: list[float] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)
    warm_up: float | None = None
    first_steps: list[list[float]] = field(default_factory=list)
    generate: float | None = None
    tokens: list[int] = field(default_factory=list)
    cache_bytes: int = 0
    attended_bytes: int = 0
    peak_bytes: int | None = None
    scoring: Scoring | None = None
    failure: str | None = None

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


class Bench:
    """A checked comparison of systems.

    Raises:
        ValueError: an option is out of range, or the budget cannot hold the window and one more entry of a prompt.
    """

    def __init__(self, options: BenchOptions) -> None:
        self.options = options
        self.settings = settings = BenchSettings(options)
        self.device = torch.device(options.device)
        self.meter = Meter(self.device)
        self.model = build(settings.model, options.seed, self.device, settings.dtype)
        self.geometry = geometry_of(self.model)
        self.step_weight_bytes = weight_bytes(self.model)
        budget = Budget.parse(settings.budget)
        self.comparisons = [
            Comparison(context, batch, budget.check(context, options.window, self.geometry.token_bytes()))
            for batch in settings.rows
            for context in settings.prompts
        ]
        wanted = [(spec, entries) for spec in settings.specs for entries in settings.formats]
        if "full" in settings.baselines:
            wanted.append((PolicySpec("full"), "model"))
        self.kvpass_systems = [self._kvpass_system(*each) for each in dict.fromkeys(wanted)]
        self.failed: list[str] = []

    def run(self, save: Callable[[Result], None] = lambda result: None) -> Result:
        """Measure, showing progress; ``save`` is handed what is there after every turn of a system.

        Returns:
            what ``--json`` writes: in ``runs`` one record a system for each context and batch. ``complete`` says
            whether it is all.

        Raises:
            RuntimeError: a system failed; what the others did is measured and saved.
        """
        result = self._described()
        waiting = [(wanted, [Measurement(system) for system in self._systems(wanted)]) for wanted in self.comparisons]
        repeats = 1 + self.options.repeats
        turns = sum(len(measured) * (repeats + self._is_profiled(wanted)) for wanted, measured in waiting)
        with torch.no_grad(), progress_bar(progress_console()) as progress:
            task = progress.add_task("", total=turns)
            while waiting:
                wanted, measured = waiting.pop(0)  # so that the compiled code of a comparison goes with its turns
                kept = {"entries": wanted.entries, "bytes": wanted.entries * self.geometry.token_bytes()}
                run: Result = {"context": wanted.context, "batch": wanted.batch, "budget": kept, "systems": []}
                result["runs"].append(run)
                for name, measurement, function in self._turns(wanted, measured):
                    said = f"{wanted.context} x {wanted.batch}, {measurement.system.name}: {name}"
                    progress.update(task, description=said)
                    if measurement.failure is None:
                        self._take(measurement, function)
                    known = [each for each in measured if each.steps or each.failure is not None]
                    run["systems"] = [self._record(each, known, wanted) for each in known]
                    progress.advance(task)
                    result["complete"] = progress.finished and not self.failed
                    save(result)
        if self.failed:
            raise RuntimeError(f"{len(self.failed)} failed, first {self.failed[0]}")
        return result

    def _described(self) -> Result:
        """What is measured and on what, and the bandwidth of the device."""
        config = self.model.config.get_text_config()
        self.bandwidth = copy_bandwidth(self.device)
        self.meter.release()
        return {
            "command": command_line(),
            "machine": machine(self.device) | {"copy_bandwidth": self.bandwidth},
            "versions": versions(),
            "model": {
                "name": self.options.model,
                "type": config.model_type,
                "dtype": str(self.settings.dtype).removeprefix("torch."),
                "hidden_size": config.hidden_size,
                "intermediate_size": getattr(config, "intermediate_size", None),
                "query_heads": config.num_attention_heads,
                "parameters": self.model.num_parameters(),
                "step_weight_bytes": self.step_weight_bytes,
                "vocabulary": config.vocab_size,
                **asdict(self.geometry),
            },
            **{name: getattr(self.options, name) for name in _RECORDED},
            "left_out": self.settings.left_out,
            "budget": self.settings.budget,
            "complete": False,
            "runs": [],
        }

    def _record(self, measurement: Measurement, measured: Iterable[Measurement], wanted: Comparison) -> Result:
        """The figures of a system, beside those of all systems with this context and batch."""
        if measurement.failure is not None:
            return {"name": measurement.system.name, "failure": measurement.failure}
        others = {other.system.name: other for other in measured if other.failure is None}
        decodes = {name: spread(other.decode_ms)["median"] for name, other in others.items() if name in BASELINES}
        prefills = {name: spread(others[name].prefill)["median"] for name in decodes if name != "hf-eager"}
        prefill, decode, scoring = spread(measurement.prefill), spread(measurement.decode_ms), measurement.scoring
        weights, eager = self.step_weight_bytes, others.get("hf-eager")
        bound = None if weights is None else 1e3 * (weights + measurement.attended_bytes) / self.bandwidth
        return {
            "name": measurement.system.name,
            "failure": None,
            "prefill_s": prefill | {"all": measurement.prefill},
            "decode_ms": decode | {"all": [[1e3 * s for s in steps] for steps in measurement.steps]},
            "first_steps_ms": [[1e3 * s for s in steps] for steps in measurement.first_steps],
            "generate_ms": None if measurement.generate is None else 1e3 * measurement.generate,
            "tokens_per_s": 1e3 * wanted.batch / decode["median"],
            **{name: getattr(measurement, name) for name in ("cache_bytes", "attended_bytes", "peak_bytes")},
            "compile_s": measurement.compile_seconds,
            "scoring": scoring
            and {"seconds": scoring.seconds, "prefill_s": scoring.prefill, "share": scoring.seconds / scoring.prefill},
            "bound_ms": bound,
            "share_of_bound": None if bound is None else bound / decode["median"],
            "decode_speedup": {name: median / decode["median"] for name, median in decodes.items()},
            "prefill_ratio": {name: prefill["median"] / median for name, median in prefills.items()},
            "same_tokens_as_hf_eager": None if eager is None else measurement.tokens == eager.tokens,
        }

    def _turns(
        self, wanted: Comparison, measured: list[Measurement]
    ) -> Iterator[tuple[str, Measurement, Callable[[], None]]]:
        """Yield the name of each turn, whose it is, and what it does."""
        size = 1 if self.options.shared_prompt else wanted.batch, wanted.context
        generator = torch.Generator().manual_seed(self.options.seed)
        ids = torch.randint(self.model.config.vocab_size, size, generator=generator).to(self.device)
        for repeat in range(self.options.repeats):
            for measurement in measured:
                if repeat == 0:
                    yield "first run", measurement, partial(self._first_run, measurement, ids, wanted.batch)
                yield f"repeat {repeat + 1}", measurement, partial(self._repeat, measurement, ids, wanted.batch)
        for measurement in measured if self._is_profiled(wanted) else ():
            yield "scoring", measurement, partial(self._profile, measurement, ids)

    def _is_profiled(self, wanted: Comparison) -> bool:
        """Whether scoring is measured: rows that share a prompt have the same as the first batch."""
        return wanted.batch == self.settings.rows[0] or not self.options.shared_prompt

    def _take(self, measurement: Measurement, function: Callable[[], None]) -> None:
        """Run a turn; where it fails, the others go on."""
        try:
            function()
        except torch.OutOfMemoryError as error:
            measurement.failure = str(error).splitlines()[0]
        except Exception as error:  # reported again when the others are measured
            traceback.print_exc()
            measurement.failure = first_line(error)
            self.failed.append(f"{measurement.system.name}: {measurement.failure}")
        gc.collect()  # its cache; the allocator keeps the memory, unless a CUDA graph was captured
        if measurement.failure is not None:
            self.meter.release()

    def _systems(self, wanted: Comparison) -> list[System]:
        settings, window = self.settings, self.options.window
        slots = wanted.context + self.options.new_tokens + WARM_UP_STEPS
        systems: list[System] = []
        if "hf-eager" in settings.baselines:
            systems.append(HfEager(self.model))
        if "hf-static" in settings.baselines:
            systems.append(HfStatic(self.model, slots, self.options.backend))
        if "kvpress" in settings.baselines:
            twins = [name for name in map(str, settings.specs) if name in KVPRESS_TWINS]
            systems += [Kvpress(self.model, name, wanted.entries, window) for name in twins]
        return systems + self.kvpass_systems

    def _kvpass_system(self, spec: PolicySpec, entries: EntryFormat) -> Kvpass:
        """One compiled model, which serves all contexts and batches."""
        return Kvpass(
            self.model,
            with_format(str(spec), entries),
            policy=spec.with_window(self.options.window).resolve(),
            budget=self.settings.budget,
            backend=self.options.backend,
            entries=entries,
        )

    def _first_run(self, measurement: Measurement, ids: Tensor, batch: int) -> None:
        """Compile, and have cuDNN plan for each length; else a short prompt loads libraries as well."""
        is_compiled, several = measurement.system.compiled, batch > 1
        seen = measurement.system.seen
        if not is_compiled or {several, ids.shape} <= seen:
            ids = ids[:, :WARM_UP_TOKENS]
        with nullcontext() if self.options.warm_cache else fresh_cache():
            prefill, steps, *_ = self._run(measurement, ids, batch, WARM_UP_STEPS)
        if is_compiled and several not in seen:
            measurement.warm_up = prefill + sum(steps)
        seen |= {several, ids.shape}

    def _repeat(self, measurement: Measurement, ids: Tensor, batch: int) -> None:
        """Time a prefill, decode steps, and the second of two answers, which finds the room that the first made."""
        system, new = measurement.system, self.options.new_tokens
        settling = WARM_UP_STEPS if self.device.type == "cuda" else 0
        prefill, steps, token, cache = self._run(measurement, ids, batch, settling + new)
        if isinstance(system, Kvpass):
            system.answer(token, cache, new)
            marks = [self.meter.mark()]
            system.answer(token, cache, new)
            measurement.generate = self.meter.seconds([*marks, self.meter.mark()])[0] / new
        measurement.prefill.append(prefill)
        measurement.first_steps.append(steps[:settling])
        measurement.steps.append(steps[settling:])

    def _profile(self, measurement: Measurement, ids: Tensor) -> None:
        """Measure scoring; where memory does not suffice for the profiler, other timings stay."""
        system = measurement.system
        if isinstance(system, Kvpass) and system.model.policy.needs_budget:
            with suppress(torch.OutOfMemoryError):
                measurement.scoring = scoring_time(partial(system.prefill, ids), self.device)

    def _run(
        self, measurement: Measurement, ids: Tensor, batch: int, new_tokens: int
    ) -> tuple[float, list[float], Tensor, Any]:
        """Prefill ids, int64 ``[B, N]`` or ``[1, N]`` for all rows, and decode greedily; note tokens and bytes.

        Returns:
            seconds of the prefill and of each decode step, the last token, int64 ``[B, 1]``, and the cache.
        """
        system, meter, prompt = measurement.system, self.meter, ids.shape[1]
        repeats = batch // ids.shape[0]
        meter.reset_peak()
        marks = [meter.mark()]
        logits, cache = system.prefill(ids)
        marks.append(meter.mark())
        cache = system.decoding_cache(cache, repeats)
        tokens = [logits[:, -1].argmax(-1, keepdim=True).repeat_interleave(repeats, 0)]
        del logits
        steps = [meter.mark()]
        for position in range(prompt, prompt + new_tokens):
            logits = system.step(tokens[-1], position, cache)
            tokens.append(logits[:, -1].argmax(-1, keepdim=True))
            steps.append(meter.mark())
        (prefill,), seconds, peak = meter.seconds(marks), meter.seconds(steps), meter.peak()
        if peak is not None:  # the most of all runs: replayed steps allocate next to nothing
            measurement.peak_bytes = max(measurement.peak_bytes or 0, peak)
        measurement.tokens = torch.cat(tokens, 1)[0].tolist()
        measurement.cache_bytes = system.nbytes(cache)
        measurement.attended_bytes = system.attended_bytes(cache, prompt + new_tokens)
        return prefill, seconds, tokens[-1], cache


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

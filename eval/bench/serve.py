"""Many requests in vLLM on the CPU, with and without compression: ``kvpass bench --serve``."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest import mock

from rich.console import Console

from kvpass.config import EntryFormat
from kvpass.eval.bench.processes import Result, header_of, in_new_process
from kvpass.eval.bench.settings import BenchSettings, build
from kvpass.eval.environment import conditions
from kvpass.eval.policy_spec import with_format
from kvpass.eval.tables import Tables
from kvpass.progress import progress_bar

CHUNKED, WHOLE, KVPASS = "chunks", "whole", "kvpass"
"""vLLM that reads prompts in chunks, vLLM that reads whole prompts, and kvpass, which needs those."""

CHUNK_TOKENS = 2048
"""Tokens of a step where prompts are read in chunks: the default of vLLM's server."""
MOST_RUNNING = 256
"""Requests that may run at once, if the cache has room for them."""

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is read here, step by step
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_OFFLINE": "1",
}


def _plugin_settings(settings: BenchSettings, entries: EntryFormat) -> dict[str, Any]:
    """What vLLM takes as ``additional_config``."""
    options = {"budget": settings.budget, "room": settings.new_tokens, "entries": entries}
    return {"kvpass": {"policy": settings.policy.name, **dict(settings.policy.options), **options}}


def measure_requests(
    settings: BenchSettings, tokens: int, requests: int, cache_mib: int, system: str, entries: EntryFormat
) -> Result:
    """Send all requests at once, and step the engine until the last has its answer; ``settings.repeats`` times.

    Args:
        tokens: of each prompt; no two prompts are equal. cache_mib: what the engine may hold in its cache, in MiB.
        system: :data:`CHUNKED`, :data:`WHOLE` or :data:`KVPASS`. entries: of kvpass.
    Returns:
        a list of the rounds: seconds in all (``seconds``); of each request, to its first token (``first_token_s``) and
        a token afterwards (``token_s``); of each step (``step_s``). And of all rounds: most requests at
        once (``running``), and bytes of cache each then had.
    """
    from vllm import LLM, SamplingParams

    new = settings.new_tokens
    options: dict[str, Any] = {"enable_chunked_prefill": True, "max_num_batched_tokens": CHUNK_TOKENS}
    if system != CHUNKED:
        # a step must take a whole prompt beside a token of every request that runs
        options = {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens + new + MOST_RUNNING}
    if system == KVPASS:
        options["additional_config"] = _plugin_settings(settings, entries)
    made = settings.ids(settings.repeats * requests + 1, tokens)
    with tempfile.TemporaryDirectory() as folder:
        build(settings.bench_model, settings.seed, "cpu", settings.torch_dtype).save_pretrained(folder)
        engine = LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype=str(settings.torch_dtype).removeprefix("torch."),
            max_model_len=tokens + new,
            max_num_seqs=MOST_RUNNING,
            kv_cache_memory_bytes=cache_mib * 2**20,
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=False,
            seed=settings.seed,
            **options,
        ).llm_engine
    params = SamplingParams(max_tokens=new, temperature=0, detokenize=False, ignore_eos=True)
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free, running, held = pool.get_num_free_blocks(), 0, 0.0
    block_bytes = cache_mib * 2**20 / pool.num_gpu_blocks

    def send(name: int) -> None:
        engine.add_request(str(name), {"prompt_token_ids": made[name].tolist()}, params)

    send(settings.repeats * requests)  # the first one compiles kernels
    while engine.has_unfinished_requests():
        engine.step()
    rounds = list[Result]()
    for first in range(0, settings.repeats * requests, requests):
        found, steps = [], []
        began = time.perf_counter()
        for name in range(first, first + requests):
            send(name)
        while engine.has_unfinished_requests():
            marked = time.perf_counter()
            found += [output.metrics for output in engine.step() if output.finished]
            steps.append(time.perf_counter() - marked)
            if len(scheduler.running) > running:
                running = len(scheduler.running)
                held = (free - pool.get_num_free_blocks()) * block_bytes / running
        rounds.append(
            {
                "seconds": time.perf_counter() - began,
                "first_token_s": [one.first_token_latency for one in found],
                "token_s": [(one.last_token_ts - one.first_token_ts) / max(new - 1, 1) for one in found],
                "step_s": steps,
            }
        )
    return {"rounds": rounds, "running": running, "request_bytes": held}


@dataclass(frozen=True)
class Serve:
    """Requests a second, their waiting and their memory, in vLLM with and without kvpass.

    Args:
        settings: of them model, dtype, contexts, budget, window, the first policy, entries, new tokens, repeats, seed.
        requests: of each length. cache_mib: MiB of KV cache of an engine.

    Raises:
        ValueError: vLLM is not installed, a value is out of range, or kvpass does not do it in vLLM.
    """

    settings: BenchSettings
    requests: int
    cache_mib: int

    def __post_init__(self) -> None:
        from kvpass.vllm.settings import Settings

        if self.settings.device != "cpu":
            raise ValueError(f"device={self.settings.device!r}: kvpass in vLLM runs on CPUs only")
        for name in ("requests", "cache_mib"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be >= 1")
        for entries in self.settings.entries:
            Settings.read(_plugin_settings(self.settings, entries))
        if find_spec("vllm") is None:
            raise ValueError("serve: vLLM is not installed; pip install 'kvpass[vllm]' in an environment of its own")

    def run(self, console: Console, save: Callable[[Result], None] = lambda result: None) -> Result:
        """Measure, showing progress on the console; ``save`` is handed what is there after every engine.

        Returns:
            what ``--json`` writes; in ``serve`` a record for every length and system.
        """
        settings, records = self.settings, list[Result]()
        result = {**header_of(settings), "requests": self.requests, "cache_mib": self.cache_mib}
        result |= {"new_tokens": settings.new_tokens, "repeats": settings.repeats, "complete": False, "serve": records}
        systems: list[tuple[str, EntryFormat]] = [(CHUNKED, "model"), (WHOLE, "model")]
        systems += [(KVPASS, entries) for entries in settings.entries]
        cases = [(tokens, *system) for tokens in settings.prompts for system in systems]
        with progress_bar(console) as progress, mock.patch.dict(os.environ, _ENVIRONMENT):
            task = progress.add_task("", total=len(cases))
            for tokens, system, entries in cases:
                name = with_format(system, entries)
                progress.update(task, description=f"{tokens} tokens, {name}")
                found = in_new_process(
                    measure_requests, settings, tokens, self.requests, self.cache_mib, system, entries
                )
                records.append({"tokens": tokens, "system": name, **found})
                progress.advance(task)
                save(result)
        save(result := result | {"complete": True})
        return result

    @staticmethod
    def shown(result: Result) -> Tables:
        """A result, with what its columns mean."""
        header = ["prompt", "system", "req / s", "first", "last", "ms / token", "step s", "running", "KiB"]
        rows = [
            [
                str(found["tokens"]),
                found["system"],
                f"{result['requests'] / _median(found, 'seconds', float):.2f}",
                f"{_median(found, 'first_token_s', statistics.median):.2f}",
                f"{_median(found, 'first_token_s', max):.2f}",
                f"{1e3 * _median(found, 'token_s', statistics.median):.0f}",
                f"{_median(found, 'step_s', max):.2f}",
                str(found["running"]),
                f"{found['request_bytes'] / 1024:.0f}",
            ]
            for found in result["serve"]
        ]
        title = (
            f"{result['model']['name']}, {result['model']['dtype']}, {result['policy']} {result['budget']}: "
            f"{result['requests']} requests of {result['new_tokens']} new tokens, {result['cache_mib']} MiB"
        )
        return Tables([(title, header, rows)], (conditions(result), SERVE_LEGEND), left=2)


def _median(found: Result, name: str, figure: Callable[[Any], float]) -> float:
    """Return the median over rounds of a figure of what each round recorded by that name."""
    return statistics.median(figure(one[name]) for one in found["rounds"])


SERVE_LEGEND = (
    f"Medians of the rounds. chunks, whole: vLLM as it is, prompts in chunks of {CHUNK_TOKENS} tokens or whole; "
    "kvpass: whole prompts, compressed. All requests are sent at once and answered greedily; enforce_eager, no prefix "
    "caching. first: seconds from sending to the first token, median; last: of the last request. ms / token: median of "
    "what a request waits for each later token. step s: the longest step, which others may wait while a prompt is "
    "read. running: most requests at once. KiB: cache that each then holds."
)

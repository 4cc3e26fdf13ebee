"""Many requests in vLLM on the CPU, with and without compression: ``kvpass bench --serve``."""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoTokenizer

from kvpass.config import EntryFormat
from kvpass.eval.bench import set_environment
from kvpass.eval.bench.base import Benchmark, Result, named
from kvpass.eval.bench.settings import BenchSettings, build
from kvpass.eval.environment import conditions
from kvpass.eval.policy_spec import with_format
from kvpass.eval.runner import chunks, ended
from kvpass.eval.tables import Tables
from kvpass.eval.tasks import encode, find_tasks
from kvpass.loading import located

CHUNKED, WHOLE, KVPASS = "chunks", "whole", "kvpass"
"""vLLM that reads prompts in chunks, vLLM that reads whole prompts, and kvpass, which reads whole ones here."""

CHUNK_TOKENS = 2048
"""Tokens of a step where prompts are read in chunks: the default of vLLM's server."""
MOST_RUNNING = 256
"""Requests that may run at once, if the cache has room for them."""

_DOCUMENT = "text.kv"
_RECORDED = ("new_tokens", "repeats", "requests", "cache_mib", "question_tokens", "task")
"""Settings that a result names, beside those of every measurement."""


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a module in a fresh Python process, which ends with it, with :func:`set_environment`.

    Raises:
        BrokenProcessPool: the process was killed, mostly for want of memory.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=set_environment) as pool:
        return pool.submit(function, *args).result()


def _plugin_settings(settings: BenchSettings, file: str) -> dict[str, Any]:
    """What vLLM takes as ``additional_config``; ``file`` is the document of questions."""
    if settings.question_tokens:
        options = {"room": settings.question_tokens + settings.new_tokens, "documents": [f"text={file}"]}
    else:
        options = {"policy": settings.policy.name, **dict(settings.policy.options)}
        options |= {"budget": settings.budget_value, "room": settings.new_tokens}
    return {"kvpass": {**options, "entries": settings.formats[0]}}


def compress_text(settings: BenchSettings, tokens: int, file: str) -> Result:
    """Compress a text by the first policy into a file.

    Returns:
        bytes of the entries kept (``document_bytes``), and seconds with those to capture and compile (``compress_s``).
    """
    model = build(settings.bench_model, settings.seed, "cpu", settings.torch_dtype)
    fast = settings.system(model, settings.specs[0], settings.formats[0]).model
    began = time.perf_counter()
    cache = fast.compress(settings.ids(1, tokens))
    seconds = time.perf_counter() - began
    cache.save(file)
    return {"document_bytes": int(fast.report().bytes_kept.sum()), "compress_s": seconds}


def _engine(settings: BenchSettings, tokens: int, system: str, cache_bytes: int, folder: str) -> Any:
    """Start an engine of a model that is written to a folder, in which a document of questions may be."""
    from vllm import LLM

    longest = tokens + settings.question_tokens + settings.new_tokens
    chunk = CHUNK_TOKENS if system == CHUNKED else None
    options: dict[str, Any] = {"enable_prefix_caching": settings.question_tokens > 0 and system != KVPASS}
    if system == KVPASS:
        options["additional_config"] = _plugin_settings(settings, f"{folder}/{_DOCUMENT}")
    build(settings.bench_model, settings.seed, "cpu", settings.torch_dtype).save_pretrained(folder)
    return LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype=str(settings.torch_dtype).removeprefix("torch."),
        max_model_len=longest,
        max_num_seqs=MOST_RUNNING,
        # a step must take a whole prompt beside a token of every request that runs
        max_num_batched_tokens=chunk or longest + MOST_RUNNING,
        enable_chunked_prefill=chunk is not None,
        enforce_eager=True,
        disable_log_stats=False,
        kv_cache_memory_bytes=cache_bytes,
        seed=settings.seed,
        **options,
    ).llm_engine


class _Questions:
    """Samples of a task of at most ``tokens`` tokens; the answer to each has a score."""

    def __init__(self, settings: BenchSettings, tokens: int, count: int) -> None:
        with located(settings.model) as place:
            self.tokenizer = AutoTokenizer.from_pretrained(place)
        [self.task] = find_tasks([settings.task])
        self.samples = self.task.samples(self.tokenizer, tokens, count, settings.seed)

        encoded = (encode(self.tokenizer, sample, chat=self.task.chat) for sample in self.samples)
        self.prompts = [list(prompt.ids) for prompt in encoded]

    def score(self, sample: int, answer: list[int]) -> float:
        """Return the score of an answer, up to the token that ends it, in [0, 1]."""
        tokens = ended(answer, [self.tokenizer.eos_token_id])
        return self.task.metric(str(self.tokenizer.decode(tokens, skip_special_tokens=True)), self.samples[sample])


def measure_requests(settings: BenchSettings, system: str, tokens: int) -> Result:
    """Send all requests at once, and step the engine until the last has its answer; ``settings.repeats`` times.

    Args:
        settings: with ``question_tokens`` each prompt is a question about one text of ``tokens``. vLLM holds the text
            in its prefix cache; kvpass as a document, whose bytes count.
        system: one of the three; kvpass with the first entry format.
        tokens: of each prompt, of a task at most; no two prompts are equal.
    Returns:
        a list of the rounds: seconds in all (``seconds``) and of the processors (``cpu_s``); of each request, to its
        first token (``first_token_s``), a token afterwards (``token_s``) and prompt tokens that it did not read
        (``cached_tokens``); of each step (``step_s``). And of all rounds: most requests at once (``running``), bytes of
        cache each then had, scores of all answers (``scores``), and what :func:`compress_text` returned.
    """
    from vllm import SamplingParams

    question_tokens, count = settings.question_tokens, settings.repeats * settings.requests + 1
    made, document, extra = settings.ids(count, question_tokens or tokens), Result(), None
    with tempfile.TemporaryDirectory() as folder:
        if question_tokens and system == KVPASS:
            document = in_new_process(compress_text, settings, tokens, f"{folder}/{_DOCUMENT}")
            extra = {"kvpass_document": "text"}
        elif question_tokens:
            made = torch.cat([settings.ids(1, tokens).expand(len(made), -1), made], 1)
        document_bytes = document.get("document_bytes", 0)
        cache_bytes = settings.cache_mib * 2**20 - document_bytes
        engine = _engine(settings, tokens, system, cache_bytes, folder)
    params = SamplingParams(
        max_tokens=settings.new_tokens, temperature=0, detokenize=False, ignore_eos=True, extra_args=extra
    )
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    unused, running, held, rounds = pool.get_num_free_blocks(), 0, 0.0, list[Result]()
    block_bytes = cache_bytes / pool.num_gpu_blocks
    questions = _Questions(settings, tokens, count) if settings.task else None
    prompts = dict(enumerate(made.tolist() if questions is None else questions.prompts))
    scores: list[float] = []
    _round(engine, dict([prompts.popitem()]), params)  # compiles kernels, and leaves the text in the prefix cache
    for some in chunks(list(prompts), settings.requests):
        found, at_once, free, answers = _round(engine, {name: prompts[name] for name in some}, params)
        rounds.append(found)
        if questions is not None:
            scores += itertools.starmap(questions.score, answers.items())
        if at_once > running:
            running, held = at_once, (unused - free) * block_bytes + document_bytes
    figures = {"rounds": rounds, "running": running, "request_bytes": held / running, **document}
    return figures if questions is None else figures | {"scores": scores}


def _round(engine: Any, prompts: Mapping[int, list[int]], params: Any) -> tuple[Result, int, int, dict[int, list[int]]]:
    """Send requests at once, and step the engine until the last has its answer.

    Returns:
        figures of the round, most requests at once, blocks of the cache that were free then, and the answers.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    found, steps, running, free = list[Any](), list[float](), 0, 0
    began, worked = time.perf_counter(), time.process_time()
    for name, ids in prompts.items():
        engine.add_request(str(name), {"prompt_token_ids": ids}, params)
    while engine.has_unfinished_requests():
        marked = time.perf_counter()
        found += [output for output in engine.step() if output.finished]
        steps.append(time.perf_counter() - marked)
        if len(scheduler.running) > running:
            running, free = len(scheduler.running), scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    seconds, times = time.perf_counter() - began, [output.metrics for output in found]
    later = max(params.max_tokens - 1, 1)
    figures = {
        "seconds": seconds,
        "cpu_s": time.process_time() - worked,
        "first_token_s": [one.first_token_latency for one in times],
        "token_s": [(one.last_token_ts - one.first_token_ts) / later for one in times],
        "cached_tokens": [output.num_cached_tokens for output in found],
        "step_s": steps,
    }
    return figures, running, free, {int(output.request_id): list(output.outputs[0].token_ids) for output in found}


@dataclass
class Serve(Benchmark):
    """Requests a second, their waiting and their memory, in vLLM with and without kvpass.

    Args:
        settings: of them model, dtype, contexts, budget, window, the first policy, entries, new tokens, repeats, seed,
            and those of ``--serve`` alone. With ``question_tokens`` the budget may be a share of the text.

    Raises:
        ValueError: vLLM is not installed, a value is out of range, or kvpass does not do it in vLLM.
    """

    def __post_init__(self) -> None:
        from kvpass.vllm.settings import Settings

        settings, policy = self.settings, self.settings.policy.resolve()
        if settings.device != "cpu":
            raise ValueError(f"device={settings.device!r}: kvpass in vLLM runs on CPUs only")
        if settings.question_tokens and policy.decode_rule() is not None:
            raise ValueError(
                f"policy={policy.name!r} evicts while decoding: a document for vLLM needs one that does not"
            )
        if settings.task:
            find_tasks([settings.task])
            if settings.question_tokens:
                raise ValueError("task and question_tokens: ask one of them")
            if not settings.bench_model.has_weights:
                raise ValueError(f"task={settings.task!r}: model {settings.model!r} has random weights")
        Settings.read(_plugin_settings(settings, "a file"))
        if find_spec("vllm") is None:
            raise ValueError("serve: vLLM is not installed; pip install 'kvpass[vllm]' in an environment of its own")

    def systems(self) -> list[tuple[str, Callable[[int], Result]]]:
        """Names of the systems, and what measures each with prompts of so many tokens."""
        systems: list[tuple[str, EntryFormat]] = [(CHUNKED, "model"), (WHOLE, "model")]
        systems += [(KVPASS, entries) for entries in self.settings.formats]
        return [
            (with_format(system, entries), partial(measure_requests, replace(self.settings, entries=entries), system))
            for system, entries in systems
        ]

    @property
    def steps(self) -> int:
        return len(self.settings.prompts) * len(self.systems())

    def measure(self, result: Result) -> Iterator[str]:
        """Add a record for every length and system."""
        settings, records = self.settings, list[Result]()
        result |= {"policy": str(settings.specs[0]), "serve": records}
        result |= {name: getattr(settings, name) for name in _RECORDED}
        for tokens, (name, measure) in itertools.product(settings.prompts, self.systems()):
            yield f"{tokens} tokens, {name}"
            records.append({"tokens": tokens, "system": name, **in_new_process(measure, tokens)})

    @staticmethod
    def shown(result: Result) -> Tables:
        """A result, with what its columns mean."""
        header = ["prompt", "system", "req / s", "first", "last", "ms / token", "step s", "running", "KiB"]
        header += ["right %"] if result.get("task") else []
        question = f" + {asked}" if (asked := result.get("question_tokens")) else ""
        rows = [
            [
                f"{found['tokens']}{question}",
                found["system"],
                f"{result['requests'] / _median(found, 'seconds', float):.3g}",
                f"{_median(found, 'first_token_s', statistics.median):.2f}",
                f"{_median(found, 'first_token_s', max):.2f}",
                f"{1e3 * _median(found, 'token_s', statistics.median):.0f}",
                f"{_median(found, 'step_s', max):.2f}",
                str(found["running"]),
                f"{found['request_bytes'] / 1024:.0f}",
                *([f"{100 * statistics.mean(found['scores']):.0f}"] if "scores" in found else []),
            ]
            for found in result["serve"]
        ]
        title = (
            f"{named(result, result['policy'])} {result['budget']}: {result['requests']} requests of "
            f"{result['new_tokens']} new tokens, {result['cache_mib']} MiB"
        )
        return Tables([(title, header, rows)], (conditions(result), SERVE_LEGEND), left=2)


def _median(found: Result, name: str, figure: Callable[[Any], float]) -> float:
    """Return the median over rounds of a figure of what each round recorded by that name."""
    return statistics.median(figure(one[name]) for one in found["rounds"])


SERVE_LEGEND = (
    f"Medians of the rounds. chunks, whole: vLLM as it is, prompts in chunks of {CHUNK_TOKENS} tokens or whole; "
    "kvpass: whole prompts, compressed. All requests are sent at once and answered greedily; enforce_eager, no prefix "
    "caching. N + M: questions of M tokens about one text of N; vLLM has the text in its prefix cache, kvpass as a "
    "document compressed before, whose bytes count as cache. first: seconds from sending to the first token, median; "
    "last: of the last request. ms / token: median of what a request waits for each later token. step s: the longest "
    "step, which others may wait while a prompt is read. running: most requests at once. KiB: cache that each then "
    "holds. right: mean score of the answers, where prompts are of a task."
)

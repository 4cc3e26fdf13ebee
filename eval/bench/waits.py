"""How long requests that run in vLLM wait for a token while a long prompt is read: ``kvpass bench --waits``."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvpass.eval.bench.base import Result, named
from kvpass.eval.bench.serve import Serve, policy_settings, start_engine
from kvpass.eval.bench.settings import BenchSettings
from kvpass.eval.environment import conditions
from kvpass.eval.tables import Tables

RUNNING_TOKENS, BEFORE = 200, 8
"""Tokens of the prompts of the requests that run, and of their answers when the long prompt comes."""
ANSWER = 400
"""Tokens of their answers at most: more steps than a long prompt takes."""
CHUNK = 512
"""Tokens of a step where prompts come in chunks."""


def measure_waits(settings: BenchSettings, chunk: int | None, compressed: bool, tokens: int) -> Result:
    """Have requests run, and send a long prompt; ``settings.repeats`` times.

    Args:
        settings: ``requests`` run. chunk: tokens of a step; None: prompts are read whole. compressed: by kvpass.
        tokens: of the long prompt.
    Returns:
        a list of the rounds: seconds between two tokens of a request that runs, of all of them, while the long prompt
        is read (``waits_s``), and until its first token (``first_token_s``).
    """
    options: dict[str, Any] = {"kv_cache_memory_bytes": settings.cache_mib * 2**20, "enable_prefix_caching": False}
    if compressed:
        options["additional_config"] = {"kvpass": policy_settings(settings, ANSWER)}
    with tempfile.TemporaryDirectory() as folder:
        longest = max(tokens + 1, RUNNING_TOKENS + ANSWER)
        engine = start_engine(settings, longest, chunk, folder=folder, **options)
    rounds = settings.repeats + 1  # the first compiles kernels, with a short prompt
    short = settings.ids(rounds * settings.requests, RUNNING_TOKENS).view(rounds, settings.requests, -1).tolist()
    long = settings.ids(rounds, tokens).tolist()
    long[0] = long[0][:CHUNK]
    return {"rounds": [_round(engine, *prompts) for prompts in zip(short, long, strict=True)][1:]}


def _round(engine: Any, short: list[list[int]], long: list[int]) -> Result:
    from vllm import SamplingParams

    def send(name: str, ids: list[int], new: int) -> None:
        params = SamplingParams(max_tokens=new, temperature=0, detokenize=False, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": ids}, params)

    names = [str(number) for number in range(len(short))]
    for name, ids in zip(names, short, strict=True):
        send(name, ids, ANSWER)
    answered, last, waits, sent = dict.fromkeys(names, 0), dict[str, float](), list[float](), 0.0
    while "long" not in last:
        outputs, now = engine.step(), time.perf_counter()
        for output in outputs:
            if sent and output.request_id in last:
                waits.append(now - last[output.request_id])
            last[output.request_id] = now
            answered[output.request_id] = answered.get(output.request_id, 0) + 1
        if not sent and min(answered.values()) >= BEFORE:
            send("long", long, 1)
            sent = now
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return {"waits_s": waits, "first_token_s": last["long"] - sent}


@dataclass
class Waits(Serve):
    """What requests that run wait while a prompt of each context is read, in vLLM with and without kvpass.

    Args:
        settings: as of :class:`Serve`, of which ``requests`` run, less entries, new tokens and questions.
    """

    name = "waits"
    recorded = ("repeats", "requests", "cache_mib")

    def systems(self) -> list[tuple[str, Callable[[int], Result]]]:
        return [
            (f"{who}{how}", partial(measure_waits, self.settings, chunk, bool(who)))
            for (how, chunk), who in itertools.product((("whole", None), ("chunks", CHUNK)), ("", "kvpass "))
        ]

    @staticmethod
    def shown(result: Result) -> Tables:
        """A result, with what its columns mean."""
        header = ["prompt", "system", "longest ms", "median ms", "tokens", "first s"]
        rows = []
        for found in result["waits"]:
            rounds = found["rounds"]
            longest, middle = (
                1e3 * statistics.median(figure(one["waits_s"]) for one in rounds) for figure in (max, statistics.median)
            )
            got = statistics.median(len(one["waits_s"]) / result["requests"] for one in rounds)
            first = statistics.median(one["first_token_s"] for one in rounds)
            cells = (f"{longest:.0f}", f"{middle:.0f}", f"{got:.0f}", f"{first:.2f}")
            rows.append([str(found["tokens"]), found["system"], *cells])
        title = (
            f"{named(result, result['policy'])} {result['budget']}: {result['requests']} requests run, "
            f"{result['cache_mib']} MiB"
        )
        return Tables([(title, header, rows)], (conditions(result), LEGEND), left=2)


LEGEND = (
    f"Medians of the rounds. whole, chunks: vLLM as it is, prompts whole or in steps of {CHUNK} tokens; kvpass: the "
    f"same, compressed. Requests of {RUNNING_TOKENS} tokens run when a prompt comes. longest, median ms: what they "
    "wait for a token while it is read. tokens: that each gets meanwhile. first s: until its first token. "
    "enforce_eager."
)

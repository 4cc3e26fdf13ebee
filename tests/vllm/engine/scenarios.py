"""``python scenarios.py NAME FOLDER ARGUMENTS``: one scenario of test_engine.py; prints its result as JSON."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import psutil
import torch
from driver import CASES, NEW, alone, engine, greedy, joined, make_model, prompt, together
from vllm.v1.request import RequestStatus

import kvpass

SHORT, SHORT_NEW = [(1, 60), (2, 90), (3, 40)], 8
"""Cases for Triton's interpreter, which is slow."""


def reference(folder: str, policy: str | None, budget: int | None, short: bool = False) -> dict[int, list[int]]:
    """Tokens of ``kvpass.compile``, each prompt alone; without a policy, of the model itself."""
    cases, new = (SHORT, SHORT_NEW) if short else (CASES, NEW)
    model: Any = make_model(folder)
    if policy is not None:
        model = kvpass.compile(model, policy=policy, budget=budget, backend="eager")
    return {
        n: model.generate(torch.tensor([prompt(seed, n)]), max_new_tokens=new, do_sample=False, eos_token_id=None)[
            0, n:
        ].tolist()
        for seed, n in cases
    }


def ways(folder: str, settings: dict[str, Any] | None) -> dict[str, Any]:
    """Tokens alone, together, with one more request every 5 steps, and preempted after 25 steps."""
    llm = engine(folder, settings)
    resumed, preempted = joined(llm, every=0, preempt_at=25)
    return {
        "alone": alone(llm),
        "together": together(llm, CASES),
        "joined": joined(llm)[0],
        "resumed": resumed,
        "preempted": preempted,
    }


def capacity(folder: str, settings: dict[str, Any] | None) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """160 requests of 1,000 tokens in 64 MiB: most running at once, (answers, different ones), free blocks."""
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    llm = engine(
        folder, settings, kv_cache_memory_bytes=64 * 2**20, max_num_seqs=256, max_num_batched_tokens=16384
    ).llm_engine
    scheduler = llm.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    before, peak, answers = pool.get_num_free_blocks(), 0, []
    for i in range(160):
        llm.add_request(str(i), {"prompt_token_ids": prompt(5, 1000)}, greedy())
    while llm.has_unfinished_requests():
        answers += [tuple(out.outputs[0].token_ids) for out in llm.step() if out.finished]
        peak = max(peak, len(scheduler.running))
    return peak, (len(answers), len(set(answers))), (before, pool.get_num_free_blocks())


def soak(folder: str, settings: dict[str, Any], requests: int) -> dict[str, Any]:
    """Requests of random prompts in random order; some are cancelled, now and then all that run are preempted.

    Returns:
        answers, those that differ from the prompt's own when it is alone, cancelled and preempted requests, free blocks
        before and after, and resident MiB after each fifth of the requests.
    """
    random = Random(0)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    llm = engine(
        folder, settings, kv_cache_memory_bytes=32 * 2**20, max_num_seqs=12, max_num_batched_tokens=4096
    )  # so few blocks that all are soon in memory
    cases = [(seed, random.randrange(2, 1200)) for seed in range(30)]
    solo = {case: together(llm, [case])[case[1]] for case in cases}
    core = llm.llm_engine
    scheduler = core.engine_core.engine_core.scheduler
    pool, process = scheduler.kv_cache_manager.block_pool, psutil.Process()
    before, sent, open_requests = pool.get_num_free_blocks(), 0, {}
    answers = wrong = cancelled = preempted = 0
    resident: list[int] = []
    while sent < requests or core.has_unfinished_requests():
        if sent < requests and random.random() < 0.4:
            params, case = greedy(random.randrange(1, NEW + 1)), random.choice(cases)
            core.add_request(str(sent), {"prompt_token_ids": prompt(*case)}, params)
            open_requests[str(sent)] = case, params.max_tokens
            sent += 1
            if sent % (requests // 5) == 0:
                resident.append(process.memory_info().rss >> 20)
        if open_requests and random.random() < 0.03:
            name = random.choice([*open_requests])
            core.abort_request([name])
            del open_requests[name]
            cancelled += 1
        if random.random() < 0.01:
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
            preempted += sum(request.status == RequestStatus.PREEMPTED for request in scheduler.requests.values())
        for out in core.step():
            if out.finished and out.request_id in open_requests:
                case, new = open_requests.pop(out.request_id)
                answers += 1
                wrong += list(out.outputs[0].token_ids) != solo[case][:new]
    return {
        "answers": answers, "wrong": wrong, "cancelled": cancelled, "preempted": preempted,
        "free": [before, pool.get_num_free_blocks()], "resident": resident,
    }  # fmt: skip


def two_processes(folder: str, settings: dict[str, Any]) -> tuple[dict[int, list[int]], int]:
    """Tokens with tensor parallelism, with one more request every 3 steps, all preempted after 25; how many were."""
    return joined(engine(folder, settings, tensor_parallel_size=2), every=3, preempt_at=25)


def cuda_kernels(folder: str, settings: dict[str, Any]) -> tuple[dict[int, list[int]], int]:
    """Tokens of short prompts by what runs on CUDA, in Triton's interpreter; three in a batch, preempted after 6 steps.

    Returns:
        tokens, and how many requests were preempted.
    """
    from kvpass.vllm import devices

    devices.operators = lambda device: devices.OnCUDA
    found = joined(engine(folder, settings), every=2, preempt_at=6, cases=SHORT, new=SHORT_NEW)
    assert "kvpass.kernels.block_decode" in sys.modules
    return found


def loaded(folder: str) -> list[bool]:
    """Whether the plug-in is among the logits processors that each model runner loads."""
    from vllm.v1.sample.logits_processor import _load_logitsprocs_plugins
    from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_plugins

    from kvpass.vllm.prompt_rows import PromptRows

    return [PromptRows in load() for load in (_load_logitsprocs_plugins, _load_v2_logitsprocs_plugins)]


def in_turn(folder: str, settings: list[dict[str, Any] | None]) -> list[dict[int, list[int]]]:
    """Tokens of several engines of one process."""
    found = []
    for given in settings:
        llm = engine(folder, given)
        found.append(together(llm, CASES))
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    return found


def long_answer(folder: str, settings: dict[str, Any]) -> tuple[int, str]:
    """Length of an answer without a limit of its own, and why it ended."""
    params = greedy()
    params.max_tokens = None
    out = engine(folder, settings).generate([{"prompt_token_ids": prompt(1, 300)}], params, use_tqdm=False)[0]
    assert params.max_tokens is None  # the caller's
    return len(out.outputs[0].token_ids), out.outputs[0].finish_reason


def refused(folder: str, settings: dict[str, Any], options: dict[str, Any]) -> str:
    """What the error of the start says."""
    try:
        engine(folder, settings, **options)
    except ValueError as error:
        return str(error)
    return "started"


if __name__ == "__main__":
    name, folder, arguments = sys.argv[1:]
    print("\n" + json.dumps(globals()[name](folder, *json.loads(arguments))))

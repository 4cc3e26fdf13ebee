"""``python scenarios.py NAME FOLDER ARGUMENTS``: one scenario of test_engine.py; prints its result as JSON."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from driver import alone, engine, greedy, joined, together
from tiny import CASES, SHORT, SHORT_NEW, prompt


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


def capacity(folder: str, settings: dict[str, Any] | None) -> dict[str, Any]:
    """160 requests of 1,000 tokens in 64 MiB: most running at once, all answers, free blocks before and after."""
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
        answers += [list(out.outputs[0].token_ids) for out in llm.step() if out.finished]
        peak = max(peak, len(scheduler.running))
    return {"running": peak, "answers": answers, "free": [before, pool.get_num_free_blocks()]}


def two_processes(folder: str, settings: dict[str, Any]) -> tuple[dict[int, list[int]], int]:
    """Tokens with tensor parallelism, with one more request every 3 steps, all preempted after 25; how many were."""
    return joined(engine(folder, settings, tensor_parallel_size=2), every=3, preempt_at=25)


def cuda_kernels(folder: str, settings: dict[str, Any], graphs: bool) -> tuple[dict[int, list[int]], int]:
    """Tokens of short prompts by what runs on CUDA, in Triton's interpreter; three in a batch, preempted after 5 steps.

    Args:
        graphs: decode steps are recorded once and replayed, as CUDA graphs are.
    Returns:
        tokens, and how many requests were preempted.
    """
    from kvpass.vllm import devices

    devices.operators = lambda device: devices.OnCUDA
    if graphs:
        from replayed import replay_decode_steps

        replay_decode_steps()
    found = joined(engine(folder, settings), every=2, preempt_at=5, cases=SHORT, new=SHORT_NEW)
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


def long_answer(folder: str, settings: dict[str, Any]) -> tuple[list[int], str]:
    """Tokens of an answer to a prompt of one token without a limit of its own, and why it ended."""
    params = greedy()
    params.max_tokens = None
    out = engine(folder, settings).generate([{"prompt_token_ids": prompt(4, 1)}], params, use_tqdm=False)[0]
    assert params.max_tokens is None  # the caller's
    return list(out.outputs[0].token_ids), out.outputs[0].finish_reason


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

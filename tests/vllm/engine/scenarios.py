"""``python scenarios.py FOLDER``: runs the scenarios of test_engine.py that it reads from its input, one a line."""

import gc
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

from driver import alone, engine, greedy, joined, preempt, send, together
from tiny import CASES, LONG, MANY, RESULT, SHORT, SHORT_NEW, Cases, prompt
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import BeamSearchParams
from vllm.v1.core.sched.interface import PauseState

from kvpass.vllm import refusals
from kvpass.vllm.admission import Rows
from kvpass.vllm.kept import Kept, Tables


def ways(folder: str, settings: dict[str, Any] | None) -> dict[str, Any]:
    """Tokens alone, together, with one more request every 5 steps, and preempted after 25 steps."""
    with engine(folder, settings) as llm:
        resumed, preempted = joined(llm, every=0, preempt_at=25)
        return {
            "alone": alone(llm),
            "together": together(llm, CASES),
            "joined": joined(llm)[0],
            "resumed": resumed,
            "preempted": preempted,
        }


def chunks(folder: str, settings: dict[str, Any], tokens: int, then: str) -> dict[str, Any]:
    """Requests that are all sent at once, whose prompts are read in chunks while others run.

    Args:
        tokens: of a step. then: what happens when half of the longest prompt but one has been read: "preempt" all that
            run, "cancel" it and ask again, or nothing; "preempt late" when an answer is longer than the window.
    Returns:
        tokens of each; most prompts that were read in part at once; requests that waited for a token after their first;
        how many were preempted; free blocks before and after.
    """
    with engine(folder, settings, enable_chunked_prefill=True, max_num_batched_tokens=tokens, max_num_seqs=8) as llm:
        core, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        before, step, most, preempted = pool.get_num_free_blocks(), 0, 0, 0
        found, first, waited = dict[str, list[int]](), dict[str, int](), list[str]()
        for case in CASES:
            send(core, *case)
        while core.has_unfinished_requests():
            for out in core.step():
                first.setdefault(out.request_id, step)
                if out.finished:
                    found[out.request_id] = list(out.outputs[0].token_ids)
                    waited += [out.request_id] * (step - first[out.request_id] > len(found[out.request_id]) - 1)
            step += 1
            read = [one for one in scheduler.running if one.is_prefill_chunk]
            most = max(most, len(read))
            half = any(one.num_prompt_tokens == LONG[1] and 2 * one.num_computed_tokens > LONG[1] for one in read)
            late = any(one.num_output_tokens > 35 for one in scheduler.running)
            if then and (late if then == "preempt late" else half):
                assert len(scheduler.running) > 1, "none runs meanwhile"
                if then.startswith("preempt"):
                    preempted = preempt(scheduler)
                else:
                    core.abort_request([str(LONG[1])])
                    send(core, *LONG)
                then = ""
        free = [before, pool.get_num_free_blocks()]
        return {"tokens": found, "most": most, "waited": waited, "preempted": preempted, "free": free, "then": then}


def paused(folder: str, settings: dict[str, Any]) -> dict[str, list[int]]:
    """Tokens of requests that run while the engine is paused, during which a client leaves, and of two that come then.

    vLLM then runs a step without tokens, in which all rows leave the batch; later they come back behind the new ones.
    """
    with engine(folder, settings) as llm:
        core, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
        found, step, gone = dict[str, list[int]](), 0, CASES[0]
        for case in CASES[:3]:
            send(core, *case)
        while core.has_unfinished_requests():
            if step == 10:
                scheduler.set_pause_state(PauseState.PAUSED_ALL)
                core.abort_request([str(gone[1])])
                core.step()
                scheduler.set_pause_state(PauseState.UNPAUSED)
                for case in CASES[3:5]:
                    send(core, *case)
            found |= {out.request_id: list(out.outputs[0].token_ids) for out in core.step() if out.finished}
            step += 1
        return found


def capacity(folder: str, settings: dict[str, Any] | None, orders: int, length: int = 1000) -> dict[str, Any]:
    """Requests of ``length`` tokens in 64 MiB, all at once, then in reverse order if ``orders`` is 2.

    Returns:
        most running at once, answers by seed of each order, free blocks before and after.
    """
    options = {"kv_cache_memory_bytes": 64 * 2**20, "max_num_seqs": 256, "max_num_batched_tokens": 16384}
    with engine(folder, settings, **options) as llm:
        core, peak, answers = llm.llm_engine, 0, []
        scheduler = core.engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        before = pool.get_num_free_blocks()
        for seeds in [range(MANY), reversed(range(MANY))][:orders]:
            for seed in seeds:
                send(core, seed, length, name=seed)
            found = {}
            while core.has_unfinished_requests():
                found |= {out.request_id: list(out.outputs[0].token_ids) for out in core.step() if out.finished}
                peak = max(peak, len(scheduler.running))
            answers.append(found)
        return {"running": peak, "answers": answers, "free": [before, pool.get_num_free_blocks()]}


def mixed(folder: str, settings: dict[str, Any], cases: list[list[int]], mib: int, preempt_at: int) -> dict[str, Any]:
    """Requests of some seeds, lengths and numbers of new tokens, all at once; at a step, those that run are preempted.

    Returns:
        tokens of each, how many were preempted, sizes of blocks held at once, and free blocks before and after.
    """
    with engine(folder, settings, kv_cache_memory_bytes=mib * 2**20) as llm:
        core, found, preempted, step, held = llm.llm_engine, {}, 0, 0, set[tuple[int, ...]]()
        scheduler = core.engine_core.engine_core.scheduler
        [manager] = scheduler.kv_cache_manager.coordinator.single_type_managers
        before = manager.block_pool.get_num_free_blocks()
        for number, (seed, length, new) in enumerate(cases):
            send(core, seed, length, name=number, new=new)
        while core.has_unfinished_requests():
            if step == preempt_at:
                preempted = preempt(scheduler)
            found |= {int(out.request_id): list(out.outputs[0].token_ids) for out in core.step() if out.finished}
            held.add(tuple(sorted(map(len, manager.req_to_blocks.values()))))
            step += 1
        free = [before, manager.block_pool.get_num_free_blocks()]
        return {"tokens": found, "preempted": preempted, "held": sorted(held, key=len), "free": free}


def blocks(folder: str, settings: dict[str, Any], options: dict[str, Any]) -> list[int]:
    """Blocks in 64 MiB, and how many of them no request gets."""
    with engine(folder, settings, kv_cache_memory_bytes=64 * 2**20, **options) as llm:
        manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        [ours] = manager.coordinator.single_type_managers
        return [manager.block_pool.num_gpu_blocks, ours.layout.reserved]


def documents(
    folder: str, settings: dict[str, Any], cases: Cases, new: int, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Tokens of questions about documents and of prompts, in four ways, and what is held.

    Returns:
        also: how many were preempted, numbers that the documents hold, and most blocks held at once.
    """
    with engine(folder, settings, **options or {}) as llm:
        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        free, taken, take = pool.get_num_free_blocks(), [], pool.touch

        def counted(*args: Any) -> None:
            take(*args)
            taken.append(free - pool.get_num_free_blocks())

        pool.touch = counted
        resumed, preempted = joined(llm, every=0, preempt_at=9, cases=cases, new=new)
        found = Rows.latest.documents
        assert found is not None
        return {
            "alone": alone(llm, cases, new),
            "together": together(llm, cases, new),
            "joined": joined(llm, every=2, cases=cases, new=new)[0],
            "resumed": resumed,
            "preempted": preempted,
            "numbers": found.pools["pool_k"].numel() + found.pools["pool_v"].numel(),
            "blocks": max(taken),
            "left": free - pool.get_num_free_blocks(),
        }


def protected(
    folder: str, settings: dict[str, Any], cases: list[tuple[int, int, int | None]], options: dict[str, Any]
) -> dict[str, Any]:
    """Prompts of some seeds and lengths of which so many first tokens are protected, alone, then all at once.

    Returns:
        positions that each kept, of each layer and head, where one process holds all; tokens of each, alone and if all
        are preempted; how many were.
    """
    kept, tokens, preempted, enter = list[list[list[int]]](), list[dict[str, list[int]]](), 0, Tables.enter

    def noted(self: Tables, block: int, units: int, before: int, digest: bytes, found: Kept) -> None:
        kept.append([found.positions[a:b].tolist() for a, b in pairwise(found.offsets.tolist())])
        enter(self, block, units, before, digest, found)

    with engine(folder, settings, **options) as llm, patch.object(Tables, "enter", noted):
        core, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
        numbered = [(str(number), *case) for number, case in enumerate(cases)]
        for chosen in (*([one] for one in numbered), numbered):
            for name, seed, length, first in chosen:
                core.add_request(name, {"prompt_token_ids": prompt(seed, length)}, greedy(protect=first))
            tokens.append({})
            step = 0
            while core.has_unfinished_requests():
                if step == 25 and len(chosen) > 1:
                    preempted = preempt(scheduler)
                tokens[-1] |= {out.request_id: list(out.outputs[0].token_ids) for out in core.step() if out.finished}
                step += 1
    alone = {name: found for each in tokens[:-1] for name, found in each.items()}
    return {"kept": kept[: len(cases)], "alone": alone, "resumed": tokens[-1], "preempted": preempted}


def two_processes(
    folder: str, settings: dict[str, Any], cases: Cases = CASES, options: dict[str, Any] | None = None
) -> tuple[dict[int, list[int]], int]:
    """Tokens with tensor parallelism, with one more request every 3 steps, all preempted after 25; how many were."""
    with engine(folder, settings, tensor_parallel_size=2, **options or {}) as llm:
        return joined(llm, every=3, preempt_at=25, cases=cases)


def cuda_kernels(
    folder: str, settings: dict[str, Any], graphs: bool, cases: Cases = SHORT, options: dict[str, Any] | None = None
) -> tuple[dict[int, list[int]], int]:
    """Tokens of short prompts by what runs on CUDA, in Triton's interpreter; three in a batch, preempted after 5 steps.

    Args:
        graphs: decode steps are recorded once and replayed, as CUDA graphs are.
    Returns:
        tokens, and how many requests were preempted.
    """
    from kvpass.vllm import devices

    devices.operators = lambda device: devices.on_cuda()
    if graphs:
        from replayed import replay_decode_steps

        replay_decode_steps()
    with engine(folder, settings, **options or {}) as llm:
        found = joined(llm, every=2, preempt_at=5, cases=cases, new=SHORT_NEW)
    assert "kvpass.kernels.ragged_decode" in sys.modules
    return found


def loaded(folder: str) -> list[bool]:
    """Whether the plug-in is among the logits processors that each model runner loads."""
    from vllm.v1.sample.logits_processor import _load_logitsprocs_plugins
    from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_plugins

    from kvpass.vllm.prompt_rows import PromptRows

    return [PromptRows in load() for load in (_load_logitsprocs_plugins, _load_v2_logitsprocs_plugins)]


def long_answer(folder: str, settings: dict[str, Any]) -> tuple[list[int], str]:
    """Tokens of an answer to a prompt of one token without a limit of its own, and why it ended."""
    params = greedy()
    params.max_tokens = None
    with engine(folder, settings) as llm:
        out = llm.generate([{"prompt_token_ids": prompt(4, 1)}], params, use_tqdm=False)[0]
    assert params.max_tokens is None  # the caller's
    return list(out.outputs[0].token_ids), out.outputs[0].finish_reason


def refused(folder: str, settings: dict[str, Any], options: dict[str, Any]) -> str:
    """What the error of the start says."""
    try:
        with engine(folder, settings, **options):
            return "started"
    except ValueError as error:
        return str(error)


def refused_latents(folder: str, settings: dict[str, Any], latents: str) -> list[str]:
    """What the error of the start says for the model in the folder ``latents``: as it is, and if no flag is checked."""
    with patch.object(refusals, "REFUSALS", []):
        unchecked = refused(latents, settings, {})
    return [refused(latents, settings, {}), unchecked]


def beams(folder: str, settings: dict[str, Any]) -> str:
    """What the error of a beam search says."""
    with engine(folder, settings) as llm:
        try:
            llm.beam_search([{"prompt_token_ids": prompt(4, 9)}], BeamSearchParams(beam_width=2, max_tokens=4))
        except VLLMValidationError as error:
            return str(error)
    return "searched"


if __name__ == "__main__":
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print("\n" + RESULT + json.dumps(globals()[name](sys.argv[1], *arguments)), flush=True)
        gc.collect()

"""Runs in a process of its own: engines, one after the other, in three ways of asking them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")  # else memory grows by code for each number of tokens

from tiny import CASES, NEW, Cases, prompt
from vllm import LLM, SamplingParams

Tokens = dict[int, list[int]]


@contextmanager
def engine(folder: str, kvpass: dict[str, Any] | None = None, **options: Any) -> Iterator[LLM]:
    given = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "kv_cache_memory_bytes": 256 * 2**20,
        "additional_config": {} if kvpass is None else {"kvpass": kvpass},
    }
    llm = LLM(model=folder, **given | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def greedy(new: int = NEW, document: str | None = None, protect: int | None = None) -> SamplingParams:
    given = {"kvpass_document": document, "kvpass_protect": protect}
    given = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(max_tokens=new, temperature=0, detokenize=False, ignore_eos=True, extra_args=given or None)


def together(llm: LLM, cases: Cases, new: int = NEW) -> Tokens:
    prompts = [{"prompt_token_ids": prompt(*case[:2])} for case in cases]
    outputs = llm.generate(prompts, [greedy(new, *case[2:]) for case in cases], use_tqdm=False)
    return {case[1]: list(out.outputs[0].token_ids) for case, out in zip(cases, outputs, strict=True)}


def alone(llm: LLM, cases: Cases = CASES, new: int = NEW) -> Tokens:
    return {length: found for case in cases for length, found in together(llm, [case], new).items()}


def send(core: Any, seed: int, length: int, *document: str, name: object = None, new: int = NEW) -> None:
    """Have an engine answer a prompt, or a question about a document; the request is named by its length."""
    named = str(length if name is None else name)
    core.add_request(named, {"prompt_token_ids": prompt(seed, length)}, greedy(new, *document))


def preempt(scheduler: Any) -> int:
    """Preempt all requests that run; return how many have been."""
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    return sum(request.num_preemptions for request in scheduler.requests.values())


def joined(
    llm: LLM, every: int = 5, preempt_at: int | None = None, cases: Cases = CASES, new: int = NEW
) -> tuple[Tokens, int]:
    """One more request every few steps; at a step, preempt all that run. Also return how many were preempted."""
    core = llm.llm_engine
    scheduler = core.engine_core.engine_core.scheduler
    waiting, found, step, preempted = list(cases), {}, 0, 0
    while waiting or core.has_unfinished_requests():
        while waiting and (every == 0 or step % every == 0):
            send(core, *waiting.pop(0), new=new)
            if every:
                break
        if step == preempt_at:
            preempted = preempt(scheduler)
        for out in core.step():
            if out.finished:
                found[int(out.request_id)] = list(out.outputs[0].token_ids)
        step += 1
    return found, preempted

"""What each process of a test runs: a divided model against the same model whole.

Usage: worker.py FOLDER COMPILER POLICIES, with the policies as JSON: pairs of a name and its options; an option
``compile_regions`` is of the divided model only. With none, what processes send each other is counted.

Instead of a compiler, one of :data:`FAILURES`: the last process fails, or all call the model until they are stopped.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import kvpass
from kvpass import ranks as module_of_ranks
from kvpass.compiler.backend import PhaseCompiler
from kvpass.errors import UnsupportedAttentionError
from kvpass.ops import reference
from kvpass.policies.base import Policy
from kvpass.policies.observation import Observation

SIZE = int(os.environ["WORLD_SIZE"])
WINDOW = 8
torch.manual_seed(1)
IDS, MORE = torch.randint(0, 128, (2, 90)), torch.randint(0, 128, (2, 5))
MASK = torch.ones_like(IDS)
MASK[1, :13] = 0


@kvpass.register_policy
@dataclass(frozen=True, kw_only=True)
class Undeclared(Policy):
    """A policy that does not say ``divisible = True``."""

    name = "undeclared"

    def score(self, obs: Observation) -> Tensor:
        return obs.mean[..., : obs.evictable]


def loaded(folder: str, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options).eval()


def own(x: torch.Tensor, heads: int, rank: int) -> torch.Tensor:
    """The part of ``[B, L, K, ...]`` that belongs to this process, which has so many of the heads."""
    return x if heads == x.shape[2] else x[:, :, rank * heads : (rank + 1) * heads]


def compare_entries(cache: Any, reference: Any, label: str) -> None:
    rank, heads = dist.get_rank(), cache.lengths.shape[2]
    assert torch.equal(cache.lengths, own(reference.lengths, heads, rank)), f"{label}: other numbers of entries"
    positions = own(reference.positions, heads, rank)[..., : cache.positions.shape[-1]]
    assert torch.equal(cache.positions, positions), f"{label}: other entries"


def compare_reports(found: Any, expected: Any) -> None:
    """Of all heads in every process."""
    ours, theirs = found.report(), expected.report()
    assert torch.equal(ours.lengths, theirs.lengths) and ours.bytes_full == theirs.bytes_full
    torch.testing.assert_close(ours.attention_mass, theirs.attention_mass)
    for part, other in zip(ours.prompt.full_layers, theirs.prompt.full_layers, strict=True):
        assert part.group == other.group and torch.equal(part.offsets, other.offsets)
        kept = torch.arange(part.positions.shape[1]) < other.offsets[:, -1:]
        assert torch.equal(part.positions[kept], other.positions[:, : kept.shape[1]][kept])
    if ours.ranks is not None:
        of_process = ours.lengths.unflatten(2, (SIZE, -1)).sum(3).double()
        assert torch.equal(ours.imbalance, of_process.amax(2) / of_process.mean(2))
        assert f"{SIZE} processes share the heads" in str(ours) and ours.to_dict()["processes"] == SIZE


def compare(divided: PreTrainedModel, whole: PreTrainedModel, compiler: str, policy: str, options: Any) -> None:
    label = f"{policy} {options}"
    given = {"policy": policy, **({} if policy == "full" else {"budget": 24, "window": WINDOW}), **options}
    found = kvpass.compile(divided, backend=compiler, **given)
    given.pop("compile_regions", None)
    expected = kvpass.compile(whole, backend="eager", **given)
    cache = found.compress(IDS, MASK, reusable=False)
    reference = expected.compress(IDS, MASK, reusable=False)
    compare_entries(cache, reference, label)
    compare_reports(found, expected)
    for new in (MORE, MORE[:, :1]):
        logits = found(new, cache=cache).logits
        torch.testing.assert_close(logits, expected(new, cache=reference).logits, atol=1e-4, rtol=0, msg=label)
        compare_entries(cache, reference, label)
    if policy in ("lava", "tova", "h2o", "r_kv", "triattention") and found._kvpass.ranks is not None:
        compare_files(found, cache, expected, reference)
    if policy == "lava" and found._kvpass.ranks is not None:
        compare_different_ids(found)
    if policy == "tova":
        agree_on_arguments(divided)
    if policy == "snapkv":
        agree_on_captures(divided, whole)
    if policy in ("lava", "pyramidkv"):
        compare_recompression(divided, whole, policy, options)
    settings = {"attention_mask": MASK, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(found.generate(IDS, **settings), expected.generate(IDS, **settings)), f"{label}: other tokens"


def compare_different_ids(fast: Any) -> None:
    for ids in (torch.roll(IDS, dist.get_rank(), 1), IDS[:, dist.get_rank() :]):
        try:
            fast(ids)
        except ValueError as error:
            assert "input_ids: " in str(error) and "must make the same calls" in str(error), error
        else:
            raise AssertionError("each process had a prompt of its own")


def compare_files(found: Any, cache: Any, expected: Any, reference: Any) -> None:
    """A file of several processes is one of one device, and each reads both."""
    folder = os.path.dirname(found.config.name_or_path + "/")
    ours, theirs, failing = (os.path.join(folder, name) for name in ("ours.kv", "theirs.kv", "missing/cache.kv"))
    cache.save(ours)
    if dist.get_rank() == 0:
        reference.save(theirs)
    dist.barrier()
    for path in (ours, theirs):
        one, other = kvpass.load_cache(path, expected), kvpass.load_cache(path, found)
        assert torch.equal(one.positions, reference.positions) and torch.equal(other.positions, cache.positions), path
        logits = expected(MORE, cache=one).logits
        torch.testing.assert_close(found(MORE, cache=other).logits, logits, atol=1e-4, rtol=0, msg=path)
    try:
        cache.save(failing)
    except OSError:
        return
    raise AssertionError("every process must raise what the first one does")


LAST = f"in process {SIZE - 1} of {SIZE}, counted from 0: "
GIVEN: dict[str, Any] = {"policy": "lava", "budget": 24, "window": WINDOW}


def refused(run: Callable[[], Any], *said: str, kind: type[Exception] = ValueError) -> None:
    """Must raise in every process, with the same words."""
    try:
        run()
    except kind as error:
        messages = [None] * SIZE
        dist.all_gather_object(messages, str(error))
        assert len(set(messages)) == 1, messages
        assert all(part in str(error) for part in said), error
    else:
        raise AssertionError(f"not refused: {said}")


def agree_on_arguments(divided: PreTrainedModel) -> None:
    """What the last process refuses alone, all refuse, before one waits for another."""
    last, given = dist.get_rank() == SIZE - 1, GIVEN
    compiled = functools.partial(kvpass.compile, divided, backend="eager")
    refused(lambda: compiled(**{**given, "policy": "lavva" if last else "lava"}), LAST, "lavva")
    refused(lambda: compiled(**{**given, "policy": "lavva"}), "policy='lavva': did you mean 'lava'?")
    refused(lambda: compiled(**{**given, "policy": "snapkv" if last else "lava"}), "policy: ", "lava", "snapkv")
    refused(lambda: compiled(**{**given, "budget": 25 if last else 24}), "budget: ", "24", "25", "in process 0")
    own = {"policy": Undeclared(window=WINDOW), "budget": 24}
    refused(lambda: compiled(**(own if last else given)), LAST, "'undeclared'")
    fast = compiled(**given)
    refused(lambda: fast(IDS.float() if last else IDS), LAST, "input_ids")
    refused(lambda: fast(IDS, MASK if last else None), "attention_mask: None in process 0")
    refused(lambda: kvpass.load_cache("missing", fast) if last else fast(IDS), LAST, "missing", kind=RuntimeError)
    refused(lambda: compiled(**given) if last else fast(IDS), "call: a call of the model in process 0, kvpass.compile")
    fast.set_budget(30 if last else 24)
    refused(lambda: fast(IDS), "budget: ", "30")


def agree_on_captures(divided: PreTrainedModel, whole: PreTrainedModel) -> None:
    """What the last process cannot capture or compile, none runs; all go on once it can."""
    last = dist.get_rank() == SIZE - 1
    fast, expected = kvpass.compile(divided, backend="eager", **GIVEN), kvpass.compile(whole, backend="eager", **GIVEN)

    def failing(method: str, error: Exception) -> Any:
        return mock.patch.object(PhaseCompiler, method, side_effect=error) if last else mock.MagicMock()

    with failing("canonicalize", UnsupportedAttentionError("here", "node", "injected")):
        refused(lambda: fast(IDS), LAST, "injected")
    with failing("compile", torch.OutOfMemoryError("no memory")):
        refused(lambda: fast(IDS), LAST, "no memory", kind=RuntimeError)
    fast.warmup()
    cache = fast.compress(IDS, MASK, reusable=False)
    other = kvpass.compile(divided, backend="eager", **GIVEN).compress(IDS, MASK)
    refused(lambda: fast(MORE, cache=other if last else cache), LAST, "the cache was filled by another model")
    for new in (MORE, MORE[:, :1]):
        with failing("compile", RuntimeError("injected")):
            refused(lambda new=new: fast(new, cache=cache), LAST, "injected", kind=RuntimeError)
    reference = expected.compress(IDS, MASK, reusable=False)
    for new in (MORE, MORE[:, :1]):
        logits = fast(new, cache=cache).logits
        torch.testing.assert_close(logits, expected(new, cache=reference).logits, atol=1e-4, rtol=0)
        compare_entries(cache, reference, "after refusals")


FAILURES = ("raises", "refuses", "memory", "interrupted", "goes on")


def fail(divided: PreTrainedModel, how: str) -> None:
    """The last process fails alone: between calls, in ``kvpass.compile``, or in the middle of a prompt."""
    last = dist.get_rank() == SIZE - 1

    def now() -> None:
        os.write(2, f"fails at {time.time()}\n".encode())  # in one piece: both processes write

    if how == "refuses":
        now()
        kvpass.compile(divided, policy="lavva" if last else "lava", budget=24, window=WINDOW, backend="eager")
    fast = kvpass.compile(divided, policy="lava", budget=24, window=WINDOW, backend="eager")
    fast(IDS)
    if last and how == "raises":
        now()
        raise ValueError("out of luck")
    if last and how in ("memory", "interrupted"):
        judge = reference.judge

        def failing(call: Any, lse: Any, start: Any, first: Any, layer: int, *rest: Any) -> Any:
            if layer == 1:
                now()
                if how == "memory":
                    raise torch.OutOfMemoryError("out of memory, injected")
                os.kill(os.getpid(), signal.SIGINT)
            return judge(call, lse, start, first, layer, *rest)

        reference.judge = failing
    now()
    while how != "raises" or not last:
        fast(IDS)


def compare_recompression(divided: PreTrainedModel, whole: PreTrainedModel, policy: str, options: Any) -> None:
    """Two turns, each compressed again; one row is left as it is after the first."""
    given = {"policy": policy, "budget": 24, "window": WINDOW, "recompress": "every_turn", "backend": "eager"}
    found = kvpass.compile(divided, **given, **options)
    expected = kvpass.compile(whole, **given, **{k: v for k, v in options.items() if k != "compile_regions"})
    cache, reference = (fast.compress(IDS, MASK, reusable=False) for fast in (found, expected))
    for new in (MORE, torch.roll(MORE, 1), MORE[:, :1]):
        logits = found(new, cache=cache).logits
        torch.testing.assert_close(logits, expected(new, cache=reference).logits, atol=1e-4, rtol=0, msg=policy)
        compare_entries(cache, reference, f"{policy}, compressed again")
        compare_reports(found, expected)


def compare_bytes_sent(divided: PreTrainedModel) -> None:
    """Of scores: fp32, of the evictable tokens, once a layer."""
    sent = []
    gather = module_of_ranks.dist.all_gather

    def counted(found: Any, x: torch.Tensor, group: Any) -> Any:
        sent.append((x.shape, x.numel() * x.element_size()))
        return gather(found, x, group)

    fast = kvpass.compile(divided, policy="lava", budget=24, window=WINDOW, backend="eager")
    fast(IDS)  # captures
    module_of_ranks.dist.all_gather = counted
    try:
        fast(IDS, logits_to_keep=1)
    finally:
        module_of_ranks.dist.all_gather = gather
    config = divided.config
    heads, tokens = config.num_key_value_heads // SIZE, IDS.shape[1] - WINDOW
    scores = [size for shape, size in sent if len(shape) == 3 and shape[1:] == (heads, tokens)]
    assert scores == [4 * len(IDS) * heads * tokens] * config.num_hidden_layers, sent


def main(folder: str, compiler: str, policies: str) -> None:
    divided, whole = loaded(folder, distributed_config=DistributedConfig(tp_size=SIZE)), loaded(folder)
    if compiler in FAILURES:
        fail(divided, compiler)
    for policy, options in json.loads(policies):
        compare(divided, whole, compiler, policy, options)
    if policies == "[]":
        compare_bytes_sent(divided)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

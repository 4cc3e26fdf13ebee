"""What tests run on one device and in each of several processes that share a model, and how they compare the two."""

import functools
import io
import os
import runpy
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import kvpass
from command_line import invoke
from kvpass import builtin
from kvpass.compiler.backend import PhaseCompiler
from kvpass.errors import UnsupportedAttentionError
from kvpass.policies.base import Policy
from kvpass.policies.observation import Observation
from kvpass.report import Report
from tiny_models import left_pad, random_ids

WINDOW = 8
KVZAP = "kvzap.safetensors"
"""Maps of policy ``kvzap``, beside the model."""
IDS, MASK = left_pad([random_ids(1, 90)[0], random_ids(1, 77, seed=1)[0]])
TURNS = (random_ids(2, 5, seed=2), random_ids(2, 3, seed=3))
GIVEN: dict[str, Any] = {"policy": "lava", "budget": 24, "window": WINDOW}
OPTIONS: dict[str, dict[str, Any]] = {
    "cake": {"tau1": 1.0, "tau2": 1.0},
    "duo_attention": {"head_map": ((0.1, 0.8, 0.4, 0.6), (0.7, 0.3, 0.9, 0.2)), "sinks": 3},
    "pyramidkv": {"shape": "entropy"},
}

Entries: TypeAlias = tuple[Tensor, Tensor]
"""Numbers of the entries of each head, and their positions."""


@dataclass(frozen=True)
class Dialogue:
    """What a prompt and some turns gave.

    Attributes:
        entries: of the heads of one process, after the prompt and after each turn. report: after the prompt. logits:
            of every new token, ``[B, steps, vocabulary]``. tokens: the answers, ``[B, tokens]``.
    """

    entries: Sequence[Entries]
    report: Report
    logits: Tensor
    tokens: Tensor


@functools.cache
def model_in(folder: Path) -> PreTrainedModel:
    """The model in a folder; where processes have a group, they share it."""
    shared: dict[str, Any] = {}
    if dist.is_initialized():
        from transformers.distributed import DistributedConfig

        shared["distributed_config"] = DistributedConfig(tp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(folder, **shared).eval()


@functools.cache
def compiled_in(folder: Path, **given: Any) -> Any:
    """The model in a folder, compiled; captured once for all policies."""
    made: dict[str, Any] = {"policy": "snapkv", "budget": 1.0, "backend": "eager", **given}
    return kvpass.compile(model_in(folder), **made)


def with_policy(folder: Path, policy: str, **given: Any) -> Any:
    """The model in a folder with a policy; ``given`` to ``kvpass.compile``."""
    fast = compiled_in(folder, **given)
    if policy == "full":
        fast.set_policy(policy)
    else:
        own = OPTIONS.get(policy, {})
        if policy == "kvzap":
            own = {"weights": str(folder / KVZAP), "evict_during_decode": True}
        fast.set_policy(policy, 24, window=WINDOW, **own)
    return fast


def entries_of(cache: Any) -> Entries:
    return cache.lengths, cache.positions


def turn(fast: Any, cache: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and tokens of an answer of four tokens; the last is not in the cache."""
    out = fast.generate(
        ids, past_key_values=cache, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return torch.stack(out.logits, 1), out.sequences[:, ids.shape[1] :]


def dialogue(folder: Path, policy: str, **given: Any) -> Dialogue:
    """A left-padded prompt that is compressed, and two turns; ``given`` to ``kvpass.compile``."""
    fast = with_policy(folder, policy, **given)
    return talk(fast, fast.compress(IDS, MASK, reusable=False))


def talk(fast: Any, cache: Any) -> Dialogue:
    """Two turns after a prompt."""
    entries, report, answers = [entries_of(cache)], fast.report(), []
    for ids in TURNS:
        answers.append(turn(fast, cache, ids))
        entries.append(entries_of(cache))
    logits, tokens = (torch.cat(parts, 1) for parts in zip(*answers, strict=True))
    return Dialogue(entries, report, logits, tokens)


def compare_entries(found: Sequence[Entries], expected: Entries) -> None:
    """Those of each process against those of one device."""
    (lengths, positions) = expected
    for rank, (own_lengths, own_positions) in enumerate(found):
        own, first = own_lengths.shape[2], 0
        if own < lengths.shape[2]:
            assert own * len(found) == lengths.shape[2]
            first = rank * own
        heads = slice(first, first + own)
        assert torch.equal(own_lengths, lengths[:, :, heads]), "other numbers of entries"
        assert torch.equal(own_positions, positions[:, :, heads, : own_positions.shape[-1]]), "other entries"


def compare_reports(ours: Report, theirs: Report) -> None:
    """Of all heads, in every process."""
    assert torch.equal(ours.lengths, theirs.lengths) and ours.bytes_full == theirs.bytes_full
    torch.testing.assert_close(ours.attention_mass, theirs.attention_mass, equal_nan=True)
    for part, other in zip(ours.prompt.full_layers, theirs.prompt.full_layers, strict=True):
        assert part.group == other.group and torch.equal(part.offsets, other.offsets)
        kept = torch.arange(part.positions.shape[1]) < other.offsets[:, -1:]
        assert torch.equal(part.positions[kept], other.positions[:, : kept.shape[1]][kept])
    if ours.ranks.several:
        size = ours.ranks.size
        of_process = ours.lengths.unflatten(2, (size, -1)).sum(3).double()
        assert torch.equal(ours.imbalance, of_process.amax(2) / of_process.mean(2))
        assert f"{size} processes share the heads" in str(ours) and ours.to_dict()["processes"] == size


def compare_dialogues(found: Sequence[Dialogue], expected: Dialogue) -> None:
    """Those of each process against that of one device."""
    for entries, of_one in zip(zip(*(part.entries for part in found), strict=True), expected.entries, strict=True):
        compare_entries(entries, of_one)
    for part in found:
        torch.testing.assert_close(part.logits, expected.logits, atol=1e-4, rtol=0)
        assert torch.equal(part.tokens, expected.tokens), "other tokens"
        compare_reports(part.report, expected.report)


def saved(folder: Path, policy: str, path: Path, **given: Any) -> Entries:
    """The entries after a prompt and a turn, which are in the file now."""
    fast = with_policy(folder, policy, **given)
    cache = fast.compress(IDS, MASK, reusable=False)
    turn(fast, cache, TURNS[0])
    cache.save(path)
    return entries_of(cache)


def continued(folder: Path, policy: str, path: Path, **given: Any) -> tuple[Entries, Tensor]:
    """The entries in a file, and the logits of a turn on them."""
    fast = with_policy(folder, policy, **given)
    cache = kvpass.load_cache(path, fast)
    return entries_of(cache), turn(fast, cache, TURNS[1])[0]


def saved_where_nothing_can_be(folder: Path, path: Path) -> None:
    """Every process raises what the first one does."""
    cache = with_policy(folder, "lava").compress(IDS, MASK)
    try:
        cache.save(path)
    except OSError:
        return
    raise AssertionError("saved")


def refused(run: Callable[[], Any], *said: str, kind: type[Exception] = ValueError) -> None:
    """Must raise in every process, with the same words."""
    try:
        run()
    except kind as error:
        messages = [None] * dist.get_world_size()
        dist.all_gather_object(messages, str(error))
        assert len(set(messages)) == 1, messages
        assert all(part in str(error) for part in said), error
    else:
        raise AssertionError(f"not refused: {said}")


def _last() -> tuple[bool, str]:
    """Whether this is the last process, and what errors of that one begin with."""
    size = dist.get_world_size()
    return dist.get_rank() == size - 1, f"in process {size - 1} of {size}, counted from 0: "


def _undeclared() -> Policy:
    @kvpass.register_policy
    @dataclass(frozen=True, kw_only=True)
    class Undeclared(Policy):
        """A policy that does not say ``divisible = True``."""

        name = "undeclared"

        def score(self, obs: Observation) -> Tensor:
            return obs.mean[..., : obs.evictable]

    return Undeclared(window=WINDOW)


def agree_on_arguments(folder: Path) -> None:
    """What the last process refuses alone, all refuse, before one waits for another."""
    last, said = _last()
    compiled = functools.partial(kvpass.compile, model_in(folder), backend="eager")
    refused(lambda: compiled(**{**GIVEN, "policy": "lavva" if last else "lava"}), said, "lavva")
    refused(lambda: compiled(**{**GIVEN, "policy": "lavva"}), "policy='lavva': did you mean 'lava'?")
    refused(lambda: compiled(**{**GIVEN, "policy": "snapkv" if last else "lava"}), "policy: ", "lava", "snapkv")
    refused(lambda: compiled(**{**GIVEN, "budget": 25 if last else 24}), "budget: ", "24", "25", "in process 0")
    own = {"policy": _undeclared(), "budget": 24}
    refused(lambda: compiled(**(own if last else GIVEN)), said, "'undeclared'")
    fast = with_policy(folder, "lava")
    refused(lambda: fast(IDS.float() if last else IDS), said, "input_ids")
    refused(lambda: fast(torch.roll(IDS, int(last), 1)), "input_ids: ", "must make the same calls")
    refused(lambda: fast(IDS[:, int(last) :]), "input_ids: ", "must make the same calls")
    refused(lambda: fast(IDS, MASK if last else None), "attention_mask: None in process 0")
    refused(lambda: kvpass.load_cache("missing", fast) if last else fast(IDS), said, "missing", kind=RuntimeError)
    refused(lambda: compiled(**GIVEN) if last else fast(IDS), "call: a call of the model in process 0, kvpass.compile")
    fast.set_budget(30 if last else 24)
    refused(lambda: fast(IDS), "budget: ", "30")


def agree_on_captures(folder: Path) -> Dialogue:
    """What the last process cannot capture or compile, none runs; all go on once it can."""
    last, said = _last()
    fast = kvpass.compile(model_in(folder), backend="eager", **GIVEN)

    def failing(method: str, error: Exception) -> Any:
        return mock.patch.object(PhaseCompiler, method, side_effect=error) if last else mock.MagicMock()

    with failing("canonicalize", UnsupportedAttentionError("here", "node", "injected")):
        refused(lambda: fast.compress(IDS), said, "injected")
    with failing("compile", torch.OutOfMemoryError("no memory")):
        refused(lambda: fast.compress(IDS), said, "no memory", kind=RuntimeError)
    fast.warmup()
    cache = fast.compress(IDS, MASK, reusable=False)
    other = kvpass.compile(model_in(folder), backend="eager", **GIVEN).compress(IDS, MASK)
    refused(lambda: fast(TURNS[0], cache=other if last else cache), said, "the cache was filled by another model")
    for ids in (TURNS[0], TURNS[0][:, :1]):
        with failing("compile", RuntimeError("injected")):
            step = functools.partial(fast, ids, cache=cache, logits_to_keep=1)
            refused(step, said, "injected", kind=RuntimeError)
    return talk(fast, cache)


def small_builtin(folder: Path, layers: int = 2) -> Path:
    """The first layers of the built-in model, and its tokenizer, in a folder."""
    first: dict[str, Any] = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    for part in builtin.load(**first):
        part.save_pretrained(folder)
    return folder


def command(*arguments: str) -> str:
    """What the command ``kvpass`` prints; where processes have a group, in one that ``torchrun`` would have started."""
    launched = {"TORCHELASTIC_RUN_ID": "test"} if dist.is_initialized() else {}
    with mock.patch.dict(os.environ, launched):
        result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def printed_by(script: Path) -> str:
    """What a script prints. It runs without Inductor, and leaves the group as it is."""
    with (
        redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(kvpass, "compile", functools.partial(kvpass.compile, backend="eager")),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()

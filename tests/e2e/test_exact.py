"""Exact answers: drafted on the compressed cache, verified against the full one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import kvpass
from kvpass.cache.layers import FullAttentionLayers
from kvpass.errors import CacheMismatchError
from kvpass.operands import AppendBuffers
from kvpass.ops import schemas
from kvpass.ops.entry_formats import quantised
from kvpass.ops.host_pool import layer_on_device
from kvpass.transformers_compat import CACHE
from tiny_models import compiled_once, left_pad, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("captures_kept")
NEW = 24
PROMPT, QUESTION = random_ids(1, 65, seed=5), random_ids(1, 5, seed=6)
AS_DICT = {"return_dict_in_generate": True}


def greedy(model: Any, ids: Tensor, **options: Any) -> Any:
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **options})


def fast_model(family: str = "llama", **settings: Any) -> tuple[Any, Any]:
    return compiled_once(
        family, layers=2, **{"policy": "snapkv", "budget": 12, "window": 8, "backend": "eager", **settings}
    )


@pytest.mark.parametrize(
    ("family", "policy", "draft_tokens"),
    [
        ("llama", "snapkv", "auto"),
        pytest.param("gpt2", "lava", 3, marks=pytest.mark.exhaustive),
        ("llama", "lava", 3),
        pytest.param("qwen3", "keydiff", 1, marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v3", "lava", 5, marks=pytest.mark.exhaustive),
    ],
)
def test_greedy_answers_are_those_of_the_uncompiled_model(family, policy, draft_tokens):
    model, fast = fast_model(family, policy=policy)
    for ids in (PROMPT, random_ids(1, 90, seed=7)):
        found = greedy(fast, ids, exact=True, draft_tokens=draft_tokens)
        assert torch.equal(found, greedy(model, ids))
        accepted = fast.report().prompt.accepted
        assert sum(accepted.accepted) + len(accepted.drafted) in (
            NEW - 2,
            NEW - 1,
        )  # the prompt gives one, the last may have no draft
        if draft_tokens != "auto":
            assert max(accepted.drafted) == draft_tokens


def test_drafts_are_refused_and_accepted():
    """With a small budget some of both; with everything kept, all are accepted."""
    _, fast = fast_model(budget=40)
    greedy(fast, PROMPT, exact=True)
    some = fast.report().prompt.accepted
    assert 0 < sum(some.accepted) < sum(some.drafted)
    greedy(fast, PROMPT, exact=True, budget=1.0)
    every = fast.report().prompt.accepted
    assert every.accepted == every.drafted
    assert every.run == sum(every.drafted)
    assert every.drafted == (8, 13)  # twice as many after a whole draft, as far as the answer goes


@pytest.mark.parametrize("entries", ["model", pytest.param("int8", marks=pytest.mark.exhaustive), "rot4"])
def test_the_compressed_cache_has_the_exact_entries_of_the_answer(entries):
    if entries == "model":
        model, fast = fast_model()
    else:
        model = tiny_model("llama", layers=2)
        fast = kvpass.compile(model, policy="snapkv", budget=12, window=8, backend="eager", entries=entries)
    out = greedy(fast, PROMPT, exact=True, return_dict_in_generate=True)
    assert torch.equal(out.sequences, greedy(model, PROMPT))
    compressed = out[CACHE]
    assert compressed.get_seq_length() == compressed.full.get_seq_length() == PROMPT.shape[1] + NEW - 1
    for store, full in zip(compressed.full_layers, compressed.full.full_layers, strict=True):
        answer = slice(store.used - (NEW - 1), store.used), slice(full.used - (NEW - 1), full.used)
        for name in ("tail_k", "tail_v"):
            held, exact = getattr(store, name)[..., answer[0], :], getattr(full, name)[..., answer[1], :]
            if entries == "model":
                assert torch.equal(held, exact)
            else:
                codes, scale = quantised(exact - store.key_mean[:, :, :, None] if name == "tail_k" else exact, entries)
                assert torch.equal(held, codes)
                assert torch.equal(getattr(store, f"{name}_scale")[..., answer[0]], scale)
    assert compressed.full.full_layers[0].tail_k.dtype == torch.float32


def test_documents_and_conversations_keep_their_full_cache():
    model, fast = fast_model()
    document = fast.compress(PROMPT, keep_full=True)
    assert document.to("meta").full is None and document.full is not None
    assert document.nbytes < document.full.nbytes
    whole = torch.cat([PROMPT, QUESTION], 1)
    expected = greedy(model, whole)[:, whole.shape[1] :]
    for _ in range(2):  # the document does not change
        found = greedy(fast, QUESTION, past_key_values=document, exact=True)
        assert torch.equal(found[:, QUESTION.shape[1] :], expected)
    assert document.get_seq_length() == document.full.get_seq_length() == PROMPT.shape[1]
    branch = document.clone()  # which goes on, and neither the document nor its full cache does
    for cache in (branch, document):
        found = greedy(fast, QUESTION, past_key_values=cache, exact=True)
        assert torch.equal(found[:, QUESTION.shape[1] :], expected)
    assert branch.get_seq_length() == branch.full.get_seq_length() == whole.shape[1] + NEW - 1
    branch.reset()
    assert branch.full is None

    first = greedy(fast, PROMPT, exact=True, return_dict_in_generate=True)
    text = torch.cat([first.sequences, QUESTION], 1)
    second = greedy(fast, text[:, first[CACHE].get_seq_length() :], past_key_values=first[CACHE], exact=True)
    seen = torch.ones_like(text)  # an answer may have the token of padding
    assert torch.equal(second[:, -NEW:], greedy(model, text, attention_mask=seen)[:, -NEW:])


def test_a_saved_full_cache_answers_exactly(tmp_path):
    model, fast = fast_model()
    document = fast.compress(PROMPT, keep_full=True)
    document.save(tmp_path / "small")
    document.full.save(tmp_path / "full")
    loaded = kvpass.load_cache(tmp_path / "small", fast)
    with pytest.raises(CacheMismatchError, match="exact=True needs the full cache of the text beside"):
        greedy(fast, QUESTION, past_key_values=loaded, exact=True)
    loaded.full = fast.compress(PROMPT.flip(1), keep_full=True).full
    with pytest.raises(CacheMismatchError, match=r"cache\.full holds another text"):
        greedy(fast, QUESTION, past_key_values=loaded, exact=True)
    loaded.full = kvpass.load_cache(tmp_path / "full", fast)
    whole = torch.cat([PROMPT, QUESTION], 1)
    found = greedy(fast, QUESTION, past_key_values=loaded, exact=True)
    assert torch.equal(found[:, -NEW:], greedy(model, whole)[:, -NEW:])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="says what is mapped")
@pytest.mark.parametrize("rows", [1, 3])
def test_a_mapped_full_cache_stays_in_its_file(tmp_path, rows):
    model, fast = fast_model()
    document = fast.compress(PROMPT, keep_full=True)
    document.full.save(tmp_path / "full")
    document.full = kvpass.load_cache(tmp_path / "full", fast, mapped=True)
    content = (tmp_path / "full").read_bytes()
    questions = random_ids(rows, 5, seed=6)
    out = greedy(fast, questions, past_key_values=document, exact=True, **AS_DICT)
    expected = greedy(model, torch.cat([PROMPT.expand(rows, -1), questions], 1))
    assert torch.equal(out.sequences[:, -NEW:], expected[:, -NEW:])
    for cache in (document.full, out[CACHE].full):
        (store,) = cache.full_layers
        places = [buffer.data_ptr() for buffer in (store.pool_k, store.pool_v)]
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        ours = [line[0].split("-") for line in lines if line[-1] == str(tmp_path / "full")]
        assert all(any(int(low, 16) <= place < int(high, 16) for low, high in ours) for place in places)
    assert (tmp_path / "full").read_bytes() == content


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.exhaustive), "inductor"])
@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.exhaustive)])
def test_a_full_cache_on_the_host_is_copied_layer_by_layer(monkeypatch, family, backend):
    """As if the model were on another device than every pool: tests/e2e/test_gpu.py has one."""
    copied: list[tuple[int, int]] = []

    def copy_layer(held: AppendBuffers, layer: int, device: torch.device) -> AppendBuffers:
        found = layer_on_device(held, layer, device)
        copied.append((held.pool_k.shape[1], found.pool_k.shape[1]))
        return found

    model, fast = fast_model(family, backend=backend)
    monkeypatch.setattr(schemas, "_is_elsewhere", lambda pool, like: True)
    monkeypatch.setattr(schemas, "layer_on_device", copy_layer)
    with pytest.raises(ValueError, match="keep_full='disk': must be True, False or 'host'"):
        fast.compress(PROMPT, keep_full="disk")
    for lengths in ((65,), (40, 65)):
        prompts, mask = padded_prompts(*lengths)
        document = fast.compress(prompts, mask, keep_full="host")
        questions = random_ids(len(lengths), 5, seed=6)
        out = greedy(fast, questions, past_key_values=document, exact=True)
        whole, seen = torch.cat([prompts, questions], 1), torch.cat([mask, torch.ones_like(questions)], 1)
        assert torch.equal(out[:, -NEW:], greedy(model, whole, attention_mask=seen)[:, -NEW:])
    assert copied and all(part < held for held, part in copied), "a pool was copied whole"


def test_processors_end_tokens_and_padding_count():
    model, fast = fast_model()
    plain = greedy(model, PROMPT)
    end = int(plain[0, PROMPT.shape[1] + 14])
    for options in ({"repetition_penalty": 1.5}, {"eos_token_id": end}, {"bad_words_ids": [[end]]}):
        for budget in (12, 1.0):
            found = greedy(fast, PROMPT, exact=True, budget=budget, **options)
            assert torch.equal(found, greedy(model, PROMPT, **options))
        accepted = fast.report().prompt.accepted
        assert accepted.accepted == accepted.drafted  # everything is kept, and drafts go by the same rules
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.int64), PROMPT], 1)
    mask = (torch.arange(padded.shape[1]) >= 7).long()[None]
    assert torch.equal(greedy(fast, padded, exact=True, attention_mask=mask)[:, 7:], plain)


def padded_prompts(*lengths: int) -> tuple[Tensor, Tensor]:
    """Prompts of these lengths, left-padded, and their mask."""
    return left_pad([random_ids(1, n, seed=n)[0] for n in lengths])


@pytest.mark.parametrize("rows", [2, 5, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_each_row_is_answered_as_alone(rows):
    """Rows of several lengths that accept and end each at another place."""
    model, fast = fast_model(budget=40)
    ids, mask = padded_prompts(*(65, 41, 90, 58, 77, 66, 49, 82)[:rows])
    alone = [greedy(model, row[None, seen.bool()])[0, -NEW:] for row, seen in zip(ids, mask, strict=True)]
    assert torch.equal(greedy(fast, ids, attention_mask=mask, exact=True)[:, -NEW:], torch.stack(alone))

    end = int(alone[0][9])
    found = greedy(fast, ids, attention_mask=mask, exact=True, eos_token_id=end, pad_token_id=3)
    for answer, with_end in zip(alone, found[:, ids.shape[1] :], strict=True):
        length = [*answer.tolist(), end].index(end) + 1
        assert with_end.tolist() == [*answer.tolist()[:length], *(NEW * [3])][: len(with_end)]
    greedy(fast, ids, attention_mask=mask, exact=True, eos_token_id=end, pad_token_id=3, budget=1.0)
    accepted = fast.report().prompt.accepted
    assert accepted.accepted == accepted.drafted  # drafts of a row that has ended are padding


class RowsEndApart(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor([len(ids) >= 95 + row for row, ids in enumerate(input_ids)])


class Listener(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[int] = []

    def put(self, value: Tensor) -> None:
        self.heard += value.flatten().tolist()

    def end(self) -> None:
        self.heard.append(-1)


def test_arguments_of_generate_count_for_every_row():
    model, fast = fast_model(budget=40)
    ids, mask = padded_prompts(65, 41, 90)
    end = int(greedy(model, ids, attention_mask=mask)[0, -9])
    for options in (
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"stopping_criteria": [RowsEndApart()], "eos_token_id": end},
        {"min_new_tokens": 20, "eos_token_id": end, "output_scores": True},
    ):
        options |= {"attention_mask": mask, **AS_DICT}
        found, expected = greedy(fast, ids, exact=True, **options), greedy(model, ids, **options)
        assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.scores, expected.scores)
    ours, theirs = Listener(), Listener()
    greedy(fast, PROMPT, exact=True, streamer=ours)
    greedy(model, PROMPT, streamer=theirs)
    assert ours.heard == theirs.heard


def test_a_row_keeps_what_it_accepted_when_another_does_not():
    """Together, rows need as many checks as the slowest alone."""
    _, fast = fast_model(budget=40)
    ids, mask = padded_prompts(65, 41, 90, 58)

    def checks(ids: Tensor, mask: Tensor | None = None) -> int:
        greedy(fast, ids, attention_mask=mask, exact=True, draft_tokens=8, max_new_tokens=64)
        return len(fast.report().prompt.accepted.drafted)

    alone = [checks(row[None, seen.bool()]) for row, seen in zip(ids, mask, strict=True)]
    assert min(alone) < max(alone) / 2
    assert checks(ids, mask) == max(alone)


@pytest.mark.parametrize("rows", [1, 3])
def test_sampled_answers_are_those_of_the_full_cache_with_the_same_seed(rows):
    model, fast = fast_model(budget=40)
    ids, mask = padded_prompts(65, 41, 90)
    options = {"attention_mask": mask[-rows:], "do_sample": True, "temperature": 1.5, "num_return_sequences": 2}
    found = []
    for made, exact in ((model, {}), (fast, {"exact": True}), (fast, {"exact": True, "budget": 1.0})):
        torch.manual_seed(1)
        found.append(greedy(made, ids[-rows:], **options, **exact))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    accepted = fast.report().prompt.accepted
    assert accepted.accepted == accepted.drafted  # everything is kept, and drafts are sampled by the same numbers


@pytest.mark.parametrize("entries", ["model", pytest.param("int8", marks=pytest.mark.exhaustive)])
def test_questions_of_several_lengths_about_one_document(entries):
    model = tiny_model("llama", layers=2)
    fast = kvpass.compile(model, policy="snapkv", budget=40, window=8, backend="eager", entries=entries)
    document = fast.compress(PROMPT, keep_full=True)
    questions, mask = padded_prompts(5, 9, 3)
    out = greedy(fast, questions, attention_mask=mask, past_key_values=document, exact=True, **AS_DICT)
    for row, question in enumerate(questions):
        text = torch.cat([PROMPT, question[None, mask[row].bool()]], 1)
        assert torch.equal(out.sequences[row, -NEW:], greedy(model, text)[0, -NEW:])
    assert out[CACHE].full.columns == out[CACHE].columns == PROMPT.shape[1] + 9 + NEW - 1
    more = torch.cat([out.sequences[:, -1:], QUESTION.expand(3, -1)], 1)
    second = greedy(fast, more, past_key_values=out[CACHE], exact=True)
    for row, question in enumerate(questions):
        text = torch.cat([PROMPT, question[None, mask[row].bool()], out.sequences[row, None, -NEW:], QUESTION], 1)
        assert torch.equal(second[row, -NEW:], greedy(model, text, attention_mask=text * 0 + 1)[0, -NEW:])


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.exhaustive), 5])
def test_sampled_answers_have_the_distribution_of_the_full_cache(rows):
    """Every text of three tokens out of two each, as often as the uncompiled model has it (chi-squared test)."""
    model, fast = fast_model(budget=40)
    document = fast.compress(PROMPT, keep_full=True)
    options = {"do_sample": True, "top_k": 2, "temperature": 1.5, "max_new_tokens": 3, "num_return_sequences": rows}
    expected: dict[tuple[int, ...], float] = {}
    for choice in itertools.product(range(2), repeat=3):
        text, chance = torch.cat([PROMPT, QUESTION], 1), 1.0
        for place in choice:
            best = (model(text).logits[0, -1] / options["temperature"]).topk(2)
            chance *= best.values.double().softmax(-1)[place].item()
            text = torch.cat([text, best.indices[place].view(1, 1)], 1)
        expected[tuple(text[0, -3:].tolist())] = chance
    torch.manual_seed(0)
    counts, total, refused = dict.fromkeys(expected, 0), 250, 0
    for _ in range(total // rows):
        found = greedy(fast, QUESTION, past_key_values=document, exact=True, **AS_DICT, **options)
        for text in found.sequences[:, -3:].tolist():
            counts[tuple(text)] += 1
        accepted = found[CACHE].record.accepted
        refused += sum(accepted.drafted) - sum(accepted.accepted)
    assert refused > total / 20, "the full cache hardly ever decided"
    chances = torch.tensor(list(expected.values()), dtype=torch.float64)
    assert chisquare(list(counts.values()), total * chances / chances.sum()).pvalue > 0.01


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"policy": "h2o"}, {}, "'exact' is not supported with policy 'h2o': for every draft it evicts"),
        ({"recompress": "every_turn"}, {}, "'exact' is not supported with recompress='every_turn'"),
        ({}, {"num_beams": 2}, "exact=True with num_beams=2 is not supported: beams change their order"),
        ({}, {"guidance_scale": 1.5}, "exact=True with guidance_scale=1.5 is not supported: it reads each token"),
        ({}, {"prompt_lookup_num_tokens": 3}, "exact=True and 'prompt_lookup_num_tokens' are two kinds of drafts"),
        ({}, {"draft_tokens": 0}, "draft_tokens=0: must be"),
        ({}, {"draft_tokens": 4, "exact": False}, "draft_tokens=4 goes with exact=True"),
        ({"family": "gemma3"}, {}, "cannot be cropped, as drafts .* need it: layers with a sliding window"),
    ],
)
def test_refused_with_the_reason(settings, options, message):
    _, fast = fast_model(**settings)
    with pytest.raises(ValueError, match=message):
        greedy(fast, PROMPT, **{"exact": True, **options})


@pytest.mark.parametrize("door", ["compress", "generate"])
def test_without_memory_for_the_full_cache_the_error_says_what_to_do(door, monkeypatch):
    _, fast = fast_model()

    def fails(self: Any, *args: Any, **given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(FullAttentionLayers, "begin_prefill", fails)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as failure:
        fast.compress(PROMPT, keep_full=True) if door == "compress" else greedy(fast, PROMPT, exact=True)
    assert "load the full one with mapped=True" in failure.value.__notes__[0]
    with pytest.raises(torch.OutOfMemoryError) as failure:
        fast.compress(PROMPT)
    assert not hasattr(failure.value, "__notes__")


def test_a_full_cache_left_behind_is_refused():
    _, fast = fast_model()
    cache = fast.compress(PROMPT, keep_full=True, reusable=False)
    greedy(fast, QUESTION, past_key_values=cache)
    with pytest.raises(CacheMismatchError, match=r"cache\.full holds 65 tokens, and the cache 93"):
        greedy(fast, QUESTION, past_key_values=cache, exact=True)

"""A second prompt of the same shape is in the memory of the first, so that no decode step is captured again.

On the CPU, with a recorder that, like a CUDA graph, keeps no tensor of the cache and replays on addresses.
"""

import copy
import ctypes
import functools
import inspect
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

import kvpass
from compiled_models import compiled_anew, greedy, two_layers
from kvpass.cache.buffer_reuse import BufferReuse
from kvpass.cache.cache import CompressedCache
from kvpass.cache.layers import FullAttentionLayers
from kvpass.compiler.backend import PhaseCompiler
from pairwise import quick, quick_rows
from small_decoders import raw_decoder
from tiny_models import in_session, left_pad, random_ids, tiny_model


def at_address(tensor):
    """A function that makes a tensor of the memory that ``tensor`` has now."""
    address, shape, dtype, nbytes = tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.nbytes
    return lambda: torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype).view(shape)


class Recorder:
    recorded = 0

    def __init__(self, device):
        pass

    def __call__(self, function):
        Recorder.recorded += 1
        known = inspect.getclosurevars(function).nonlocals
        capture, step, used = known["self"], known["step"], known["used"]
        state = [at_address(tensor) for tensor in known["state"]]

        def replay():
            capture._outputs = step(*used, *(tensor() for tensor in state))

        return SimpleNamespace(replay=replay)


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """How many decode steps have been captured since it was last asked."""
    monkeypatch.setattr("kvpass.compiler.backend.CudaRecorder", Recorder)
    graphed = compiled()._kvpass.captures.compiler
    monkeypatch.setattr(PhaseCompiler, "captures_steps", lambda self, device: self is graphed)
    Recorder.recorded = 0

    def asked():
        count, Recorder.recorded = Recorder.recorded, 0
        return count

    # What Dynamo leaves of a capture refers to the cache; it collects that garbage itself, if not told otherwise.
    with torch._dynamo.config.patch(run_gc_after_compile=True):
        yield asked


def graphed_model(policy="lava", budget=16):
    """A model with a window whose steps are captured, which the tests of this file share.

    Two rows and one logit each: of these alone there is a capture.
    """
    fast = compiled()
    fast.set_policy(policy, budget, **({} if budget is None else {"window": 8}))
    return fast


@functools.cache
def compiled():
    return compiled_anew(tiny_model("gemma3", layers=2))


def plain_model(policy="lava", budget=16):
    """The same model whose steps are not: it keeps no memory."""
    return two_layers("gemma3", policy=policy, budget=budget, **({} if budget is not None else {"window": None}))[1]


@pytest.mark.parametrize(
    ("policy", "budget"), quick_rows([("snapkv", 14), ("lava", 14), ("h2o", 14), ("full", None)], [("snapkv", 14)])
)
def test_a_second_prompt_of_any_length_and_padding_captures_nothing(policy, budget, recorded):
    graphed, plain = graphed_model(policy, budget), plain_model(policy, budget)
    others = [(61, 61), (61, 61)] if policy == "full" else [(100, 61), (200, 70)]
    for turn, lengths in enumerate([(61, 61), (61, 61), *others]):  # without a budget a cache is as long as its prompt
        ids, mask = left_pad([random_ids(1, n, seed=turn + n)[0] for n in lengths])
        expected = greedy(plain, ids, 12, attention_mask=mask)
        assert torch.equal(greedy(graphed, ids, 12, attention_mask=mask), expected), f"prompt {turn}"
        assert recorded() == (turn == 0), f"prompt {turn}"


@pytest.mark.parametrize("policy", quick(["lava", "h2o"], ["h2o"]))
def test_nor_does_a_second_question_about_a_document(policy, recorded):
    graphed, plain = graphed_model(policy), plain_model(policy)
    text = random_ids(2, 61)
    caches = [model.compress(text) for model in (graphed, plain)]
    for turn in range(3):
        question = random_ids(2, 9, seed=turn + 1)
        pairs = zip((graphed, plain), caches, strict=True)
        said, expected = (greedy(model, question, 20, past_key_values=cache) for model, cache in pairs)
        assert torch.equal(said, expected), f"question {turn}"
        assert (recorded() > 0) == (turn == 0), f"question {turn}"


def test_a_cache_that_is_still_referred_to_is_not_overwritten():
    graphed, plain = graphed_model(), plain_model()
    texts, token = [random_ids(2, 61, seed=seed) for seed in range(3)], random_ids(2, 1)

    def filled(model, text):
        return model(text, logits_to_keep=1).past_key_values

    for hold in (lambda cache: cache, CompressedCache.clone, copy.deepcopy):  # a clone shares what no call writes
        held = [hold(filled(graphed, text)) for text in texts]
        for text, cache in zip(texts, held, strict=True):
            expected = plain(token, past_key_values=filled(plain, text)).logits
            assert torch.equal(graphed(token, past_key_values=cache).logits, expected)
    views, expected = (
        torch.stack([filled(model, text).state.full_layers[0].buffers.pool_k[:, 3:5] for text in texts])
        for model in (graphed, plain)
    )
    assert torch.equal(views, expected), "a view of a cache that is gone"


def test_a_cache_that_is_reset_gives_its_memory_to_the_next_and_a_report_outlives_it():
    graphed = graphed_model()
    cache, report = graphed.compress(random_ids(2, 61)), graphed.report()
    of_report = (report.prompt.start, report.prompt.full_layers[0].offsets)
    expected = [tensor.clone() for tensor in of_report]
    before = cache.state.full_layers[0].buffers.pool_k.data_ptr()
    cache.reset()
    assert graphed.compress(random_ids(2, 61)).state.full_layers[0].buffers.pool_k.data_ptr() == before
    for turn in range(3):
        graphed.compress(random_ids(2, 70, seed=turn + 1))
    assert all(map(torch.equal, of_report, expected))


def test_what_is_held_back_is_bounded_and_let_go_by_a_prompt_of_another_shape():
    reuse, shape = BufferReuse(), (4, 5)
    given = [reuse.empty("k", shape, torch.float32, torch.device("cpu")) for _ in range(5)]
    assert len({tensor.data_ptr() for tensor in given}) == 5, "one was given twice"
    assert len(reuse._known["k"]) == 2, "more than two are held back when all are gone"
    kept = {tensor.data_ptr() for tensor in given[-2:]}
    del given
    again = reuse.empty("k", shape, torch.float32, torch.device("cpu"))
    assert again.data_ptr() in kept
    assert len(reuse._known["k"]) == 1, "one that nobody took was held back"
    other = reuse.empty("k", (6,), torch.float32, torch.device("cpu"))
    del again, other
    last = reuse.empty("k", (6,), torch.float64, torch.device("cpu"))
    assert [tensor.dtype for tensor in reuse._known["k"]] == [torch.float64] == [last.dtype]


# -- the tail is reserved for what generate is asked for --------------------------------------------------------


def appending():
    return two_layers(budget=16)[1]


@pytest.fixture
def tails(monkeypatch):
    """Lengths of the tail in every call that continues a cache."""
    seen, ensure_room = [], FullAttentionLayers.ensure_room

    def watched(self, *args):
        ensure_room(self, *args)
        seen.append(self.buffers.tail_k.shape[3])

    monkeypatch.setattr(FullAttentionLayers, "ensure_room", watched)
    return seen


def tail_of(cache):
    return cache.state.full_layers[0].buffers.tail_k.shape[3]


def test_generate_reserves_the_tail_once(tails):
    plain = appending()
    for asked, slots in (
        ({"max_new_tokens": 64 + 1}, 8 + 64),
        ({"max_new_tokens": 64 + 2}, 8 + 128),
        ({"max_length": 61 + 70}, 8 + 128),
        ({"generation_config": GenerationConfig(max_new_tokens=70)}, 8 + 128),
        ({"generation_config": GenerationConfig(max_length=61 + 130)}, 8 + 192),
        ({}, 8 + 64),
    ):
        tails.clear()
        ends = [] if asked == {"max_new_tokens": 64 + 1} else [lambda ids, _: torch.tensor([ids.shape[1] > 61 + 2])]
        plain.generate(random_ids(1, 61), do_sample=False, stopping_criteria=ends, **asked)
        assert set(tails) == {slots} and len(tails) == (2 if ends else 64), asked


def test_a_turn_reserves_the_tail_once_and_tokens_beyond_what_was_expected_find_room(tails):
    plain = appending()
    cache = plain.compress(random_ids(1, 61), reusable=False)
    ends = [lambda ids, _: torch.tensor([ids.shape[1] > 60 + 14])]
    greedy(plain, random_ids(1, 60, seed=1), 50, past_key_values=cache, stopping_criteria=ends)
    assert tails[-1] == 128 and len(set(tails)) == 2, "as long as the prompt's first, then once"
    cache = greedy(plain, random_ids(1, 61), 4, return_dict_in_generate=True).past_key_values
    for tokens in (40, 1, 20, *[1] * 19):
        plain(random_ids(1, tokens), past_key_values=cache)
    assert cache.columns == 61 + 3 + 80 and tail_of(cache) == 128


def test_what_is_reserved_ahead_is_bounded_and_so_is_what_an_early_end_leaves():
    """Many ask for thousands of tokens and mean: until the end of the answer."""
    plain = appending()
    ids = random_ids(1, 61)
    end = int(greedy(plain, ids, 3)[0, -1])
    cache = greedy(plain, ids, 50_000, eos_token_id=end, return_dict_in_generate=True).past_key_values
    assert tail_of(cache) == 8 + 1024
    parts = [*cache.state.parts, cache.state.start, cache.ids]
    assert cache.nbytes == sum(part.nbytes for part in parts)
    cache.reset()
    assert tail_of(plain(ids, past_key_values=cache).past_key_values) == 8 + 64
    assert not plain._kvpass.captures.compiler.reuse._known, "where no steps are captured nothing is held back"


def test_the_greedy_loop_of_a_plain_module_reserves_the_tail_once(tails):
    _, compiled = raw_decoder(budget=16)
    _, cache = in_session(compiled, [40], random_ids(1, 40), torch.arange(40)[None])
    assert tail_of(cache) == 8 + 64
    kvpass.generate(compiled, random_ids(1, 40), max_new_tokens=70, positions=True)
    assert set(tails) == {8 + 128} and len(tails) == 69

"""The loop of ``generate`` on CUDA, which queues a step before it waits for a token: against that of transformers.

On a CPU the step is run where it would be queued.
"""

import pytest
import torch
from transformers import GenerationMixin, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import kvpass
from compiled_models import UNLIMITED, compiled_anew, compiled_apart, failing, greedy, padded, two_layers
from kvpass.compiler.capture import CaptureCache
from kvpass.frontends import sampling
from kvpass.transformers_compat import CACHE
from pairwise import pairwise
from small_decoders import SmallDecoder
from tiny_models import random_ids, raw, tiny_model
from versions import needs_transformers

EVERYTHING = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


class Said(BaseStreamer):
    """Keeps what it is given, and how many calls of the model there had been; may raise an error at a call."""

    def __init__(self, calls=(), error=None, at=0):
        self.calls, self.error, self.at, self.values, self.counts = calls, error, at, [], []

    def put(self, value):
        self.values.append(value.tolist())
        self.counts.append(len(self.calls))
        if len(self.values) == self.at:
            raise self.error

    def end(self):
        self.values.append("end")


class EndsAfter:
    """A criterion that counts its calls."""

    def __init__(self, most):
        self.most = most

    def __call__(self, ids, scores, **kwargs):
        self.most -= 1
        return torch.full((len(ids),), self.most == 0)


class TheirLoopError(Exception):
    """The loop of transformers was asked for."""


def refuse(*args, **kwargs):
    raise TheirLoopError


@pytest.fixture
def ours(monkeypatch):
    monkeypatch.setattr(sampling, "QUEUING", {"cpu"})
    monkeypatch.setattr(GenerationMixin, "_sample", refuse)


def answered(fast, ids, new, sample, **options):
    """What a call gives and leaves, by name."""
    torch.manual_seed(0)
    streamer, chosen = Said(), {"do_sample": sample, **({"temperature": 3.0} if sample else {})}
    out = distinct(fast, ids, new, streamer=streamer, **EVERYTHING, **chosen, **options)
    cache = out[CACHE]
    left = {name: getattr(cache, name) for name in ("columns", "positions", "lengths", "ids", "attention_mask")}
    return {
        "sequences": out.sequences,
        "scores": torch.stack(out.scores),
        "logits": torch.stack(out.logits),
        "streamed": streamer.values,
        "generator": torch.get_rng_state(),
        **left,
        "what comes next": fast(out.sequences[:, -1:], past_key_values=cache.clone()).logits,
    }


def by_both(monkeypatch, *args, make=dict, **options):
    """What a call gives and leaves, which must be the same by both loops; ``make``: returns what a call may change."""
    expected = answered(*args, **options, **make())
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "QUEUING", {"cpu"})
        patch.setattr(GenerationMixin, "_sample", refuse)
        found = answered(*args, **options, **make())
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name
    return expected


def distinct(fast, ids, new, **options):
    """The best tokens, each another."""
    return greedy(fast, ids, new, no_repeat_ngram_size=1, **options)


def ends(tokens):
    return {"eos_token_id": tokens, "pad_token_id": 0}


@pairwise(place=[0, 1, 2, 3, 4, "different"], sample=[False, True], rows=[1, 3])
def test_an_answer_that_ends_at_any_place_is_that_of_transformers(place, sample, rows, monkeypatch):
    fast, (ids, mask) = two_layers(budget=24)[1], padded(40, 31, 22)
    given = fast, ids[:rows], 6, sample
    free = by_both(monkeypatch, *given, attention_mask=mask[:rows])["sequences"][:, 40:].tolist()
    places = (3, 0, 2) if place == "different" else (place,) * 3
    end = [row[at] for row, at in zip(free, places, strict=False)]
    out = by_both(monkeypatch, *given, attention_mask=mask[:rows], **ends(end))
    assert out["sequences"].shape[1] <= 41 + max(places) and out["columns"] == out["sequences"].shape[1] - 1


@pytest.mark.parametrize("new", [1, 2, 3])
def test_a_short_answer_is_that_of_transformers(new, monkeypatch):
    given = two_layers(budget=24)[1], random_ids(2, 40), new
    for sample in (False, True):
        free = by_both(monkeypatch, *given, sample)
        by_both(monkeypatch, *given, sample, **ends(free["sequences"][:, -1].tolist()))


@pytest.mark.usefixtures("ours")
def test_the_next_step_is_queued_before_the_host_waits_for_a_token(calls):
    """A streamer gets a token when the host has it; behind the last token of the greatest length is no step."""
    fast, ids = two_layers(budget=24)[1], random_ids(1, 30)
    free = distinct(fast, ids, 4)[0]
    for options, expected in (({}, [0, 2, 3, 4, 4]), (ends(int(free[31])), [0, 2, 3])):
        calls.clear()
        streamer = Said(calls)
        distinct(fast, ids, 4, streamer=streamer, **options)
        assert streamer.counts == expected


OPTIONS = {
    "a criterion of the user's": lambda: {"stopping_criteria": [EndsAfter(3)], "max_time": 1e3},
    "a processor that runs the model": lambda: {"guidance_scale": 1.5},
    "processors of the text": lambda: {"repetition_penalty": 1.5, "min_new_tokens": 3},
    "several answers": lambda: {"num_return_sequences": 2},
}


@pytest.mark.parametrize("make", OPTIONS.values(), ids=OPTIONS)
def test_criteria_and_processors_are_called_as_by_transformers(make, monkeypatch):
    by_both(monkeypatch, two_layers(budget=UNLIMITED)[1], random_ids(1, 30), 5, True, make=make)


@pytest.mark.parametrize("reusable", [True, False])
def test_a_given_cache_is_left_as_by_transformers(reusable, monkeypatch):
    fast, asked, left = two_layers(budget=24)[1], random_ids(2, 5, seed=1), []
    document = fast.compress(random_ids(2, 40), reusable=reusable)

    def make():
        left.append(document if reusable else document.clone())
        return {"past_key_values": left[-1], "stopping_criteria": [EndsAfter(4)]}

    by_both(monkeypatch, fast, asked, 8, True, make=make)
    assert [cache.columns for cache in left] == [40 if reusable else 48] * 2


@pytest.mark.parametrize(("family", "policy"), [("llama", "h2o"), ("gemma3", "lava")])
def test_a_cache_that_cannot_be_cropped_gets_no_step_too_many_if_the_caller_has_it(family, policy, monkeypatch, calls):
    fast, ids = two_layers(family, policy=policy, budget=24)[1], random_ids(1, 40)
    free = by_both(monkeypatch, fast, ids, 5, False)["sequences"]
    end = ends(int(free[0, 42]))
    assert by_both(monkeypatch, fast, ids, 5, False, **end)["sequences"].shape[1] == 43
    monkeypatch.setattr(sampling, "QUEUING", {"cpu"})
    first = distinct(fast, ids, 1, return_dict_in_generate=True)
    later = first.sequences[:, -1:], {"past_key_values": first[CACHE]}
    for text, options, counts in (
        (ids, {}, [2, 3, 4]),
        (ids, {"return_dict_in_generate": True}, [1, 2, 3]),
        (*later, [1, 2]),  # a cache that a call returned is the caller's
    ):
        calls.clear()
        streamer = Said(calls)
        distinct(fast, text, 5, streamer=streamer, **end, **options)
        assert streamer.counts[1:] == counts


def test_what_a_step_too_many_raises_is_of_no_matter(monkeypatch):
    """The answer ends with the last position of the table."""
    fast, ids = compiled_anew(tiny_model("gpt2", layers=1, n_positions=44), budget=24), random_ids(1, 40)
    free = distinct(fast, ids, 5)
    monkeypatch.setattr(sampling, "QUEUING", {"cpu"})
    assert torch.equal(distinct(fast, ids, 8, **ends(int(free[0, -1]))), free)
    streamer = Said()
    with pytest.raises(ValueError, match="44"):
        distinct(fast, ids, 8, streamer=streamer)
    assert len(streamer.values) == 1 + 5
    with failing(CaptureCache, "run", 3, ValueError):  # not tried again
        distinct(fast, ids, 4)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_streamer_that_raises_leaves_a_cache_without_its_token(error, monkeypatch):
    fast, asked, columns = two_layers(budget=24)[1], random_ids(1, 5, seed=1), []
    for queuing in ((), {"cpu"}):
        monkeypatch.setattr(sampling, "QUEUING", queuing)
        cache = fast.compress(random_ids(1, 40), reusable=False)
        with pytest.raises(error):
            greedy(fast, asked, past_key_values=cache, streamer=Said(error=error, at=4))
        columns.append(cache.columns)
    assert columns == [47, 47]


def of_a_class_with_a_loop():
    model = tiny_model("llama", layers=1)
    model.__class__ = type("Mine", (LlamaForCausalLM,), {"_sample": lambda *_, **__: refuse()})
    return compiled_apart(1, model=model)


def of_longrope():
    rope = {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 48}
    return compiled_anew(tiny_model("phi3", layers=1, **rope, max_position_embeddings=192))


def an_assisted_one():
    model, fast = two_layers(budget=24)
    return lambda ids, **options: greedy(model, ids, assistant_model=fast, **options)


LEFT = [
    pytest.param(lambda: two_layers(budget=24)[1].generate, {"synced_gpus": True}, id="several devices"),
    pytest.param(lambda: two_layers(budget=24)[1].generate, {"use_cache": False}, id="without a cache"),
    pytest.param(an_assisted_one, {}, id="drafts"),
    pytest.param(lambda: of_a_class_with_a_loop().generate, {}, id="a class with a loop of its own"),
    pytest.param(
        lambda: of_longrope().generate,
        {},
        id="a step that may read the text again",
        marks=needs_transformers("5.23", "older ones branch on the longest row, which is no graph"),
    ),
]


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize(("make", "options"), LEFT)
def test_what_is_left_to_the_loop_of_transformers(make, options):
    with pytest.raises(TheirLoopError):
        make()(random_ids(1, 40), max_new_tokens=2, **options)


def test_a_cpu_has_the_loop_of_transformers(monkeypatch):
    monkeypatch.setattr(GenerationMixin, "_sample", refuse)
    with pytest.raises(TheirLoopError):
        greedy(two_layers(budget=24)[1], random_ids(1, 40))


def test_a_raw_module_gets_a_step_before_its_token_is_waited_for(monkeypatch):
    module = raw(SmallDecoder(wide=2), {"policy": "lava", "budget": 1000, "window": 8, "compiler": "eager"})
    ids, calls = random_ids(2, 37), []

    def counted(*args):
        calls.append(1)
        return module(*args)

    monkeypatch.setattr(sampling, "QUEUING", {"cpu"})
    end = int(kvpass.generate(counted, ids, max_new_tokens=2)[0, -1])
    assert len(calls) == 2
    for queuing, steps in (((), 2), ({"cpu"}, 3)):
        monkeypatch.setattr(sampling, "QUEUING", queuing)
        calls.clear()
        out = kvpass.generate(counted, ids[:1], max_new_tokens=9, eos_token_id=end)
        assert len(calls) - (out.shape[1] - 39) == steps

"""Decode steps that run without Dynamo's guards, and the changes between two of them that are noticed all the same."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import kvpass
from compiled_models import UNLIMITED
from numeric_checks import assert_close
from tiny_models import compiled_once, random_ids, tiny_model

OPTIONS = {"budget": 24, "window": 8, "backend": "eager"}
TEXT = torch.cat([random_ids(1, 60), *(random_ids(1, 1, seed=seed) for seed in (0, 1, 9))], 1)
"""What :func:`begun` and :func:`step` give."""


def begun(model=None, steps=2, **options):
    """A compiled model and a cache after a prompt and some decode steps; the model is shared if none is given."""
    if model is None:
        _, fast = compiled_once(layers=1, **OPTIONS)
    else:
        fast = kvpass.compile(model, **OPTIONS | options)
    cache = fast(random_ids(1, 60)).past_key_values
    for seed in range(steps):
        fast(random_ids(1, 1, seed=seed), past_key_values=cache)
    return fast, cache


def step(fast, cache):
    return fast(random_ids(1, 1, seed=9), past_key_values=cache).logits


def lookups(function):
    """How often Dynamo evaluates guards."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return sum(event.name == "TorchDynamo Cache Lookup" for event in profile.events())


def test_only_the_first_step_after_a_prompt_asks_dynamo():
    fast, cache = begun(steps=0)
    assert [lookups(lambda: step(fast, cache)) for _ in range(3)] == [1, 0, 0]
    cache = fast(random_ids(1, 50)).past_key_values
    assert [lookups(lambda: step(fast, cache)) for _ in range(2)] == [1, 0]


def zeros_like_head(fast):
    return torch.zeros_like(fast.lm_head.weight)


def replace_module(fast):
    fast.lm_head = nn.Linear(fast.lm_head.in_features, fast.lm_head.out_features, bias=False)
    fast.lm_head.weight.data.zero_()


REPLACED = {
    "parameter": lambda fast: setattr(fast.lm_head, "weight", nn.Parameter(zeros_like_head(fast))),
    "module": replace_module,
    "data": lambda fast: setattr(fast.lm_head.weight, "data", zeros_like_head(fast)),
}


def test_the_next_step_has_what_was_replaced():
    fast, cache = begun(tiny_model("llama", layers=1))
    for name, change in REPLACED.items():
        assert step(fast, cache).any()
        change(fast)
        assert not step(fast, cache).any(), name
        nn.init.normal_(fast.lm_head.weight)


def test_another_dtype_is_refused():
    fast, cache = begun(tiny_model("llama", layers=1))
    fast.to(torch.float64)
    with pytest.raises(kvpass.CacheMismatchError, match=r"of torch.float32 was handed to a model of torch.float64"):
        step(fast, cache)


class Scaled(nn.Module):
    """Attributes that are no parameters, buffers or modules."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scales, self.shift = inner, {"here": 1.0}, torch.zeros(1)

    def forward(self, x):
        return self.inner(x) * self.config.scale * self.scales["here"] + self.shift


class Listed(nn.Module):
    """A tensor in a list, where replacing it writes no attribute."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.shifts = inner, [torch.zeros(1)]

    def forward(self, x):
        return self.inner(x) + self.shifts[0]


def with_head(kind, **options):
    """A compiled model whose output layer is inside of another module, and a cache."""
    model = tiny_model("llama", layers=1)
    model.lm_head = kind(model.lm_head).eval()
    model.lm_head.config, model.config.scale = model.config, 1.0
    return begun(model, **options)


CHANGED = {
    "tensor in a list": lambda fast: fast.lm_head.shifts.__setitem__(0, torch.ones(1)),
    "number": lambda fast: setattr(fast.model.norm, "variance_epsilon", 10.0),
    "configuration": lambda fast: setattr(fast.lm_head.config, "scale", 3.0),
    "dictionary": lambda fast: fast.lm_head.scales.update(here=3.0),
    "plain tensor": lambda fast: setattr(fast.lm_head, "shift", torch.ones(1)),
}


@pytest.mark.parametrize(("kind", "names"), [(Listed, [*CHANGED][:1]), (Scaled, [*CHANGED][1:])])
def test_the_next_step_sees_what_was_changed(kind, names):
    fast, cache = with_head(kind, budget=UNLIMITED)
    for name in names:
        before = step(fast, cache.clone())
        CHANGED[name](fast)
        after = step(fast, cache.clone())
        assert not torch.allclose(after, before), name
        assert_close(name, after, fast(TEXT).logits[:, -1:], atol=1e-4)


@pytest.mark.exhaustive
def test_compiled_code_is_not_given_data_of_another_dtype():
    fast, cache = with_head(Scaled, backend="inductor")
    before = step(fast, cache.clone())
    fast.lm_head.shift.data = torch.ones(1, dtype=torch.float64)
    torch.testing.assert_close(step(fast, cache), before.double() + 1)


def test_generate_repeats_its_steps():
    _, fast = compiled_once(layers=1, **OPTIONS)
    fast.generate(random_ids(1, 40), max_new_tokens=4, do_sample=False)
    assert lookups(lambda: fast.generate(random_ids(1, 40), max_new_tokens=8, do_sample=False)) == 2


def test_autocast_that_begins_between_steps():
    fast, cache = begun()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(kvpass.CacheMismatchError):
        step(fast, cache)  # keys would be bfloat16


def test_a_mode_of_functions_sees_the_step():
    class Seen(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    fast, cache = begun()
    with Seen():
        assert lookups(lambda: step(fast, cache)) > 0


class Marked(nn.Module):
    """An attribute that every call writes."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, ""

    def forward(self, x):
        self.last = "called"
        return self.inner(x)


def test_a_decoder_that_writes_to_its_attributes_is_always_called_by_dynamo():
    fast, cache = with_head(Marked)
    for _ in range(2):
        fast.lm_head.last = ""
        step(fast, cache)
        assert fast.lm_head.last == "called"

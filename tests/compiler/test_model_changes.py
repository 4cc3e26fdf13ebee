"""A compiled model that changes between calls: the next call has the change, and nothing else is captured again."""

import copy
import functools
import sys
from dataclasses import dataclass

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch._dynamo.utils import counters
from transformers import DynamicCache
from transformers.models.llama import modeling_llama

import kvpass
from numeric_checks import assert_close
from pairwise import quick
from tiny_models import random_ids, tiny_model

GAIN = 1.0
PROMPT, TOKEN = random_ids(1, 40), random_ids(1, 1, seed=1)
pytestmark = pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")  # two adapters are meant


@dataclass
class Settings:
    gain: float = 1.0


class Slots:
    __slots__ = ("gain",)


class Head(nn.Module):
    """An output layer that reads an attribute of every kind."""

    factor = 1.0

    def __init__(self, inner, config):
        super().__init__()
        self.inner, self.config = inner, config
        self.gain, self.shift, self.shifts = 1.0, torch.zeros(1), [torch.zeros(1)]
        self.gains, self.listed, self.settings, self.slots = {"here": 1.0}, [[1.0]], Settings(), Slots()
        self.slots.gain = 1.0

    def forward(self, x):
        gain = self.gain * self.gains["here"] * self.listed[0][0] * self.settings.gain * self.slots.gain
        gain = gain * self.factor * self.config.gain * (2.0 if self.training else 1.0) * GAIN
        return self.inner(x) * gain + self.shift + self.shifts[0]


class Twice(Head):
    def forward(self, x):
        return super().forward(x) * 2


def with_head():
    model = tiny_model("llama", layers=1)
    model.config.gain = 1.0
    model.lm_head = Head(model.lm_head, model.config).eval()
    return model


def lora(*modules):
    return LoraConfig(r=2, init_lora_weights=False, target_modules=[*modules])


def with_adapters():
    model = tiny_model("llama", layers=1)
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        model.add_adapter(lora("q_proj", "v_proj"), name)
    model.set_adapter("one")
    return model.eval()


@functools.cache
def models(make):
    """A compiled model and its uncompiled twin, which share no weight."""
    model = make()
    return kvpass.compile(copy.deepcopy(model), policy="full", backend="eager"), model


def attribute(find, name, value):
    """A change of an attribute of what ``find`` finds in a model, by its value before, and back."""

    def change(model):
        holder = find(model)
        before = getattr(holder, name)
        setattr(holder, name, value(before))
        return lambda: setattr(holder, name, before)

    return change


def item(find, key, value):
    """A change of an element of a container, and back."""

    def change(model):
        container = find(model)
        before = container[key]
        container[key] = value
        return lambda: container.__setitem__(key, before)

    return change


def head(model):
    return model.lm_head


def norm(model):
    return model.model.norm


def hooked(model):
    return model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 3).remove


def other_dtype(model):
    model.to(torch.float64)
    return lambda: model.to(torch.float32)


def loaded(model):
    before = model.state_dict()
    model.load_state_dict({name: value + 0.1 for name, value in before.items()}, assign=True)
    return lambda: model.load_state_dict(before, assign=True)


def switched(model):
    model.set_adapter("two")
    return lambda: model.set_adapter("one")


def merged(model):
    layers = [module for module in model.modules() if hasattr(module, "merged_adapters")]
    for layer in layers:
        layer.merge()
    return lambda: [layer.unmerge() for layer in layers]


def added(model):
    torch.manual_seed(5)
    model.add_adapter(lora("o_proj"), "three")
    model.eval()


def tripled(function):
    return lambda x: 3 * function(x)


def doubled(weight):
    return nn.Parameter(weight.detach() * 2)


# what changes, whether another capture is needed, and whether caches filled before are refused
CHANGES = {
    "parameter replaced": (attribute(norm, "weight", doubled), 0, True),
    "data": (attribute(lambda model: norm(model).weight, "data", lambda data: data * 2), 0, False),
    "dtype": (other_dtype, 1, True),
    "checkpoint assigned": (loaded, 0, True),
    "rope buffer": (attribute(lambda model: model.model.rotary_emb, "inv_freq", lambda x: x / 2), 0, False),
    "hook": (hooked, 1, False),
    "submodule": (attribute(lambda model: model.model.layers[0].mlp, "act_fn", lambda _: nn.Tanh()), 1, False),
    "class": (attribute(head, "__class__", lambda _: Twice), 1, False),
    "class attribute": (attribute(lambda model: Head, "factor", lambda _: 3.0), 1, False),
    "global": (attribute(lambda model: sys.modules[__name__], "GAIN", lambda _: 3.0), 1, False),
    "function of a module": (attribute(lambda model: modeling_llama, "rotate_half", tripled), 1, False),
    "training of a part": (attribute(head, "training", lambda _: True), 1, False),
    "number": (attribute(norm, "variance_epsilon", lambda _: 10.0), 1, False),
    "configuration": (attribute(lambda model: head(model).config, "gain", lambda _: 3.0), 1, False),
    "dictionary": (item(lambda model: head(model).gains, "here", 3.0), 1, False),
    "nested list": (item(lambda model: head(model).listed[0], 0, 3.0), 1, False),
    "tensor in a list": (item(lambda model: head(model).shifts, 0, torch.ones(1)), 0, False),
    "plain tensor": (attribute(head, "shift", lambda _: torch.ones(1)), 0, False),
    "object": (attribute(lambda model: head(model).settings, "gain", lambda _: 3.0), 1, False),
    "object with slots": (attribute(lambda model: head(model).slots, "gain", lambda _: 3.0), 1, False),
}
OF_ALL_MODELS = [CHANGES[name][0] for name in ("class attribute", "global", "function of a module")]
OF_ADAPTERS = {"switched": (switched, 1, True), "merged": (merged, 1, True, False), "added": (added, 1, True)}


def check(make, change, captures, refuses, differs=True):
    """Change a model after a prompt: a step, a prompt, and both again as it was before."""
    fast, plain = models(make)
    out, cache = fast(PROMPT), DynamicCache()
    before = plain(PROMPT, past_key_values=cache).logits
    assert_close("before", out.logits, before, atol=1e-5)
    fast(TOKEN, past_key_values=out.past_key_values.clone())
    graphs = counters["stats"]["unique_graphs"]
    undo = [change(model) for model in ([plain] if change in OF_ALL_MODELS else [fast, plain])]
    try:
        if refuses:
            with pytest.raises(kvpass.CacheMismatchError, match=r"another model|replaced|other adapters|was handed"):
                fast(TOKEN, past_key_values=out.past_key_values)
        else:
            expected = plain(TOKEN, past_key_values=cache).logits
            assert_close("step", fast(TOKEN, past_key_values=out.past_key_values).logits, expected, atol=1e-5)
        expected = plain(PROMPT).logits
        assert expected.dtype != before.dtype or torch.allclose(expected, before, atol=1e-3) != differs
        changed = fast(PROMPT)
        assert_close("prompt", changed.logits, expected, atol=1e-5)
        fast(TOKEN, past_key_values=changed.past_key_values)
        assert counters["stats"]["unique_graphs"] - graphs == captures
    finally:
        for back in filter(None, undo):
            back()
    if all(undo):
        assert_close("as before", fast(PROMPT).logits, before, atol=1e-5)
        assert counters["stats"]["unique_graphs"] - graphs == captures, "captured again for a state that it had"


SELDOM = ("submodule", "function of a module", "object", "plain tensor")
"""What is found as others are: in __dict__, in the globals of a module, in an object, as a tensor."""


@pytest.mark.parametrize("name", quick([*CHANGES], CHANGES.keys() - {*SELDOM}))
def test_the_next_call_has_what_was_changed(name):
    check(with_head, *CHANGES[name])


@pytest.mark.parametrize("name", quick([*OF_ADAPTERS], ["merged"]))
def test_the_next_call_has_the_adapters_of_now(name):
    """When they are switched in every run: tests/misuse/test_changed_models.py."""
    check(with_adapters, *OF_ADAPTERS[name])


class Noted(nn.Linear):
    """Every call writes to attributes that no call reads."""

    def forward(self, x):
        self.last, self.state = x[:, -1:], "called"
        return super().forward(x)


def test_what_every_call_writes_is_captured_once(monkeypatch):
    model = tiny_model("llama", layers=1)
    model.lm_head.__class__ = Noted
    fast = kvpass.compile(model, policy="full", backend="eager")
    cache = fast(PROMPT).past_key_values
    graphs = counters["stats"]["unique_graphs"]
    for tokens in (1, 1, 7, 1):
        fast.lm_head.state = ""
        fast(random_ids(1, tokens), past_key_values=cache)
        assert fast.lm_head.state == "called" and fast.lm_head.last.shape[1] == 1
    fast(random_ids(1, 30))
    fast.generation_config.temperature, fast.note = 0.5, "of the user"
    monkeypatch.setattr(modeling_llama, "note", "of the user", raising=False)
    fast(random_ids(1, 1), past_key_values=cache)
    assert counters["stats"]["unique_graphs"] == graphs


def test_autocast_that_begins_between_steps():
    fast, _ = models(with_head)
    cache = fast(PROMPT).past_key_values
    fast(TOKEN, past_key_values=cache)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(kvpass.CacheMismatchError):
        fast(TOKEN, past_key_values=cache)  # keys would be bfloat16


@pytest.mark.exhaustive
def test_compiled_code_is_not_given_data_of_another_dtype():
    fast = kvpass.compile(with_head(), policy="full")
    cache = fast(PROMPT).past_key_values
    before = fast(TOKEN, past_key_values=cache.clone()).logits
    fast.lm_head.shift.data = torch.ones(1, dtype=torch.float64)
    torch.testing.assert_close(fast(TOKEN, past_key_values=cache).logits, before.double() + 1)

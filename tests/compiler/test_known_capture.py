"""Captures that an earlier model, here of the same process, left in a folder: used only where all is the same."""

from __future__ import annotations

import copy
import functools
import shutil
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

import kvpass
from kvpass.compiler import known_capture
from pairwise import each_value
from tiny_models import FAMILIES, random_ids, tiny_model

NOT_KEPT: set[str] = set()
"""Families whose captures have no exact text."""
OPTIONS = {"policy": "snapkv", "budget": 1.0, "window": 8, "backend": "eager"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPASS_CACHE", str(tmp_path))
    return tmp_path / "checks"


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A folder with captures of models."""
    left = tmp_path_factory.mktemp("captured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPASS_CACHE", str(left))
        for family, layers in (("llama", 1), ("llama", 2), ("gpt2", 1)):
            first(family, layers=layers)
    return left


@pytest.fixture
def after(folder, captured):
    shutil.copytree(captured, folder.parent, dirs_exist_ok=True)


def kept(folder):
    return len(list(folder.glob("capture-*.json")))


def logits(model, rows=1, **given):
    return model(random_ids(rows, 30), **given).logits


def first(family="llama", rows=1, layers=1, **given):
    """Leave the capture of a model in the folder."""
    logits(kvpass.compile(tiny_model(family, layers=layers), **OPTIONS), rows, **given)


@contextmanager
def counted_captures():
    """How often Dynamo is asked to compile a forward."""
    with pytest.MonkeyPatch.context() as patch:
        made, compile_ = [], torch.compile
        patch.setattr(torch, "compile", lambda *args, **named: made.append(1) or compile_(*args, **named))
        yield made


@each_value(rows=[1, 2], family=["llama", "gemma3", "gpt2"])
def test_a_capture_of_before_gives_what_the_model_gives(folder, family, rows):
    layers = 2 if family == "gemma3" else 1  # its second one has no sliding window
    first(family, rows, layers)
    first(family, rows, layers, logits_to_keep=1)
    assert kept(folder) == 2
    model = tiny_model(family, layers=layers)
    text = random_ids(rows, 40, seed=3)
    with counted_captures() as captures:
        fast = kvpass.compile(model, **OPTIONS)
        given = fast.generate(text, max_new_tokens=12, do_sample=False)
        cache = fast(text[:, :25]).past_key_values
        turn = fast(text[:, 25:39], past_key_values=cache).logits
        step = fast(text[:, 39:], past_key_values=cache).logits
    assert not captures
    assert torch.equal(given, model.generate(text, max_new_tokens=12, do_sample=False))
    assert (torch.cat([turn, step], 1) - model(text).logits[:, 25:]).abs().max() < 1e-4
    assert next(one.name for one in fast.report().compiled[0].passes) == "recall"


def test_its_graph_has_the_code_of_the_captured_one(monkeypatch):
    """By that Inductor's cache knows it: the second process compiles nothing."""
    codes, write, read = [], known_capture.graph_to_json, known_capture.graph_from_json

    def code(graph):
        codes.append(graph.graph.python_code("self").src)
        return graph

    monkeypatch.setattr(known_capture, "graph_to_json", lambda graph, paths: write(code(graph), paths))
    monkeypatch.setattr(known_capture, "graph_from_json", lambda found, model: code(read(found, model)))
    first()
    first()
    captured, recalled = codes
    assert captured == recalled


def test_a_policy_that_scores_keys_is_refused_where_they_hold_positions():
    first("bloom")
    with counted_captures() as captures:
        fast = kvpass.compile(tiny_model("bloom", layers=1), policy="knorm", budget=16, backend="eager")
        with pytest.raises(kvpass.UnsupportedAttentionError, match="needs the keys of the model alone"):
            logits(fast)
    assert not captures


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(folder, family):
    first(family, layers=2)
    assert kept(folder) == (family not in NOT_KEPT)
    model = tiny_model(family, layers=2)
    with counted_captures() as captures:
        given = logits(kvpass.compile(model, **OPTIONS))
    assert bool(captures) == (family in NOT_KEPT)
    assert (given - logits(model)).abs().max() < 1e-4


@pytest.mark.usefixtures("after")
def test_other_models_and_their_hooks_change_nothing():
    other = tiny_model("phi3", layers=1)  # transformers notes its class in a registry that traced code reads
    other.register_forward_hook(lambda *_: None).remove()  # torch counts hooks
    with counted_captures() as captures:
        fast = kvpass.compile(tiny_model("llama", layers=1), **OPTIONS)
        before = logits(fast)
        tiny_model("olmo2", layers=1)
        assert torch.equal(logits(fast), before)
    assert captures == []


@pytest.mark.usefixtures("after")
def test_it_serves_any_length_and_ends_where_the_decoder_does():
    model = tiny_model("gpt2", layers=1)
    fast = kvpass.compile(model, **OPTIONS)
    longest = model.config.max_position_embeddings
    with counted_captures() as captures:
        for tokens in (2, 31, longest):
            ids = random_ids(1, tokens)
            assert (fast(ids).logits - model(ids).logits).abs().max() < 1e-4
        with pytest.raises(ValueError, match=f"does not take more than {longest}"):
            fast(random_ids(1, longest + 1))
    assert captures == []


@pytest.mark.usefixtures("after")
def test_a_first_prompt_that_is_too_long_is_refused_as_ever():
    fast = kvpass.compile(tiny_model("gpt2", layers=1), **OPTIONS)
    longest = fast.config.max_position_embeddings
    with pytest.raises(ValueError, match=f"does not take more than {longest}"):
        fast(random_ids(1, longest + 1))
    assert fast(random_ids(1, longest)).logits.isfinite().all()


def test_a_prompt_of_embeddings(folder):
    model = tiny_model("llama", layers=1)
    embeds = model.get_input_embeddings()(random_ids(1, 30)).detach()
    for expected in ([1], []):
        with counted_captures() as captures:
            given = kvpass.compile(model, **OPTIONS)(inputs_embeds=embeds).logits
        assert captures == expected
        assert (given - logits(model)).abs().max() < 1e-4


def other_weights(model, monkeypatch):
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 4] += 0.5


def other_attribute(model, monkeypatch):
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


def other_config(model, monkeypatch):
    model.config.rms_norm_eps = 0.5  # read by no forward: it may be read again, and costs a capture


def other_config_of_one_module(model, monkeypatch):
    own = model.model.layers[0].self_attn
    own.config = copy.copy(own.config)
    own.config.attention_dropout = 0.5


def other_order(model, monkeypatch):
    model.model.layers = nn.ModuleList(reversed(model.model.layers))


def function_of_the_module(model, monkeypatch):
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x.flip(-1))


def method_of_the_class(model, monkeypatch):
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))


def method_of_the_object(model, monkeypatch):
    own = model.model.layers[0].mlp
    own.forward = functools.partial(lambda self, x: self.down_proj(self.up_proj(x)), own)


def class_of_the_user(model, monkeypatch):
    class Doubled(modeling_llama.LlamaMLP):
        def forward(self, x):
            return 2 * super().forward(x)

    model.model.layers[0].mlp.__class__ = Doubled


def hook(model, monkeypatch):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: 2 * out)


OF_THE_MODEL = [other_weights, other_attribute, other_config, other_config_of_one_module, other_order]
OF_CODE = [function_of_the_module, method_of_the_class, method_of_the_object, class_of_the_user, hook]
"""Changes to what is outside of torch and transformers: it has no exact text, and its capture is not kept."""


def llama_for(change):
    return tiny_model("llama", layers=2 if change is other_order else 1)


@pytest.mark.parametrize("change", [*OF_THE_MODEL, *OF_CODE])
@pytest.mark.usefixtures("after")
def test_a_model_that_differs_is_captured(folder, monkeypatch, change):
    model, before = llama_for(change), kept(folder)
    change(model, monkeypatch)
    with counted_captures() as captures:
        given = logits(kvpass.compile(model, **OPTIONS))
    assert captures == [1] and kept(folder) == before + (change in OF_THE_MODEL)
    assert (given - logits(model)).abs().max() < 1e-4


@pytest.mark.parametrize("change", [other_attribute, other_order, function_of_the_module, method_of_the_class, hook])
@pytest.mark.usefixtures("after")
def test_a_model_that_is_changed_later_is_captured_then(monkeypatch, change):
    model = llama_for(change)
    fast = kvpass.compile(model, **OPTIONS)
    with counted_captures() as captures:
        logits(fast)
        assert captures == []
        for changed in (model, fast):
            change(changed, monkeypatch)
        given = logits(fast)
    assert captures == [1]
    assert (given - logits(model)).abs().max() < 1e-4


@pytest.mark.usefixtures("after")
def test_graphs_that_are_to_be_dumped_are_made(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPASS_DUMP", str(tmp_path / "dump"))
    first()
    assert any("find_attention" in file.name for file in (tmp_path / "dump").iterdir())


@pytest.mark.usefixtures("after")
def test_settings_of_torch_under_which_a_trace_differs_are_part_of_it():
    with torch.autocast("cpu", torch.bfloat16), counted_captures() as captures:
        first()
    assert captures == [1]

"""The self-check of a later process: known for the same graph and weights, made for any other."""

from __future__ import annotations

from functools import partial, wraps

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.find.sdpa import find_attention_pass
from kvpass.graphs.verify import graph_text as graph_text_module
from kvpass.graphs.verify import self_check
from kvpass.graphs.verify.graph_text import NoTextError, graph_text
from kvpass.graphs.verify.offset_positions import COUNTED, MARK

PASSES = [find_attention_pass, self_check.self_check_pass]
TOKENS = 11
LIBRARY = torch.library.Library("kvpass_remembered_test", "DEF")
LIBRARY.define("half(Tensor x) -> Tensor")
LIBRARY.impl("half", lambda x: x / 2, "CompositeExplicitAutograd")
LIBRARY.impl("half", lambda x: torch.empty_like(x), "Meta")


class Scaled(nn.Module):
    """A decoder with a weight of its own on its output; what is done to that, a test may change."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder, self.scale, self.number = decoder, nn.Parameter(torch.linspace(1, 2, 999)), 2.0
        self.change = lambda x: x

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.change(self.decoder(ids, positions)) * self.scale.mean() * self.number


@pytest.fixture
def model(decoder) -> Scaled:
    return Scaled(decoder(layers=1))


@pytest.fixture
def was_made(capture, inputs, monkeypatch, tmp_path):
    """Return whether the check of a model is made, and not known."""
    monkeypatch.setenv("KVPASS_CACHE", str(tmp_path))
    texts, check = [], self_check._check_text
    monkeypatch.setattr(self_check, "_check_text", lambda *given: texts.append(1) or check(*given))

    def was_made(model: nn.Module, tokens: int = TOKENS) -> bool:
        texts.clear()
        given = inputs(tokens=tokens)
        for value in given:
            torch._dynamo.mark_dynamic(value, 1)
        capture(model, given, PASSES)
        return bool(texts)

    return was_made


def test_the_same_model_is_checked_once_whatever_the_length_of_its_first_prompt(model, was_made):
    assert was_made(model)
    assert not was_made(model)
    assert not was_made(model, tokens=29)


CHANGED = {
    "one element": lambda model: model.scale.data[500].add_(1e-6),
    "two elements": lambda model: model.scale.data[500:503].copy_(model.scale.data[500:503].flip(0)),  # swapped
    "a number": lambda model: setattr(model, "number", 2.5),
    "an operation": lambda model: setattr(model, "change", F.gelu),
    "trained": lambda model: model.scale.requires_grad_(False),
    "dtype": lambda model: model.double(),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_changed_model_is_checked_again(what, model, was_made):
    assert was_made(model)
    CHANGED[what](model)
    assert was_made(model)


@pytest.mark.parametrize(
    ("read", "change", "other"),
    [
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
        (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu"), True),
    ],
)
def test_settings_of_torch_are_part_of_what_is_remembered(model, was_made, read, change, other):
    assert was_made(model)
    before = read()
    assert before != other
    change(other)
    try:
        assert was_made(model)
    finally:
        change(before)


def test_a_refused_model_is_refused_each_time(model, was_made):
    assert was_made(model)
    model.change = lambda x: x + x.cumsum(1)
    for _ in range(2):
        with pytest.raises(UnsupportedAttentionError, match="outside of an attention site"):
            was_made(model)


def test_operators_of_other_libraries_are_checked_each_time(model, was_made):
    """Their code may change, and neither torch's nor kvpass's version says so."""
    model.change = torch.ops.kvpass_remembered_test.half.default
    assert was_made(model)
    assert was_made(model)


def test_a_function_under_the_name_of_another_has_no_text(model, capture, inputs):
    """As a wrapper has after ``functools.wraps``."""

    def other(x: Tensor) -> Tensor:
        return x.cumsum(1)

    def put_other(gm: GraphModule) -> int:
        (node,) = gm.graph.find_nodes(op="call_function", target=F.gelu)
        assert any("torch._C._nn.gelu" in line for line in graph_text(gm))
        other.__module__, other.__name__, other.__qualname__ = F.gelu.__module__, F.gelu.__name__, F.gelu.__qualname__
        node.target = other
        with pytest.raises(NoTextError, match="no function of torch"):
            graph_text(gm)
        node.target = F.gelu
        return 0

    model.change = F.gelu
    capture(model, inputs(), [find_attention_pass, put_other])


def test_a_function_in_the_place_of_another_has_no_text(model, capture, inputs, monkeypatch):
    """As one that was patched before Dynamo first looked."""

    @wraps(F.silu)
    def other(x: Tensor) -> Tensor:
        return x.cumsum(1)

    def put_other(gm: GraphModule) -> int:
        (node,) = gm.graph.find_nodes(op="call_function", target=F.silu)
        assert graph_text(gm)
        monkeypatch.setattr(F, "silu", other)
        node.target = other
        with pytest.raises(NoTextError, match="no function of torch"):
            graph_text(gm)
        monkeypatch.undo()
        node.target = F.silu
        return 0

    model.change = F.silu
    capture(model, inputs(), [find_attention_pass, put_other])


CONTENTS = {
    "half": torch.ones(7, dtype=torch.float16),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(3),
    "empty": torch.ones(0, 4),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "offset": torch.arange(9, dtype=torch.int8)[1:],
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
}


def test_weights_have_texts_by_their_content():
    texts = {name: graph_text_module.content_text(value) for name, value in CONTENTS.items()}
    assert texts == {name: graph_text_module.content_text(value.clone()) for name, value in CONTENTS.items()}
    assert len(set(texts.values())) == len(texts)


def test_weights_without_bytes_have_no_text():
    for weight in (None, torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), torch.eye(3).to_sparse()):
        with pytest.raises(NoTextError):
            graph_text_module.content_text(weight)


def test_counted_positions_are_marked_from_memory(decoder, capture, inputs, was_made):
    model = decoder(layers=2)

    def counting(ids: Tensor) -> Tensor:
        return model(ids, torch.arange(ids.shape[1])[None].expand(ids.shape))

    marks = []
    for _ in range(2):
        graph, counts = capture(counting, inputs()[:1], PASSES)
        marks.append(([(node.meta.get(MARK), node.meta.get(COUNTED)) for node in graph.graph.nodes], counts))
    assert marks[0] == marks[1]
    found, counts = marks[0]
    assert counts[1] == sum(counted or 0 for _, counted in found) > 0
    assert any(mark for mark, _ in found)

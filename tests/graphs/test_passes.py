"""Passes over the captured graph, one at a time: their order, one token, attributes."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional as F

import kvpass
from compiled_models import GIVEN
from kvpass.graphs.canonical import find_sites
from kvpass.graphs.find.sdpa import find_attention_pass
from kvpass.graphs.one_token import one_token_pass
from kvpass.graphs.specialize_attributes import specialize_attributes_pass
from kvpass.torch_compat import FakeTensorMode
from small_decoders import SmallDecoder
from tiny_models import compiled_once, random_ids, raw, tiny_model


def test_a_disabled_pass_does_not_run_and_is_not_in_the_report(monkeypatch):
    _, model = compiled_once(layers=1, **GIVEN)
    other, ids = kvpass.compile(tiny_model("llama", layers=1), **GIVEN), random_ids(1, 40)
    expected = model(ids).logits
    monkeypatch.setenv("KVPASS_DISABLE_PASSES", "fold_alibi,strip_repeat_kv")
    with pytest.warns(UserWarning, match="results may be wrong"):
        torch.testing.assert_close(other(ids).logits, expected, atol=1e-4, rtol=1e-4)
    compiled = [[graph for graph in each.report().compiled if graph.phase == "prefill"] for each in (model, other)]
    ran = [{record.name for graph in graphs for record in graph.passes} for graphs in compiled]
    assert ran[0] >= {"fold_alibi", "strip_repeat_kv"} and not ran[1] & {"fold_alibi", "strip_repeat_kv"}


def test_a_pass_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv("KVPASS_DISABLE_PASSES", "find_atention")
    fast = raw(SmallDecoder(), {"policy": "full", "compiler": "eager"})
    said = r"KVPASS_DISABLE_PASSES: \['find_atention'\] are no passes"
    with pytest.raises(Exception, match=said), torch.no_grad(), kvpass.session():
        fast(random_ids(1, 40))


def test_recording_one_token_leaves_the_number_of_rows_open():
    """``polar``, of complex rotary embeddings, makes a constant of it unless it is recorded as Dynamo does."""
    shapes, graph = ShapeEnv(), Graph()
    mode = FakeTensorMode(shape_env=shapes)
    rows = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    angles = mode.from_tensor(torch.randn(3, 4), symbolic_context=rows)
    node = graph.placeholder("angles")
    graph.output(graph.call_function(torch.polar, (node, node)))
    assert one_token_pass(GraphModule({}, graph), inputs=[angles], mode=mode) == 1
    assert not shapes.guards


@pytest.mark.parametrize("lower", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("shape", [(5, 8), (8,)], ids=str)
@pytest.mark.parametrize("by_name", [False, True])
def test_a_linear_layer_is_recorded_as_torch_computes_it(by_name, shape, lower):
    x, weight, graph = torch.randn(3, 4, 8).transpose(0, 1), torch.randn(shape), Graph()
    nodes = [graph.placeholder(name) for name in ("x", "weight")]
    given = ((), dict(zip(("input", "weight"), nodes, strict=True))) if by_name else (tuple(nodes), {})
    call = graph.call_function(F.linear, *given)
    graph.output(call)
    mode = FakeTensorMode()
    with torch.autocast("cpu", torch.bfloat16, enabled=lower):
        one_token_pass(GraphModule({}, graph), inputs=[mode.from_tensor(x), mode.from_tensor(weight)], mode=mode)
        expected = F.linear(x, weight)
    found = call.meta["example_value"]
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, eps=0.01)
        self.drop = nn.Dropout(0.1)
        self.scale = 0.3

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(x))[:, None]
        return F.scaled_dot_product_attention(y, y, y, is_causal=True, scale=self.scale)


def test_float_attributes_are_numbers_again_and_guarded():
    scales: list[float] = []

    def backend(gm, _):
        assert specialize_attributes_pass(gm) == 0
        copied = gm.graph.python_code("self").src
        assert "item" not in copied and "0.01" in copied
        find_attention_pass(gm)
        scales.extend(site.scale for site in find_sites(gm))
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    module = Scaled().eval()
    fast = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    x = torch.randn(2, 11, 8)
    with torch.no_grad():
        for module.scale in (0.3, 0.3, 0.7):
            torch.testing.assert_close(fast(x), module(x))
    assert scales == [0.3, 0.7]


def test_floats_made_from_sizes_are_no_reason_to_start_again(capture, inputs):
    _, counts = capture(lambda ids, positions: ids * positions.shape[1] ** 0.5, inputs(), [specialize_attributes_pass])
    assert counts == [0]

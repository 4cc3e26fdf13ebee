"""Values that are recorded anew: as if each call had run, with one object for those of one form."""

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import kvpass
from kvpass.compiler import parts
from kvpass.graphs import one_token
from kvpass.graphs import record_values as recording
from kvpass.graphs.bind_state import placeholders
from kvpass.graphs.fx_utils import recorded, storage_of
from kvpass.graphs.record_values import record_values
from kvpass.graphs.split import split_graph
from kvpass.torch_compat import FakeTensorMode, ShapeEnv
from pairwise import quick
from tiny_models import FAMILIES, random_ids, tiny_model


def forms(gm):
    values = [recorded(node) for node in gm.graph.nodes]
    return [[recording._form(x) for x in (value if isinstance(value, tuple) else [value])] for value in values]


@pytest.mark.parametrize("family", quick(FAMILIES, ["gpt2"]))
def test_values_are_those_of_calls_that_all_run(monkeypatch, family):
    known = []

    def both(gm, inputs, mode):
        with monkeypatch.context() as patch:
            patch.setattr(recording._Recorder, "_key", lambda recorder, node: None)
            record_values(gm, inputs, mode)
        known.extend(forms(gm))
        guards = len(mode.shape_env.guards)
        record_values(gm, inputs, mode)
        assert forms(gm) == known and len(mode.shape_env.guards) == guards

    monkeypatch.setattr(one_token, "record_values", both)
    fast = kvpass.compile(tiny_model(family, layers=2), budget=1.0, window=8, backend="eager")
    fast(random_ids(2, 1), past_key_values=fast(random_ids(2, 30)).past_key_values)
    assert known


def graph_of(body):
    """A graph of ``x`` and ``y``, recorded with fake inputs ``[4, 6]``; the nodes that ``body`` returns."""
    graph = Graph()
    nodes = body(graph, graph.placeholder("x"), graph.placeholder("y"))
    graph.output(tuple(nodes))
    gm, mode = GraphModule(nn.Module(), graph), FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        inputs = [torch.empty(4, 6) for _ in range(2)]
    record_values(gm, inputs, mode)
    return gm, inputs, nodes


def sines(graph, x, y):
    return [graph.call_function(torch.sin, (operand,)) for operand in (x, y)]


def test_calls_on_one_form_have_one_value():
    _, _, (first, second) = graph_of(sines)
    assert recorded(first) is recorded(second)


def test_where_a_call_writes_each_tensor_has_its_own_memory():
    def body(graph, x, y):
        found = sines(graph, x, y)
        graph.call_method("add_", (found[0], 1))
        return found

    _, _, (first, second) = graph_of(body)
    assert storage_of(first) != storage_of(second)


def test_the_same_call_under_autocast_gives_another_value():
    enter, leave = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast

    def body(graph, x, y):
        begun = graph.call_function(enter, ("cpu", torch.bfloat16, True, None))
        inside = graph.call_function(torch.nn.functional.linear, (x, y))
        graph.call_function(leave, (begun,))
        return [inside, graph.call_function(torch.nn.functional.linear, (x, y))]

    _, _, nodes = graph_of(body)
    assert [recorded(node).dtype for node in nodes] == [torch.bfloat16, torch.float32]


def test_a_call_that_returns_nothing_runs_each_time():
    def body(graph, x, y):
        found = []
        for enabled in (True, False, True):
            graph.call_function(torch._C._set_grad_enabled, (enabled,))
            found.append(graph.call_function(torch.is_grad_enabled))
        return found

    _, _, nodes = graph_of(body)
    assert [recorded(node) for node in nodes] == [True, False, True]


def test_a_part_is_compiled_for_inputs_apart():
    """Else the compiler would take two inputs for one."""

    def body(graph, x, y):
        first, second = sines(graph, x, y)
        between = graph.call_function(torch.ops.kvpass.real_tokens.default, (first,))
        return [between, graph.call_function(torch.sub, (first, second))]

    gm, inputs, _ = graph_of(body)
    given = dict(zip(placeholders(gm), inputs, strict=True))
    last = [piece for piece in split_graph(gm) if not isinstance(piece, torch.fx.Node)][-1]
    first, second = parts._inputs(last, given)
    assert first.shape == second.shape and first.untyped_storage()._cdata != second.untyped_storage()._cdata

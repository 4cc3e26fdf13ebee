"""Data flow with in-place writes, shape-only operands, evaluation on small sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from kvpass.graphs.fx_utils import (
    DataFlow,
    literals_of,
    mutated_inputs,
    recorded,
    shape_of,
    symbols_of,
    target_name,
    value_inputs,
)
from kvpass.graphs.verify.examples import EvaluationError, concrete, evaluate


def graph_of(function: Callable[..., Any], *inputs: Any) -> GraphModule:
    """The Dynamo graph of ``function``; dimension 0 of every input is symbolic."""
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    for value in inputs:
        torch._dynamo.mark_dynamic(value, 0)
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return graphs[0]


def named(gm: GraphModule, name: str) -> Node:
    (node,) = (node for node in gm.graph.nodes if node.op.startswith("call_") and target_name(node) == name)
    return node


def written(x: Tensor) -> list[Tensor]:
    x = x + 1
    x[0] = 1.0
    x.mul_(2.0)
    x *= 3.0
    F.relu(x, inplace=True)
    F.dropout(x, 0.5, False, True)
    torch.sin(x, out=x)
    torch.ops.aten.add_.Tensor(x, x)
    F.relu(x, inplace=False)
    (x > 0) & (x < 1)
    return [x.__and__(x) if x.dtype == torch.bool else x.cos()]


def test_writes_are_seen_in_every_form():
    gm = graph_of(written, torch.randn(5, 3))
    wrote = [target_name(node) for node in gm.graph.nodes if mutated_inputs(node)]
    assert wrote == ["setitem", "mul_", "imul", "relu", "dropout", "sin", "add_"]


def test_sources_follow_writes_through_views_and_stop_before_the_reader():
    def function(x: Tensor, y: Tensor) -> Tensor:
        table = torch.zeros(4, 3)
        table[1:].view(-1).add_(y.exp().sum())
        read = table.sin()
        table.add_(x.cos().sum())
        return read + table.tan()

    gm = graph_of(function, torch.randn(5), torch.randn(6))
    flow = DataFlow(gm)
    read = named(gm, "sin")
    before = {target_name(node) for node in flow.sources([read], before=read)}
    assert "exp" in before
    assert "cos" not in before
    assert "cos" in {target_name(node) for node in flow.sources([named(gm, "tan")])}


def test_operands_read_for_their_shape_are_no_sources():
    gm = graph_of(lambda x: torch.ones_like(x.sin()).type_as(x.cos()) + x.shape[0], torch.randn(5))
    names = {target_name(node) for node in DataFlow(gm).sources([gm.graph.output_node()])}
    assert {"ones_like", "type_as"} <= names
    assert not names & {"sin", "cos"}
    assert value_inputs(named(gm, "ones_like")) == []


def test_evaluation_replaces_symbols_and_runs_the_operators():
    gm = graph_of(lambda x: torch.maximum(torch.arange(x.shape[0] * 2).view(2, -1), torch.ones_like(x)), torch.randn(5))
    result = named(gm, "maximum")
    (symbol,) = symbols_of(shape_of(result)[1:])
    sources = [node for node in DataFlow(gm).sources([result]) if node.op.startswith("call_")]
    assert concrete(tuple(recorded(result).shape), {symbol: 3}) == (2, 3)
    assert evaluate(result, sources, {}, {symbol: 3}).tolist() == [[1, 1, 2], [3, 4, 5]]
    with pytest.raises(EvaluationError, match="depends on"):
        evaluate(result, sources, {}, {})


def test_evaluation_without_an_example_fails_by_name():
    gm = graph_of(lambda x: x.sin(), torch.randn(5))
    with pytest.raises(EvaluationError, match="sin needs l_x_, which has no example"):
        evaluate(named(gm, "sin"), [named(gm, "sin")], {}, {})


def test_literals_are_the_ints_of_calls_and_slices():
    gm = graph_of(lambda x: x[2:40].view(2, -1).sum(dim=-1) + 7 + 2.5, torch.randn(80, 3))
    assert literals_of(gm.graph.nodes) == {2, 40, -1, 7}

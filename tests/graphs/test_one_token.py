"""The graph of one token, recorded from a capture of several."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from kvpass.graphs.one_token import one_token_pass
from kvpass.torch_compat import FakeTensorMode


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

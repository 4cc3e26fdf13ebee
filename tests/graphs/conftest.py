"""Small decoders, and a Dynamo capture that runs passes and compares the rewritten graph with the eager model."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from kvpass.errors import UnsupportedAttentionError
from kvpass.graphs.bind_state import copy_graph
from kvpass.graphs.passes import CANONICAL_PASSES, GraphPass
from kvpass.operands import Attention as AttentionCall
from kvpass.operands import PolicyInputs
from kvpass.ops import reference

HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 2, 8, 50
TOKENS = 11
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor], Tensor]


def attend_grouped(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.projection = nn.Linear(HEADS * HEAD_DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HEADS * HEAD_DIM, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        b, t, _ = x.shape
        rows = self.projection(x).view(b, t, HEADS + 2 * KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k, v = rows.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        out = self.attend(self, q, k, v, positions)
        return self.out(out.transpose(1, 2).reshape(b, t, -1))


class Decoder(nn.Module):
    """Two layers on ids and positions; ``attend(module, q, k, v, positions)`` is what a test varies."""

    def __init__(self, attend: Attend = attend_grouped, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HEADS * HEAD_DIM)
        self.layers = nn.ModuleList(Attention(attend) for _ in range(layers))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = placed(self.embed(ids), positions)
        for layer in self.layers:
            x = x + layer(x, positions)
        return x @ self.embed.weight.T


def placed(x: Tensor, positions: Tensor) -> Tensor:
    """Activations ``[B, T, D]`` with a wave of their positions ``[B, T]`` added."""
    return x + (positions[..., None] * 100.0 ** -torch.linspace(0, 1, x.shape[-1])).cos().to(x.dtype)


def token_inputs(batch: int = 2, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, VOCABULARY, (batch, tokens))
    return ids, torch.arange(tokens).expand(batch, tokens).contiguous()


def run_capture(
    function: Callable[..., Tensor],
    inputs: Sequence[Any],
    passes: Sequence[GraphPass] = CANONICAL_PASSES,
    *,
    dynamic: bool = True,
    execute: bool = True,
    tolerance: float = 1e-5,
) -> tuple[GraphModule, list[int]]:
    """Capture ``function(*inputs)`` as one graph, run ``passes``, compare the graph's output with eager.

    Args:
        dynamic: whether every dimension of TOKENS in the inputs is symbolic.
        tolerance: absolute and relative, of the comparison.
        execute: False to keep the rewritten graph from running, where the site operator cannot.
    Returns:
        the rewritten graph and what each pass returned.
    """
    graphs: list[GraphModule] = []
    counts: list[int] = []

    def backend(gm: GraphModule, _: list[Any]) -> Callable[..., Any]:
        copy = copy_graph(gm)
        try:
            for graph_pass in passes:
                counts.append(graph_pass(copy))
                copy.graph.lint()
        except UnsupportedAttentionError as error:
            refusal = error
            return lambda *_: refuse(refusal)
        copy.recompile()
        graphs.append(copy)
        return copy.forward if execute else gm.forward

    def refuse(error: UnsupportedAttentionError) -> None:
        raise error

    reset(inputs if dynamic else [])
    with torch.no_grad():
        got = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
        torch.testing.assert_close(got, function(*inputs), atol=tolerance, rtol=tolerance)
    (graph,) = graphs
    return graph, counts


def reset(inputs: Sequence[Tensor]) -> None:
    """Forget earlier captures; in the next one every dimension of TOKENS in the inputs is symbolic."""
    torch._dynamo.reset()
    for value in inputs:
        for dim in (dim for dim, size in enumerate(value.shape) if size == TOKENS):
            torch._dynamo.mark_dynamic(value, dim)


def run_each(
    forms: Sequence[Callable[..., Tensor]], inputs: Sequence[Any], passes: Sequence[GraphPass], *, dynamic: bool = True
) -> list[UnsupportedAttentionError | None]:
    """What passes refuse each function of the inputs with; None: nothing.

    All functions are captured as one graph, since a capture is what takes time; each is then cut out of a copy.
    """
    found: list[UnsupportedAttentionError | None] = []

    def refusal(gm: GraphModule) -> UnsupportedAttentionError | None:
        try:
            for graph_pass in passes:
                graph_pass(gm)
                gm.graph.lint()
        except UnsupportedAttentionError as error:
            return error
        return None

    def backend(gm: GraphModule, _: list[Any]) -> Callable[..., Any]:
        places, begin = {node: place for place, node in enumerate(gm.graph.nodes)}, 0
        for end in (places[out] for out in gm.graph.output_node().args[0]):
            copy = copy_graph(gm)
            *nodes, output = copy.graph.nodes
            output.args = ((nodes[end],),)
            for place, node in reversed([*enumerate(nodes)]):
                if node.op != "placeholder" and not begin <= place <= end and not node.users:
                    copy.graph.erase_node(node)
            found.append(refusal(copy))
            begin = end + 1
        return lambda *_: [torch.zeros(()) for _ in forms]

    def each(*given: Any) -> list[Tensor]:
        return [form(*given) * 1 for form in forms]  # the product comes after all writes

    reset(inputs if dynamic else [])
    with torch.no_grad():
        torch.compile(each, backend=backend, fullgraph=True)(*inputs)
    assert len(found) == len(forms)
    return found


@pytest.fixture(scope="session")
def capture_each() -> Callable[..., list[UnsupportedAttentionError | None]]:
    return run_each


@pytest.fixture
def capture() -> Callable[..., tuple[GraphModule, list[int]]]:
    return run_capture


@pytest.fixture
def decoder() -> Callable[..., Decoder]:
    return lambda *args, **kwargs: Decoder(*args, **kwargs).eval()


@pytest.fixture
def inputs() -> Callable[..., tuple[Tensor, Tensor]]:
    return token_inputs


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[AttentionCall, PolicyInputs]]:
    """What a policy is given of each layer: the attention op, and what policies read beside it."""
    seen: list[tuple[AttentionCall, PolicyInputs]] = []
    judge = reference.score_layer

    def record(call: AttentionCall, lse: Any, start: Any, first: Any, layer: int, layers: int, policy: Any, *rest: Any):
        seen.append((call, rest[0]))
        return judge(call, lse, start, first, layer, layers, policy, *rest)

    monkeypatch.setattr(reference, "score_layer", record)
    return seen

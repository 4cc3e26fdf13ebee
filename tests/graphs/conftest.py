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
        out = self.attend(self, rotate(q, positions), rotate(k, positions), v, positions)
        return self.out(out.transpose(1, 2).reshape(b, t, -1))


class Decoder(nn.Module):
    """Two layers with rotary positions of their own; ``attend(module, q, k, v, positions)`` is what a test varies."""

    def __init__(self, attend: Attend = attend_grouped, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HEADS * HEAD_DIM)
        self.layers = nn.ModuleList(Attention(attend) for _ in range(layers))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, positions)
        return x @ self.embed.weight.T


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of ``[B, heads, T, D]`` at integer positions ``[B, T]``."""
    half = x.shape[-1] // 2
    frequencies = 100.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = (positions[:, None, :, None] * frequencies).to(x.dtype)
    (first, second), cos, sin = x.split(half, -1), angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


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

    torch._dynamo.reset()
    if dynamic:
        for value in inputs:
            for dim in (dim for dim, size in enumerate(value.shape) if size == TOKENS):
                torch._dynamo.mark_dynamic(value, dim)
    with torch.no_grad():
        got = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
        torch.testing.assert_close(got, function(*inputs), atol=tolerance, rtol=tolerance)
    (graph,) = graphs
    return graph, counts


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

"""Speed of kvpass's kernels alone, on a CUDA device: ``python -m kvpass.eval.bench.kernels --json FILE``.

Two questions. Does decode attention read a ragged cache as fast as a uniform one of equal bytes, and how near is it to
a plain copy? What does compression add to the attention of a prompt? One shape, that of Llama-3.1-8B in bf16; inputs
are random, results are compared with the eager reference before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from kvpass.cache.layers import FullAttentionLayers
from kvpass.config import Geometry, LayerGroup
from kvpass.eval.bench.measure import copy_bandwidth, median_seconds, scoring_time
from kvpass.eval.environment import machine, versions
from kvpass.eval.tables import rich_table
from kvpass.operands import AppendBuffers, Attention
from kvpass.ops import reference
from kvpass.ops.cuda import index_pool
from kvpass.policies import resolve

BUDGET = 1024
WINDOW = 32
BATCHES = (1, 8, 32)
PROMPTS = (8192, 32768, 131072)
PREFILL_LAYERS = 4
"""Whose prompt fits beside everything else; figures are per layer."""
POLICIES: dict[str, dict[str, float]] = {"lava": {}, "cake": {"tau1": 1.6, "tau2": 0.4}}
WORST_ERROR = 1e-2
"""Norm of the difference from the fp32 reference over the norm of the reference; bf16 gives a few 1e-3."""


@dataclass(frozen=True)
class Shape:
    """Attention of a decoder; the usual values are those of Llama-3.1-8B."""

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    place: str = "cuda"

    @property
    def device(self) -> torch.device:
        return torch.device(self.place)

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=self.dtype, device=self.device)

    @property
    def geometry(self) -> Geometry:
        itemsize = self.dtype.itemsize
        return Geometry(
            layers=self.layers, kv_heads=self.kv_heads, key_dim=self.dim, value_dim=self.dim, itemsize=itemsize
        )


# -- decode -----------------------------------------------------------------------------------------------------------


def uniform_lengths(shape: Shape, rows: int, entries: int) -> Tensor:
    """Pool entries of each row, layer and head, all alike; int64 ``[B, L, K]``."""
    return torch.full((rows, shape.layers, shape.kv_heads), entries)


def ragged_lengths(shape: Shape, rows: int, entries: int, seed: int = 0) -> Tensor:
    """As many in each row, but unequal: log-normal shares of sigma 1, as LAVa's top-k across heads leaves them."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.randn(rows, shape.layers * shape.kv_heads, generator=generator, dtype=torch.float64).exp()
    total = entries * shape.layers * shape.kv_heads
    ends = (shares.cumsum(1) / shares.sum(1, keepdim=True) * total).round().long()
    ends[:, -1] = total
    return ends.diff(dim=1, prepend=torch.zeros(rows, 1, dtype=torch.int64)).view(rows, shape.layers, shape.kv_heads)


@dataclass
class TimedCase:
    """Cache of all layers, and one new token."""

    call: Attention
    held: AppendBuffers

    @classmethod
    def make(cls, shape: Shape, lengths: Tensor) -> TimedCase:
        rows, layers, kv_heads = lengths.shape
        offsets = torch.nn.functional.pad(lengths.flatten(1).cumsum(1), (1, 0)).int().to(shape.device)
        entries = int(lengths.flatten(1).sum(1).max())
        held = AppendBuffers(
            pool_k=shape.random(rows, entries, shape.dim),
            pool_v=shape.random(rows, entries, shape.dim),
            offsets=offsets,
            tail_k=shape.random(layers, rows, kv_heads, WINDOW + 32, shape.dim),
            tail_v=shape.random(layers, rows, kv_heads, WINDOW + 32, shape.dim),
            tail_start=torch.zeros(rows, dtype=torch.int64, device=shape.device),
            tail_used=torch.tensor(WINDOW, device=shape.device),
        )
        q, k, v = (
            shape.random(rows, 1, heads, shape.dim).transpose(1, 2) for heads in (shape.heads, kv_heads, kv_heads)
        )
        return cls(Attention(q, k, v, shape.dim**-0.5), held)

    def reference(self, layer: int) -> Tensor:
        """Of the eager reference, fp32 on the CPU."""

        def exact(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.cpu().float() if x.is_floating_point() else x.cpu()

        return reference.attend_cache(Attention(*map(exact, self.call)), AppendBuffers(*map(exact, self.held)), layer)


def time_decode(shape: Shape, lengths: Tensor, bandwidth: float, check: bool) -> dict[str, float]:
    """One token through all layers, as a CUDA graph; a batch of one leaves part of its bytes in the device's own cache.

    Raises:
        RuntimeError: asked to check, and the kernel does not give what the reference gives.
    """
    from kvpass.kernels.ragged_decode import attend_ragged

    case = TimedCase.make(shape, lengths)
    tiles, tile_offsets = index_pool(case.held.offsets, shape.kv_heads, case.held.pool_k.shape[1])
    held = case.held._replace(tiles=tiles, tile_offsets=tile_offsets)

    def attend(layer: int) -> Tensor:
        return attend_ragged(case.call, held, layer)

    error = 0.0
    if check:
        for layer in (0, shape.layers - 1):
            expected = case.reference(layer)
            found = attend(layer).float().cpu()
            error = max(error, float((found - expected).norm() / expected.norm()))
            if not error <= WORST_ERROR:
                raise RuntimeError(f"decode kernel, layer {layer}: relative error {error:.2e} above {WORST_ERROR:.0e}")
    seconds = time_graph(lambda: [attend(layer) for layer in range(shape.layers)])
    read = (int(lengths.sum()) + lengths.numel() * (WINDOW + 1)) * shape.geometry.entry_bytes
    return {
        "us_per_layer": 1e6 * seconds / shape.layers,
        "bytes": read,
        "share_of_copy": read / seconds / bandwidth,
        **({"error": error} if check else {}),
    }


def time_graph(function: Callable[[], Any]) -> float:
    """Median seconds of what ``function`` launches, replayed as a CUDA graph so that no launch gap counts."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = function()  # the memory of its results stays the graph's
    seconds = median_seconds(graph.replay)
    del kept
    return seconds


def decode_figures(shape: Shape, bandwidth: float, batches: Sequence[int] = BATCHES) -> list[dict[str, Any]]:
    """Uniform and ragged attention for each batch."""
    figures = []
    for rows in batches:
        uniform, ragged = (make(shape, rows, BUDGET - WINDOW) for make in (uniform_lengths, ragged_lengths))
        record: dict[str, Any] = {"batch": rows}
        check = rows == batches[0]
        record["uniform"] = time_decode(shape, uniform, bandwidth, check)
        record["ragged"] = time_decode(shape, ragged, bandwidth, check)
        record["ragged_over_uniform"] = record["ragged"]["us_per_layer"] / record["uniform"]["us_per_layer"]
        figures.append(record)
    return figures


# -- prefill ----------------------------------------------------------------------------------------------------------


def prompt_run(shape: Shape, tokens: int, policy: str) -> tuple[Callable[[], None], Callable[[], Any]]:
    """A compressed prefill of all layers, attention operators only, and the plain attention of one layer."""
    resolved = resolve(policy, window=WINDOW, **POLICIES[policy])
    q = shape.random(1, tokens, shape.heads, shape.dim).transpose(1, 2)
    k, v = (shape.random(1, tokens, shape.kv_heads, shape.dim).transpose(1, 2) for _ in range(2))
    start = torch.zeros(1, dtype=torch.int64)
    call = Attention(q, k, v, shape.dim**-0.5)
    group = LayerGroup(geometry=shape.geometry, layers=tuple(range(shape.layers)))
    operators = torch.ops.kvpass

    def compress() -> None:
        store = FullAttentionLayers(group, resolved)
        store.begin_prefill([BUDGET], start, tokens, shape.dtype, shape.device)
        buffers = store.prefill_state.values()
        for layer in range(shape.layers):
            _, *seen = operators.observe_attention(*call, start, layer, shape.layers, resolved.spec)
            operators.cascade_step(*buffers, call.k, call.v, *seen, start, layer, resolved.spec)
        operators.pack(*buffers)

    return compress, lambda: operators.site(*call[:4])


def prompt_figures(shape: Shape, prompts: Sequence[int] = PROMPTS) -> list[dict[str, Any]]:
    """What scoring, cascade and pack add to the attention of a prompt of batch 1, milliseconds a layer."""
    figures = []
    for tokens in prompts:
        for policy in POLICIES:
            compress, attend = prompt_run(shape, tokens, policy)
            compress()
            attention = median_seconds(attend)
            found = scoring_time(compress, shape.device)
            added = None if found is None else found.seconds / shape.layers
            parts = list(found.parts.items())[:12] if found is not None else []
            record: dict[str, Any] = {
                "prompt": tokens,
                "policy": policy,
                "attention_ms": 1e3 * attention,
                "added_ms": None if added is None else 1e3 * added,
                "added_over_attention": None if added is None else added / attention,
                "parts_ms": {name: 1e3 * seconds / shape.layers for name, seconds in parts},
            }
            figures.append(record)
    return figures


# -- command ----------------------------------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of the decode table and of the prefill table."""
    decode = [
        [
            str(record["batch"]),
            *(
                cell
                for kind in ("uniform", "ragged")
                for cell in (f"{record[kind]['us_per_layer']:.1f}", f"{record[kind]['share_of_copy']:.0%}")
            ),
            f"{record['ragged_over_uniform']:.3f}",
        ]
        for record in result.get("decode", [])
    ]
    prefill = [
        [
            str(record["prompt"]),
            record["policy"],
            f"{record['attention_ms']:.3f}",
            *(
                ["-", "-"]
                if record["added_ms"] is None
                else [f"{record['added_ms']:.3f}", f"{record['added_over_attention']:.2%}"]
            ),
        ]
        for record in result.get("prefill", [])
    ]
    return [
        (["batch", "uniform us/layer", "of copy", "ragged us/layer", "of copy", "ragged/uniform"], decode),
        (["prompt", "policy", "attention ms/layer", "added ms/layer", "added/attention"], prefill),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="kernel_bench", description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="what is measured goes here, part by part")
    path = parser.parse_args(arguments).json
    if not torch.cuda.is_available():
        print("kernel_bench: this machine has no CUDA device", file=sys.stderr)
        return 1
    shape = Shape()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(shape.device)
    described = {name: str(value) for name, value in asdict(shape).items()}
    result: dict[str, Any] = {
        "machine": {**machine(shape.device), "copy_bandwidth": bandwidth},
        "versions": versions(),
        "shape": {**described, "prefill_layers": PREFILL_LAYERS, "budget": BUDGET, "window": WINDOW},
        "complete": False,
    }
    with torch.no_grad():
        result["decode"] = decode_figures(shape, bandwidth)
        path.write_text(json.dumps(result, indent=1) + "\n")
        result["prefill"] = prompt_figures(Shape(layers=PREFILL_LAYERS))
        path.write_text(json.dumps({**result, "complete": True}, indent=1) + "\n")
    for header, rows in tables(result):
        Console().print(rich_table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

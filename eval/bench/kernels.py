"""Speed of kvpass's kernels alone, on a CUDA device: ``python -m kvpass.eval.bench.kernels --json FILE``.

Two questions. Does decode attention read a ragged cache as fast as a uniform one of equal bytes, and how near is it to
a plain copy? How long does it take for as many entries in 8, 4 and 2 bits? Two shapes in bf16: that of Llama-3.1-8B,
and the latent rows of DeepSeek-V3. Inputs are random, results are compared with the eager reference before anything is
timed. What compression adds to a prompt, ``kvpass bench`` measures in a model.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.utils._pytree import tree_map_only

from kvpass.config import EntryFormat, Geometry
from kvpass.eval.bench.measure import ceilings, first_line
from kvpass.eval.environment import machine, save_json, versions
from kvpass.eval.tables import Tables
from kvpass.operands import BUFFERS, AppendBuffers, Attention, Entries
from kvpass.ops import reference
from kvpass.ops.entry_formats import packed

BUDGET = 1024
WINDOW = 32
BATCHES = (1, 8, 32, 64, 256)
AT_LEAST = 0.1  # seconds for each figure
WORST_ERROR = 1e-2
"""Norm of the difference from the fp32 reference over the norm of the reference; bf16 gives a few 1e-3."""


@dataclass(frozen=True)
class Shape:
    """Attention of a decoder; the usual values are those of Llama-3.1-8B.

    ``latent``: values are the first so many columns of the keys, and stored there only; None: they are apart.
    """

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = torch.device("cuda")  # noqa: RUF009
    latent: int | None = None

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=self.dtype, device=self.device)

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            layers=self.layers,
            kv_heads=self.kv_heads,
            key_dim=self.dim,
            value_dim=self.latent or self.dim,
            itemsize=self.dtype.itemsize,
            values_in_keys=self.latent is not None,
        )

    def tokens(self, rows: int, tokens: int) -> Attention:
        """Random queries, keys and values of new tokens."""
        q, k, v = (
            self.random(rows, tokens, heads, self.dim).transpose(1, 2)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        return Attention(q, k, v if self.latent is None else k[..., : self.latent], self.dim**-0.5)


LATENT = Shape(heads=128, kv_heads=1, dim=576, latent=512)  # of DeepSeek-V3, with fewer layers


def ragged_lengths(shape: Shape, rows: int, entries: int) -> Tensor:
    """Pool entries of each row, layer and head, int64 ``[B, L, K]``; in each row ``entries`` on average.

    They have log-normal shares of sigma 1, as LAVa's top-k across heads leaves them.
    """
    generator = torch.Generator().manual_seed(0)
    shares = torch.randn(rows, shape.layers * shape.kv_heads, generator=generator, dtype=torch.float64).exp()
    total = entries * shape.layers * shape.kv_heads
    ends = (shares.cumsum(1) / shares.sum(1, keepdim=True) * total).round().long()
    ends[:, -1] = total
    return ends.diff(dim=1, prepend=torch.zeros(rows, 1, dtype=torch.int64)).view(rows, shape.layers, shape.kv_heads)


def cache_of(shape: Shape, lengths: Tensor, entry_format: EntryFormat) -> AppendBuffers:
    """A random cache of all layers with pool entries as in :func:`ragged_lengths`."""
    rows, layers, kv_heads = lengths.shape
    dims = shape.dim, shape.geometry.stored_value_dim
    entries = int(lengths.flatten(1).sum(1).max())
    buffers = AppendBuffers(
        pool=Entries(*(shape.random(rows, entries, dim) for dim in dims)),
        offsets=torch.nn.functional.pad(lengths.flatten(1).cumsum(1), (1, 0)).int().to(shape.device),
        tail=Entries(*(shape.random(layers, rows, kv_heads, WINDOW + 32, dim) for dim in dims)),
        tail_start=torch.zeros(rows, dtype=torch.int64, device=shape.device),
        tail_used=torch.tensor(WINDOW, device=shape.device),
        arrivals=BUFFERS["arrivals"].new({"programs": rows * kv_heads}, shape.device),
    )
    return buffers if entry_format == "model" else packed(buffers, entry_format)


def attend(call: Attention, buffers: AppendBuffers, layer: int) -> Tensor:
    """Attention of the new token at a layer, ``[B, H, 1, D]``, by the kernels of this package."""
    from kvpass.ops.cuda import attend_cache

    return attend_cache(call, buffers, layer)


FORMATS: dict[str, EntryFormat] = {"uniform": "model", "ragged": "model", "int8": "int8"}
FORMATS |= {"rot4": "rot4", "rot3": "rot3", "rot2": "rot2"}
"""Entry format of each column; lengths are ragged but in the first."""


def time_decode(
    shape: Shape, lengths: Tensor, bandwidth: float, check: bool, entry_format: EntryFormat
) -> dict[str, Any]:
    """One token through all layers, as a CUDA graph; a batch of one leaves part of its bytes in the device's own cache.

    Raises:
        RuntimeError: asked to check, and the kernel does not give what the reference gives.
    """
    call, buffers = shape.tokens(len(lengths), 1), cache_of(shape, lengths, entry_format)
    error = 0.0
    for layer in (0, shape.layers - 1) if check else ():
        exact = tree_map_only(Tensor, lambda x: x.cpu().float() if x.is_floating_point() else x.cpu(), [call, buffers])
        expected = reference.attend_cache(exact[0], exact[1], layer)
        error = max(error, float((attend(call, buffers, layer).float().cpu() - expected).norm() / expected.norm()))
        if not error <= WORST_ERROR:
            raise RuntimeError(f"decode kernel, layer {layer}: relative error {error:.2e} above {WORST_ERROR:.0e}")
    seconds = time_graph(lambda: [attend(call, buffers, layer) for layer in range(shape.layers)])
    read = (int(lengths.sum()) + lengths.numel() * (WINDOW + 1)) * shape.geometry.entry_bytes(entry_format)
    figures = {"us_per_layer": 1e6 * seconds / shape.layers, "bytes": read, "share_of_copy": read / seconds / bandwidth}
    return figures | ({"error": error} if check else {})


def time_graph(function: Callable[[], Any]) -> float:
    """Median seconds of what ``function`` launches, replayed as a CUDA graph so that no launch gap counts."""
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(function, rep=int(100 * AT_LEAST), return_mode="median")) / 1e3  # ten times so long


def figures(decode: list[dict[str, Any]], bandwidth: float) -> Iterator[None]:
    """Add a record for each batch; yields after each figure."""
    for (shape, columns), rows in itertools.product(((Shape(), tuple(FORMATS)), (LATENT, ("ragged",))), BATCHES):
        record: dict[str, Any] = {"batch": rows} | ({} if shape.latent is None else {"rows": "latent"})
        decode.append(record)
        for column in columns:
            lengths = ragged_lengths(shape, rows, BUDGET - WINDOW)
            if column == "uniform":
                lengths.fill_(BUDGET - WINDOW)
            try:
                record[column] = time_decode(shape, lengths, bandwidth, rows == BATCHES[0], FORMATS[column])
            except Exception as error:  # the other figures do not need it; the exit status says that it is missing
                traceback.print_exc()
                record[column] = {"failure": first_line(error)}
            times = [record.get(name, {}).get("us_per_layer") for name in ("ragged", "uniform")]
            if all(times):
                record["ragged_over_uniform"] = times[0] / times[1]
            yield


def shown(result: dict[str, Any]) -> Tables:
    """A line for each batch."""
    columns = [(name, figure) for name in FORMATS for figure in ("us_per_layer", "share_of_copy")]
    rows = [
        [
            f"{record['batch']} {record.get('rows', '')}".strip(),
            *(_cell(record.get(name, {}), figure) for name, figure in columns),
            _cell(record, "ragged_over_uniform"),
        ]
        for record in result["decode"]
    ]
    header = ["batch", *(f"{name}\n{figure}" for name, figure in columns), "ragged over\nuniform"]
    return Tables([("", header, rows)])


def _cell(record: dict[str, Any], name: str) -> str:
    value = record.get(name)
    return f"{value:.3g}" if value is not None else "failed" if "failure" in record else "-"


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 1 without a CUDA device, or where something failed."""
    parser = argparse.ArgumentParser(prog="kvpass.eval.bench.kernels", description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="what is measured goes here, figure by figure")
    path = parser.parse_args(arguments).json
    if not torch.cuda.is_available():
        print("this machine has no CUDA device", file=sys.stderr)
        return 1
    device = Shape().device
    torch.manual_seed(0)
    limits = ceilings(device, Shape().dtype)
    described = {name: str(value) for name, value in asdict(Shape()).items()}
    result: dict[str, Any] = {
        "command": ["python", "-m", "kvpass.eval.bench.kernels"],
        "machine": machine(device) | limits,
        "versions": versions(),
        "shape": {**described, "budget": BUDGET, "window": WINDOW},
        "complete": False,
        "decode": [],
    }
    with torch.no_grad():
        for _ in figures(result["decode"], limits["copy_bandwidth"]):
            save_json(path, result)
    Console().print(shown(result))
    parts = [part for record in result["decode"] for part in record.values() if isinstance(part, dict)]
    result["complete"] = not any("failure" in part for part in parts)
    save_json(path, result)
    return int(not result["complete"])


if __name__ == "__main__":
    sys.exit(main())

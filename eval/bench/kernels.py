"""Speed of kvpass's kernels alone, on a CUDA device: ``python -m kvpass.eval.bench.kernels --json FILE``.

Three questions. Does decode attention read a ragged cache as fast as a uniform one of equal bytes, and how near is it
to a plain copy? How long does it take for as many entries in 8, 4 and 2 bits? What does compression add to the
attention of a prompt? Two shapes in bf16: that of Llama-3.1-8B, and the latent rows of DeepSeek-V3. Inputs are random,
results are compared with the eager reference before anything is timed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.profiler import record_function

from kvpass.cache.prefill import PrefillLayers
from kvpass.cache.state import KVState
from kvpass.config import EntryFormat, Geometry, LayerGroup, PoolFacts
from kvpass.eval.bench.measure import copy_bandwidth, first_line, median_seconds, scoring_time
from kvpass.eval.environment import machine, save_json, versions
from kvpass.eval.tables import Tables
from kvpass.operands import BUFFERS, AppendBuffers, Attention, Entries
from kvpass.ops import reference
from kvpass.ops.compress import compress_layer
from kvpass.ops.entry_formats import packed
from kvpass.ops.schemas import implementation
from kvpass.policies import resolve
from kvpass.ranks import ONE_PROCESS

CUDA = torch.device("cuda")
BUDGET = 1024
WINDOW = 32
BATCHES = (1, 8, 32)
AT_LEAST = 0.15
"""Seconds for each figure: a device's time is dear, and its kernels take as long every time."""
PROMPTS = (8192, 32768, 131072)
PREFILL_LAYERS = 4
"""Whose prompt fits beside everything else; figures are per layer."""
POLICIES: dict[str, dict[str, float]] = {"lava": {}, "cake": {"tau1": 1.6, "tau2": 0.4}}
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
    device: torch.device = CUDA
    latent: int | None = None

    @property
    def named(self) -> dict[str, str]:
        """What records of latent rows have besides."""
        return {} if self.latent is None else {"rows": "latent"}

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=self.dtype, device=self.device)

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            layers=self.layers,
            kv_heads=self.kv_heads,
            key_dim=self.dim,
            value_dim=self.dim if self.latent is None else self.latent,
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


LATENT = Shape(heads=128, kv_heads=1, dim=576, latent=512)
"""That of DeepSeek-V3 where it attends latent rows, with fewer layers."""
LATENT_PROMPTS = (8192,)


# -- decode -----------------------------------------------------------------------------------------------------------


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


def cache_of(shape: Shape, lengths: Tensor, entry_format: EntryFormat = "model") -> tuple[Attention, AppendBuffers]:
    """One new token, and a random cache of all layers with pool entries as in :func:`ragged_lengths`."""
    rows, layers, kv_heads = lengths.shape
    dims = shape.dim, shape.geometry.stored_value_dim
    entries = int(lengths.flatten(1).sum(1).max())
    held = AppendBuffers(
        pool=Entries(*(shape.random(rows, entries, dim) for dim in dims)),
        offsets=torch.nn.functional.pad(lengths.flatten(1).cumsum(1), (1, 0)).int().to(shape.device),
        tail=Entries(*(shape.random(layers, rows, kv_heads, WINDOW + 32, dim) for dim in dims)),
        tail_start=torch.zeros(rows, dtype=torch.int64, device=shape.device),
        tail_used=torch.tensor(WINDOW, device=shape.device),
        arrivals=BUFFERS["arrivals"].new({"programs": rows * kv_heads}, shape.device),
    )
    return shape.tokens(rows, 1), held if entry_format == "model" else packed(held, entry_format)


def attend(call: Attention, held: AppendBuffers, layer: int) -> Tensor:
    """Attention of the new token at a layer, ``[B, H, 1, D]``, by the kernels of this package."""
    from kvpass.ops.cuda import attend_cache

    return attend_cache(call, held, layer)


def exact(x: Any) -> Any:
    """A tensor, or those of entries, on the CPU, numbers in fp32; anything else as it is."""
    if isinstance(x, Entries):
        return Entries(*map(exact, x))
    if not isinstance(x, Tensor):
        return x
    return x.cpu().float() if x.is_floating_point() else x.cpu()


KINDS: dict[str, EntryFormat] = {
    "uniform": "model",
    "ragged": "model",
    "int8": "int8",
    "rot4": "rot4",
    "rot3": "rot3",
    "rot2": "rot2",
}
"""Entry format of each column; lengths are ragged but in the first."""


def time_decode(
    shape: Shape, lengths: Tensor, bandwidth: float, check: bool, entry_format: EntryFormat = "model"
) -> dict[str, Any]:
    """One token through all layers, as a CUDA graph; a batch of one leaves part of its bytes in the device's own cache.

    Raises:
        RuntimeError: asked to check, and the kernel does not give what the reference gives.
    """
    call, held = cache_of(shape, lengths, entry_format)
    error = 0.0
    for layer in (0, shape.layers - 1) if check else ():
        expected = reference.attend_cache(Attention(*map(exact, call)), AppendBuffers(*map(exact, held)), layer)
        error = max(error, float((attend(call, held, layer).float().cpu() - expected).norm() / expected.norm()))
        if not error <= WORST_ERROR:
            raise RuntimeError(f"decode kernel, layer {layer}: relative error {error:.2e} above {WORST_ERROR:.0e}")
    seconds = time_graph(lambda: [attend(call, held, layer) for layer in range(shape.layers)])
    read = (int(lengths.sum()) + lengths.numel() * (WINDOW + 1)) * shape.geometry.entry_bytes(entry_format)
    return {
        "us_per_layer": 1e6 * seconds / shape.layers,
        "bytes": read,
        "share_of_copy": read / seconds / bandwidth,
        **({"error": error} if check else {}),
    }


def time_graph(function: Callable[[], Any]) -> float:
    """Median seconds of what ``function`` launches, replayed as a CUDA graph so that no launch gap counts."""
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(function, rep=int(100 * AT_LEAST), return_mode="median")) / 1e3  # ten times so long


# -- prefill ----------------------------------------------------------------------------------------------------------


def time_prompt(shape: Shape, tokens: int, policy: str) -> dict[str, Any]:
    """What scoring, cascade and pack add to the attention of a prompt of batch 1, milliseconds a layer."""
    resolved = resolve(policy, window=WINDOW, **POLICIES[policy])
    start = torch.zeros(1, dtype=torch.int64)
    first, call = start.to(shape.device), shape.tokens(1, tokens)
    group = LayerGroup(geometry=shape.geometry, layers=tuple(range(shape.layers)))
    ops = implementation(call.q)

    def compress() -> None:
        state = KVState(policy=resolved, budget=None, start=start, columns=tokens, budgets=[BUDGET])
        buffers = PrefillLayers(group, PoolFacts(1, plain=False), state, shape.dtype, shape.device).buffers
        for layer in range(shape.layers):
            _, lse = ops.attend_prompt(call, start)
            compress_layer(ops, call, lse, start, first, layer, resolved, buffers, ONE_PROCESS)
        with record_function("kvpass::pack"):
            ops.pack(buffers)

    compress()
    attention = median_seconds(lambda: torch.ops.kvpass.site(*call[:4]), AT_LEAST)
    found = scoring_time(compress, shape.device)
    added = None if found is None else found.seconds / shape.layers
    parts = list(found.parts.items())[:12] if found is not None else []
    return {
        "attention_ms": 1e3 * attention,
        "added_ms": None if added is None else 1e3 * added,
        "added_over_attention": None if added is None else added / attention,
        "parts_ms": {name: 1e3 * seconds / shape.layers for name, seconds in parts},
    }


# -- command ----------------------------------------------------------------------------------------------------------


def measured(function: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """The figures, or under ``failure`` why there are none."""
    try:
        return function(*given)
    except Exception as error:  # the other figures do not need this one; the exit status says that it is missing
        traceback.print_exc()
        return {"failure": first_line(error)}


def figures(decode: list[dict[str, Any]], prefill: list[dict[str, Any]], bandwidth: float) -> Iterator[None]:
    """Add a record for each batch, and one for each prompt and policy; yields after each figure."""
    usual = Shape()
    for shape, kinds in ((usual, tuple(KINDS)), (LATENT, ("ragged",))):
        for rows in BATCHES:
            record: dict[str, Any] = {"batch": rows, **shape.named}
            decode.append(record)
            for kind in kinds:
                lengths, check = ragged_lengths(shape, rows, BUDGET - WINDOW), rows == BATCHES[0]
                if kind == "uniform":
                    lengths.fill_(BUDGET - WINDOW)
                record[kind] = measured(time_decode, shape, lengths, bandwidth, check, KINDS[kind])
                times = [record.get(known, {}).get("us_per_layer") for known in ("ragged", "uniform")]
                if all(times):
                    record["ragged_over_uniform"] = times[0] / times[1]
                yield
    for shape, prompts in ((usual, PROMPTS), (LATENT, LATENT_PROMPTS)):
        for tokens, policy in itertools.product(prompts, POLICIES):
            found = measured(time_prompt, replace(shape, layers=PREFILL_LAYERS), tokens, policy)
            prefill.append({"prompt": tokens, "policy": policy, **shape.named, **found})
            yield


def shown(result: dict[str, Any]) -> Tables:
    """The decode table and the prefill table, and of what the additions to a prompt are made."""
    kinds = [kind for kind in KINDS if any(kind in record for record in result["decode"])]
    decode, prefill, notes = [], [], []
    for record in result["decode"]:
        cells = [_size(record, "batch")]
        for found in (record.get(kind, {}) for kind in kinds):
            cells += [_cell(found, "us_per_layer", ".1f"), _cell(found, "share_of_copy", ".0%")]
        decode.append([*cells, _cell(record, "ragged_over_uniform", ".3f")])
    for record in result["prefill"]:
        size = _size(record, "prompt")
        figures = {"attention_ms": ".3f", "added_ms": ".3f", "added_over_attention": ".2%"}
        prefill.append([size, record["policy"], *(_cell(record, name, form) for name, form in figures.items())])
        parts = ", ".join(f"{name[:60]} {ms:.3f}" for name, ms in record.get("parts_ms", {}).items())
        notes.append(f"{record['policy']}, {size} tokens, ms a layer: {parts or '-'}")
    of_kinds = [name for kind in kinds for name in (f"{kind} us/layer", "of copy")]
    tables = [
        ("", ["batch", *of_kinds, "ragged/uniform"], decode),
        ("", ["prompt", "policy", "attention ms/layer", "added ms/layer", "added/attention"], prefill),
    ]
    return Tables(tables, notes)


def _size(record: dict[str, Any], name: str) -> str:
    return f"{record[name]} {record.get('rows', '')}".strip()


def _cell(found: dict[str, Any], name: str, form: str) -> str:
    if "failure" in found:
        return "failed"
    return "-" if found.get(name) is None else format(found[name], form)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 1 without a CUDA device, or where something failed."""
    parser = argparse.ArgumentParser(prog="kvpass.eval.bench.kernels", description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="what is measured goes here, figure by figure")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this machine has no CUDA device", file=sys.stderr)
        return 1
    device = Shape().device
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(device)
    described = {name: str(value) for name, value in asdict(Shape()).items()}
    result: dict[str, Any] = {
        "command": ["python", "-m", "kvpass.eval.bench.kernels"],
        "machine": {**machine(device), "copy_bandwidth": bandwidth},
        "versions": versions(),
        "shape": {**described, "prefill_layers": PREFILL_LAYERS, "budget": BUDGET, "window": WINDOW},
        "complete": False,
        "decode": [],
        "prefill": [],
    }
    with torch.no_grad():
        for _ in figures(result["decode"], result["prefill"], bandwidth):
            save_json(given.json, result)
    Console().print(shown(result))
    found = [one for record in result["decode"] for one in record.values() if isinstance(one, dict)]
    complete = not any("failure" in one for one in (*found, *result["prefill"]))
    save_json(given.json, result | {"complete": complete})
    return int(not complete)


if __name__ == "__main__":
    sys.exit(main())

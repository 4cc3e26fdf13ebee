"""Speed of kvpass's kernels alone, on a CUDA device: ``python -m kvpass.eval.bench.kernels --json FILE``.

Three questions. Does decode attention read a ragged cache as fast as a uniform one of equal bytes, and how near is it
to a plain copy? How long does it take for as many entries in 8, 4 and 2 bits? What does compression add to the
attention of a prompt? Two shapes in bf16: that of Llama-3.1-8B, and the latent rows of DeepSeek-V3. Inputs are random,
results are compared with the eager reference before anything is timed.

With ``--baselines``: the same ragged entries read by FlashInfer and by torch's ``varlen_attn``, where installed. Both
read pages, each KV head of each row as a sequence of its own; kvpass also appends the new token meanwhile.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import kvpass.ops.schemas  # noqa: F401  defines the operators of the prompt
from kvpass.cache.layers import FullAttentionLayers
from kvpass.config import EntryFormat, Geometry, LayerGroup
from kvpass.eval.bench.measure import copy_bandwidth, first_line, median_seconds, scoring_time
from kvpass.eval.environment import machine, save_json, versions
from kvpass.eval.tables import rich_table
from kvpass.operands import AppendBuffers, Attention, PolicyInputs
from kvpass.ops import reference
from kvpass.ops.cuda import index_pool
from kvpass.ops.entry_formats import packed
from kvpass.policies import resolve
from kvpass.ranks import ONE_PROCESS

BUDGET = 1024
WINDOW = 32
BATCHES = (1, 8, 32)
PROMPTS = (8192, 32768, 131072)
PREFILL_LAYERS = 4
"""Whose prompt fits beside everything else; figures are per layer."""
POLICIES: dict[str, dict[str, float]] = {"lava": {}, "cake": {"tau1": 1.6, "tau2": 0.4}}
WORST_ERROR = 1e-2
"""Norm of the difference from the fp32 reference over the norm of the reference; bf16 gives a few 1e-3."""
FLASHINFER_PAGE = 16
VARLEN_PAGE = 256
"""Entries; FlashAttention-2 reads pages of no other size than its multiples."""
WORKSPACE_BYTES = 2**27
Attend = Callable[[int], Tensor]
"""Attention of one new token at a layer, ``[B, H, 1, D]`` in any form."""


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
    place: str = "cuda"
    latent: int | None = None

    @property
    def device(self) -> torch.device:
        return torch.device(self.place)

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
    def make(cls, shape: Shape, lengths: Tensor, entry_format: EntryFormat = "model") -> TimedCase:
        rows, layers, kv_heads = lengths.shape
        dims = shape.dim, shape.geometry.stored_value_dim
        offsets = torch.nn.functional.pad(lengths.flatten(1).cumsum(1), (1, 0)).int().to(shape.device)
        entries = int(lengths.flatten(1).sum(1).max())
        held = AppendBuffers(
            pool_k=shape.random(rows, entries, dims[0]),
            pool_v=shape.random(rows, entries, dims[1]),
            offsets=offsets,
            tail_k=shape.random(layers, rows, kv_heads, WINDOW + 32, dims[0]),
            tail_v=shape.random(layers, rows, kv_heads, WINDOW + 32, dims[1]),
            tail_start=torch.zeros(rows, dtype=torch.int64, device=shape.device),
            tail_used=torch.tensor(WINDOW, device=shape.device),
        )
        return cls(shape.tokens(rows, 1), held if entry_format == "model" else packed(held, entry_format))

    @property
    def layers(self) -> int:
        return self.held.tail_k.shape[0]

    def queries(self) -> Tensor:
        """Those of each KV head as a sequence: ``[B*K, G, D]``."""
        rows, heads, _, dim = self.call.q.shape
        kv_heads = self.call.k.shape[1]
        return self.call.q.reshape(rows * kv_heads, heads // kv_heads, dim)

    def pages(self, layer: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """All entries of a layer, the new one included, in pages of zeros beyond them.

        Returns:
            keys, values ``[pages, size, 1, D]``, those of a sequence one after another, and entries of each sequence
            (row by row, KV head by KV head), int32 ``[B*K]``.
        """
        rows, kv_heads = self.call.k.shape[:2]
        bounds = self.held.offsets[:, layer * kv_heads : (layer + 1) * kv_heads + 1]
        parts = [
            torch.nn.functional.pad(whole, (0, 0, 0, -len(whole) % size))
            for pool, tail, new in (
                (self.held.pool_k, self.held.tail_k, self.call.k),
                (self.held.pool_v, self.held.tail_v, self.call.v),
            )
            for row, segments in enumerate(bounds.tolist())
            for head in range(kv_heads)
            for whole in [
                torch.cat(
                    [pool[row, segments[head] : segments[head + 1]], tail[layer, row, head, :WINDOW], new[row, head]]
                )
            ]
        ]
        half = rows * kv_heads
        keys, values = (torch.cat(some).unflatten(0, (-1, size)).unsqueeze(2) for some in (parts[:half], parts[half:]))
        return keys, values, (bounds.diff(dim=1) + WINDOW + 1).flatten().int()

    def reference(self, layer: int) -> Tensor:
        """Of the eager reference, fp32 on the CPU."""

        def exact(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.cpu().float() if x.is_floating_point() else x.cpu()

        return reference.attend_cache(Attention(*map(exact, self.call)), AppendBuffers(*map(exact, self.held)), layer)


def kvpass_kernel(case: TimedCase) -> Attend:
    """The kernel of this package."""
    from kvpass.kernels.ragged_decode import attend_ragged

    tiles, tile_offsets, arrivals = index_pool(case.held.offsets, case.call.k.shape[1], case.held.pool_k.shape[1])
    held = case.held._replace(tiles=tiles, tile_offsets=tile_offsets, arrivals=arrivals)
    return lambda layer: attend_ragged(case.call, held, layer)


def flashinfer_kernel(case: TimedCase) -> Attend:
    """FlashInfer's decode of a paged cache, planned once, as it is for the layers of one step.

    Raises:
        ImportError: it is not installed.
    """
    wrapper = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    q, device = case.queries(), case.call.q.device
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    planned = []
    for layer in range(case.layers):
        keys, values, counts = case.pages(layer, FLASHINFER_PAGE)
        pages = (counts + FLASHINFER_PAGE - 1) // FLASHINFER_PAGE
        bounds = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
        made = wrapper(workspace, "NHD", use_tensor_cores=True)
        made.plan(
            bounds,
            torch.arange(len(keys), dtype=torch.int32, device=device),
            (counts - (pages - 1) * FLASHINFER_PAGE).int(),
            q.shape[1],
            1,
            q.shape[2],
            FLASHINFER_PAGE,
            q_data_type=q.dtype,
            kv_data_type=q.dtype,
            sm_scale=case.call.scale,
        )
        planned.append((made, (keys, values)))
    return lambda layer: planned[layer][0].run(q, planned[layer][1])


def varlen_kernel(case: TimedCase) -> Attend:
    """torch's FlashAttention with a block table.

    Raises:
        ImportError: this torch has none.
    """
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        raise ImportError(f"varlen_attn of torch {torch.__version__} takes no block_table")
    q = case.queries()
    one_each = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    calls = []
    for layer in range(case.layers):
        keys, values, counts = case.pages(layer, VARLEN_PAGE)
        pages = (counts + VARLEN_PAGE - 1) // VARLEN_PAGE
        table = (pages.cumsum(0) - pages)[:, None] + torch.arange(int(pages.max()), device=q.device)
        options = {
            "seqused_k": counts, "block_table": table.clamp(max=len(keys) - 1).int(), "enable_gqa": True,
            "scale": case.call.scale,
        }  # fmt: skip
        calls.append(partial(varlen_attn, q, keys, values, one_each, None, 1, int(counts.max()), **options))
    return lambda layer: calls[layer]()


KINDS: dict[str, tuple[Callable[[Shape, int, int], Tensor], Callable[[TimedCase], Attend], EntryFormat]] = {
    "uniform": (uniform_lengths, kvpass_kernel, "model"),
    "ragged": (ragged_lengths, kvpass_kernel, "model"),
    "int8": (ragged_lengths, kvpass_kernel, "int8"),
    "rot4": (ragged_lengths, kvpass_kernel, "rot4"),
    "rot3": (ragged_lengths, kvpass_kernel, "rot3"),
    "rot2": (ragged_lengths, kvpass_kernel, "rot2"),
    "flashinfer": (ragged_lengths, flashinfer_kernel, "model"),
    "varlen": (ragged_lengths, varlen_kernel, "model"),
}
"""Lengths, kernel and format of the pool of each column."""
OURS = ("uniform", "ragged", "int8", "rot4", "rot3", "rot2")
BASELINES = ("ragged", "flashinfer", "varlen")


def time_decode(
    shape: Shape,
    lengths: Tensor,
    bandwidth: float,
    check: bool,
    kernel: Callable[[TimedCase], Attend] = kvpass_kernel,
    entry_format: EntryFormat = "model",
) -> dict[str, Any]:
    """One token through all layers, as a CUDA graph; a batch of one leaves part of its bytes in the device's own cache.

    Raises:
        RuntimeError: asked to check, and the kernel does not give what the reference gives.
    """
    case = TimedCase.make(shape, lengths, entry_format)
    attend = kernel(case)
    error = 0.0
    if check:
        for layer in (0, shape.layers - 1):
            expected = case.reference(layer)
            found = attend(layer).float().cpu().reshape(expected.shape)
            error = max(error, float((found - expected).norm() / expected.norm()))
            if not error <= WORST_ERROR:
                raise RuntimeError(f"decode kernel, layer {layer}: relative error {error:.2e} above {WORST_ERROR:.0e}")
    seconds = time_graph(lambda: [attend(layer) for layer in range(shape.layers)])
    g = shape.geometry
    read = int(lengths.sum()) * g.pool_entry_bytes(entry_format) + lengths.numel() * (WINDOW + 1) * g.entry_bytes
    return {
        "us_per_layer": 1e6 * seconds / shape.layers,
        "bytes": read,
        "share_of_copy": read / seconds / bandwidth,
        **({"error": error} if check else {}),
    }


def measured(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures, or under ``failure`` why there are none."""
    try:
        return function()
    except Exception as error:  # the other figures do not need this one; main says that it is missing
        traceback.print_exc()
        return {"failure": first_line(error)}


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


def decode_figures(
    shape: Shape,
    bandwidth: float,
    kinds: Sequence[str] = OURS,
    batches: Sequence[int] = BATCHES,
    save: Callable[[list[dict[str, Any]]], None] = lambda figures: None,
) -> list[dict[str, Any]]:
    """Attention of each kind for each batch; ``save`` is handed the figures so far after each."""
    figures: list[dict[str, Any]] = []
    for rows in batches:
        record: dict[str, Any] = {"batch": rows, **_named(shape)}
        figures.append(record)
        for kind in kinds:
            make, kernel, entry_format = KINDS[kind]
            lengths, check = make(shape, rows, BUDGET - WINDOW), rows == batches[0]
            record[kind] = measured(partial(time_decode, shape, lengths, bandwidth, check, kernel, entry_format))
            if all("us_per_layer" in record.get(known, {}) for known in ("uniform", "ragged")):
                record["ragged_over_uniform"] = record["ragged"]["us_per_layer"] / record["uniform"]["us_per_layer"]
            save(figures)
    return figures


# -- prefill ----------------------------------------------------------------------------------------------------------


def prompt_run(shape: Shape, tokens: int, policy: str) -> tuple[Callable[[], None], Callable[[], Any]]:
    """A compressed prefill of all layers, attention operators only, and the plain attention of one layer."""
    resolved = resolve(policy, window=WINDOW, **POLICIES[policy])
    start = torch.zeros(1, dtype=torch.int64)
    first = start.to(shape.device)
    call = shape.tokens(1, tokens)
    group = LayerGroup(geometry=shape.geometry, layers=tuple(range(shape.layers)))
    operators = torch.ops.kvpass

    def compress() -> None:
        store = FullAttentionLayers(group, resolved)
        store.begin_prefill([BUDGET], start, tokens, shape.dtype, shape.device)
        buffers = store.prefill_state.values()
        for layer in range(shape.layers):
            asked = (resolved.spec, *PolicyInputs(entries=store.prefill_state["entries"]), ONE_PROCESS.spec)
            _, *seen = operators.observe_attention(*call, start, first, layer, shape.layers, *asked)
            operators.cascade_step(*buffers, call.k, call.v, *seen, first, layer, resolved.spec, ONE_PROCESS.spec)
        operators.pack(*buffers)

    return compress, lambda: operators.site(*call[:4])


def time_prompt(shape: Shape, tokens: int, policy: str) -> dict[str, Any]:
    """What scoring, cascade and pack add to the attention of a prompt of batch 1, milliseconds a layer."""
    compress, attend = prompt_run(shape, tokens, policy)
    compress()
    attention = median_seconds(attend)
    found = scoring_time(compress, shape.device)
    added = None if found is None else found.seconds / shape.layers
    parts = list(found.parts.items())[:12] if found is not None else []
    return {
        "attention_ms": 1e3 * attention,
        "added_ms": None if added is None else 1e3 * added,
        "added_over_attention": None if added is None else added / attention,
        "parts_ms": {name: 1e3 * seconds / shape.layers for name, seconds in parts},
    }


def prompt_figures(
    shape: Shape,
    prompts: Sequence[int] = PROMPTS,
    save: Callable[[list[dict[str, Any]]], None] = lambda figures: None,
) -> list[dict[str, Any]]:
    """Each policy for each prompt; ``save`` is handed the figures so far after each."""
    figures: list[dict[str, Any]] = []
    for tokens in prompts:
        for policy in POLICIES:
            found = measured(partial(time_prompt, shape, tokens, policy))
            figures.append({"prompt": tokens, "policy": policy, **_named(shape), **found})
            save(figures)
    return figures


def _named(shape: Shape) -> dict[str, str]:
    """Return what records of another shape than the usual one have besides."""
    return {} if shape.latent is None else {"rows": "latent"}


# -- command ----------------------------------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of the decode table and of the prefill table."""
    kinds = [kind for kind in KINDS if any(kind in record for record in result.get("decode", []))]
    decode = [
        [
            _size(record, "batch"),
            *(cell for kind in kinds for cell in _decode_cells(record.get(kind, {}))),
            f"{record['ragged_over_uniform']:.3f}" if "ragged_over_uniform" in record else "-",
        ]
        for record in result.get("decode", [])
    ]
    prefill = [
        [_size(record, "prompt"), record["policy"], *_prefill_cells(record)] for record in result.get("prefill", [])
    ]
    of_kinds = [name for kind in kinds for name in (f"{kind} us/layer", "of copy")]
    return [
        (["batch", *of_kinds, "ragged/uniform"], decode),
        (["prompt", "policy", "attention ms/layer", "added ms/layer", "added/attention"], prefill),
    ]


def _size(record: dict[str, Any], name: str) -> str:
    return f"{record[name]} {record.get('rows', '')}".strip()


def _decode_cells(found: dict[str, Any]) -> list[str]:
    if "us_per_layer" not in found:
        return ["failed" if "failure" in found else "-", "-"]
    return [f"{found['us_per_layer']:.1f}", f"{found['share_of_copy']:.0%}"]


def _prefill_cells(record: dict[str, Any]) -> list[str]:
    if "failure" in record:
        return ["failed", "-", "-"]
    attention = f"{record['attention_ms']:.3f}"
    if record["added_ms"] is None:
        return [attention, "-", "-"]
    return [attention, f"{record['added_ms']:.3f}", f"{record['added_over_attention']:.2%}"]


def failures(result: dict[str, Any]) -> dict[str, str]:
    """Why there are no figures, by what was measured."""
    decode = {
        f"{kind}, batch {_size(record, 'batch')}": record[kind]
        for record in result.get("decode", [])
        for kind in KINDS
        if kind in record
    }
    prefill = {f"{record['policy']}, {_size(record, 'prompt')} tokens": record for record in result.get("prefill", [])}
    return {name: found["failure"] for name, found in (decode | prefill).items() if "failure" in found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 without a CUDA device, or where something of kvpass failed. A baseline may."""
    parser = argparse.ArgumentParser(prog="kernel_bench", description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="what is measured goes here, figure by figure")
    parser.add_argument("--baselines", action="store_true", help="FlashInfer and torch's varlen_attn beside ragged")
    given = parser.parse_args(arguments)
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

    def save(part: str, before: list[dict[str, Any]], figures: list[dict[str, Any]]) -> None:
        result[part] = [*before, *figures]
        save_json(given.json, result)

    with torch.no_grad():
        kinds = BASELINES if given.baselines else OURS
        usual = decode_figures(shape, bandwidth, kinds, save=partial(save, "decode", []))
        if not given.baselines:
            decode_figures(LATENT, bandwidth, ("ragged",), save=partial(save, "decode", usual))
            usual = prompt_figures(Shape(layers=PREFILL_LAYERS), save=partial(save, "prefill", []))
            few = replace(LATENT, layers=PREFILL_LAYERS)
            prompt_figures(few, LATENT_PROMPTS, save=partial(save, "prefill", usual))
    for header, rows in tables(result):
        Console().print(rich_table(header, rows))
    failed = failures(result)
    for name, reason in failed.items():
        print(f"kernel_bench: {name}: {reason}", file=sys.stderr)
    result["complete"] = all(name.startswith(("flashinfer", "varlen")) for name in failed)
    save_json(given.json, result)
    return int(not result["complete"])


if __name__ == "__main__":
    sys.exit(main())

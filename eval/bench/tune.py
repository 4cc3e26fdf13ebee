"""Measure block sizes of kvpass's kernels on a CUDA device and pin the fastest: ``kvpass bench --tune``.

From the pinned config of a case, one number at a time is changed as long as that is faster. One shape stands for all
lengths and batches. The table then has a row for the device's architecture, whose spills
``tests/kernels/test_compile_ahead.py`` checks; commit it, or kept sets differ from those of other machines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from kvpass.config import EntryFormat
from kvpass.eval.bench.kernels import LATENT, WINDOW, WORST_ERROR, Shape, cache_of, ragged_lengths, time_graph
from kvpass.eval.environment import machine, versions
from kvpass.operands import AppendBuffers, Attention, SlotCache
from kvpass.replace_file import write_shared
from kvpass.rotation import rotated_call

LEAST_GAIN = 0.03
"""Share of the time that a config must save to be taken: less is noise."""
MOST_STAGES = 4
WARPS = (2, 4, 8)
REGISTERS = (None, 168, 128)
"""With four warps, three and four programs of a multiprocessor share its 65,536."""
LEAST_BLOCK = 16

Workload = Callable[..., Any]
"""Runs a kernel with the given ``config``, None for the pinned one."""


def workloads(
    place: str = "cuda", tokens: int = 8192, rows: int = 8, budget: int = 1024, layers: int = 16
) -> Iterator[tuple[str, Workload]]:
    """Yield each case that is worth measuring, with its work on random inputs; those of one case at a time are held.

    Args:
        tokens: of the prompt, batch 1. rows: of a decode step. budget: entries per KV head there.
        layers: of the cache that decode steps read, so many that it does not stay in the device's own cache.
    """
    from kvpass.kernels.launch import kind
    from kvpass.kernels.prefill_attention import dims_case, prefill_attention, wide_case
    from kvpass.kernels.ragged_decode import attend_ragged, case_of
    from kvpass.kernels.ragged_extend import attend_extend
    from kvpass.kernels.slot_decode import attend_slots
    from kvpass.kernels.window_statistics import column_sums, window_statistics

    for dtype in (torch.bfloat16, torch.float32):
        latent = replace(LATENT, layers=1, heads=16, dtype=dtype, place=place)
        usual = Shape(layers=1, dtype=dtype, place=place)
        for shape in (*(replace(usual, dim=dim) for dim in (64, 128, 256)), latent):
            call, case = shape.tokens(1, tokens), dims_case(dtype, shape.dim)
            yield f"prefill {case}", partial(prefill_attention, call)
            start, lse = torch.zeros(1, dtype=torch.int64, device=shape.device), prefill_attention(call)[1]
            yield f"window {case}", partial(window_statistics, call, start, lse, WINDOW)
            yield f"column sums {case}", partial(column_sums, call, start, lse, tokens)
        for shape in (usual, latent):
            case = kind(dtype) + wide_case(shape.dim)
            many = replace(shape, layers=layers)
            formats: tuple[EntryFormat, ...] = ("model", "int8", "rot4")  # in 16 bits each has a case of its own
            for entry_format in formats if shape is usual and dtype == torch.bfloat16 else formats[:1]:
                call, held = cache_of(many, ragged_lengths(many, rows, budget), entry_format)
                decode_case = case_of(dtype, shape.dim, shape.geometry.value_dim, held)
                yield decode_case, partial(through_layers, attend_ragged, rotated_call(call, held), held)
            call, held = cache_of(shape, ragged_lengths(shape, rows, budget))
            yield f"extend {case}", partial(attend_extend, shape.tokens(rows, WINDOW), held, 0)
            position = torch.arange(budget, dtype=torch.int32, device=shape.device).expand(rows, shape.kv_heads, -1)
            stored = shape.dim, shape.geometry.stored_value_dim
            keys, values = (shape.random(1, rows, shape.kv_heads, budget, dim) for dim in stored)
            slots = SlotCache(None, None, None, keys, values, position)
            yield f"slots {case}", partial(attend_slots, call, slots, 0)


def through_layers(attend: Callable[..., Tensor], call: Attention, held: AppendBuffers, config: Any = None) -> Tensor:
    """Attend each layer of a cache; return what the last gave."""
    return [attend(call, held, layer, config) for layer in range(held.tail_k.shape[0])][-1]


def result(found: Any) -> Tensor:
    """Return the tensor of a workload's result by which configs are compared, fp32."""
    if not isinstance(found, Tensor):
        found = found.mean if hasattr(found, "mean") else found[0]
    return found.float()


def neighbours(config: Any) -> Iterator[Any]:
    """Yield the configs that differ in a block or the warps by a factor of two, the stages by one, or in registers."""
    sizes, warps, stages = dict(config.blocks), config.num_warps, config.num_stages
    for name, size in sizes.items():
        for other in (2 * size, size // 2):
            if other >= LEAST_BLOCK:
                yield replace(config, blocks=tuple({**sizes, name: other}.items()))
    yield from (replace(config, num_warps=other) for other in (2 * warps, warps // 2) if other in WARPS)
    yield from (replace(config, num_stages=other) for other in (stages + 1, stages - 1) if 1 <= other <= MOST_STAGES)
    yield from (replace(config, registers=other) for other in REGISTERS if other != config.registers)


def fastest(config: Any, seconds: Callable[[Any], float | None]) -> Any:
    """Return the config that no neighbour beats, from ``config`` on.

    Args:
        seconds: time of a config, None for one that cannot run; it is asked once each.

    Raises:
        RuntimeError: ``config`` itself cannot run.
    """
    least = seconds(config)
    if least is None:
        raise RuntimeError(f"the pinned config {config} does not run on this device")
    tried, best = {config}, config
    while True:
        for near in neighbours(best):
            if near not in tried:
                tried.add(near)
                found = seconds(near)
                if found is not None and found < least * (1 - LEAST_GAIN):
                    best, least = near, found
                    break
        else:
            return best


def time_config(work: Workload, expected: Tensor, config: Any) -> float | None:
    """Median seconds of the work; None if the config needs more than the device has, or gives something else."""
    from triton.errors import TritonError

    try:
        found = result(work(config=config))
    except TritonError:
        return None
    error = float((found - expected).norm() / expected.norm())
    return time_graph(partial(work, config=config)) if error <= WORST_ERROR else None


def write_row(path: Path, architecture: int, chosen: dict[str, str], measured_on: str) -> None:
    """Write the configs of an architecture into the table, and what they were measured on."""
    content = json.loads(path.read_text(encoding="utf-8"))
    for case, config in chosen.items():
        of_archs = {**content["cases"][case], str(architecture): config}
        content["cases"][case] = dict(sorted(of_archs.items(), key=lambda item: int(item[0])))
    content["measured"][str(architecture)] = measured_on
    write_shared(path, json.dumps(content, indent=2).encode() + b"\n")


def tune() -> None:
    """Measure every case on the current CUDA device and print it; the table then has a row for the device.

    Raises:
        ValueError: there is no CUDA device, or the table cannot be written.
    """
    if not torch.cuda.is_available():
        raise ValueError("tune: this machine has no CUDA device")
    from kvpass.kernels.launch import TABLE, architecture_of, pinned, table

    if not os.access(TABLE, os.W_OK):
        raise ValueError(f"tune: the table {str(TABLE)!r} cannot be written; install kvpass from a checkout")
    device = torch.device("cuda", torch.cuda.current_device())
    architecture = architecture_of(device)
    chosen, console = {}, Console()
    with torch.no_grad():
        for case, work in workloads():
            config = pinned(case, architecture)
            chosen[case] = str(fastest(config, partial(time_config, work, result(work()))))
            console.print(f"{case}: {chosen[case]}", highlight=False)
    write_row(TABLE, architecture, chosen, f"{machine(device)['name']}, triton {versions()['triton']}")
    table.cache_clear()
    console.print(f"written: {TABLE}", highlight=False)

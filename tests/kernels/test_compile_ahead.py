"""Every launch compiles in its pinned config for the GPUs we ship to, within their shared memory and without spilling.

No GPU is needed. The launchers are called as the operators call them, on CPU tensors; what they would launch goes to
Triton's compiler instead. That happens in another process, because Triton's interpreter, which the other tests use, is
chosen once and for all when a kernel is imported. Run as a script, this file is that process.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
SHARED_KIB = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}
"""Of a block, by architecture."""
SPILLED_BYTES = 16
"""Of the stack, per thread; a few bytes of it are no spill in a loop."""
MAY_SPILL = {("prefill half 576", 90): 88}
"""By case and architecture: on an H200 faster than every config that does not spill."""
COUNTED, BARRIERS = "decode half", {80: 35, 90: 49}
"""In a decode kernel of 16 segments, by architecture: two more than when each piece was a program of its own."""
THREE_BITS = {"decode float levels", "slots float levels", "extend float levels"}
"""Cases in which codes of 3 bits at head dim 256 spill in every config: fp32 is not what a GPU holds in few bits."""
LATENT = (576, 512)
"""Rows of one KV head, whose values are stored in the keys."""
HEAD_DIMS = {
    torch.float32: ((64, 64), (100, 100), (128, 128), (256, 256), LATENT),
    torch.float16: ((64, 64), (80, 80), (100, 100), (128, 128), (192, 128), (256, 256), (512, 512), LATENT),
    torch.bfloat16: ((64, 64), (128, 128), (256, 256), LATENT),
}
"""Of keys and values. Types differ in few instructions, so that fp16 stands for bf16 in places."""
USUAL = {"rows": 2, "kv_heads": 8, "group": 4, "tokens": 133}
ONES = dict.fromkeys(USUAL, 1)
WINDOW = 32
WINDOWS = (8, WINDOW, 200)
"""Of statistics: products of many heads, of four, of one."""


@dataclass(frozen=True)
class Launch:
    """What a launcher wanted to run: every argument but the blocks, tensors as their dtypes."""

    kernel: Any
    arguments: tuple[tuple[str, Any], ...]
    case: str

    @property
    def left_out(self) -> tuple[str, ...]:
        """Optional arguments that are not given: without them it is another program."""
        return tuple(name for name, value in self.arguments if value is None)

    def __str__(self) -> str:
        given = dict(self.arguments)
        dims = [f"{name}={given[name]}" for name in ("D", "DV", "PER", "BLOCK_R", "width") if name in given]
        options = [name for name in ("softcap", "sinks", "variance", "weights") if given.get(name) is not None]
        dtypes = {str(value).removeprefix("torch.") for value in given.values() if isinstance(value, torch.dtype)}
        kind = dtypes & {"float16", "bfloat16"} or {"float32"}
        return " ".join([self.kernel.__name__.strip("_"), *kind, *dims, *options])


def import_kernels(launches: dict[Launch, None]) -> None:
    """Import every kernel file of this checkout such that its launches are noted, each once, instead of run."""
    package = ModuleType("kvpass")  # without what `import kvpass` loads: the kernels need none of it
    package.__path__ = [str(ROOT / "kvpass")]
    sys.modules["kvpass"] = package
    from kvpass.kernels import launch as module

    def note(kernel: Any, grid: Any, arguments: Any, case: str, config: Any = None) -> None:
        types = ((name, x.dtype if isinstance(x, torch.Tensor) else x) for name, x in arguments.items())
        launches[Launch(kernel, tuple(types), case)] = None

    module.launch = note


def call_everything(
    dtype: torch.dtype, dims: tuple[int, int], options: bool, rows: int, kv_heads: int, group: int, tokens: int
) -> None:
    """Call every launcher with tensors of these sizes; with soft-capping, sinks and a sliding window, or plain."""
    from kvpass.kernels import (
        block_attention,
        gather,
        merge_attention,
        prefill_attention,
        ragged_decode,
        ragged_extend,
        slot_decode,
        slot_lines,
        window_statistics,
    )
    from kvpass.operands import (
        BITS,
        AppendBuffers,
        Attention,
        BlockSelection,
        Candidates,
        Entries,
        PartialAttention,
        PrefillBuffers,
        SlotCache,
    )
    from kvpass.ops import entry_formats

    heads, layers, entries, capacity = kv_heads * group, 2, 96, 128
    extra = (20.0, torch.zeros(heads, dtype=dtype)) if options else ()
    start = torch.zeros(rows, dtype=torch.int64)

    def site(count: int) -> Attention:
        sizes = ((heads, dims[0]), (kv_heads, dims[0]), (kv_heads, dims[1]))
        return Attention(*(torch.zeros(rows, count, *size, dtype=dtype).transpose(1, 2) for size in sizes), 0.1, *extra)

    call = site(tokens)
    lse = torch.zeros(rows, heads, tokens)
    sliding = 17 if options else None
    prefill_attention.prefill_attention(call, sliding)
    if max(dims) <= 256:
        blocks = torch.ones(rows, heads, -(-tokens // 64), -(-tokens // 64), dtype=torch.bool)
        columns = torch.zeros(rows, heads, 3, dtype=torch.int32)
        block_attention.attend_blocks(call, BlockSelection(blocks, columns), 64)
    part = PartialAttention(torch.zeros(rows, tokens, heads, dims[1], dtype=dtype).transpose(1, 2), lse)
    merge_attention.merge_attention(part, part)
    for window in WINDOWS:
        window_statistics.window_statistics(call, start, lse, window, spread=options)
    window_statistics.column_sums(call, start, lse, tokens)

    stored = (dims[0], 0 if dims == LATENT else dims[1])
    pool = [torch.zeros(rows, entries, dim, dtype=dtype) for dim in stored]
    tables = [torch.zeros(3, rows, entries, dtype=torch.int32), torch.zeros(2, rows, entries)]
    rank = torch.zeros(rows, kv_heads, tokens, dtype=torch.int32)
    stats, source = torch.zeros(2, rows, kv_heads, tokens), torch.zeros(rows, entries, dtype=torch.int32)
    offsets = torch.zeros(rows, layers * kv_heads + 1, dtype=torch.int32)
    tail = [torch.zeros(layers, rows, kv_heads, capacity, dim, dtype=dtype) for dim in stored]
    unread = torch.zeros(0)
    buffers = PrefillBuffers(*pool, *tables, unread, unread, *tail, offsets, unread)
    candidates = Candidates(call.k, call.v, unread, stats, unread, start).stored_in(buffers)
    gather.gather_winners(source, rank, candidates, buffers, 1)

    used = torch.zeros((), dtype=torch.int64)
    arrivals = torch.zeros(rows * kv_heads, 64, dtype=torch.int32)
    held = AppendBuffers(Entries(*pool), offsets, Entries(*tail), start, used, arrivals)
    for count in (1, 8 if dims == LATENT else 16):
        ragged_decode.attend_ragged(site(count), held, 1)
    ragged_extend.attend_extend(site(17), held, 1)
    line = (rows, kv_heads, capacity + 40)
    position = torch.zeros(line, dtype=torch.int32)
    for entry_format, bits in BITS.items() if max(dims) <= 256 else ():
        if bits < 8 and any(dim % 8 for dim in dims):
            continue
        packed = entry_formats.packed(held, entry_format)
        ragged_decode.attend_ragged(site(1), packed, 1)
        ragged_extend.attend_extend(site(17), packed, 1)
        slot_decode.attend_slots(site(1), SlotCache(*packed[:3], position, start), 1)

    if dims[0] == dims[1]:
        indexed = held._replace(tail_used=start, row_index=start)
        for count in (1, 8 if dims == LATENT else 16):
            ragged_decode.attend_ragged(site(count), indexed, 1)
        ragged_extend.attend_extend(site(17), indexed, 1)

    slot_decode.attend_slots(site(1), SlotCache(*held[:3], position, start), 1)
    ring = torch.zeros(rows, 1, capacity, dtype=torch.int32).expand(-1, kv_heads, -1)
    slot_decode.attend_slots(site(1), SlotCache(None, None, held.tail, ring), 1)
    how = ("max", 7, "max") if options else ("avg", 5, "mean")
    slot_lines.pool_in_order(torch.zeros(rows, heads, line[2]), position, position, WINDOW, *how)
    slot_lines.evict_lowest(torch.zeros(line), position, torch.zeros(rows, kv_heads, dtype=torch.int64), WINDOW)


def of_everything(launches: dict[Launch, None]) -> Iterator[tuple[Launch, int]]:
    """Every dtype, head dim and option for each architecture, and each kernel with sizes of 1."""
    for dtype, sizes in HEAD_DIMS.items():
        for dims in sizes:
            sizes_of = {**USUAL, "kv_heads": 1, "group": 16} if dims == LATENT else USUAL
            for options in (False, True):
                call_everything(dtype, dims, options, **sizes_of)
    yield from ((launch, arch) for launch in launches for arch in SHARED_KIB)
    launches.clear()
    call_everything(torch.bfloat16, (128, 128), False, **ONES)
    yield from ((launch, 90) for launch in {one.kernel: one for one in launches}.values())


def of_a_few(launches: dict[Launch, None]) -> Iterator[tuple[Launch, int]]:
    """bf16 at head dim 128: each program with every option for one architecture, each kernel plain for another."""
    call_everything(torch.bfloat16, (128, 128), True, **USUAL)
    yield from ((launch, 90) for launch in {(launch.kernel, launch.left_out): launch for launch in launches}.values())
    launches.clear()
    call_everything(torch.bfloat16, (128, 128), False, **USUAL)
    plainest = {launch.kernel: launch for launch in sorted(launches, key=lambda launch: len(launch.left_out))}
    yield from ((launch, 80) for launch in plainest.values() if launch.left_out)


class Driver:
    """What Triton asks a driver when it compiles; ``device`` is the compute capability compiled for."""

    device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.device, 32)


def compile_ahead(launch: Launch, arch: int) -> dict[str, Any]:
    """Compile as the JIT would, with the ptxas that Triton ships.

    Returns:
        case and config, shared memory per block in bytes, registers and spilled bytes per thread, barriers where they
        are counted. Spilled is the stack frame, which Triton's kernels use for nothing else.
    """
    from triton import knobs
    from triton.runtime.jit import MockTensor

    from kvpass.kernels.launch import pinned

    config = pinned(launch.case, arch)
    arguments = {name: MockTensor.wrap_dtype(value) for name, value in launch.arguments}
    compiled = launch.kernel.warmup(grid=(1,), **arguments, **config.all_kwargs())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        code = (
            subprocess.run(command, check=True, capture_output=True, text=True).stdout if launch.case == COUNTED else ""
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return {
        "case": launch.case,
        "config": str(config),
        "shared_bytes": compiled.metadata.shared,
        "registers": int(found[1]),
        "spilled_bytes": int(found[2]),
        "barriers": code.count("BAR.SYNC"),
    }


def main(exhaustive: bool) -> None:
    """Print a JSON line for each compiled launch."""
    launches: dict[Launch, None] = {}
    import_kernels(launches)
    from triton.runtime import driver

    stand_in = Driver()
    driver.set_active(stand_in)
    for launch, arch in (of_everything if exhaustive else of_a_few)(launches):
        stand_in.device = arch
        row = {"name": str(launch), "arch": arch, **compile_ahead(launch, arch)}
        print(json.dumps(row), flush=True)


def run_compiler(*options: str) -> list[dict[str, Any]]:
    """What each launch needs. Triton's own cache serves a kernel that has not changed since an earlier run."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, __file__, *options], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    for row in rows:
        print(
            f"sm_{row['arch']} {row['shared_bytes'] / 1024:6.1f} KiB {row['registers']:4} registers "
            f"{row['spilled_bytes']:4} spilled  {row['name']}  [{row['config']}]"
        )
    return rows


def check(rows: list[dict[str, Any]]) -> None:
    too_big = [row for row in rows if row["shared_bytes"] > SHARED_KIB[row["arch"]] * 1024]
    spilling = [
        row
        for row in rows
        if row["spilled_bytes"] > MAY_SPILL.get((row["case"], row["arch"]), SPILLED_BYTES)
        and not (row["case"] in THREE_BITS and "D=256" in row["name"])
    ]
    assert not too_big, f"more shared memory than there is: {too_big}"
    assert not spilling, f"more than {SPILLED_BYTES} bytes spilled: {spilling}"


if __name__ == "__main__":
    main("exhaustive" in sys.argv)
else:
    import pytest

    @pytest.mark.slow
    def test_every_kernel_compiles():
        rows = run_compiler()
        check(rows)
        assert {row["arch"] for row in rows} == {80, 90}
        counted = {row["arch"]: row["barriers"] for row in rows if row["case"] == COUNTED}
        assert all(0 < counted[arch] <= most for arch, most in BARRIERS.items()), f"too many barriers: {counted}"
        source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "kernels").glob("*.py"))
        launched = set(re.findall(r"\blaunch\(_(\w+),", source))
        assert {row["name"].split()[0] for row in rows} == launched, "a kernel is not called here"

    @pytest.mark.exhaustive
    @pytest.mark.timeout(3600)
    def test_every_case_compiles():
        rows = run_compiler("exhaustive")
        check(rows)
        assert {row["arch"] for row in rows} == set(SHARED_KIB)
        table = json.loads((ROOT / "kernels" / "configs.json").read_text(encoding="utf-8"))["cases"]
        assert {row["case"] for row in rows} == set(table), "the table has a case that is never launched"

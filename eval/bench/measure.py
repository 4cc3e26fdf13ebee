"""How the bench measures: clocks, memory, bandwidth, share of scoring."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer
from transformers import PreTrainedModel

from kvpass.block_sparse import BlockSparse
from kvpass.operands import Attention, BlockSelection

REPLAY = "kvpass::replay"  # tokens that run only to be observed: their attention counts too
_NAMES = "column_sums score_layer cascade_step fixed_shares rank_heads gather_layer keep_newest pack".split()
KVPASS_OPERATORS = {REPLAY, *(f"kvpass::{name}" for name in _NAMES)}
"""All that compression adds to a prefill, and the attention of the prompt."""
ATTENTION_OPERATORS = {
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
}
ATTENTION_KERNEL = "_prefill_kernel"  # of Triton, where neither cuDNN nor FlashAttention takes the site
ATTEND, SELECT = "kvpass::attend_prompt", "kvpass::select_blocks"
SAMPLED = 64  # queries, evenly apart
WAITING = "Command Buffer Full"
"""What the profiler notes in an operator while the device has all launches it can hold, with kernels of others."""

_COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}
_MATRIX = {"cpu": 2**10, "cuda": 2**13}  # rows and columns
_LEAST_SECONDS = 0.5
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class Meter:
    """Time stamps of a device, and the most bytes allocated there; the CPU counts none."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"

    def mark(self) -> Any:
        """A point after everything launched so far; the device is not waited for."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Seconds between neighbouring marks, once the device has passed them all."""
        pairs = itertools.pairwise(marks)
        if not self.is_cuda:
            return [last - first for first, last in pairs]
        torch.cuda.synchronize()
        return [first.elapsed_time(last) / 1e3 for first, last in pairs]

    def peak(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self.is_cuda else None

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def release(self) -> None:
        """Give back what nothing holds any more."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()


def first_line(error: Exception) -> str:
    """Type and first line of an exception."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """What the device can do a second: bytes of a large copy, read and written, and operations of a matrix product."""
    size, side = _COPY_BYTES[device.type], _MATRIX[device.type]
    source = torch.randint(256, (size // 16,), dtype=torch.uint8, device=device).repeat(16)
    matrix = torch.randn(side, side, device=device).to(dtype)
    tensors = {"source": source, "target": torch.empty_like(source), "matrix": matrix}

    def seconds(statement: str) -> float:
        timer = Timer(statement, globals=tensors, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=_LEAST_SECONDS).median

    return {
        "copy_bandwidth": 2 * size / seconds("target.copy_(source)"),
        "matmul_operations": 2 * side**3 / seconds("matrix @ matrix"),
    }


class PrefillProfile(NamedTuple):
    """Where the time of one prefill goes: on CUDA that of the device, on the CPU that of the thread that calls.

    Attributes:
        scoring: share that compression takes: all that kvpass does but the attention itself, of replays everything;
            None where the profiler saw none of its operators or, on CUDA, none of their kernels.
        attend_s, select_s: seconds of attention, and of the selection of blocks.
        blocks: share of the blocks on and below the diagonal that are computed, mean of the layers where they are
            selected. covered: share of the attention that these keys hold, of ``SAMPLED`` queries of each head.
    """

    scoring: float | None
    attend_s: float
    select_s: float
    blocks: float = 1.0
    covered: float = 1.0


def profile_prefill(run: Callable[[], Any], device: torch.device) -> PrefillProfile:
    """Profile one prefill, already compiled; blocks and what they cover are not measured here."""
    meter = Meter(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if meter.is_cuda else [])]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes lines into the progress bar
    with profile(activities=activities) as profiler:
        marks = [meter.mark()]
        run()
        marks.append(meter.mark())
        total = meter.seconds(marks)[0]
    events = [*(profiler.events() or ())]
    parts = [part for x in events if x.name in KVPASS_OPERATORS for part in _beyond_attention(x, meter.is_cuda)]
    attend_s, select_s = (
        sum(x.device_time_total if meter.is_cuda else x.cpu_time_total for x in events if x.name == name) / 1e6
        for name in (ATTEND, SELECT)
    )
    return PrefillProfile(sum(parts) / 1e6 / total if parts else None, attend_s, select_s)


@contextmanager
def noting_coverage(noted: list[Tensor]) -> Iterator[None]:
    """Note for each selection of blocks which share of the attention of sampled queries the selected keys hold."""
    selected = BlockSparse.selected

    def noting(self: BlockSparse, call: Attention, queries: int) -> BlockSelection:
        selection, n = selected(self, call, queries), call.k.shape[2]
        rows, columns = (
            torch.linspace(0, n - 1, SAMPLED, device=call.q.device).long(),
            torch.arange(n).to(call.q.device),
        )
        sampled = call.q[:, :, rows].unflatten(1, (call.k.shape[1], -1)).float()
        logits = (sampled @ call.k[:, :, None].float().mT).flatten(1, 2) * call.scale
        weights = logits.masked_fill(columns > rows[:, None], float("-inf")).softmax(-1)
        single = selection.blocks.new_zeros(*weights.shape[:2], n).scatter_(-1, selection.columns.long(), True)
        blocks = selection.blocks[:, :, rows // self.block].repeat_interleave(self.block, -1)[..., :n]
        noted.append((weights * (blocks | single[:, :, None])).sum(-1).mean())
        return selection

    BlockSparse.selected = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        BlockSparse.selected = selected  # type: ignore[method-assign]


def _beyond_attention(event: Any, is_cuda: bool, *, replays: bool = False) -> Iterator[float]:
    """Microseconds of each kernel (CPU: operator) of a profiled operator, without attention but in replays."""
    replays = replays or event.name == REPLAY
    if event.name == WAITING or (event.name in ATTENTION_OPERATORS and not replays):
        return
    if not is_cuda:
        yield event.self_cpu_time_total
    for kernel in event.kernels if is_cuda else ():
        if replays or ATTENTION_KERNEL not in kernel.name:
            yield kernel.duration
    for child in event.cpu_children:
        yield from _beyond_attention(child, is_cuda, replays=replays)


def weight_bytes(model: PreTrainedModel) -> int | None:
    """Bytes of the weights that every decode step reads, whatever the batch.

    The embedding table is not read as a whole, unless it is the output projection too.

    Returns:
        None for a mixture of experts: which of them are read depends on the tokens.
    """
    config: Any = model.config.get_text_config()
    if any(getattr(config, name, None) for name in _EXPERT_COUNTS):
        return None
    table: Any = model.get_input_embeddings().weight
    head: Any = model.get_output_embeddings()
    total = sum(parameter.nbytes for parameter in model.parameters())
    return total if head is not None and head.weight is table else total - table.nbytes


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, least and most."""
    names = ("min", "q1", "median", "q3", "max")
    return dict(zip(names, numpy.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist(), strict=True))

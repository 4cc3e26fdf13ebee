"""How the bench measures: clocks, memory, copy bandwidth, the share of scoring in a prefill, the largest batch."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KVPASS_OPERATORS = {"kvpass::observe_attention", "kvpass::cascade_step", "kvpass::pack"}
"""All that compression adds to a prefill, and the attention of the prompt."""
ATTENTION_OPERATORS = {"aten::scaled_dot_product_attention", "aten::_flash_attention_forward"}
ATTENTION_KERNEL = "_prefill_kernel"
"""The Triton kernel that attends where FlashAttention does not take the site."""

_COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}
_WARM_UP_SECONDS = 0.2
_CHUNKS = 64


class Clock:
    """Marks on the time line of a device: CUDA events, or the clock of the host for the CPU."""

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
        self.wait()
        pairs = list(itertools.pairwise(marks))
        if not self.is_cuda:
            return [last - first for first, last in pairs]
        return [first.elapsed_time(last) / 1e3 for first, last in pairs]

    def wait(self) -> None:
        """Until the device has done all that was launched."""
        if self.is_cuda:
            torch.cuda.synchronize()


def median_seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Of one ``run``, which is repeated for a while, because clocks rise under load, and then timed as often again."""
    clock = Clock(device)
    begun, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - begun < _WARM_UP_SECONDS:
        run()
        clock.wait()
        count += 1
    marks = [clock.mark()]
    for _ in range(count):
        run()
        marks.append(clock.mark())
    return statistics.median(clock.seconds(marks))


class Memory:
    """Bytes by the allocator's own count; the CPU's keeps none."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.is_cuda else 0

    def peak(self) -> int | None:
        """Most bytes allocated at once since :meth:`reset_peak`."""
        return torch.cuda.max_memory_allocated() if self.is_cuda else None

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def release(self) -> None:
        """Give back what nothing holds any more."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()


def run_in_memory(function: Callable[[], Any]) -> str | None:
    """Run it; if the device's memory does not suffice, say so. Every other failure is the caller's.

    Returns:
        None, or the first line of the allocator's message.
    """
    try:
        function()
    except torch.OutOfMemoryError as error:
        return str(error).splitlines()[0]
    return None


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy within the memory of the device; the median of several."""
    size = _COPY_BYTES[device.type]
    source = torch.randint(256, (size // 16,), dtype=torch.uint8, device=device).repeat(16)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device)


@dataclass(frozen=True)
class Scoring:
    """What compression adds to a prefill.

    Attributes:
        seconds: of it. prefill: seconds of the whole prefill, in the same run.
        parts: seconds by kernel (on the CPU by operator), longest first.
    """

    seconds: float
    prefill: float
    parts: dict[str, float]

    @property
    def share(self) -> float:
        return self.seconds / self.prefill


def scoring_time(run: Callable[[], Any], device: torch.device) -> Scoring | None:
    """What compression adds to a prefill, measured in one profiled run.

    Counted is all that the operators of kvpass do but the attention itself: window statistics, scores, schedule,
    selection, gather and pack, and the zeroing of padding in the output. On CUDA it is time of the device, kernel by
    kernel; on the CPU time of the thread that calls.

    Args:
        run: one prefill, already compiled.

    Returns:
        None where the profiler saw none of kvpass's operators or, on CUDA, none of their kernels.
    """
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    clock = Clock(device)
    with profile(activities=activities) as profiler:
        marks = [clock.mark()]
        run()
        marks.append(clock.mark())
        total = clock.seconds(marks)[0]
    parts: defaultdict[str, float] = defaultdict(float)
    for event in profiler.events() or ():
        if event.name in KVPASS_OPERATORS:
            for name, microseconds in _beyond_attention(event, is_cuda):
                parts[name] += microseconds / 1e6
    longest_first = dict(sorted(parts.items(), key=lambda part: -part[1]))
    return Scoring(sum(parts.values()), total, longest_first) if parts else None


def _beyond_attention(event: Any, is_cuda: bool) -> Iterator[tuple[str, float]]:
    """Kernels (operators on the CPU) of a profiled operator and of what it calls, attention apart; microseconds."""
    if event.name in ATTENTION_OPERATORS:
        return
    if is_cuda:
        yield from ((kernel.name, kernel.duration) for kernel in event.kernels if ATTENTION_KERNEL not in kernel.name)
    else:
        yield event.name, event.self_cpu_time_total
    for child in event.cpu_children:
        yield from _beyond_attention(child, is_cuda)


def largest_batch(fits: Callable[[int], bool], most: int = 2**16) -> int:
    """The largest number of rows that fits, by doubling and bisection; 0 where not even one does."""
    good, bad = 0, 1
    while bad <= most and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def fits_on_device(rows: int, row_bytes: int, device: torch.device) -> bool:
    """Whether the device can hold ``rows`` more times ``row_bytes``, tried by allocating them in pieces of a layer."""
    piece = -(-rows * row_bytes // _CHUNKS)
    held: list[torch.Tensor] = []

    def allocate() -> None:
        held.extend(torch.empty(piece, dtype=torch.uint8, device=device) for _ in range(_CHUNKS))

    fits = run_in_memory(allocate) is None
    held.clear()
    Memory(device).release()
    return fits


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, least and most."""
    points = torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64)
    low, q1, median, q3, high = torch.tensor(values, dtype=torch.float64).quantile(points).tolist()
    return {"median": median, "q1": q1, "q3": q3, "min": low, "max": high}

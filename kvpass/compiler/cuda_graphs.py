"""CUDA graphs of a decode step: captured once per cache buffers and input shapes, then replayed.

A graph reads and writes fixed addresses. Addresses of the cache and of the module's tensors are part of its key, so it
is replayed only for the memory it was captured with; a longer tail or another cache means another key. Other inputs
(ids, positions) are copied into buffers of the graph.

Captures of one phase share memory for intermediate results, so only one thread at a time captures, or replays and
copies the outputs. Threads that decode on streams of their own must not share a compiled model.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpass.torch_compat import wrapped_tensors

log = logging.getLogger(__name__)

MAX_GRAPHS = 8
"""Captured graphs kept per compiled phase; the least recently replayed is dropped first."""
MAX_SEEN = 64
"""Keys kept per compiled phase that ran once; they are captured when they come again."""

_LOCK = threading.Lock()

Step = Callable[..., Sequence[Any]]


class CaptureError(RuntimeError):
    """A decode step could not be captured as a CUDA graph; compile with ``cuda_graphs=False``."""


class Recording(Protocol):
    """A capture that can be replayed on the same addresses."""

    def replay(self) -> None: ...


Recorder = Callable[[Callable[[], None]], Recording]
"""Captures what a function launches, without running it."""


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
"""One capture stream per device, because cuBLAS keeps a workspace for every stream used."""


class CudaRecorder:
    """Records launches on ``device``; all recordings share one memory pool.

    Not with ``torch.cuda.graph``, which waits for the device and returns all free memory to it before each recording.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        if device not in _STREAMS:
            _STREAMS[device] = torch.cuda.Stream(device)
        self.stream = _STREAMS[device]

    def __call__(self, function: Callable[[], None]) -> Recording:
        try:
            return self._recorded(function)
        except torch.OutOfMemoryError:  # free memory of other pools is not returned while recording
            torch.cuda.empty_cache()
        return self._recorded(function)

    def _recorded(self, function: Callable[[], None]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    function()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            for cause in (error, error.__context__):  # ending a failed capture may raise too
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
            raise CaptureError(
                f"a decode step cannot be captured as a CUDA graph ({error}); compile with cuda_graphs=False"
            ) from error
        return graph


class GraphedStep:
    """Runs ``step(*inputs, *state)`` once per key to warm up, then captures and replays it.

    Every call runs the step once: a capture runs nothing and is then replayed.

    Args:
        step: a compiled graph; returns tensors. record: captures launches.
        device: of the recording. Inputs on other devices would be constants in a capture: such a step is not captured.
        held: indices of inputs that the module holds (parameters, buffers); they are not copied.
    """

    def __init__(self, step: Step, record: Recorder, device: torch.device, held: Collection[int]) -> None:
        self._step, self._record, self._device, self._held = step, record, device, sorted(held)
        self._given: list[int] = []  # places of the other inputs, once they have been seen
        self._captured: OrderedDict[tuple[Any, ...], _Capture] = OrderedDict()
        self._seen: OrderedDict[tuple[Any, ...], None] = OrderedDict()

    def __call__(self, inputs: Sequence[Any], state: Sequence[Tensor]) -> Sequence[Any]:
        if not self._given:
            self._given = sorted(set(range(len(inputs))).difference(self._held))
        key = self._key(inputs, state)
        with _LOCK:
            if key in self._captured:
                self._captured.move_to_end(key)
                return self._captured[key](inputs)
            if key in self._seen:
                capture = _Capture(self._step, self._record, inputs, self._given, state)
                # stays non-empty: the shared memory pool must not be used again after its last capture is freed
                _remember(self._captured, key, capture, MAX_GRAPHS)
                del self._seen[key]
                log.info("captured a CUDA graph: %d in use", len(self._captured))
                return capture(inputs)
        outputs = self._step(*inputs, *state)
        elsewhere = {str(x.device) for x in inputs if isinstance(x, Tensor) and x.device != self._device}
        if elsewhere:
            warnings.warn(f"no CUDA graphs: the module is given tensors on {sorted(elsewhere)}", stacklevel=2)
            return outputs
        with _LOCK:
            _remember(self._seen, key, None, MAX_SEEN)
        return outputs

    def _key(self, inputs: Sequence[Any], state: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return a capture's key: layout of copied inputs, addresses of other tensors and of state, other values."""
        given = [_layout(value) for value in map(inputs.__getitem__, self._given)]
        fixed = (*map(inputs.__getitem__, self._held), *state)
        addresses = list(map(Tensor.data_ptr, fixed))
        if 0 in addresses:  # of tensors that wrap others, such as quantised weights
            addresses += [part.data_ptr() for x in fixed for part in wrapped_tensors(x)]
        return (*given, *addresses, *(x.shape for x in state))


def _remember(known: OrderedDict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any, most: int) -> None:
    """Add the newest item, and drop the oldest ones above ``most``."""
    known[key] = value
    while len(known) > most:
        known.popitem(last=False)


class _Capture:
    """One captured step with its own input and output buffers."""

    def __init__(
        self, step: Step, record: Recorder, inputs: Sequence[Any], given: Sequence[int], state: Sequence[Tensor]
    ) -> None:
        self._own = {place: _own(inputs[place]) for place in given if isinstance(inputs[place], Tensor)}
        self._outputs: Sequence[Any] = ()
        used = [self._own.get(place, value) for place, value in enumerate(inputs)]

        def run() -> None:
            self._outputs = step(*used, *state)

        self._recording = record(run)

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        for place, own in self._own.items():
            _distinct(own).copy_(_distinct(inputs[place]))
        self._recording.replay()
        return [value.clone() if isinstance(value, Tensor) else value for value in self._outputs]


def _distinct(tensor: Tensor) -> Tensor:
    """Return a view without the rows that an expanded dimension repeats."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor


def _own(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, expanded like the tensor."""
    distinct = _distinct(tensor)
    own = torch.empty_strided(distinct.shape, distinct.stride(), dtype=tensor.dtype, device=tensor.device)
    return own.copy_(distinct).expand(tensor.shape)


def _layout(value: Any) -> Any:
    """Return what a capture that copies a tensor depends on; of other values all."""
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else value

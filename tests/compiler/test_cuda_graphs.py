"""Keys, buffers and lifetime of captured steps, with a recorder that runs on the CPU."""

import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kvpass.compiler import cuda_graphs
from kvpass.compiler.cuda_graphs import CaptureError, CudaRecorder, GraphedStep
from kvpass.graphs.bind_state import held_by_module
from wrapping_tensor import HalfPrecision

CPU = torch.device("cpu")


class Recorder:
    """Like a CUDA graph: a recording runs what was recorded on the tensors of that time."""

    def __init__(self):
        self.recorded = 0

    def __call__(self, function):
        self.recorded += 1
        function()  # fixes the output buffers, as a capture does
        return SimpleNamespace(replay=function)


class Step:
    """``out = ids * weight + state``, then the state is overwritten with ``ids`` (idempotent, as a decode step is)."""

    def __init__(self):
        self.out = None

    def __call__(self, ids, weight, state):
        result = ids * weight + 1
        if self.out is None or self.out.shape != result.shape:
            self.out = torch.empty_like(result)
        self.out.copy_(result)
        state.copy_(ids.sum())
        return [self.out]


def make(weight=2.0):
    """A step, what records it, and a weight and a state to give it."""
    recorder = Recorder()
    step = GraphedStep(Step(), recorder, CPU, held=[1])
    return step, recorder, nn.Parameter(torch.tensor(weight), requires_grad=False), torch.zeros(())


def test_the_first_call_runs_the_second_captures_and_all_later_ones_replay():
    step, recorder, weight, state = make(3.0)
    texts, answers = [torch.tensor([1.0 + call, 2.0]) for call in range(5)], []
    for call, ids in enumerate(texts):
        answers += step((ids, weight), [state])
        assert torch.equal(answers[-1], ids * 3 + 1), f"call {call} answered for other ids"
        assert state == ids.sum(), f"call {call} wrote another state"
        assert recorder.recorded == (0 if call == 0 else 1)
    assert torch.equal(torch.stack(answers[1:]), torch.stack(texts[1:]) * 3 + 1), "overwritten by the next call"


@pytest.mark.parametrize("change", ["state", "state shape", "weight", "wrapped weight", "ids shape"])
def test_other_memory_or_shapes_are_captured_apart(change):
    step, recorder, weight, state = make()
    if change == "wrapped weight":
        weight = HalfPrecision(torch.tensor(2.0).bfloat16())
    ids = torch.ones(2)
    for _ in range(3):
        step((ids, weight), [state])
    if change.startswith("state"):
        state = torch.zeros(()) if change == "state" else torch.zeros(3)
    elif change == "weight":
        weight = nn.Parameter(torch.tensor(5.0), requires_grad=False)
    elif change == "wrapped weight":
        weight = HalfPrecision(torch.tensor(5.0).bfloat16())
    else:
        ids = torch.ones(3)
    for call in range(3):
        out = step((ids * (call + 1), weight), [state])
        assert torch.equal(out[0], ids * (call + 1) * weight + 1)
    assert recorder.recorded == 2


def test_few_captures_are_kept_and_the_least_used_goes_first(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    step, recorder, weight, _ = make()
    states = [torch.zeros(()) for _ in range(3)]
    for state in (*states[:1] * 2, *states[1:2] * 2, states[0], *states[2:] * 2):
        step((torch.ones(1), weight), [state])
    assert recorder.recorded == 3
    step((torch.ones(1), weight), [states[0]])
    assert recorder.recorded == 3, "the one used last was dropped"
    step((torch.ones(1), weight), [states[1]])
    step((torch.ones(1), weight), [states[1]])
    assert recorder.recorded == 4, "the least used one should have been dropped"


def test_caches_that_take_turns_do_not_drop_each_others_captures(monkeypatch):
    """Nor are there ever none: the memory they share must not be used again after the last one is gone."""
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    step, recorder, weight, first = make()
    for _ in range(3):
        step((torch.ones(1), weight), [first])
    for state in [torch.zeros(()) for _ in range(5)]:
        step((torch.ones(1), weight), [state])
    step((torch.ones(1), weight), [first])
    assert recorder.recorded == 1, "caches that were seen once dropped the one in use"


VIEWS = {"expanded": lambda x: x[:1].expand(3, -1), "cut": lambda x: x[:, 1:3], "transposed": lambda x: x.T}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_an_input_keeps_its_strides(view):
    """Compiled code is made for them."""
    strides = []

    def double(ids, state):
        strides.append(ids.stride())
        return [ids * 2]

    step = GraphedStep(double, Recorder(), CPU, held=[])
    state = torch.zeros(())
    for value in range(4):
        ids = view(torch.arange(15.0).view(3, 5) + value)
        assert torch.equal(step((ids,), [state])[0], ids * 2)
    assert set(strides) == {ids.stride()}


def test_a_first_call_that_fails_does_not_count_as_warming_up():
    """What the first launch measures and loads cannot be captured."""
    recorder, failures = Recorder(), [torch.OutOfMemoryError("no memory")]

    def negate(ids, state):
        if failures:
            raise failures.pop()
        return [-ids]

    step, ids, state = GraphedStep(negate, recorder, CPU, held=[]), torch.ones(2), torch.zeros(())
    with pytest.raises(torch.OutOfMemoryError):
        step((ids,), [state])
    for recorded in (0, 1, 1):
        assert torch.equal(step((ids,), [state])[0], -ids) and recorder.recorded == recorded


def test_a_step_given_something_on_another_device_is_neither_captured_nor_replayed():
    """A number that launches take from the host would be that of the capture for ever."""
    recorder, seen, ids, state = Recorder(), [], torch.ones(2), torch.zeros(())

    def scale(ids, factor, state):
        seen.append(factor)
        return [ids * 2]

    for before in (0, 3):
        step = GraphedStep(scale, recorder, CPU, held=[])
        for _ in range(before):
            step((ids, torch.ones(())), [state])
        for factor in (torch.empty((), device="meta") for _ in range(2)):
            with pytest.warns(UserWarning, match="no CUDA graphs.*meta"):
                assert torch.equal(step((ids, factor), [state])[0], ids * 2)
            assert seen[-1] is factor
        assert recorder.recorded == (before > 0)


def test_threads_take_their_own_answers_away():
    """All captures write their answers to one place, as those of a GPU may."""
    step, _, weight, _ = make(1.0)
    states, wrong = [torch.zeros(()) for _ in range(4)], []
    for state in states * 2:  # captured before the threads begin
        step((torch.zeros(1), weight), [state])

    def ask(state, value):
        for _ in range(300):
            if float(step((torch.tensor([value]), weight), [state])[0]) != value + 1:
                wrong.append(value)

    threads = [threading.Thread(target=ask, args=(state, float(i))) for i, state in enumerate(states)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_what_a_module_holds_is_read_where_it_is_and_the_rest_is_copied():
    """Quantised weights are buffers, and as large as all the rest."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0))
            self.register_buffer("scale", torch.tensor(3.0))

        def forward(self, ids, positions):
            return ids * self.weight * self.scale + positions

    found = []

    def backend(gm, inputs):
        found.append({inputs[place].item() for place in held_by_module(gm)})
        return gm.forward

    torch.compile(Scaled(), backend=backend, fullgraph=True)(torch.tensor(5.0), torch.tensor(7.0))
    assert found == [{2.0, 3.0}]


class Devices:
    """Pretends two devices: which stream is current, and what is recorded on which."""

    def __init__(self, monkeypatch):
        self.home = self.current = SimpleNamespace(device=torch.device("cuda", 0))
        self.recorded, self.streams, self.fails = [], [], False
        monkeypatch.setattr(cuda_graphs, "_STREAMS", {})
        self.returned = 0
        for name in ("Stream", "stream", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)

    def Stream(self, device):
        self.streams.append(SimpleNamespace(device=device))
        return self.streams[-1]

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def empty_cache(self):
        assert self.current is self.home, "not while recording"
        self.returned += 1

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local", "what other threads allocate meanwhile is no part of it"
        assert self.current is not self.home, "the stream that the caller works on cannot be recorded"
        self.recorded.append(self.current.device.index)

    def capture_end(self):
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_a_step_is_recorded_on_the_device_it_runs_on(monkeypatch):
    devices, launched = Devices(monkeypatch), []
    recorders = [CudaRecorder(torch.device("cuda", index)) for index in (0, 1, 1)]
    for index in (1, 0, 2):
        recorders[index](lambda: launched.append(devices.current.device.index))
    assert launched == devices.recorded == [1, 0, 1]
    assert len(devices.streams) == 2, "one stream a device"
    assert devices.current is devices.home
    assert devices.returned == 0, "free memory was returned to the device, and every next allocation waits for it"


def test_a_capture_without_memory_is_tried_again_with_what_the_allocator_had_kept(monkeypatch):
    devices = Devices(monkeypatch)

    def allocate():
        if not devices.returned:
            raise torch.OutOfMemoryError("no memory")

    assert CudaRecorder(torch.device("cuda", 1))(allocate) is devices
    assert devices.recorded == [1, 1] and devices.returned == 1 and devices.current is devices.home


@pytest.mark.parametrize("ending_fails", [False, True])
def test_no_memory_for_a_capture_is_said_as_such(monkeypatch, ending_fails):
    devices = Devices(monkeypatch)

    def allocate():
        try:
            raise torch.OutOfMemoryError("no memory")
        finally:
            if ending_fails:
                raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        CudaRecorder(torch.device("cuda", 1))(allocate)
    assert devices.current is devices.home


def test_a_capture_that_fails_leaves_the_current_stream_alone(monkeypatch):
    devices = Devices(monkeypatch)
    devices.fails = True
    with pytest.raises(CaptureError, match="cuda_graphs=False"):
        CudaRecorder(torch.device("cuda", 1))(lambda: None)
    assert devices.current is devices.home

"""Where a kernel is launched; the devices are pretended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvpass.kernels.launch import KernelConfig, launch

CONFIG = KernelConfig.of(4, 2, BLOCK=16)


class Kernel:
    """Notes the current device and the arguments of each launch."""

    def __init__(self, current: list[int]) -> None:
        self.current = current
        self.launches: list[tuple[int, Any, dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda **arguments: self.launches.append((self.current[0], grid, arguments))


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device of a machine with several, here in a list."""
    current = [0]

    def exchange(device: int) -> int:
        before = current[0]
        if device >= 0:
            current[0] = device
        return before

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    return current


@pytest.mark.parametrize(("place", "expected"), [("cpu", 0), ("cuda:0", 0), ("cuda:1", 1)])
@pytest.mark.parametrize("config", [None, CONFIG])
def test_a_kernel_runs_where_its_tensors_are(
    place: str, expected: int, config: KernelConfig | None, current: list[int]
) -> None:
    kernel = Kernel(current)
    with FakeTensorMode():
        arguments = {"tokens": 3, "sinks": None, "q": torch.empty(3, device=place)}
        launch(kernel, (7,), arguments, (CONFIG,), config=config)
    ((device, grid, given),) = kernel.launches
    assert (device, grid) == (expected, (7,))
    assert given == {**arguments, "BLOCK": 16, "num_warps": 4, "num_stages": 2}
    assert current == [0], "another device is current afterwards"

"""Where a kernel is launched; the devices are pretended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvpass.kernels import launch as module
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


@pytest.mark.parametrize(("storage_order", "expected"), [("cpu", 0), ("cuda:0", 0), ("cuda:1", 1)])
@pytest.mark.parametrize("config", [None, CONFIG])
def test_a_kernel_runs_where_its_tensors_are(
    storage_order: str, expected: int, config: KernelConfig | None, current: list[int]
) -> None:
    kernel = Kernel(current)
    with FakeTensorMode():
        arguments = {"tokens": 3, "sinks": None, "q": torch.empty(3, device=storage_order)}
        launch(kernel, (7,), arguments, (CONFIG,), config=config)
    ((device, grid, given),) = kernel.launches
    assert (device, grid) == (expected, (7,))
    assert given == {**arguments, "BLOCK": 16, "num_warps": 4, "num_stages": 2}
    assert current == [0], "another device is current afterwards"


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), [16]), ((9, 0), [64, 16]), ((7, 5), [16])])
def test_a_config_that_needs_more_registers_than_the_device_has_is_left_out(
    capability: tuple[int, int], expected: list[int], current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = (KernelConfig.of(8, 2, least_arch=90, BLOCK=64), CONFIG)
    offered: list[list[int]] = []
    module._suited.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(module, "is_interpreted", lambda kernel: False)

    def tuned(kernel: Any, choices: tuple[KernelConfig, ...], key: tuple[str, ...]) -> Any:
        offered.append([config["BLOCK"] for config in choices])
        return kernel

    monkeypatch.setattr(module, "_tuned", tuned)
    kernel = Kernel(current)
    with FakeTensorMode():
        launch(kernel, (7,), {"q": torch.empty(3, device="cuda:0")}, configs)
        launch(kernel, (7,), {"q": torch.empty(3, device="cuda:0")}, configs, config=configs[0])
    (_, _, chosen), (_, _, pinned) = kernel.launches
    assert (offered or [[chosen["BLOCK"]]])[0] == expected
    assert pinned["BLOCK"] == 64, "what is asked for is used as it is"

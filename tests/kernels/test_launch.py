"""Where a kernel is launched; the devices are pretended."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import Config

from kvpass.kernels import launch as module
from kvpass.kernels.launch import launch

LOWER, HIGHER = Config({"BLOCK": 16}, 4, 2, maxnreg=128), Config({"BLOCK": 64}, 8, 3)
TABLE = {"case": {80: LOWER, 90: HIGHER}}


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


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "table", lambda: TABLE)


@pytest.mark.parametrize(("place", "expected"), [("cpu", 0), ("cuda:0", 0), ("cuda:1", 1)])
@pytest.mark.parametrize("config", [None, LOWER])
def test_a_kernel_runs_where_its_tensors_are(place, expected, config, current, monkeypatch):
    monkeypatch.setattr(module, "architecture_of", lambda device: 80)
    kernel = Kernel(current)
    with FakeTensorMode():
        arguments = {"tokens": 3, "sinks": None, "q": torch.empty(3, device=place)}
        launch(kernel, (7,), arguments, "case", config)
    ((device, grid, given),) = kernel.launches
    assert (device, grid) == (expected, (7,))
    assert given == {**arguments, "BLOCK": 16, "num_warps": 4, "num_ctas": 1, "num_stages": 2, "maxnreg": 128}
    assert current == [0], "another device is current afterwards"


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 0), LOWER), ((8, 9), LOWER), ((9, 0), HIGHER), ((12, 0), HIGHER), ((7, 5), LOWER), (None, LOWER)],
)
def test_an_architecture_without_a_row_takes_the_nearest_lower_one(capability, expected, current, monkeypatch):
    """And what is below all of them, or no CUDA device, takes the lowest; a config that is given is used as it is."""
    module.architecture_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    kernel = Kernel(current)
    with FakeTensorMode():
        q = torch.empty(3, device="cpu" if capability is None else "cuda:0")
        launch(kernel, (7,), {"q": q}, "case")
        launch(kernel, (7,), {"q": q}, "case", HIGHER)
    module.architecture_of.cache_clear()
    (_, _, chosen), (_, _, given) = kernel.launches
    assert (chosen["BLOCK"], chosen["num_warps"]) == (expected.kwargs["BLOCK"], expected.num_warps)
    assert given["BLOCK"] == 64


def test_the_table_in_the_repository(monkeypatch):
    monkeypatch.undo()
    found = module.table()
    assert all({80, 90, 100} <= set(configs) for configs in found.values()), "a case lacks an architecture"
    for configs in found.values():
        for config in configs.values():
            assert [*config.kwargs] == [*configs[80].kwargs]

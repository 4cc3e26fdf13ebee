"""Without a CUDA device, Triton's kernels run in its interpreter, on CPU tensors."""

import importlib.util
import os
import sys
from typing import Any

import pytest
import torch

# Triton looks at the variable whenever something is decorated: its own library functions (tl.sum...) too, which a test
# module collected earlier has already loaded through Dynamo.
if not torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"
    for library in ("triton.language.standard", "triton.language"):
        if library in sys.modules:
            importlib.reload(sys.modules[library])
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    from cheap_interpreter import cheap_interpreter

    cheap_interpreter()


ON_CPU_TENSORS = {
    "test_row_index.py",
    "test_decode_shares.py",
    "test_device.py",
    "test_gather.py",
    "test_launch.py",
    "test_ragged_decode.py",
    "test_slots.py",
}


@pytest.fixture(autouse=True)
def unwritten_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs begin as NaN, so that a place which no program writes shows."""
    empty = torch.empty

    def filled(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() and made.dtype.itemsize > 1 else made

    monkeypatch.setattr(torch, "empty", filled)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        return
    for item in items:
        if item.path.name in ON_CPU_TENSORS and item.path.parent.name == "kernels":
            item.add_marker(pytest.mark.skip(reason="for Triton's interpreter; test_gpu.py compares on the device"))

"""``make gpu-check``: run the GPU tests on this machine. The benchmarks join it with the CUDA kernels."""

from __future__ import annotations

import platform
import sys

import pytest
import torch
import transformers


def main() -> int:
    """Exit status: pytest's own; 1 without a CUDA device."""
    if not torch.cuda.is_available():
        print("gpu-check: this machine has no CUDA device, so there is nothing to check", file=sys.stderr)
        return 1
    print(
        f"{torch.cuda.get_device_name()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    return int(pytest.main(["-m", "gpu"]))


if __name__ == "__main__":
    sys.exit(main())

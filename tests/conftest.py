"""What holds for every test: no network, no checkout on ``sys.path``, two threads, fixed seeds."""

import functools
import gc
import importlib.util
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub is imported
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes, each of which imports torch
# Dynamo otherwise looks for garbage after every capture.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

ROOT = Path(__file__).resolve().parent.parent

# Test the kvpass of this checkout, but keep the checkout off the path: its kernels/, graphs/ and eval/ must not answer
# to those names at top level, where transformers looks for the Hugging Face package `kernels`.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
spec = importlib.util.spec_from_file_location("kvpass", ROOT / "kvpass" / "__init__.py")
assert spec is not None and spec.loader is not None
sys.modules["kvpass"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["kvpass"])

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from cheap_captures import cheap_captures  # noqa: E402

torch.set_num_threads(min(2, torch.get_num_threads()))

cheap_captures()

# Machines differ and are shared, so no example has a time limit; everybody gets the same examples.
hypothesis.settings.register_profile("kvpass", deadline=None, derandomize=True)
hypothesis.settings.load_profile("kvpass")


@pytest.fixture(autouse=True, scope="module")
def garbage() -> Iterator[None]:
    """What is there before a module, and what it leaves for good, is not searched for garbage again.

    That is libraries, Dynamo's caches, shared models."""
    gc.freeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def compile_once() -> Iterator[None]:
    """Models with the same weights share captures, also those that ``kvpass.calibrate`` compiles."""
    import kvpass
    from kvpass.calibration import fit
    from kvpass.eval.environment import model_digest
    from tiny_models import sharing_captures

    original = kvpass.compile

    @functools.wraps(original)
    def with_captures(model: Any, *, backend: Any = "inductor", compile_regions: Any = "auto", **options: Any) -> Any:
        made = original(model, backend=backend, compile_regions=compile_regions, **options)
        prefill = made._kvpass.captures.compiler.prefill
        return sharing_captures(made, model_digest(model), backend, compile_regions, prefill)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvpass, "compile", with_captures)
        patch.setattr(fit, "compile_model", with_captures)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

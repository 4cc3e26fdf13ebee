"""Loading of a model and its tokenizer by name, for the commands."""

from __future__ import annotations

import atexit
import difflib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvpass import builtin
from kvpass.fetch import PACKAGES, fetched
from kvpass.torch_compat import is_traceable_wrapper_subclass

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4")


def launched() -> tuple[int, int]:
    """Return the number of this process and of all that ``torchrun`` started with it; (0, 1) where it did not."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def load_model(name: str, *, dtype: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the built-in model, or one that ``from_pretrained`` finds, in evaluation mode.

    Processes that ``torchrun`` started share it: each has some of its attention heads.

    Args:
        name: ``builtin``, a name of ``kvpass fetch``, or a folder or hub name.
        dtype: one of :data:`DTYPES`; ``auto`` is fp32 for the built-in model, else the checkpoint's own; ``int8``
            quantises the linear layers of a model in bf16, with torchao, ``int4`` those of its decoder in 4 bits.
        device: a name that ``torch.device`` reads.

    Raises:
        ValueError: there is no such model, dtype or device, or transformers does not read it.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: {str(error).splitlines()[0]}") from None
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: this machine has no CUDA device")
    processes, quantise, shared = launched()[1], None, dict[str, Any]()
    if dtype in ("int8", "int4"):
        if processes > 1:
            raise ValueError(f"dtype={dtype!r}: torchrun divides models in 16 or 32 bits only")
        if dtype == "int4" and target.type != "cpu":
            raise ValueError(f"dtype='int4': is for CPUs, not for device={device!r}")
        try:
            quantise = quantiser(dtype)
        except ImportError as error:
            raise ValueError(f"dtype={dtype!r} needs torchao, pip install 'kvpass[int8]': {error}") from None
        dtype = "bfloat16"
    if processes > 1:
        from transformers.distributed import DistributedConfig

        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
        shared["distributed_config"] = DistributedConfig(tp_size=processes)
    if name == "builtin":
        transformers.utils.logging.disable_progress_bar()
        dtype = "float32" if dtype == "auto" else dtype
    with located(name) as place:
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **shared)
        tokenizer = AutoTokenizer.from_pretrained(place)
    model.eval()
    if not shared:
        model.to(target)  # type: ignore[arg-type]
        if quantise is not None:
            quantise(model)
        return model, tokenizer
    if model.device.type != target.type:
        raise ValueError(
            f"device={device!r}: transformers divides a model among the {model.device.type} devices of this machine"
        )
    return model, tokenizer


def quantiser(dtype: str) -> Callable[[PreTrainedModel], None]:
    """Return a function that quantises the linear layers of a model in place, to ``int8`` or ``int4``."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    if dtype == "int8":
        return partial(quantize_, config=Int8WeightOnlyConfig())
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    def fits(module: nn.Module, name: str) -> bool:  # aten._weight_int4pack_mm_for_cpu
        return isinstance(module, nn.Linear) and module.in_features % 32 == module.out_features % 16 == 0

    def others(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not is_traceable_wrapper_subclass(module.weight)

    def quantise(model: PreTrainedModel) -> None:
        quantize_(model.base_model, PrototypeInt4WeightOnlyConfig(group_size=32), filter_fn=fits)
        quantize_(model, Int8WeightOnlyConfig(), filter_fn=others)

    return quantise


@contextmanager
def located(name: str) -> Iterator[str]:
    """Give what ``from_pretrained`` takes for a model; what is wrong there is a ``ValueError`` of one line."""
    known = ("builtin", *PACKAGES)
    near = [] if name in known or "/" in name or Path(name).exists() else difflib.get_close_matches(name, known, 1)
    if near:  # else the hub would be asked first
        raise ValueError(f"model={name!r}: did you mean {near[0]!r}?")
    try:
        yield str(builtin.path() if name == "builtin" else fetched(name) if name in PACKAGES else name)
    except OSError as error:
        raise ValueError(f"model={name!r}: {str(error).strip().splitlines()[0]}") from error

"""Loading of a model and its tokenizer by name, for the commands."""

from __future__ import annotations

import atexit
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvpass import builtin
from kvpass.fetch import PACKAGES, fetch, fetched

DTYPES = ("auto", "float32", "bfloat16", "float16")


def launched() -> tuple[int, int]:
    """Return the number of this process and of all that ``torchrun`` started with it; (0, 1) where it did not."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def load_model(name: str, *, dtype: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the built-in model, or one that ``from_pretrained`` finds, in evaluation mode.

    Processes that ``torchrun`` started share it: each has some of its attention heads.

    Args:
        name: ``builtin``, a name of ``kvpass fetch``, a GGUF file, or a folder or hub name.
        dtype: one of :data:`DTYPES`; ``auto`` is fp32 for the built-in model and GGUF files, else the checkpoint's own.
        device: a name that ``torch.device`` reads.

    Raises:
        ValueError: there is no such model, dtype or device, or transformers does not read it.
        ImportError: a GGUF file, without the packages that read it.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    target, shared = _device(device), _shared()
    if name == "builtin":
        transformers.utils.logging.disable_progress_bar()
        dtype = "float32" if dtype == "auto" else dtype
    with located(name) as (place, file):
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **file, **shared)
        tokenizer = AutoTokenizer.from_pretrained(place, **file)
    forget_gguf(model)
    model.eval()
    if not shared:
        model.to(target)  # type: ignore[arg-type]
        return model, tokenizer
    if model.device.type != target.type:
        raise ValueError(
            f"device={device!r}: transformers divides a model among the {model.device.type} devices of this machine"
        )
    return model, tokenizer


def is_gguf(name: str) -> bool:
    """Whether a model's name is that of a GGUF file."""
    return name.lower().endswith(".gguf")


@contextmanager
def located(name: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Give what ``from_pretrained`` takes for a model: its folder or hub name, and ``gguf_file`` for a GGUF file.

    What transformers finds wrong when it reads there is a ``ValueError`` of one line.

    Raises:
        ValueError: not fetched, or no GGUF file that transformers reads. ImportError: it cannot read GGUF files here.
    """
    try:
        if name == "builtin":
            yield str(builtin.path()), {}
        elif name in PACKAGES:
            yield str(fetched(name)), {}
        elif not is_gguf(name):
            yield name, {}
        else:
            _check_readers()
            _check_whole(name)
            # alone in a folder: transformers would also read the tokenizer settings of a model beside it
            with tempfile.TemporaryDirectory() as folder:
                file = {"gguf_file": "model.gguf"}
                Path(folder, "model.gguf").symlink_to(Path(name).absolute())
                try:
                    AutoConfig.from_pretrained(folder, **file)
                except (ValueError, NotImplementedError, KeyError, IndexError) as error:
                    # an architecture that transformers does not know, or a file that ends too early
                    raise ValueError(f"model={name!r}: transformers cannot read this GGUF file: {error}") from error
                yield folder, file
    except OSError as error:
        raise ValueError(f"model={name!r}: {str(error).strip().splitlines()[0]}") from error


def _check_readers() -> None:
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise ImportError(f"a GGUF file is read with {' and '.join(missing)}: pip install 'kvpass[gguf]'")


def _check_whole(name: str) -> None:
    """Raise unless there is such a GGUF file, in one part, for one process."""
    if launched()[1] > 1:
        raise ValueError(
            f"model={name!r}: several processes cannot share a GGUF file; in one process, write it as safetensors: "
            f"kvpass.loading.write_gguf({name!r}, FOLDER)"
        )
    if not Path(name).is_file():
        raise ValueError(f"model={name!r}: there is no such file")
    if part := re.search(r"-(\d{5})-of-(\d{5})\.gguf$", name, re.IGNORECASE):
        raise ValueError(
            f"model={name!r}: part {int(part[1])} of {int(part[2])}, and transformers reads whole files; join them "
            "with llama-gguf-split --merge"
        )


def forget_gguf(model: PreTrainedModel) -> None:
    """Make a model read from a GGUF file like one from safetensors: its weights are no longer quantised.

    transformers leaves the quantiser behind, and then refuses to save the model.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and quantizer.quantization_config.quant_method == "gguf":
        del model.config.quantization_config, model.hf_quantizer, model.quantization_method, model.is_quantized


def write_gguf(file: str | Path, folder: str | Path) -> None:
    """Write a GGUF file, dequantised in fp32, as a folder that ``from_pretrained`` reads, tokenizer included."""
    model, tokenizer = load_model(str(file), dtype="float32", device="cpu")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fetch_model(name: str) -> Path:
    """Bring a model of :data:`kvpass.fetch.PACKAGES` here unless it is; return its folder.

    Raises:
        ValueError: as in :func:`kvpass.fetch.fetch`. ImportError: GGUF files cannot be read here.
    """
    _check_readers()
    return fetch(name, write_gguf)


def _shared() -> dict[str, Any]:
    """What ``from_pretrained`` must know where several processes share the model."""
    _, processes = launched()
    if processes == 1:
        return {}
    from transformers.distributed import DistributedConfig

    atexit.register(_leave_processes)
    return {"distributed_config": DistributedConfig(tp_size=processes)}


def _leave_processes() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r}: {str(error).splitlines()[0]}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: this machine has no CUDA device")
    return device

"""Loading of a model and its tokenizer by name, for the commands."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvpass import builtin

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(name: str, *, dtype: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the built-in model, or one that ``from_pretrained`` finds, in evaluation mode.

    Args:
        name: ``builtin``, or a folder or hub name.
        dtype: one of :data:`DTYPES`; ``auto`` is fp32 for the built-in model, else the checkpoint's own.
        device: a name that ``torch.device`` reads.

    Raises:
        ValueError: there is no such model, dtype or device.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    target = _device(device)
    if name == "builtin":
        transformers.utils.logging.disable_progress_bar()
        model, tokenizer = builtin.load(dtype=torch.float32 if dtype == "auto" else getattr(torch, dtype))
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype if dtype == "auto" else getattr(torch, dtype)
            )
            tokenizer = AutoTokenizer.from_pretrained(name)
        except OSError as error:
            raise ValueError(f"model={name!r}: {str(error).strip().splitlines()[0]}") from error
    model.eval().to(target)
    return model, tokenizer


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r}: {str(error).splitlines()[0]}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: this machine has no CUDA device")
    return device

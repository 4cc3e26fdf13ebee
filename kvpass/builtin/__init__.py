"""The model that ships with kvpass: 3.4M parameters, 6 layers of 4 KV heads, made to find values in a long text.

Its language is that of :mod:`kvpass.eval.tasks.needle`; ``MODEL_CARD.md`` says how it was made and what it can do.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvpass.fetch import fetched


def path() -> Path:
    """Folder that ``from_pretrained`` reads: configuration, weights (bf16) and tokenizer."""
    return Path(str(files(__name__)))


def load(
    name: str = "builtin", *, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model, or one that ``kvpass fetch`` brought, and its tokenizer; never touches the network.

    Args:
        name: ``builtin``, or a name of ``kvpass fetch``.
        dtype: of the parameters; those of the built-in model are stored as bf16. options: of ``from_pretrained``.
    Returns:
        model: on the CPU, in evaluation mode; the built-in one is a ``Qwen3ForCausalLM``.
        tokenizer: of the built-in model: one token per word, three-digit number and punctuation mark.
    Raises:
        ValueError: there is no such model, or it has not been fetched.
    """
    folder = path() if name == "builtin" else fetched(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, **options)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)

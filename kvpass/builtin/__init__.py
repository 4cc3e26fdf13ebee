"""The model that ships with kvpass: 2.8M parameters that find 5-digit values in long prompts (MODEL_CARD.md)."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def path() -> Path:
    """Folder that ``from_pretrained`` reads: configuration, weights (bf16) and tokenizer."""
    return Path(str(files(__name__)))


def load(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model and its tokenizer; never touches the network.

    Args:
        dtype: of the parameters; they are stored as bf16.
    Returns:
        model: ``Qwen3ForCausalLM`` on the CPU, in evaluation mode.
        tokenizer: one token per word, digit and punctuation mark.
    """
    model = AutoModelForCausalLM.from_pretrained(path(), dtype=dtype, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(path(), local_files_only=True)
    return model.eval(), tokenizer

"""The models that ship with kvpass; each folder has its MODEL_CARD.md.

``"digits"``: 2.8M parameters, 4 layers x 2 KV heads, finds values of five one-digit tokens. ``"needle"``: 3.4M
parameters, 6 layers x 4 KV heads, finds values of one or two three-digit tokens, among decoys and through variables.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

Name = Literal["digits", "needle"]

_FOLDERS: dict[str, str] = {"digits": ".", "needle": "needle"}


def path(name: Name = "digits") -> Path:
    """Folder that ``from_pretrained`` reads: configuration, weights (bf16) and tokenizer.

    Raises:
        ValueError: no such model.
    """
    if name not in _FOLDERS:
        raise ValueError(f"name={name!r}: must be one of {', '.join(_FOLDERS)}")
    return Path(str(files(__name__))) / _FOLDERS[name]


def load(
    name: Name = "digits", *, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer; never touches the network.

    Args:
        dtype: of the parameters; they are stored as bf16.
    Returns:
        model: ``Qwen3ForCausalLM`` on the CPU, in evaluation mode.
        tokenizer: one token per word, number and punctuation mark.
    Raises:
        ValueError: no such model.
    """
    folder = path(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.eval(), tokenizer

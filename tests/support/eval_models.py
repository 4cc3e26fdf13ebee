"""A llama of one layer with random weights and the tokenizer of the built-in model, for tests of the evaluation."""

import functools
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from kvpass import builtin
from tiny_models import tiny_model

TOKENIZER = AutoTokenizer.from_pretrained(builtin.path())
MODEL = tiny_model("llama", layers=1, vocab_size=len(TOKENIZER), eos_token_id=4)
_FILES = tempfile.TemporaryDirectory(prefix="kvpass-tests-")


@functools.cache
def model_folder() -> str:
    """Folder that ``from_pretrained`` reads both from."""
    folder = Path(_FILES.name, "tiny")
    MODEL.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)

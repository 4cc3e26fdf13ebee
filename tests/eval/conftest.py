"""What tests of the evaluation share."""

import json
import random

import pytest
from tokenizers import processors

from byte_tokenizer import byte_tokenizer
from eval_models import TOKENIZER
from kvpass.eval.tasks import registry
from tiny_models import CAPTURES


@pytest.fixture
def micro_sizes():
    """Sizes of a very small Llama, as its configuration names them."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512}
    return sizes | {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def micro(micro_sizes, tmp_path):
    """Path of its configuration."""
    path = tmp_path / "micro.json"
    path.write_text(json.dumps({"model_type": "llama", **micro_sizes}))
    return str(path)


@pytest.fixture
def captured_anew():
    """Forget what ``compile_once`` shares, for a test that sees a capture being made; later ones share that."""
    CAPTURES.clear()


@pytest.fixture(scope="session")
def words():
    """One token a word."""
    return TOKENIZER


@pytest.fixture(scope="session")
def pieces():
    """Byte-level BPE, as most models have it, with <bos> in front and <eos> behind."""
    text = [registry()[name].build(300, 0, random.Random(0)).context for name in ("niah_single_2", "cwe", "vt")]
    tokenizer = byte_tokenizer(text, 2000, ("<bos>", "<eos>"), bos_token="<bos>", eos_token="<eos>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)]
    )
    return tokenizer

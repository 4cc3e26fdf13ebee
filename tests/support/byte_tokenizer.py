"""A tokenizer that is made of some text."""

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(texts: Iterable[str], size: int, special: Iterable[str] = (), **options: Any) -> Any:
    """Byte-level BPE of so many tokens, the special ones first; ``options`` of transformers' tokenizer."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*special], initial_alphabet=alphabet)
    raw.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, **options)

"""CaptureCache of the bench: published shapes and small ones with random weights, and any transformers config file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

MOST_POSITIONS = 2**18
"""Positions of the published shapes: more than published, so that 128K prompts and their answers fit in each."""


@dataclass(frozen=True)
class BenchModel:
    """A decoder of the bench.

    Attributes:
        name: as given on the command line.
        config: transformers config; weights are random, made from it and a seed.
        context: prompt tokens when the user names none.
    """

    name: str
    config: PretrainedConfig
    context: int


def _small(layers: int, hidden: int, intermediate: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
    )


def _published(
    make: Callable[..., Any], layers: int, intermediate: int, vocabulary: int, **options: Any
) -> PretrainedConfig:
    """Hidden 4096, 32 query heads and 8 KV heads of dimension 128: what the three have in common."""
    return make(
        vocab_size=vocabulary,
        hidden_size=4096,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=MOST_POSITIONS,
        tie_word_embeddings=False,
        **options,
    )


_MODELS: dict[str, tuple[Callable[[], PretrainedConfig], int]] = {
    "llama-3.1-8b": (lambda: _published(LlamaConfig, 32, 14336, 128256), 32768),
    "qwen3-8b": (lambda: _published(Qwen3Config, 36, 12288, 151936), 32768),
    "mistral-7b": (lambda: _published(MistralConfig, 32, 14336, 32768, sliding_window=None), 32768),
    "small": (lambda: _small(8, 256, 688, 2), 16384),
    "small-mha": (lambda: _small(8, 256, 688, 8), 16384),
    "tiny": (lambda: _small(2, 128, 344, 2), 1024),
}
"""Config and usual context by name; ``mistral-7b`` is v0.3."""


def find_model(name: str) -> BenchModel:
    """Look up a model of the bench.

    Args:
        name: a known name such as ``llama-3.1-8b`` or ``small``, or the path of a transformers ``config.json``.

    Raises:
        ValueError: neither a known name nor a readable config of a known architecture.
    """
    if name in _MODELS:
        make, context = _MODELS[name]
        return BenchModel(name, make(), context)
    path = Path(name)
    if path.suffix != ".json":
        raise ValueError(f"model={name!r}: expected one of {', '.join(_MODELS)} or the path of a config.json")
    if not path.is_file():
        raise ValueError(f"model={name!r}: no such file")
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"model={name!r}: not JSON ({error})") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ValueError(f"model={name!r}: a transformers config has a 'model_type'; this file has none")
    config = AutoConfig.for_model(**fields)
    return BenchModel(name, config, min(16384, config.max_position_embeddings // 2))


def build(
    model: BenchModel, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Make the decoder with random weights, in evaluation mode.

    Weights are made on the device in their dtype, so that the host needs no memory for them.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        built = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
    return built.eval()

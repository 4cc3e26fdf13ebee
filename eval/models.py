"""Decoders of the bench: small configs with random weights, and any transformers config file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel


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


def _llama(*, layers: int, hidden: int, intermediate: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
    )


_MODELS = {
    "tiny": BenchModel("tiny", _llama(layers=2, hidden=128, intermediate=344, kv_heads=2), 1024),
    "small": BenchModel("small", _llama(layers=8, hidden=256, intermediate=688, kv_heads=2), 16384),
    "small-mha": BenchModel("small-mha", _llama(layers=8, hidden=256, intermediate=688, kv_heads=8), 16384),
}


def find_model(name: str) -> BenchModel:
    """Look up a model of the bench.

    Args:
        name: ``tiny``, ``small``, ``small-mha`` or the path of a transformers ``config.json``.

    Raises:
        ValueError: neither a known name nor a readable config of a known architecture.
    """
    if name in _MODELS:
        return _MODELS[name]
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


def build(model: BenchModel, seed: int) -> PreTrainedModel:
    """Make the decoder with random weights, fp32 on the CPU, in evaluation mode."""
    torch.manual_seed(seed)
    built = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    return built.eval()

"""What tests share: tiny models of every family, random prompts, and a comparison that names the tensor."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvpass.api import copy_structure
from kvpass.cache import CompressedCache

VOCABULARY = 128

_COMMON = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LLAMA_LIKE = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA_LIKE),
    "llama_mha": ("llama", {**_LLAMA_LIKE, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {**_LLAMA_LIKE, "head_dim": 24}),
    "mistral": ("mistral", {**_LLAMA_LIKE, "sliding_window": None}),
    "phi3": ("phi3", {**_LLAMA_LIKE, "sliding_window": None}),
    "mixtral": ("mixtral", {**_LLAMA_LIKE, "sliding_window": None, "num_local_experts": 4}),
    "olmo2": ("olmo2", _LLAMA_LIKE),
    "gpt_neox": (
        "gpt_neox",
        {
            **_COMMON,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 2048,
        },
    ),
    "gpt2": ("gpt2", {**_COMMON, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 2048}),
    "opt": (
        "opt",
        {
            **_COMMON,
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 2048,
        },
    ),
}
"""Model type and configuration of the supported families, three layers each."""


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A model of the family with random weights, in eval mode.

    Weights are drawn wide enough (std 0.1) that attention is far from uniform, so that which entries are kept matters.
    """
    model_type, options = FAMILIES[family]
    if family == "mixtral" and Version(transformers.__version__) < Version("5.17"):
        options = {**options, "experts_implementation": "batched_mm"}  # its grouped_mm traces only in bf16
    config = AutoConfig.for_model(model_type, **{**options, **changes})
    config.initializer_range = 0.1
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def random_ids(rows: int, tokens: int, *, seed: int = 0) -> Tensor:
    """Token ids without padding, int64 ``[rows, tokens]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (rows, tokens), generator=generator)


def left_pad(prompts: list[Tensor], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts ``[n_i]`` as one left-padded batch: ids and attention mask, int64 ``[B, max n_i]``."""
    width = max(prompt.numel() for prompt in prompts)
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - prompt.numel() :] = prompt
        mask[row, width - prompt.numel() :] = 1
    return ids, mask


def assert_close(label: str, actual: Tensor, expected: Tensor, *, atol: float, rtol: float = 0.0) -> None:
    """``torch.testing.assert_close`` whose message begins with the name of the tensor."""
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol, msg=lambda text: f"{label}: {text}")


class MaskedOracle:
    """The uncompressed model in eager mode, whose later tokens may look only at chosen prompt entries.

    Keeps everything and masks, so it shares no code with the compressed path: new tokens attend, per layer and KV
    head, to the kept positions of the prompt and causally to each other; prompt tokens attend to the whole prompt.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = copy_structure(model)
        for module in self.model.modules():
            if getattr(module, "config", None) is not None:
                module.config._attn_implementation = _ORACLE_NAME

    @torch.no_grad()
    def logits(self, ids: Tensor, mask: Tensor, keep: Tensor) -> Tensor:
        """Logits of every token, ``[B, S, vocabulary]``.

        Args:
            ids: prompt and new tokens, ``[B, S]``, left-padded. mask: ``[B, S]``.
            keep: bool ``[B, L, K, N]`` over the prompt's columns.
        """
        s = ids.shape[1]
        n = keep.shape[3]
        causal = torch.ones(s, s, dtype=torch.bool).tril() & mask[:, None, None, :].bool()
        seen = torch.cat([keep, torch.ones(*keep.shape[:3], s - n, dtype=torch.bool)], 3)
        new_rows = torch.arange(s)[:, None] >= n
        allowed = causal[:, None] & (seen[:, :, :, None, :] | ~new_rows)
        allowed |= torch.eye(s, dtype=torch.bool)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        _ORACLE_MASKS[:] = list(allowed.unbind(1))
        return self.model(input_ids=ids, position_ids=positions, use_cache=False).logits


_ORACLE_NAME = "kvpass_masked_oracle"
_ORACLE_MASKS: list[Tensor] = []


def _masked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    group = query.shape[1] // key.shape[1]
    allowed = _ORACLE_MASKS[module.layer_idx].repeat_interleave(group, 1)  # type: ignore[index]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(_ORACLE_NAME, _masked_attention)


def kept_columns(cache: CompressedCache, columns: int) -> Tensor:
    """Which prompt columns a cache keeps, bool ``[B, L, K, columns]``."""
    positions = cache.positions
    keep = torch.zeros(*positions.shape[:3], columns, dtype=torch.bool, device=positions.device)
    live = positions + cache.start[:, None, None, None]
    live = torch.where((positions >= 0) & (live < columns), live, columns)
    return torch.cat([keep, torch.zeros_like(keep[..., :1])], -1).scatter(3, live, True)[..., :columns]

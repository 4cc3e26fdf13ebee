"""The tiny model of these tests, its prompts, and what ``kvpass.compile`` answers; needs no vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import kvpass
from kvpass import builtin

CASES = [(1, 300), (2, 40), (3, 777), (4, 130), (5, 1000), (6, 31), (7, 129), (8, 500)]
"""Seed and length of each prompt; each length occurs once."""
NEW = 40
MANY = 160
"""Requests of 1,000 tokens that are sent at once."""
SHORT, SHORT_NEW = [(4, 1), (1, 60), (2, 90), (3, 40)], 6
"""Cases for Triton's interpreter, which is slow."""

RESULT = "result "
"""Begins the line that a scenario prints."""

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}question"


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(5, 1344, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_model(folder: Path) -> None:
    """Save a tiny model whose answers depend on the whole prompt, and a tokenizer with a chat template."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=1344,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.12,
        bos_token_id=1,
        eos_token_id=4,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    _, tokenizer = builtin.load()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def make_latent_model(folder: Path) -> None:
    """Save a tiny model with latent attention; vLLM takes latents of few sizes."""
    config = DeepseekV2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=512,
        q_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=1,
        max_position_embeddings=4096,
    )
    DeepseekV2ForCausalLM(config).save_pretrained(folder)


def answers(
    folder: Path, prompts: list[list[int]], new: int, policy: str | None = None, budget: int | None = None
) -> list[list[int]]:
    """Tokens of ``kvpass.compile``, each prompt alone; without a policy, of the model itself."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    if policy is not None:
        model = kvpass.compile(model, policy=policy, budget=budget, backend="eager")
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    return [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts]

"""The tiny model of these tests, its prompts and documents, and what ``kvpass.compile`` answers; needs no vLLM."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV2ForCausalLM, LlamaConfig, LlamaForCausalLM

import kvpass
from kvpass import builtin
from kvpass.config import EntryFormat

CASES = [(1, 300), (2, 40), (3, 777), (4, 130), (5, 1000), (6, 31), (7, 129), (8, 500)]
"""Seed and length of each prompt; each length occurs once."""
LONG = CASES[2]
NEW = 40
MANY = 160
"""Requests of 1,000 tokens that are sent at once."""
SHORT, SHORT_NEW = [(4, 1), (1, 60), (2, 90), (3, 40)], 6
"""Cases for Triton's interpreter, which is slow."""

DOCUMENTS = {
    "zip": (700, {"policy": "kvzip", "budget": 0.3}),
    "fitted": (400, {"policy": "keydiff", "budget": 100, "compact": True}),
    "all": (90, {"policy": "full"}),
    "small": (60, {"policy": "lava", "budget": 40}),
}
"""Length of each document, and how it is compressed."""
QUESTIONS = [
    *[(10, 1, "zip"), (11, 7, "zip"), (1, 300), (12, 60, "fitted"), (4, 129), (13, 2, "all"), (14, 3, "fitted")],
    *[(15, 45, "small"), (6, 31)],
]
"""Seed and length of each question and the document that it is about, and prompts without one."""
SHORT_QUESTIONS = [(10, 1, "small"), (1, 60), (11, 7, "small"), (12, 20, "small"), (3, 40)]
"""The same for Triton's interpreter."""

RESULT = "result "
"""Begins the line that a scenario prints."""

CHAT_TEMPLATE = """{% set names = {'system': 'castle', 'user': 'farmer', 'assistant': 'baker'} %}
<bos>{% if tools %} fox{% endif %}
{% for message in messages %} {{ names[message['role']] }} {{ message['content'] }} .{% endfor %} baker"""
"""Of words that the tokenizer knows."""


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(5, 1344, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_model(folder: Path, seed: int = 3, key_bias: float = 0.0) -> None:
    """Save a tiny model whose answers depend on the whole prompt, and a tokenizer with a chat template.

    Args:
        key_bias: standard deviation of what is added to all keys of a head: the mean key of random weights is small.
    """
    torch.manual_seed(seed)
    sizes = {"vocab_size": 1344, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "attention_bias": key_bias > 0}
    others = {"tie_word_embeddings": False, "initializer_range": 0.12, "bos_token_id": 1, "eos_token_id": 4}
    config = LlamaConfig(**sizes, **heads, **others, max_position_embeddings=4096)
    model: Any = LlamaForCausalLM(config)
    for layer in model.model.layers if key_bias else ():
        layer.self_attn.k_proj.bias.data.normal_(std=key_bias)
    model.save_pretrained(folder)
    _, tokenizer = builtin.load()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def make_latent_model(folder: Path) -> None:
    """Save a tiny model with latent attention; vLLM takes latents of few sizes."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 16, "qk_rope_head_dim": 64}
    others = {"v_head_dim": 64, "q_lora_rank": 32, "first_k_dense_replace": 1, "max_position_embeddings": 4096}
    config = DeepseekV2Config(**sizes, **heads, **others, kv_lora_rank=512)
    DeepseekV2ForCausalLM(config).save_pretrained(folder)


Cases = list[tuple[int, int] | tuple[int, int, str]]


class Answer(list[int]):
    """Tokens, and how much more likely each was than the next one: the difference of their logits."""

    margins: list[float]


def answer(model: Any, ids: list[int], new: int, **options: Any) -> Answer:
    """Greedy tokens of a model."""
    options |= {"do_sample": False, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(torch.tensor([ids]), max_new_tokens=new, **options)
    found = Answer(out.sequences[0, len(ids) :].tolist())
    best = torch.cat(out.logits).topk(2).values
    found.margins = (best[:, 0] - best[:, 1]).tolist()
    return found


def compress_documents(
    folder: Path, into: Path, cases: Cases, new: int, entries: EntryFormat = "model"
) -> tuple[list[str], dict[str, Answer], int]:
    """Save the documents that questions are about.

    Returns:
        name and file of each, the tokens of ``kvpass`` for each question by its length, and the entries of all.
    """
    named, found, held = [], {}, 0
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    for name in dict.fromkeys(case[2] for case in cases if len(case) == 3):
        length, options = DOCUMENTS[name]
        fast = kvpass.compile(model, **options, entries=entries, backend="eager")
        cache = fast.compress(torch.tensor([prompt(length, length)]))
        cache.save(into / f"{name}.kv")
        named.append(f"{name}={into / name}.kv")
        held += int(cache.lengths.sum())
        for seed, asked, *about in cases:
            if about == [name]:
                found[str(asked)] = answer(fast, prompt(seed, asked), new, past_key_values=cache)
    return named, found, held


def answers(
    folder: Path,
    prompts: list[list[int]],
    new: int,
    policy: str | None = None,
    budget: int | None = None,
    entries: EntryFormat = "model",
) -> list[Answer]:
    """Tokens of ``kvpass.compile``, each prompt alone; without a policy, of the model itself."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    if policy is not None:
        model = kvpass.compile(model, policy=policy, budget=budget, entries=entries, backend="eager")
    return [answer(model, ids, new) for ids in prompts]

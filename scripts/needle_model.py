"""The decoder and the tokenizer of the built-in needle model, before training."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from kvpass.eval.tasks.words import vocabulary

POSITIONS = 16384
IDS = {word: token for token, word in enumerate(vocabulary())}


class Shape(NamedTuple):
    """Size of the decoder, which has as many KV heads as query heads; two layers and two heads at least."""

    layers: int = 6
    hidden: int = 256
    heads: int = 4
    feed_forward: int = 256


def _causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """SDPA that is causal by index: transformers would read gaps as packed sequences."""
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register("needle_training", _causal_attention)


def build(shape: Shape, seed: int) -> Qwen3ForCausalLM:
    """The decoder with random weights, fp32.

    Embeddings have a standard deviation of 1 and are not tied: with small tied ones key matching is not learned.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(IDS),
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        bos_token_id=IDS["<bos>"],
        eos_token_id=IDS["."],
        pad_token_id=IDS["<pad>"],
    )
    model = Qwen3ForCausalLM(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            std = 0.7 * weight.shape[1] ** -0.5
            if "embed_tokens" in name:
                std = 1.0
            elif "lm_head" in name:
                std = 0.02
            elif "o_proj" in name or "down_proj" in name:
                std *= (2 * shape.layers) ** -0.5
            nn.init.normal_(weight, std=std)
    _start_with_copying(model)
    return model


@torch.no_grad()
def _start_with_copying(model: Qwen3ForCausalLM) -> None:
    """Set the first two layers to induction: find earlier words, copy what followed.

    Random weights need about a million tokens to find this circuit (Olsson et al. 2022), these have it from the start.
    Of an orthogonal basis cut into one block a head, block 0 stands for the word itself. In layer 0, head ``h`` looks
    ``h`` + 1 tokens back, by RoPE alone (queries and keys are made of channel 0, the same for every word), and writes
    that word into block ``h`` + 1. In layer 1, head ``h`` matches its block ``h`` with block ``h`` + 1 of others, which
    finds the successor of like words, and copies it to the output. Everything is trained further.
    """
    config, inner = model.config, model.model
    d, heads, pairs = config.head_dim, config.num_attention_heads, config.head_dim // 2
    inner.embed_tokens.weight[:, 0] = 4.0
    model.lm_head.weight.copy_(0.02 * inner.embed_tokens.weight)
    basis = nn.init.orthogonal_(torch.empty(config.hidden_size, config.hidden_size))
    basis[:, 0] = 0.0
    model.lm_head.weight[:, 0] = 0.0
    blocks = basis.split(d)
    angles = 500_000.0 ** (-torch.arange(4) / pairs)  # the fastest, which tell neighbours apart
    looking, matching = inner.layers[0].self_attn, inner.layers[1].self_attn
    for head in range(heads):
        rows = slice(head * d, (head + 1) * d)
        for projection, back in ((looking.q_proj, 0), (looking.k_proj, head + 1)):
            projection.weight[rows] *= 0.1
            projection.weight[rows, 0] = 0.0
            projection.weight[rows, 0][:4] = (angles * back).cos()
            projection.weight[rows, 0][pairs : pairs + 4] = (angles * back).sin()
        looking.v_proj.weight[rows] = blocks[0]
        looking.o_proj.weight[:, rows] = blocks[(head + 1) % heads].T if head + 1 < heads else 0.0
        matching.q_proj.weight[rows] = blocks[head]
        matching.k_proj.weight[rows] = blocks[(head + 1) % heads]
    turned = nn.init.orthogonal_(torch.empty_like(basis))
    matching.v_proj.weight.copy_(turned)
    matching.o_proj.weight.copy_(2.0 * turned.T)
    slow = 0.3 + 1.2 * (torch.arange(pairs) >= 3 * pairs // 8).float().repeat(2)  # match words, not places
    for norm in (matching.q_norm, matching.k_norm):
        norm.weight.copy_(slow * (64 / d) ** 0.25)
    for norm in (looking.q_norm, looking.k_norm):
        norm.weight.fill_(1.5 * (64 / d) ** 0.25)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; ``<bos>`` is put first."""
    inner = Tokenizer(models.WordLevel(dict(IDS), unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", IDS["<bos>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=POSITIONS,
    )

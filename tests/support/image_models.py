"""Tiny random models of classes that read images, and prompts with images for them."""

import functools
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

import kvpass
from kvpass.config import Block, Compiler

IMAGE, VIDEO = 120, 121
"""Ids of the tokens that stand for parts of an image, or of a video."""
_TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "sliding_window": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDES = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.3,
}
_QWEN_TOWER = {**_TOWER, "depth": 2, "num_heads": 2, "embed_dim": 32, "out_hidden_size": 64}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections], **more}}


_HALF = _rope(1, 1, 2, partial_rotary_factor=0.5)
_EVERY = _rope(2, 3, 3, mrope_interleaved=True)
MODELS: dict[str, dict[str, Any]] = {
    "llava": {"text": {"model_type": "llama"}, "tower": {"model_type": "clip_vision_model", "projection_dim": 32}}
    | {"vision_feature_layer": -1},
    "llama4": {
        "text": {
            **{"intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1, "moe_layers": [1]},
            **{"no_rope_layers": [1, 0], "attention_chunk_size": 24, "floor_scale": 16, "attn_scale": 0.5},
            **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        },
        "tower": {"intermediate_size": 128, "vision_output_dim": 64, "projector_input_dim": 64}
        | {"projector_output_dim": 64},
    },
    "qwen2_vl": {"text": _rope(2, 3, 3), "tower": {**_QWEN_TOWER, "hidden_size": 64}},
    "qwen2_5_vl": {"text": _rope(2, 3, 3), "tower": {**_QWEN_TOWER, "fullatt_block_indexes": [1], "window_size": 16}},
    "qwen3_vl": {"text": _EVERY, "tower": {**_QWEN_TOWER, "deepstack_visual_indexes": [0, 1]}},
    "qwen3_vl_moe": {"text": {**_EVERY, **_EXPERTS}, "tower": {**_QWEN_TOWER, "deepstack_visual_indexes": [0, 1]}},
    "qwen3_5": {
        "text": {
            **_rope(1, 1, 2, mrope_interleaved=True, partial_rotary_factor=0.5),
            **{"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16},
            **{"linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        },
        "tower": _QWEN_TOWER,
    },
    "glm4v": {"text": _HALF, "tower": {**_QWEN_TOWER, "intermediate_size": 96}},
    "gemma3": {"text": _SLIDES, "tower": {}, "mm_tokens_per_image": 4},
    "gemma4": {
        "text": {"num_hidden_layers": 3, "num_kv_shared_layers": 1, "global_head_dim": 16}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128, "sliding_window": 24}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        "tower": {"head_dim": 16, "num_key_value_heads": 2, "pooling_kernel_size": 3, "position_embedding_size": 64},
    },
    "gemma4_both_ways": {
        "type": "gemma4",
        "text": {**_SLIDES, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 16}
        | {"use_bidirectional_attention": "vision"},
        "tower": {"head_dim": 16, "num_key_value_heads": 2, "pooling_kernel_size": 3, "position_embedding_size": 64},
    },
    "idefics3": {"text": {"model_type": "llama"}, "tower": {}, "scale_factor": 2},
    "smolvlm": {"text": {"model_type": "llama"}, "tower": {}, "scale_factor": 2},
    "internvl": {"text": {"model_type": "qwen2"}, "tower": {"image_size": [16, 16], "patch_size": [4, 4]}},
    "mistral3": {"text": {"model_type": "mistral"}, "tower": {"head_dim": 16}, "spatial_merge_size": 2},
    "llava_onevision": {"text": {"model_type": "qwen2"}, "tower": {"model_type": "siglip_vision_model"}}
    | {"image_grid_pinpoints": [[16, 32], [32, 16]]},
    "paligemma": {"text": {"model_type": "gemma"}, "tower": {"model_type": "siglip_vision_model", "projection_dim": 64}}
    | {"projection_dim": 64},
    "ernie4_5_vl_moe": {
        "text": {**_rope(2, 2, 4), "moe_num_experts": 4, "moe_intermediate_size": [32, 32], "moe_k": 2},
        "tower": _QWEN_TOWER,
    },
}
"""Configurations of text model and tower, and what else the class's own has, by model type or with ``type``."""
ALONG = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
"""Arguments with a number for each token."""
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "ernie4_5_vl_moe")
"""Models whose image of ``grid`` patches is given with its grid, and has positions of several axes."""


@functools.cache
def image_model(name: str, **text: Any) -> PreTrainedModel:
    """Return a tiny random model; ``text``: changes to the configuration of its text model."""
    given = dict(MODELS[name])
    own, tower = {**_TEXT, **given.pop("text"), **text}, {**_TOWER, **given.pop("tower")}
    marks = {"vision_start_token_id": 122, "vision_end_token_id": 123, "image_token_id": IMAGE, "video_token_id": VIDEO}
    marks |= {"image_token_index": IMAGE, "image_start_token_id": 122, "image_end_token_id": 123, "audio_token_id": 124}
    marks |= {"video_start_token_id": 125, "video_end_token_id": 126, "boi_token_id": 122, "eoi_token_id": 123}
    config = AutoConfig.for_model(given.pop("type", name), text_config=own, vision_config=tower, **{**marks, **given})
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    for weight in model.parameters():
        if weight.ndim > 1 and weight.std() < 0.05:
            torch.nn.init.normal_(weight, std=0.1)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@functools.cache
def _compiled(name: str, backend: Compiler, **text: Any) -> Any:
    return kvpass.compile(image_model(name, **text), policy="full", backend=backend)


def compiled(
    name: str,
    policy: str = "full",
    budget: int | None = None,
    *,
    backend: Compiler = "eager",
    block: Block = "auto",
    text: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, Any]:
    """Return a tiny model and its compiled copy, which tests share; ``text``: of :func:`image_model`."""
    fast = _compiled(name, backend, **(text or {}))
    fast.set_policy(policy, budget, **options)
    fast.prefill_block = block
    return image_model(name, **(text or {})), fast


def _pixels(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def image(name: str, seed: int = 0) -> tuple[int, dict[str, Tensor]]:
    """Return how many tokens an image has, and its arguments."""
    if name in GRIDS:
        size = 48 if name == "ernie4_5_vl_moe" else 96  # of a patch, two frames but for ernie
        return 6, {"pixel_values": _pixels(24, size, seed=seed), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    if name.startswith("gemma4"):
        places = torch.cartesian_prod(torch.arange(6), torch.arange(6))[None]
        return 4, {"pixel_values": _pixels(1, 36, 48, seed=seed).sigmoid(), "image_position_ids": places}
    if name in ("idefics3", "smolvlm"):
        return 4, {"pixel_values": _pixels(1, 1, 3, 16, 16, seed=seed)}
    if name == "llava_onevision":
        return 52, {"pixel_values": _pixels(1, 3, 3, 16, 16, seed=seed), "image_sizes": torch.tensor([[16, 32]])}
    if name == "mistral3":
        return 12, {"pixel_values": _pixels(1, 3, 32, 24, seed=seed), "image_sizes": torch.tensor([[32, 24]])}
    tokens = {"llava": 16, "paligemma": 16}.get(name, 4)
    return tokens, {"pixel_values": _pixels(1, 3, 16, 16, seed=seed)}


def prompt(name: str, *seeds: int, before: int = 20, after: int = 24, seed: int = 0) -> dict[str, Tensor]:
    """Return what a processor gives for a prompt of one row with an image for each of ``seeds``, in its order.

    Args:
        before, after: tokens of text before each image, and behind the last one.
    """
    generator, parts, given = torch.Generator().manual_seed(seed), list[Tensor](), dict[str, list[Tensor]]()
    for one in seeds:
        tokens, arguments = image(name, one)
        parts += [torch.randint(3, 110, (before,), generator=generator), torch.full((tokens,), IMAGE)]
        for argument, value in arguments.items():
            given.setdefault(argument, []).append(value)
    ids = torch.cat([*parts, torch.randint(3, 110, (after,), generator=generator)])[None]
    axis = 1 if name in ("idefics3", "smolvlm") else 0
    joined = {argument: torch.cat(values, axis) for argument, values in given.items()}
    types = "token_type_ids" if name in ("gemma3", "paligemma") else "mm_token_type_ids"
    if name in (*GRIDS, "paligemma") or name.startswith("gemma"):
        joined[types] = (ids == IMAGE).long()
    if name == "ernie4_5_vl_moe":
        joined["moe_mm_token_type_ids"] = joined[types].int()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **joined}


def joined(name: str, *prompts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return prompts of one row each, one behind the other, as one prompt."""
    along = {**dict.fromkeys(ALONG, 1), "pixel_values": 1 if name in ("idefics3", "smolvlm") else 0}
    arguments = dict.fromkeys(argument for one in prompts for argument in one)
    return {
        argument: torch.cat([one[argument] for one in prompts if argument in one], along.get(argument, 0))
        for argument in arguments
    }


def batch(*prompts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return prompts of one row each as a left-padded batch."""
    longest, rows = max(one["input_ids"].shape[1] for one in prompts), dict[str, Tensor]()
    for argument in dict.fromkeys(argument for one in prompts for argument in one):
        values = [one[argument] for one in prompts if argument in one]
        if argument in ALONG:
            values = [torch.nn.functional.pad(x, (longest - x.shape[1], 0)) for x in values]
        rows[argument] = torch.cat(values)
    return rows

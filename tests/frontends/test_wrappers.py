"""Text given to classes that also read images, and what is said where an image is given."""

import functools
import re

import pytest
import torch
import transformers
from transformers import AutoConfig

import kvpass
from compiled_models import UNLIMITED, greedy, padded
from numeric_checks import assert_close
from pairwise import quick
from tiny_models import LLAMA_LIKE, random_ids

TEXT = {**LLAMA_LIKE, "num_hidden_layers": 2, "head_dim": 16, "initializer_range": 0.1}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
MARKS = {name: 100 + number for number, name in enumerate(("image_token_id", "video_token_id", "image_token_index"))}
MARKS |= {"vision_start_token_id": 104, "vision_end_token_id": 105}
TOWER = {"hidden_size": 64, "embed_dim": 32, "depth": 1, "num_hidden_layers": 1, "num_heads": 2, "patch_size": 4}
TOWER |= {"num_attention_heads": 2, "intermediate_size": 48, "image_size": 16}
WRAPPERS = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", {**TEXT, "rope_parameters": SECTIONS}),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", {**TEXT, "model_type": "qwen2"}),
}
IDS, MASK = padded(41, 30)


@functools.cache
def pair(model_type):
    """A tiny wrapper, left as if it had read an image, and its compiled copy."""
    name, text = WRAPPERS[model_type]
    torch.manual_seed(0)
    tower = TOWER if model_type == "qwen2_vl" else {**TOWER, "model_type": "siglip_vision_model"}
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=tower, **MARKS)
    model = getattr(transformers, name)(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    model.model.rope_deltas = torch.tensor([[-7]])
    return model, kvpass.compile(model, policy="full", backend="eager")


@pytest.mark.parametrize("model_type", quick([*WRAPPERS], ["qwen2_vl"]))
def test_text_alone_is_answered_as_by_the_uncompiled_class(model_type):
    model, fast = pair(model_type)
    given = {"attention_mask": MASK, **dict.fromkeys(("mm_token_type_ids", "token_type_ids"), torch.zeros_like(IDS))}
    expected = greedy(model, IDS, attention_mask=MASK)
    assert torch.equal(greedy(fast, IDS, **given), expected)
    assert torch.equal(greedy(fast, IDS[:1], num_beams=2), greedy(model, IDS[:1], num_beams=2))


def test_a_question_about_a_compressed_text_is_not_moved_by_an_image_of_before():
    model, fast = pair("qwen2_vl")
    document, question = IDS[:1], random_ids(1, 5, seed=3)
    expected = greedy(model, torch.cat([document, question], 1))[:, 41:]
    model.model.rope_deltas = fast.model.rope_deltas = torch.tensor([[-7]])
    assert torch.equal(greedy(fast, question, past_key_values=fast.compress(document)), expected)


def test_positions_of_equal_axes_are_those_of_text():
    model, fast = pair("qwen2_vl")
    places = torch.arange(5, 46)
    expected = model(IDS[:1], position_ids=places.expand(3, 1, -1), logits_to_keep=1).logits
    for axes in (1, 3, 4):
        found = fast(IDS[:1], position_ids=places.expand(axes, 1, -1), logits_to_keep=1).logits
        assert_close(f"logits of {axes} axes", found, expected, atol=1e-4)
    with pytest.raises(ValueError, match=r"\[3, 1, 41\]: must be \[1, 41\]; .*M-RoPE"):
        fast(IDS[:1], position_ids=places.expand(3, 1, -1) * torch.tensor([1, 1, 2])[:, None, None])


def test_an_image_is_refused_by_what_it_is_and_a_language_model_inside_told_what_can_be_compiled():
    model, fast = pair("qwen2_vl")
    types = torch.zeros_like(IDS).index_fill(1, torch.tensor([3]), 1)
    images = {"pixel_values": torch.zeros(4, 96), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    for given in ({"mm_token_type_ids": types}, images, {"token_type_ids": types, **images}):
        for call in (fast, functools.partial(fast.generate, max_new_tokens=2)):
            with pytest.raises(ValueError, match="kvpass reads no images, videos or sound yet") as refusal:
                call(IDS, **given)
            assert re.search("mm_token_type_ids|pixel_values", str(refusal.value))
    with pytest.raises(ValueError, match="it is a part of a model that has one, compile that"):
        kvpass.compile(model.model.language_model, budget=UNLIMITED)

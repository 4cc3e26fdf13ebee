"""Text given to classes that also read images, and what is refused of images."""

import functools

import pytest
import torch
import transformers
from transformers import AutoConfig

import kvpass
from compiled_models import UNLIMITED, greedy, padded, two_layers
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


TYPES = torch.zeros_like(IDS).index_fill(1, torch.tensor([3]), 1)
IMAGES = {"pixel_values": torch.zeros(4, 96), "image_grid_thw": torch.tensor([[1, 2, 2]])}
REFUSED = [
    ({"mm_token_type_ids": TYPES}, "mm_token_type_ids.*zeros only, or those of images"),
    ({"input_features": torch.zeros(1, 4, 4)}, "'input_features' is of sound, which kvpass does not read"),
    ({**IMAGES, "pixel_mask": torch.ones(1)}, "'pixel_mask' is no argument of Qwen2VLForConditionalGeneration"),
    ({**IMAGES, "position_ids": torch.arange(41)[None]}, "without use_cache=False and position_ids"),
    ({**IMAGES, "mm_token_type_ids": TYPES}, "do not match"),  # the class itself
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_contract_10_images_that_are_not_taken(given, message):
    _, fast = pair("qwen2_vl")
    for call in (fast, functools.partial(fast.generate, max_new_tokens=2)):
        with pytest.raises(ValueError, match=message):
            call(IDS, **given)
    assert greedy(fast, IDS, attention_mask=MASK).shape == (2, 47)


def test_contract_10_images_where_nothing_could_be_read():
    _, fast = pair("qwen2_vl")
    llama, embeds = two_layers()[1], torch.zeros(1, 5, 64)
    with pytest.raises(ValueError, match="'pixel_values' is no argument of LlamaForCausalLM"):
        llama(IDS, **IMAGES)
    for call in (fast, fast.generate):
        with pytest.raises(ValueError, match="give them with input_ids"):
            call(inputs_embeds=embeds, **IMAGES)
    with pytest.raises(ValueError, match="without use_cache=False"):
        fast.generate(IDS, use_cache=False, **IMAGES)
    with pytest.raises(ValueError, match="guide with pixel_values, image_grid_thw"):
        fast.compress(IDS, guide=IDS[:1, :4], **IMAGES)
    try:
        fast.set_policy("kvzip", 20)
        with pytest.raises(ValueError, match="policy 'kvzip' replays the ids of the prompt"):
            fast.compress(IDS, **IMAGES)
    finally:
        fast.set_policy("full")


def test_a_language_model_inside_is_told_what_can_be_compiled():
    model, _ = pair("qwen2_vl")
    with pytest.raises(ValueError, match="it is a part of a model that has one, compile that"):
        kvpass.compile(model.model.language_model, budget=UNLIMITED)

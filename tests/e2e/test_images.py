"""Prompts with images: what the uncompiled class answers, and what compressed caches make of it."""

import functools

import pytest
import torch

import kvpass
from compiled_models import greedy, reloaded
from image_models import ALONG, IMAGE, MODELS, VIDEO, batch, compiled, image_model, joined, prompt
from masked_oracle import MaskedOracle, kept_columns
from numeric_checks import assert_close
from pairwise import quick, quick_rows

REFUSED = {"ernie4_5_vl_moe": "moe_mm_token_type_ids of shape", "paligemma": "position_ids of shape"}
READ = [name for name in MODELS if name not in REFUSED]
CAUSAL = [name for name in READ if name not in ("gemma3", "gemma4_both_ways")]
"""Models in which the tokens of an image do not see later ones."""
TOLD = {"return_dict_in_generate": True, "output_logits": True}


def assert_same(found, expected, label="logits"):
    """Whether two results of ``generate`` of one row end with the same tokens, and their logits."""
    found, expected = ((one.sequences[:, -6:], torch.stack(one.logits, 1)) for one in (found, expected))
    assert torch.equal(found[0], expected[0])
    assert_close(label, found[1], expected[1], atol=1e-4)


def text(tokens=5, seed=7):
    """A prompt of one row without images."""
    ids = torch.randint(3, 110, (1, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("name", quick(READ, ["qwen3_vl", "gemma3"]))
def test_an_image_is_answered_as_by_the_uncompiled_class(name):
    model, fast = compiled(name, block=11)
    inputs = prompt(name, 1)
    expected = greedy(model, **inputs, **TOLD)
    assert_same(greedy(fast, **inputs, **TOLD), expected)
    blind = model(**{key: inputs[key] for key in ("input_ids", "attention_mask")}, logits_to_keep=1).logits
    first = fast(**inputs, logits_to_keep=1).logits
    assert_close("logits of forward", first[:, 0], expected.logits[0], atol=1e-4)
    assert (first - blind).abs().max() > 1e-2, "the image should change the answer"


@pytest.mark.parametrize("name", quick(READ, ["qwen3_vl"]))
def test_rows_with_and_without_images_of_several_lengths_are_answered_as_alone(name):
    model, fast = compiled(name)
    rows = [prompt(name, 1, 2), prompt(name, seed=3), prompt(name, 3, before=9, after=11, seed=4)]
    if name in ("idefics3", "smolvlm"):  # all rows have as many images
        rows = [prompt(name, 1), prompt(name, 3, before=9, after=11, seed=4)]
    told = greedy(fast, **batch(*rows), **TOLD)
    for row, one in enumerate(rows):
        alone = greedy(model, **one, **TOLD)
        assert torch.equal(told.sequences[row, -6:], alone.sequences[0, -6:])
        logits = torch.stack(told.logits, 1)[row]
        assert_close(f"logits of row {row}", logits, torch.stack(alone.logits, 1)[0], atol=1e-4)


@pytest.mark.parametrize("name", quick(CAUSAL, ["qwen3_vl"]))
def test_a_question_and_a_second_image_behind_a_saved_image(name, tmp_path):
    model, fast = compiled(name)
    first = prompt(name, 1)
    cache = reloaded(fast.compress(**first), fast, tmp_path)
    for turn in (prompt(name, seed=6, after=5), prompt(name, 2, before=7, after=9, seed=5)):
        whole = joined(name, first, turn)
        expected = greedy(model, **whole, **TOLD)
        new = {key: x for key, x in turn.items() if key not in ALONG}
        for given in (turn, {**whole, **new}) if new else (turn,):  # the whole text, and the new image alone
            assert_same(greedy(fast, **given, past_key_values=cache, **TOLD), expected)


def test_a_call_that_fails_leaves_no_image_to_the_next():
    _, fast = compiled("qwen3_vl")
    cache, turn = fast.compress(**prompt("qwen3_vl", 1)), prompt("qwen3_vl", 2, seed=5)
    with pytest.raises(ValueError, match="model_kwargs"):
        fast.generate(**turn, past_key_values=cache, unknown=1)
    ids = {key: turn[key] for key in ("input_ids", "attention_mask")}
    assert torch.equal(greedy(fast, **ids, past_key_values=cache), greedy(fast, **ids, past_key_values=cache.clone()))


@pytest.mark.parametrize("name", quick(["qwen2_vl", "qwen2_5_vl"], []))
def test_a_video_is_read_as_the_uncompiled_class_does(name):
    model, fast = compiled(name)
    inputs = joined(name, prompt(name, seed=1, after=20), prompt(name, seed=2, after=24))
    inputs["input_ids"][:, 20:32], inputs["mm_token_type_ids"][:, 20:32] = VIDEO, 2
    pixels = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    inputs |= {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[2, 4, 6]])}
    assert_same(greedy(fast, **inputs, **TOLD), greedy(model, **inputs, **TOLD))


@pytest.mark.parametrize("name", quick(["gemma3", "gemma4_both_ways"], ["gemma3"]))
def test_a_second_image_is_refused_where_its_tokens_see_each_other(name):
    _, fast = compiled(name)
    cache = fast.compress(**prompt(name, 1))
    with pytest.raises(ValueError, match="see later ones in this model, and a cache is filled"):
        fast.generate(**prompt(name, 2), past_key_values=cache)
    assert greedy(fast, **prompt(name, after=5), past_key_values=cache).shape == (1, 11)


@pytest.mark.parametrize("name", quick(["llava", "qwen2_vl", "qwen3_vl"], ["qwen3_vl"]))
def test_a_second_turn_of_several_lengths_with_an_image_in_one_row(name):
    model, fast = compiled(name)
    firsts = [prompt(name, 1), prompt(name, seed=3, after=31)]
    turns = [prompt(name, seed=6, after=7), prompt(name, 4, before=6, after=5, seed=8)]
    cache, turn = fast(**batch(*firsts)).past_key_values, batch(*turns)
    mask, logits = torch.cat([cache.attention_mask, turn.pop("attention_mask")], 1), []
    given = turn
    for _ in range(3):
        out = fast(**given, attention_mask=mask, past_key_values=cache)
        logits.append(out.logits[:, -1])
        given, cache = {"input_ids": logits[-1].argmax(-1, keepdim=True)}, out.past_key_values
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    for row, both in enumerate(zip(firsts, turns, strict=True)):
        expected = greedy(model, **joined(name, *both), new=3, **TOLD).logits
        assert_close(f"logits of row {row}", torch.stack(logits, 1)[row], torch.cat(expected), atol=1e-4)


def test_rows_that_are_picked_keep_their_positions():
    _, fast = compiled("qwen3_vl")
    rows, new = [prompt("qwen3_vl", 1), prompt("qwen3_vl", seed=3, after=31)], text()["input_ids"]
    cache = fast(**batch(*rows)).past_key_values
    cache.batch_select_indices(torch.tensor([1, 0, 0]))
    found = fast(new.repeat(3, 1), past_key_values=cache).logits
    for row, one in enumerate([rows[1], rows[0], rows[0]]):
        alone = fast(new, past_key_values=fast(**one).past_key_values).logits
        assert_close(f"logits of row {row}", found[row], alone[0], atol=1e-4)


MASKED = [(name, policy) for name in [*CAUSAL, "gemma3"] for policy in ("snapkv", "lava", "keydiff", "h2o")]


@pytest.mark.parametrize(("name", "policy"), quick_rows(MASKED, [("qwen3_vl", "snapkv"), ("gemma3", "h2o")]))
def test_later_tokens_see_what_was_kept_of_an_image(name, policy):
    more = {"evict_during_decode": False} if policy == "h2o" else {}
    text_config = {"num_kv_shared_layers": 0} if name == "gemma4" else {}
    model, fast = compiled(name, policy, 24, window=8, block=11, text=text_config, **more)
    inputs, new, logits = prompt(name, 1), text(6)["input_ids"], []
    if policy == "h2o" and name not in CAUSAL:
        with pytest.raises(ValueError, match="see later ones in this model, and policy 'h2o' scores by all tokens"):
            fast(**inputs)
        return
    ids = inputs.pop("input_ids")
    cache, n = fast(ids, **inputs).past_key_values, ids.shape[1]
    keep = kept_columns(cache, n)
    for piece in new.split([1, 2, 3], 1):
        out = fast(piece.contiguous(), past_key_values=cache)
        cache = out.past_key_values
        logits.append(out.logits)
    whole, mask = torch.cat([ids, new], 1), torch.ones(1, n + 6, dtype=torch.int64)
    images = {name: x for name, x in inputs.items() if name != "attention_mask"}
    images |= {name: (whole == IMAGE).long() for name in images if name.endswith("token_type_ids")}
    of_image = whole[0] == IMAGE
    later = torch.eye(n + 6, dtype=torch.bool) | ((of_image[:, None] & of_image) if name not in CAUSAL else False)
    oracle = MaskedOracle(model, reads_images=True, sees_later=later)
    expected, everything = (oracle.logits(whole, mask, seen, **images)[:, n:] for seen in (keep, torch.ones_like(keep)))
    assert_close("decode logits", torch.cat(logits, 1), expected, atol=1e-4)
    assert (everything - expected).abs().max() > 1e-2, "the budget should change the logits"


@pytest.mark.parametrize("name", quick(READ, ["qwen3_vl"]))
def test_inductor_reads_an_image(name):
    """The steps after it are those of text."""
    model, fast = compiled(name, backend="inductor")
    inputs = prompt(name, 1)
    assert_close("logits", fast(**inputs).logits, model(**inputs).logits, atol=1e-4)


SEVERAL = [{"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}]


@pytest.mark.parametrize(
    ("name", "more"),
    quick_rows([(name, more) for name in ("llava", "qwen3_vl") for more in SEVERAL], [("qwen3_vl", SEVERAL[1])]),
)
def test_beams_several_answers_and_drafts(name, more):
    model, fast = compiled(name)
    inputs = prompt(name, 1)
    assert torch.equal(greedy(fast, **inputs, **more), greedy(model, **inputs, **more))


def test_images_are_protected_and_counted():
    _, fast = compiled("qwen3_vl", "snapkv", 24, window=8)
    inputs, heads = prompt("qwen3_vl", 1), 2 * 2
    fast.compress(**inputs)
    free = fast.report().prompt.entries_of_images()
    cache = fast.compress(**inputs, protect=("images",))
    report = fast.report()
    assert report.prompt.entries_of_images() == 6 * heads > free
    assert f"of images: {6 * heads} of {6 * heads} entries; of text: {18 * heads} of {44 * heads}" in str(report)
    places = (inputs["input_ids"][0] == IMAGE).nonzero().flatten().tolist()
    for layer, head in [(0, 0), (1, 1)]:
        assert {*places} <= {*cache.positions[0, layer, head].tolist()}
    assert report.to_dict()["image_entries"] == 6 * heads
    rows = [prompt("qwen3_vl", 1, before=0, after=4), prompt("qwen3_vl", 2)]  # the window of one reaches into its image
    positions = fast.compress(**batch(*rows)).positions
    of_images = [(one["input_ids"][0] == IMAGE)[kept.clamp(min=0)] for one, kept in zip(rows, positions, strict=True)]
    held = sum(int((marked & (kept >= 0)).sum()) for marked, kept in zip(of_images, positions, strict=True))
    assert fast.report().prompt.entries_of_images() == held >= 6 * heads
    with pytest.raises(ValueError, match="protect: 6 tokens of row 0 are to be kept"):
        fast.compress(**inputs, protect=("images",), budget=10)
    with pytest.raises(
        ValueError, match=r"\('images',\): must be pairs .* of tokens, a mask, or \('images',\) beside images"
    ):
        fast.compress(inputs["input_ids"], protect=("images",))


def test_contract_7_a_class_that_does_otherwise_with_embeddings_than_with_images_is_refused(monkeypatch):
    """Captures give it the embeddings that it made of the image."""
    model, kind = image_model("llava"), type(image_model("llava"))

    @functools.wraps(kind.forward)
    def forward(self, input_ids=None, inputs_embeds=None, **given):
        return kind.forward(
            self, input_ids, inputs_embeds=None if inputs_embeds is None else 2 * inputs_embeds, **given
        )

    monkeypatch.setattr(model, "__class__", type(kind.__name__, (kind,), {"forward": forward}))
    with pytest.raises(ValueError, match="gives its language model another inputs_embeds than it is given"):
        kvpass.compile(model, policy="full", backend="eager")(**prompt("llava", 1))


def test_contract_7_policies_that_turn_queries_back_refuse_positions_of_several_axes():
    _, fast = compiled("qwen3_vl", "expected_attention", 24)
    with pytest.raises(kvpass.UnsupportedAttentionError, match="the policy needs the rotary embedding of the queries"):
        fast(**prompt("qwen3_vl", 1))


@pytest.mark.parametrize("name", REFUSED)
def test_contract_7_what_a_language_model_is_given_beside_is_named(name):
    _, fast = compiled(name)
    with pytest.raises(ValueError, match=f"gives its language model {REFUSED[name]}"):
        fast(**prompt(name, 1))

"""What a user does with the model: generate in every way, pipelines, plain calls, and mistakes."""

import copy
import functools

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM, pipeline

import kvpass
from compiled_models import UNLIMITED, compiled_anew, compiled_apart, failing, greedy, padded, prompts_of, two_layers
from kvpass import builtin
from kvpass.ops import reference
from numeric_checks import assert_close
from pairwise import each_value, quick
from tiny_models import VOCABULARY, compiled_once, random_ids, tiny_model
from versions import needs_transformers

NEW = 10
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONG_ROPE = {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 48}
CHAIN = "let bara = 482 . let lato = bara . let mivi = lato . question the value of mivi is"


def test_the_original_is_untouched_and_every_tensor_is_shared(model, fast):
    assert type(fast) is not type(model) and isinstance(fast, type(model)) and type(fast).__name__ == "LlamaForCausalLM"
    assert model.config._attn_implementation == "sdpa"
    assert model.model.layers[0].self_attn.config is model.config
    ours, theirs = dict(fast.named_parameters()), dict(model.named_parameters())
    assert ours.keys() == theirs.keys() and all(ours[name] is theirs[name] for name in ours)
    assert type(model).forward is not type(fast).forward
    tied = tiny_model("llama", tie_word_embeddings=True)
    ours = kvpass.compile(tied, budget=100, backend="eager")
    assert ours.lm_head.weight is ours.model.embed_tokens.weight is tied.lm_head.weight


@each_value(
    policy=["lava", "h2o"],
    options=[
        {"do_sample": True, "temperature": 1.3, "top_k": 20},
        {"repetition_penalty": 1.5},
        {"output_scores": True, "return_dict_in_generate": True},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
        {"num_beams": 2, "do_sample": True},
        {"num_return_sequences": 3, "do_sample": True},
    ],
)
def test_generate_gives_what_the_original_gives(policy, options):
    ids, mask = padded(33, 20)
    results = []
    for subject in two_layers("gemma3", policy=policy, budget=100):
        torch.manual_seed(0)
        results.append(greedy(subject, ids, NEW, attention_mask=mask, **options))
    if "return_dict_in_generate" in options:
        assert isinstance(results[1].past_key_values, kvpass.CompressedCache)
        assert_close("scores", torch.stack(results[1].scores), torch.stack(results[0].scores), atol=1e-4)
        results = [result.sequences for result in results]
    assert torch.equal(*results)


@pytest.mark.parametrize("way", ["configured", "dynamic", "none"])
def test_a_cache_that_the_checkpoint_configures_gives_way_to_ours(model, fast, way, monkeypatch):
    """For a static cache transformers makes the mask itself, and none for an attention it does not know."""
    ids, mask = padded(33, 9)
    expected = greedy(model, ids, NEW, attention_mask=mask)
    if way == "configured":
        monkeypatch.setattr(fast.generation_config, "cache_implementation", "static")
    options = {"dynamic": {"cache_implementation": "dynamic"}, "none": {"use_cache": False}}.get(way, {})
    assert torch.equal(greedy(fast, ids, NEW, attention_mask=mask, **options), expected)
    grown = NEW - 1 if way == "none" else 0  # without a cache every token is a prompt of its own
    assert fast.report().prompt_lengths.tolist() == [33 + grown, 9 + grown]


def test_generation_without_a_cache_by_configuration_must_be_meant(model, monkeypatch):
    """Checkpoints say so after training; each new token would be a prompt of its own, and nothing forgotten."""
    _, fast = two_layers(policy="snapkv", budget=12)
    monkeypatch.setattr(fast, "generation_config", copy.deepcopy(fast.generation_config))
    ids, configured = random_ids(1, 40), functools.partial(GenerationConfig, max_new_tokens=NEW)
    call = functools.partial(greedy, fast, ids, NEW)
    compressed = call()
    for of_model, options in (
        (True, {"generation_config": configured(use_cache=False)}),
        *((False, options) for options in ({}, {"use_cache": None}, {"generation_config": configured()})),
    ):
        fast.generation_config.use_cache = of_model
        with pytest.raises(ValueError, match="configured with use_cache=False"):
            call(**options)
    assert torch.equal(call(use_cache=True), compressed)
    assert torch.equal(fast.generate(ids, configured(use_cache=True)), compressed)
    assert torch.equal(fast.generate(ids, generation_config=configured(do_sample=False, use_cache=True)), compressed)
    assert torch.equal(call(use_cache=False), greedy(model, ids, NEW))
    fast.generation_config.use_cache = True
    assert torch.equal(call(use_cache=None), compressed)


@pytest.mark.parametrize("given", ["filled", "empty", "chunks"])
def test_generation_without_a_cache_is_given_none(fast, given, monkeypatch):
    """Else each step would append the whole text to the cache again."""
    cache, ids = fast.compress(random_ids(1, 40)), random_ids(1, 5)
    if given == "empty":
        cache.reset()
    options = {"prefill_chunk_size": 16} if given == "chunks" else {"past_key_values": cache}
    with pytest.raises(ValueError, match=f"use_cache=False and {next(iter(options))}: the whole text is computed"):
        fast.generate(ids, use_cache=False, max_new_tokens=2, **options)
    monkeypatch.setattr(fast.generation_config, "use_cache", False)
    with pytest.raises(ValueError, match="configured with use_cache=False"):
        fast.generate(ids, max_new_tokens=2, **options)


@pytest.mark.parametrize("family", quick(["llama", "gpt2", "gemma3"], ["llama"]))
def test_autocast_is_that_of_the_uncompressed_model(family):
    original = tiny_model(family, layers=2)
    fast = kvpass.compile(original, budget=10**6, window=8, backend="eager")
    ids, new = random_ids(1, 40), random_ids(1, 3, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        expected = original(torch.cat([ids, new], 1)).logits[:, -4:]
        out = fast(ids, logits_to_keep=1)
        cache = out.past_key_values
        steps = [fast(piece, past_key_values=cache).logits for piece in new.split(1, 1)]
    assert cache.state.full_layers[0].buffers.pool_k.dtype == torch.bfloat16
    assert_close("logits", torch.cat([out.logits, *steps], 1).float(), expected.float(), atol=0.1)


@functools.cache
def rotated(kind):
    """A model whose frequencies depend on the length of the text, and its compiled copy."""
    if kind == "longrope":
        original = tiny_model("phi3", layers=1, **LONG_ROPE, max_position_embeddings=192)
    else:
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
        original = tiny_model("llama", layers=1, rope_parameters=rope, max_position_embeddings=48)
    return original, compiled_anew(original)


@needs_transformers("5.23", "older ones branch on the longest row, which is no graph")
@pytest.mark.parametrize("kind", quick(["longrope", "dynamic"], ["longrope"]))
def test_rotary_embeddings_that_depend_on_the_length_of_a_row(kind):
    """With dynamic frequencies the second row begins its answer on one side of the limit and ends it on the other."""
    original, fast = rotated(kind)
    fast.set_budget(UNLIMITED)
    lengths = (60, 38 if kind == "longrope" else 44, 20)
    ids, mask = padded(*lengths)
    answers = greedy(fast, ids, NEW, attention_mask=mask)[:, -NEW:]
    logits = fast(ids, attention_mask=mask, logits_to_keep=1).logits
    for row, prompt in enumerate(prompts_of(*lengths)):
        alone = copy.deepcopy(original)  # transformers keeps the frequencies of the longest text
        assert_close("logits", logits[row], alone(prompt[None]).logits[0, -1:], atol=1e-4)
        assert torch.equal(answers[row], greedy(copy.deepcopy(original), prompt[None], NEW)[0, -NEW:])
    if kind == "longrope":
        ids, mask = padded(*lengths[1:])
        with pytest.raises(ValueError, match="row 0 passes 48 tokens"):
            greedy(fast, ids, NEW + 2, attention_mask=mask)
        cache = fast(ids, attention_mask=mask, logits_to_keep=1).past_key_values
        with pytest.raises(ValueError, match="row 0 passes 48 tokens"):
            fast(random_ids(2, 11), past_key_values=cache)
        ids = random_ids(1, 44)  # transformers reads the text again at the limit
        expected = greedy(copy.deepcopy(original), ids, NEW)
        assert torch.equal(greedy(fast, ids, NEW), expected)


@needs_transformers("5.23", "older ones branch on the longest row, which is no graph")
def test_a_chat_goes_on_in_its_cache_where_longrope_has_the_text_read_again():
    original, fast = rotated("longrope")
    fast.set_budget(30)
    text = random_ids(1, 40)
    cache, document = fast.compress(text, reusable=False, budget=100), fast.compress(text)
    with failing(reference, "score_layer"):  # when the text is read again
        greedy(fast, random_ids(1, 6, seed=1), 6, past_key_values=cache)
    assert cache.columns == 48
    cache.crop(-8)
    for words in (random_ids(1, 6, seed=seed) for seed in range(3)):
        text = torch.cat([text, words], 1)
        expected = greedy(copy.deepcopy(original), text, 6)
        assert torch.equal(greedy(fast, text, 6, past_key_values=cache), expected)
        text = expected
        assert cache.columns == text.shape[1] - 1 and str(cache.budget) == "100"
    greedy(fast, words, 6, past_key_values=document)
    assert (document.columns, document.reusable) == (40, True)


GENERATES = {
    "any arguments": lambda self, *args, **kwargs: LlamaForCausalLM.generate(self, *args, **kwargs),
    "other names": lambda self, input_ids=None, **options: LlamaForCausalLM.generate(self, input_ids, **options),
    "rest of another name": lambda self, inputs=None, generation_config=None, **options: LlamaForCausalLM.generate(
        self, inputs, generation_config, **options
    ),
}


def test_a_class_may_have_a_generate_of_its_own(model):
    plain, ids, new = two_layers(layers=1)[1], random_ids(1, 40), random_ids(1, 5, seed=1)
    expected = greedy(plain, new, 4, past_key_values=plain.compress(ids))
    for generate in GENERATES.values():
        mine = tiny_model("llama", layers=1)
        mine.__class__ = type("Mine", (LlamaForCausalLM,), {"generate": generate})
        own = compiled_apart(1, model=mine)
        assert torch.equal(greedy(own, new, 4, past_key_values=own.compress(ids)), expected)
        with pytest.raises(TypeError, match="each argument once, and what comes after generation_config by its name"):
            own.generate(ids, None, *[None] * 20)


def test_a_loop_of_the_callers_own_continues_the_compressed_cache(model, fast):
    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, steps, **kwargs):
        while not bool(stopping_criteria(input_ids, None).all()):
            begun = kwargs["past_key_values"].get_seq_length() > 0
            steps.append(begun)
            given = model.prepare_inputs_for_generation(input_ids, next_sequence_length=1 if begun else None, **kwargs)
            out = model(**given)
            kwargs = model._update_model_kwargs_for_generation(out, kwargs)
            input_ids = torch.cat([input_ids, out.logits[:, -1:].argmax(-1)], 1)
        return input_ids

    ids, steps = random_ids(1, 40), []
    assert torch.equal(greedy(fast, ids, 4, custom_generate=loop, steps=steps), greedy(fast, ids, 4))
    assert steps == [False, True, True, True]
    assert torch.equal(*(greedy(one, ids, 4, num_beams=2, use_cache=False) for one in (model, fast))), "without a cache"


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{"do_sample": True, "num_return_sequences": 3}, {"do_sample": False, "num_beams": 3, "num_return_sequences": 2}],
    ids=lambda options: "-".join(options),
)
def test_generate_gives_several_answers_from_one_document(model, fast, options, rows):
    document, questions = random_ids(1, 40), random_ids(rows, 5, seed=8)
    whole = torch.cat([document.expand(rows, -1), questions], 1)
    for context in {1, rows}:  # rows of the cache
        cache, answers = fast.compress(document.expand(context, -1)), []
        for subject, ids, given in ((model, whole, {}), (fast, questions, {"past_key_values": cache})):
            torch.manual_seed(0)
            answers.append(subject.generate(ids, max_new_tokens=NEW, **given, **options)[:, -NEW:])
        assert torch.equal(*answers)
        assert (cache.batch_size, cache.columns, cache.reusable) == (context, 40, True)
    with pytest.raises(kvpass.CacheMismatchError, match="the ids have 3 rows, the cache 2"):
        fast.generate(random_ids(3, 5), past_key_values=fast.compress(document.expand(2, -1)), max_new_tokens=1)


@pytest.mark.parametrize("entries", quick(["model", "rot4", "fp8"], ["model"]))
def test_rows_of_one_document_hold_its_entries_once(entries, tmp_path):
    """Entries of the model's dtype in compiled code, others by the eager operators."""
    if entries == "model":
        _, fast = compiled_once("llama", layers=1, budget=0.9, window=8)
    else:
        fast = compiled_anew(tiny_model("llama", layers=1, head_dim=32), budget=0.9, entries=entries)
    document, other, asked = random_ids(1, 900), random_ids(3, 60, seed=3), random_ids(4, 5, seed=8)
    held = fast.compress(document, reusable=False)

    def alone(new, cache):
        """Of one row; in a batch of two, of which there is a capture."""
        return fast(new[None].repeat(2, 1), past_key_values=cache)

    cache = fast(asked, past_key_values=held).past_key_values
    assert cache.nbytes < 2.5 * held.nbytes and cache.batch_size == 4
    cache.reorder_cache(order := torch.tensor([2, 0, 3]))
    cache.save(tmp_path / "rows.kv")
    loaded, token = kvpass.load_cache(tmp_path / "rows.kv", fast), random_ids(3, 1, seed=9)
    assert loaded.nbytes > cache.nbytes, "a file holds the entries of each row"
    asked = asked[order]
    logits = fast(token, past_key_values=cache).logits
    for row in range(3):
        own = alone(token[row], alone(asked[row], held).past_key_values).logits
        assert_close("logits", logits[row], own[0], atol=1e-5)
    assert_close("loaded", fast(token, past_key_values=loaded).logits, logits, atol=1e-5)
    apart = fast(other).past_key_values  # by the same code
    own = alone(token[0], alone(other[0], None).past_key_values).logits
    assert_close("another", fast(token, past_key_values=apart).logits[0], own[0], atol=1e-5)


def test_generate_asks_for_the_logits_of_the_last_position_only(fast, monkeypatch):
    seen, original = [], type(fast).forward

    @functools.wraps(original)
    def spy(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        seen.append(tuple(out.logits.shape))
        return out

    monkeypatch.setattr(type(fast), "forward", spy)
    greedy(fast, random_ids(2, 30), new=3)
    assert seen == [(2, 1, VOCABULARY)] * 3


def test_logits_to_keep_and_use_cache_and_a_tuple_where_one_is_asked_for(model, fast):
    ids = random_ids(2, 30)
    expected = model(ids).logits
    for keep in (5, 0, 1, 99):
        assert_close(f"keep {keep}", fast(ids, logits_to_keep=keep).logits, expected[:, -keep:], atol=1e-4)
    assert fast(ids, use_cache=False).past_key_values is None
    logits, cache = fast(ids, None, None, None, return_dict=False)
    assert torch.equal(logits, fast(ids).logits) and isinstance(cache, kvpass.CompressedCache)
    assert len(fast(ids, return_dict=False, use_cache=False)) == 1
    with pytest.raises(TypeError, match="positional"):
        fast(ids, None, None, None, None, ids)  # labels, in transformers


def test_the_text_generation_pipeline_works_unmodified():
    model, tokenizer = builtin.load(num_hidden_layers=1, layer_types=["full_attention"])
    fast = kvpass.compile(model, budget=10**6, backend="eager")
    pipelines = [pipeline("text-generation", model=subject, tokenizer=tokenizer) for subject in (model, fast)]
    answers = [answer(CHAIN, max_new_tokens=5, do_sample=False) for answer in pipelines]
    assert answers[0] == answers[1]
    assert fast.report().prompt_lengths.tolist() == [len(tokenizer(CHAIN).input_ids)]

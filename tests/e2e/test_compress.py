"""Question-agnostic scope: compress a context once, ask it several questions."""

import logging
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MaxLengthCriteria, PreTrainedTokenizerFast, StoppingCriteria, StopStringCriteria

import kvpass
import kvpass.frontends.transformers as frontend
from compiled_models import padded, two_layers
from kvpass.cache.cache_file import read_cache_file, write_cache_file
from masked_oracle import MaskedOracle, kept_columns
from numeric_checks import assert_close
from pairwise import quick
from tiny_models import random_ids

READ_ALL_IDS = {"repetition_penalty": 1.8, "no_repeat_ngram_size": 1}
READ_ALL_IDS |= {f"encoder_{name}": value for name, value in READ_ALL_IDS.items()}
GREEDY = {"max_new_tokens": 8, "do_sample": False}
DOCUMENT = padded(50, 33)
QUESTION = random_ids(2, 5, seed=3)


@pytest.mark.parametrize("backend", quick(["eager", "inductor"], ["eager"]))
def test_a_question_is_answered_from_what_was_kept_at_its_true_positions_in_a_cache_of_its_own(backend):
    model, fast = two_layers(budget=16, backend=backend)
    ids, mask = DOCUMENT
    cache = fast.compress(ids, mask)
    answered = fast.generate(QUESTION, past_key_values=cache, return_dict_in_generate=True, **GREEDY)
    keep = kept_columns(cache, ids.shape[1])
    sequence, seen = put_together(DOCUMENT, QUESTION)
    for _ in range(8):
        logits = MaskedOracle(model).logits(sequence, seen, keep)
        sequence = torch.cat([sequence, logits[:, -1:].argmax(-1)], 1)
        seen = torch.cat([seen, torch.ones_like(seen[:, :1])], 1)
    assert torch.equal(answered.sequences, sequence[:, ids.shape[1] :])
    own = answered.past_key_values
    assert own is not cache and (own.columns, cache.columns) == (50 + 5 + 7, 50)
    pools = {c.state.full_layers[0].buffers.pool_k.data_ptr() for c in (cache, own)}
    assert len(pools) == 1, "the kept entries should be shared"
    assert fast(random_ids(2, 1), past_key_values=own).past_key_values is own


def test_a_policy_that_needs_the_question_is_named_once_with_one_that_does_not(monkeypatch):
    said = []
    monkeypatch.setattr(logging.getLogger("kvpass"), "warning", lambda text, *args: said.append(text % args))
    frontend._warn_of_question.cache_clear()  # other tests have had it say so
    for policy in ("keydiff", "snapkv", "snapkv"):
        _, fast = two_layers(policy=policy, budget=16)
        fast.compress(*DOCUMENT)
    assert len(said) == 1 and "'snapkv'" in said[0] and "take kvzip" in said[0]


# -- the whole text, where only the new ids are given -----------------------------------------------------------------


def put_together(*parts):
    """Ids and mask of a left-padded document and of what follows it."""
    (ids, mask), *new = parts
    return torch.cat([ids, *new], 1), torch.cat([mask, *map(torch.ones_like, new)], 1)


def whole_answer(model, *parts, **options):
    """What the uncompiled model answers to the whole text, without the document; all that was given it."""
    ids, mask = put_together(*parts)
    return model.generate(ids, attention_mask=mask, **options)[:, parts[0][0].shape[1] :]


@pytest.mark.parametrize("option", READ_ALL_IDS)
def test_processors_read_the_document_beside_a_question_and_in_the_next_turn(model, fast, option):
    given, turn = {**GREEDY, option: READ_ALL_IDS[option]}, random_ids(2, 3, seed=4)
    expected = whole_answer(model, DOCUMENT, QUESTION, **given)
    assert not torch.equal(expected, whole_answer(model, DOCUMENT, QUESTION, **GREEDY)), "the option should change this"
    cache = fast.compress(*DOCUMENT)
    for _ in range(2):
        assert torch.equal(fast.generate(QUESTION, past_key_values=cache, **given), expected)
    longer, mask = random_ids(2, 60, seed=5), put_together(DOCUMENT, random_ids(2, 60))[1]
    found = fast.generate(longer, attention_mask=mask, past_key_values=cache, **given)
    assert torch.equal(found, whole_answer(model, DOCUMENT, longer, **given)), "more new ids than the cache has seen"
    talk = fast.compress(*DOCUMENT, reusable=False)
    first = fast.generate(input_ids=QUESTION, past_key_values=talk, return_dict_in_generate=True, **given).sequences
    assert torch.equal(first, expected)
    asked = torch.cat([first[:, -1:], turn], 1)
    second = fast.generate(asked, attention_mask=torch.ones_like(asked), past_key_values=talk, **given)
    if not option.startswith("encoder"):  # these read what was given, which ends before the answer
        assert torch.equal(second, whole_answer(model, DOCUMENT, first, turn, **given)[:, first.shape[1] - 1 :])


def test_a_loaded_cache_knows_the_document_and_one_of_an_old_file_says_that_it_does_not(fast, model, tmp_path, recwarn):
    given = {**GREEDY, "repetition_penalty": 1.8}
    fast.compress(*DOCUMENT).save(tmp_path / "new.kv")
    loaded = kvpass.load_cache(tmp_path / "new.kv", fast)
    assert torch.equal(loaded.ids, DOCUMENT[0].int())
    answer = fast.generate(QUESTION, past_key_values=loaded, **given)
    assert torch.equal(answer, whole_answer(model, DOCUMENT, QUESTION, **given))
    metadata, tensors = read_cache_file(tmp_path / "new.kv")
    del tensors["ids"]
    write_cache_file(tmp_path / "old.kv", tensors, metadata)
    old = kvpass.load_cache(tmp_path / "old.kv", fast)
    answer = fast.generate(QUESTION, past_key_values=old, **GREEDY)
    assert torch.equal(answer, whole_answer(model, DOCUMENT, QUESTION, **GREEDY))
    assert not [warning for warning in recwarn if "only the ids of this call" in str(warning.message)]
    with pytest.warns(UserWarning, match="repetition_penalty: only the ids of this call are read"):
        fast.generate(QUESTION, past_key_values=old, **given)


def test_beams_on_repeated_rows_read_the_document(model, fast):
    """The rows of the cache are repeated by hand, once for each beam."""
    given = {**GREEDY, "num_beams": 3, "repetition_penalty": 1.8}
    cache, mask = fast.compress(*DOCUMENT), put_together(DOCUMENT, QUESTION)[1]
    cache.batch_repeat_interleave(3)
    scores = {"return_dict_in_generate": True, "output_scores": True}
    found = fast.generate(QUESTION, attention_mask=mask, past_key_values=cache, **scores, **given)
    assert torch.equal(found.sequences, whole_answer(model, DOCUMENT, QUESTION, **given))
    scored = fast.compute_transition_scores(found.sequences, found.scores, found.beam_indices)
    assert_close("scores", scored.sum(1) / 8, found.sequences_scores, atol=1e-5)


class Seen(StoppingCriteria):
    """Notes the ids that it is given; stops at a length."""

    def __init__(self, length):
        self.length, self.ids = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.ids.append(input_ids)
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


def test_lengths_and_stopping_criteria_count_the_new_ids(model, fast):
    cache = fast.compress(*DOCUMENT)

    def answer(**options):
        return fast.generate(QUESTION, past_key_values=cache, do_sample=False, **options)

    plain = answer(max_new_tokens=12)
    end = int(plain[0, 7])
    ends = {"eos_token_id": end, "pad_token_id": 0}
    assert torch.equal(answer(max_length=11), plain[:, :11])
    assert torch.equal(answer(max_new_tokens=12, stopping_criteria=[MaxLengthCriteria(9)]), plain[:, :9])
    seen = Seen(10)
    assert torch.equal(answer(max_new_tokens=12, stopping_criteria=[seen]), plain[:, :10])
    assert torch.equal(seen.ids[0], plain[:, :6])
    for least in ({"min_new_tokens": 6}, {"min_length": 11}):
        expected = whole_answer(model, DOCUMENT, QUESTION, do_sample=False, **ends, max_new_tokens=12, min_new_tokens=6)
        assert torch.equal(answer(**ends, **least, max_new_tokens=12), expected)
        assert not torch.equal(expected, plain)


@pytest.mark.parametrize("named", [False, True], ids=["criteria", "stop_strings"])
def test_stop_strings_end_the_answer_as_they_do_after_the_whole_text(model, fast, named):
    """Here a token is a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({byte: number for number, byte in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    document, question = random_ids(1, 40), random_ids(1, 5, seed=3)
    cache = fast.compress(document)
    plain = fast.generate(question, past_key_values=cache, **GREEDY)
    text, whole = tokenizer.decode(plain[0, 8:10]), torch.cat([document, question], 1)
    criteria = {"stopping_criteria": [StopStringCriteria(tokenizer, text)]}
    stop = {"tokenizer": tokenizer, "stop_strings": [text]} if named else criteria
    expected = model.generate(whole, **stop, **GREEDY)
    assert expected.shape[1] == 50 and torch.equal(fast.generate(whole, **stop, **GREEDY), expected)
    assert torch.equal(fast.generate(question, past_key_values=cache, **stop, **GREEDY), expected[:, 40:])


def test_a_streamer_gets_the_question_first_and_then_each_token(fast):
    cache, seen, question = fast.compress(random_ids(1, 40)), [], random_ids(1, 5, seed=3)
    stream = SimpleNamespace(put=lambda ids: seen.append(ids.flatten().tolist()), end=lambda: seen.append("end"))
    answer = fast.generate(question, past_key_values=cache, streamer=stream, **GREEDY)[0].tolist()
    assert seen == [question[0].tolist(), *([token] for token in answer[5:]), "end"]


def test_the_ids_of_a_cache_follow_its_rows_copies_and_cuts(fast):
    ids, new = DOCUMENT[0].int(), random_ids(2, 3, seed=3)
    cache = fast(*DOCUMENT).past_key_values
    twin = cache.clone()
    fast(new, past_key_values=cache)
    assert torch.equal(cache.ids, torch.cat([ids, new.int()], 1)) and torch.equal(twin.ids, ids)
    cache.crop(-2)
    assert torch.equal(cache.ids, torch.cat([ids, new[:, :1].int()], 1))
    assert torch.equal(cache.ids[:, : cache.state.prompt_columns], ids)
    (layers,) = twin.state.full_layers
    counters = torch.zeros(4, 64, dtype=torch.int32)  # as on CUDA: of programs, not rows of the batch
    layers.buffers = layers.buffers._replace(arrivals=counters)
    twin.reorder_cache(torch.tensor([1, 0]))
    twin.batch_repeat_interleave(2)
    twin.batch_select_indices(torch.tensor([0, 3]))
    assert torch.equal(twin.ids, ids.flip(0))
    twin.reset()
    assert twin.ids is None


def test_the_prompt_given_again_on_its_cache_is_warned_about(fast, recwarn):
    prompt = random_ids(1, 40)
    first = fast.generate(prompt, return_dict_in_generate=True, **GREEDY)
    fast.generate(prompt[:, :39], past_key_values=first.past_key_values.clone(), **GREEDY)
    fast.generate(torch.cat([first.sequences, prompt], 1), past_key_values=first.past_key_values.clone(), **GREEDY)
    assert [str(warning.message)[:75] for warning in recwarn] == [
        "the ids begin as the prompt that past_key_values holds does (3 tokens), and"
    ]
    for cache in (first.past_key_values, fast.compress(prompt)):
        with pytest.warns(UserWarning, match="begin with all 40 tokens of the prompt that past_key_values"):
            fast.generate(prompt, past_key_values=cache, **GREEDY)


@pytest.mark.parametrize(
    ("begin", "warns"),
    [([7, 8, 9], True), ([7, 8, 5], False), ([2], True), ([2, 8], True), ([3], False), ([6, 6, 6], False)],
)
def test_ids_that_begin_as_the_cache_does_are_warned_about(fast, recwarn, begin, warns):
    """As the head of a chat template does, or the token that begins a text (2)."""
    document = random_ids(1, 40).clamp(min=10)
    document[0, : len(begin)] = torch.tensor([7, 8, 9] if begin[0] == 7 else begin)
    if begin[0] == 6:  # the tokens come again, as those between two turns do
        document[0, 20:23] = 6
    fast.generation_config.bos_token_id = 2
    try:
        new = torch.tensor([[*begin, 11, 12, 13]])
        fast.generate(new, past_key_values=fast.compress(document), **GREEDY)
    finally:
        fast.generation_config.bos_token_id = None
    assert [("begin as the prompt" in str(warning.message)) for warning in recwarn] == [True] * warns


def test_a_loop_on_a_reusable_cache_is_warned_about(fast, recwarn):
    document = fast.compress(random_ids(1, 40))
    out = fast(random_ids(1, 5), past_key_values=document)
    fast(random_ids(1, 1), past_key_values=out.past_key_values)
    fast.generate(random_ids(1, 1), past_key_values=document, **GREEDY)
    assert not [warning for warning in recwarn if "loop" in str(warning.message)]
    with pytest.warns(UserWarning, match=r"a copy. In a decoding loop give the next call output.past_key") as told:
        fast(random_ids(1, 1), past_key_values=document)
    assert told[0].filename == __file__ and document.columns == 40

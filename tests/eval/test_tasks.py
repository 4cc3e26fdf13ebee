"""Tasks: what a prompt promises is read off the prompt itself, by other means than those that made it."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvpass import builtin
from kvpass.eval.tasks import GROUPS, Sample, encode, find_tasks, infinitebench, longbench, registry
from kvpass.eval.tasks.needle import DEPTHS, LENGTHS, move_fact

DATA = os.environ.get("KVPASS_DATA")
TEMPLATE = "{% for m in messages %}<user>{{ m['content'] | trim }}</user>{% endfor %}<model>"


@pytest.fixture(scope="module")
def words():
    """One token a word."""
    return AutoTokenizer.from_pretrained(builtin.path())


@pytest.fixture(scope="module")
def pieces():
    """Byte-level BPE, as most models have it, with <bos> in front and <eos> behind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = [registry()[name].build(300, 0, "0", random.Random(0)).context for name in ("niah_single_2", "cwe", "vt")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<bos>", "<eos>"]
    tokenizer.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=2000, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


def text_of(sample: Sample) -> str:
    return sample.context + sample.question + sample.answer_prefix


def sample_of(context: str, question: str, **more) -> Sample:
    return Sample(id="0", context=context, question=question, answers=("x",), max_new_tokens=1, **more)


# --- encoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
def test_the_ids_are_those_of_the_whole_string_and_the_question_begins_where_it_should(pieces, chat):
    sample = sample_of("The old farmer slept.", "\nWho slept?", answer_prefix=" It was")
    got = encode(pieces, sample, chat=chat)  # without a template, chat changes nothing
    assert list(got.ids) == pieces(text_of(sample))["input_ids"][:-1]  # <bos> stays, <eos> does not
    assert pieces.decode(got.question) == "\nWho slept? It was"
    assert len(got) == len(got.context) + len(got.question)


def test_a_chat_template_surrounds_the_prompt_and_the_answer_prefix_follows_it(pieces):
    sample = sample_of("  The old farmer slept.", "\nWho slept?", answer_prefix=" It was")
    pieces.chat_template = TEMPLATE
    try:
        chat, plain = encode(pieces, sample, chat=True), encode(pieces, sample, chat=False)
    finally:
        pieces.chat_template = None
    assert pieces.decode(chat.context) == "<user>The old farmer slept."
    assert pieces.decode(chat.question) == "\nWho slept?</user><model> It was"
    assert pieces.decode(plain.context) == "<bos>  The old farmer slept."


@pytest.mark.parametrize("limit", [6, 7, 10, 11, 31])
def test_a_long_prompt_loses_its_middle(words, limit):
    sample = sample_of("one fox slept . " * 10 + "the end .", " question the code of bear is")
    whole, cut = encode(words, sample, chat=False), encode(words, sample, chat=False, limit=limit)
    tail = limit - limit // 2
    assert cut.ids == whole.ids[: limit // 2] + whole.ids[len(whole) - tail :]
    assert cut.question == whole.question[-tail:]
    assert encode(words, sample, chat=False, limit=len(whole)) == whole


def test_a_part_without_a_token_and_a_slow_tokenizer_are_refused(words):
    with pytest.raises(ValueError, match="question of sample '0' has no token"):
        encode(words, sample_of("one fox slept .", ""), chat=False)
    with pytest.raises(ValueError, match="must be a fast one"):
        encode(SimpleNamespace(is_fast=False), sample_of("a", "b"), chat=False)


# --- registry --------------------------------------------------------------------------------------------------------


def test_the_registry_knows_every_task_by_its_own_name():
    known = registry()
    assert all(name == task.name for name, task in known.items())
    assert len(known) == 3 + 11 + 21 + 12
    groups = [find_tasks([group]) for group in GROUPS]
    assert [len(group) for group in groups] == [11, 21, 12]


def test_names_are_found_once_and_unknown_ones_refused():
    names = [task.name for task in find_tasks(["vt", "ruler", "needle"])]
    assert names[0] == "vt"
    assert len(names) == len(set(names)) == 12
    with pytest.raises(ValueError, match="tasks='niah_singel_1': did you mean 'niah_single_1'"):
        find_tasks(["niah_singel_1"])
    with pytest.raises(ValueError, match="at least one task"):
        find_tasks([])


GENERATED = [name for name in registry() if not name.startswith(("longbench", "infinitebench"))]


@pytest.mark.parametrize("kind", ["words", "pieces"])
@pytest.mark.parametrize("name", GENERATED)
def test_generated_prompts_fill_the_length_asked_for_with_any_tokenizer(name, kind, request):
    tokenizer, task = request.getfixturevalue(kind), registry()[name]
    samples = task.samples(tokenizer, 1024, 6, seed=5)
    assert samples[:2] == task.samples(tokenizer, 1024, 2, seed=5)
    assert {text_of(sample) for sample in samples}.isdisjoint(map(text_of, task.samples(tokenizer, 1024, 2, seed=6)))
    assert len(samples) == len({sample.id for sample in samples}) == 6
    for sample in samples:
        wanted = sample.labels.get("length", 1024)
        assert 0.9 * wanted < len(encode(tokenizer, sample, chat=task.chat)) <= wanted
        assert task.metric(" ".join(sample.answers), sample) == 1.0
        assert task.metric("", sample) == 0.0


@pytest.mark.parametrize("name", GENERATED)
def test_impossible_numbers_are_refused(words, name):
    with pytest.raises(ValueError, match=r"tokens=\d+: "):
        registry()[name].samples(words, 24, 1, 0)
    with pytest.raises(ValueError, match="count=0"):
        registry()[name].samples(words, 1024, 0, 0)


# --- needle ----------------------------------------------------------------------------------------------------------


def test_the_needle_in_the_built_in_vocabulary_has_no_unknown_word_and_exactly_the_length(words):
    for name in ("needle", "multi_needle"):
        for sample in registry()[name].samples(words, 300, 6, 0):
            ids = encode(words, sample, chat=False).ids
            assert len(ids) == 300
            assert words.unk_token_id not in ids
            lead = sample.question.removeprefix(" question ")
            assert f"{lead} {sample.answers[0]} ." in sample.context
            assert sample.max_new_tokens == len(sample.answers[0].split()) + 1


def test_several_needles_share_a_context_and_each_is_asked_for_once(words):
    samples = registry()["multi_needle"].samples(words, 300, 16, 0)
    contexts = Counter(sample.context for sample in samples)
    assert set(contexts.values()) <= {4, 8}
    assert len({(sample.context, sample.question) for sample in samples}) == 16
    assert len({sample.context for sample in registry()["needle"].samples(words, 300, 6, 0)}) == 6


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_the_grid_puts_the_fact_at_every_depth_of_every_length(kind, request):
    tokenizer = request.getfixturevalue(kind)
    cells = len(LENGTHS) * len(DEPTHS)
    samples = registry()["needle_grid"].samples(tokenizer, 800, 2 * cells, 0)
    assert Counter((s.labels["length"], s.labels["depth"]) for s in samples) == Counter(
        {(round(part * 800), depth): 2 for part in LENGTHS for depth in DEPTHS}
    )
    for sample in samples:
        sentences = re.findall(r"[^.]+\.", sample.context)
        lead = sample.question.removeprefix(" question ")
        (place,) = [i for i, sentence in enumerate(sentences) if sentence.strip().startswith(lead)]
        assert place / (len(sentences) - 1) == pytest.approx(sample.labels["depth"], abs=1 / len(sentences))


def test_moving_a_fact_changes_its_place_alone():
    text = "a b . the code of x is 1 . c d . e f ."
    assert move_fact(text, "the code of x is", 0.0) == "the code of x is 1 . a b . c d . e f ."
    assert move_fact(text, "the code of x is", 1.0) == "a b . c d . e f . the code of x is 1 ."


# --- RULER -----------------------------------------------------------------------------------------------------------

NEEDLE = re.compile(r"A magic (number|uuid) of (\S+) is (\S+)\.")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
NIAH = {  # name: needles (None: all of the text), answers, form of keys and values
    "niah_single_1": (1, 1, r"[a-z-]+", r"\d{7}"),
    "niah_single_2": (1, 1, r"[a-z-]+", r"\d{7}"),
    "niah_single_3": (1, 1, r"[a-z-]+", UUID),
    "niah_multikey_1": (4, 1, r"[a-z-]+", r"\d{7}"),
    "niah_multikey_2": (None, 1, r"[a-z-]+", r"\d{7}"),
    "niah_multikey_3": (None, 1, UUID, UUID),
    "niah_multivalue": (4, 4, r"[a-z-]+", r"\d{7}"),
    "niah_multiquery": (4, 4, r"[a-z-]+", r"\d{7}"),
}


@pytest.mark.parametrize("name", NIAH)
def test_the_answers_are_what_the_needles_say_of_the_keys_asked_for(pieces, name):
    count, answers, key_form, value_form = NIAH[name]
    for sample in registry()[name].samples(pieces, 1500, 4, 0):
        needles = NEEDLE.findall(sample.context)
        assert len(needles) == count or (count is None and len(needles) > 15)
        values = [value for _, _, value in needles]
        assert len(set(values)) == len(values)
        for _, key, value in needles:
            assert re.fullmatch(key_form, key)
            assert re.fullmatch(value_form, value)
        asked = {key for _, key, _ in needles if re.search(rf"\b{key}\b", sample.question)}
        said = {value for _, key, value in needles if key in asked}
        assert said == set(sample.answers)
        assert len(sample.answers) == answers
        assert all(key in sample.answer_prefix for key in asked)
        assert not any(value in sample.question + sample.answer_prefix for value in said)


def test_needles_lie_all_over_the_text(pieces):
    samples = registry()["niah_single_2"].samples(pieces, 1000, 40, 0)
    places = [sample.context.index("A magic number") / len(sample.context) for sample in samples]
    assert sum(place < 0.3 for place in places) > 5
    assert sum(place > 0.7 for place in places) > 5


def test_the_chain_of_variables_has_the_value_and_no_other_does(pieces):
    for sample in registry()["vt"].samples(pieces, 1500, 4, 0):
        (value,) = re.findall(r"value (\d{5})", sample.question)
        known: dict[str, str] = {}
        for left, right in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", sample.context):
            known[left] = known.get(right, right)
        assert len(known) == 10  # the worked example has five more
        assert {name for name, number in known.items() if number == value} == set(sample.answers)
        example = sample.context.split("\n\nFollow")[0]
        assert all(name in example.rsplit(":", 1)[1].split() for name, number in known.items() if number != value)


@pytest.mark.parametrize(("tokens", "often", "seldom"), [(1024, 6, 1), (4096, 30, 3)])
def test_common_words_occur_as_often_as_in_ruler(pieces, tokens, often, seldom):
    (sample,) = registry()["cwe"].samples(pieces, tokens, 1, 0)
    listed = re.findall(r"(\d+)\. (\w+)", sample.context.split("\n\n")[-1])
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    counts = Counter(word for _, word in listed)
    assert {word for word, count in counts.items() if count == often} == set(sample.answers)
    assert len(sample.answers) == 10
    assert set(counts.values()) == {often, seldom}


def test_frequent_words_fall_with_the_square_of_the_rank(pieces):
    (sample,) = registry()["fwe"].samples(pieces, 4096, 1, 0)
    counts = Counter(re.findall(r"\.\.\.|\b[a-z]{6}\b", sample.context.split("frequent? ")[1])).most_common()
    assert counts[0][0] == "..."
    assert tuple(word for word, _ in counts[1:4]) == sample.answers
    assert counts[3][1] > counts[4][1]
    assert counts[0][1] / counts[1][1] == pytest.approx(4, rel=0.05)
    assert counts[0][1] / counts[2][1] == pytest.approx(9, rel=0.05)


def test_an_essay_of_the_data_folder_takes_the_place_of_generated_sentences(pieces, tmp_path):
    (tmp_path / "needle").mkdir()
    rows = [{"text": "Zebras sing. Do they?"}, {"text": "They do!"}]
    with gzip.open(tmp_path / "needle" / "paul_graham_essays.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    (given,) = registry(tmp_path)["niah_single_2"].samples(pieces, 600, 1, 0)
    (own,) = registry()["niah_single_2"].samples(pieces, 600, 1, 0)
    hay = NEEDLE.sub("", given.context.split("\n", 1)[1]).split()
    assert hay[:6] == "Zebras sing. Do they? They do!".split()
    assert set(hay) == {"Zebras", "sing.", "Do", "they?", "They", "do!"}
    assert (given.labels["haystack"], own.labels["haystack"]) == ("given essay", "generated")


# --- LongBench and InfiniteBench -------------------------------------------------------------------------------------

PROMPTS = {name: "Read.\n{context}\nAsk {input}\nAnswer:" for name in longbench.NAMES}


@pytest.fixture
def folder(tmp_path):
    """A data folder with made-up rows: one data set plain, one compressed, one with two questions."""
    place = tmp_path / "longbench"
    place.mkdir()
    (place / "dataset2prompt.json").write_text(json.dumps(PROMPTS))
    (place / "dataset2maxlen.json").write_text(json.dumps(dict.fromkeys(longbench.NAMES, 7)))
    row = {"input": "who?", "context": "A fox.", "answers": ["fox", "a fox"], "length": 2, "all_classes": None}
    (place / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"input": "what?"}) + "\n")
    with gzip.open(place / "trec.jsonl.gz", "wt") as file:
        file.write(json.dumps(row | {"answers": ["Food"], "all_classes": ["Food", "Date"]}) + "\n")
    place = tmp_path / "infinitebench"
    place.mkdir()
    rows = {
        "passkey": {"id": 3, "context": "key 71432.", "input": "What is it?", "answer": ["71432"], "options": []},
        "longbook_choice_eng": {
            "id": 0, "context": "Book.", "input": "Who?", "answer": ["Ann"], "options": ["Bob", "Ann", "Eve", "Joe"]
        },
        "code_debug": {
            "id": 0, "context": "def f(): 1/0", "input": "", "answer": "f", "options": ["g", "h", "f", "k"]
        },
        "math_calc": {"id": 0, "context": "1 + 2", "input": "", "answer": [1, 3], "options": []},
        "longbook_qa_eng": {"id": 0, "context": "Book.", "input": "Who?", "answer": '["Ann", "Eve"]', "options": []},
    }  # fmt: skip
    for name, row in rows.items():
        (place / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_longbench_rows_become_the_official_prompt_cut_behind_the_context(words, folder):
    task = registry(folder)["longbench_hotpotqa"]
    first, second = task.samples(words, 512, 9, 0)
    assert first.context == second.context == "Read.\nA fox."
    assert first.question == "\nAsk who?\nAnswer:"
    assert second.question == "\nAsk what?\nAnswer:"
    assert (first.id, first.answers, first.max_new_tokens) == ("0", ("fox", "a fox"), 7)
    assert len(task.samples(words, 512, 1, 0)) == 1
    assert task.chat
    assert task.metric("A FOX!", first) == 1.0


def test_longbench_classes_reach_the_metric_and_few_shot_prompts_are_not_chats(words, folder):
    task = registry(folder)["longbench_trec"]
    (sample,) = task.samples(words, 512, 9, 0)
    assert not task.chat
    assert task.metric("\nFood\nDate", sample) == 1.0
    assert task.metric("Food or Date", sample) == 0.5


def test_longbench_without_its_prompts_says_which_file_it_needs(words, tmp_path):
    with pytest.raises(ValueError, match="data_dir=None: task 'longbench_lcc'"):
        registry()["longbench_lcc"].samples(words, 512, 1, 0)
    with pytest.raises(ValueError, match=r"needs .*dataset2prompt\.json"):
        registry(tmp_path)["longbench_lcc"].samples(words, 512, 1, 0)


def test_what_is_not_in_the_folder_is_asked_of_the_hub(words, folder, monkeypatch):
    asked = []
    row = {"question": "who?", "context": "A fox.", "answers": ["fox"], "length": 2, "all_classes": None}

    def load_dataset(repository, name, split):
        asked.append((repository, name, split))
        if name == "lcc":
            raise ConnectionError("no net")
        return [row, row, row]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    samples = registry(folder)["longbench_musique"].samples(words, 512, 2, 0)
    assert [sample.question for sample in samples] == ["\nAsk who?\nAnswer:"] * 2
    assert asked == [("Xnhyacinth/LongBench", "musique", "test")]
    with pytest.raises(ValueError, match="data set 'lcc': not in data_dir, and not on the hub: no net"):
        registry(folder)["longbench_lcc"].samples(words, 512, 2, 0)


@pytest.mark.parametrize(
    ("name", "right", "half"),
    [
        ("passkey", "71432.", None),
        ("longbook_choice_eng", "B", None),
        ("code_debug", "C. f", None),
        ("math_calc", "1, 3]", "1, 4]"),
        ("longbook_qa_eng", "eve", None),
    ],
)
def test_infinitebench_rows_become_prompts_and_scores(words, folder, name, right, half):
    task = registry(folder)[f"infinitebench_{name}"]
    (sample,) = task.samples(words, 512, 9, 0)
    row = json.loads((folder / "infinitebench" / f"{name}.jsonl").read_text())
    assert sample.context.endswith(row["context"])
    assert "{" not in sample.question
    assert all(option in sample.question for option in row["options"])
    assert row["input"] in sample.question
    assert task.metric(right, sample) == 1.0
    assert task.metric("wrong", sample) == 0.0
    if half:
        assert task.metric(half, sample) == 0.5


def test_every_infinitebench_task_has_a_metric_that_takes_an_empty_prediction():
    for name in infinitebench.NAMES:
        sample = sample_of("c", "q")
        answers = ("1", "A") if name in ("longbook_choice_eng", "code_debug") else ("1",)
        task = infinitebench.InfiniteBench(name, None)
        assert task.metric("", Sample(**{**vars(sample), "answers": answers})) == 0.0


@pytest.mark.skipif(DATA is None, reason="KVPASS_DATA does not name a folder with the official rows")
@pytest.mark.parametrize(
    "name", [*map("longbench_{}".format, longbench.NAMES), *map("infinitebench_{}".format, infinitebench.NAMES)]
)
def test_official_rows_become_prompts_that_lose_their_middle(words, name):
    assert DATA is not None
    group, dataset = name.split("_", 1)
    if not list(Path(DATA, group).glob(f"{dataset}.jsonl*")):
        pytest.skip(f"{DATA} has no {dataset}")
    task = registry(Path(DATA))[name]
    for sample in task.samples(words, 512, 2, 0):
        whole, cut = encode(words, sample, chat=True), encode(words, sample, chat=True, limit=512)
        assert len(cut) == min(512, len(whole))
        assert cut.ids[:256] == whole.ids[:256]
        assert cut.ids[-256:] == whole.ids[-256:]
        assert sample.answers
        assert 0.0 <= task.metric(sample.answers[0], sample) <= 1.0
        assert task.metric("", sample) == 0.0

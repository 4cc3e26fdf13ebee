"""Tasks: what a prompt promises is read off the prompt itself, by other means than those that made it."""

import gzip
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpass.eval.prompt import SEPARATOR, split_at_separator, without_separator
from kvpass.eval.tasks import GROUPS, Sample, encode, find_tasks, longbench, registry
from kvpass.eval.tasks.needle import DEPTHS, LENGTHS
from pairwise import each_value

TEMPLATE = "{% for m in messages %}<user>{{ m['content'] | trim }}</user>{% endfor %}<model>"


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
    assert pieces.decode(got.rest) == "\nWho slept? It was"
    assert got.ids == got.head + got.rest


def test_a_chat_template_surrounds_the_prompt_and_the_answer_prefix_follows_it(pieces):
    sample = sample_of("  The old farmer slept.", "\nWho slept?", answer_prefix=" It was")
    pieces.chat_template = TEMPLATE
    try:
        chat, plain = encode(pieces, sample, chat=True), encode(pieces, sample, chat=False)
    finally:
        pieces.chat_template = None
    assert pieces.decode(chat.head) == "<user>The old farmer slept."
    assert pieces.decode(chat.rest) == "\nWho slept?</user><model> It was"
    assert pieces.decode(plain.head) == "<bos>  The old farmer slept."


@pytest.mark.parametrize("limit", [6, 7, 10, 11, 31])
def test_a_long_prompt_loses_its_middle(words, limit):
    sample = sample_of("one fox slept . " * 10 + "the end .", " question the code of bear is")
    whole, cut = encode(words, sample, chat=False), encode(words, sample, chat=False, limit=limit)
    tail = limit - limit // 2
    assert cut.ids == whole.ids[: limit // 2] + whole.ids[len(whole) - tail :]
    assert cut.rest == whole.rest[-tail:]
    assert cut.head == cut.ids[: limit - len(cut.rest)]
    assert encode(words, sample, chat=False, limit=len(whole)) == whole
    longer = encode(words, sample_of("one fox", " slept ." * 20), chat=False, limit=limit)
    assert longer.head == longer.ids[:3], "a question of more than half of it"


def test_a_part_without_a_token_and_a_slow_tokenizer_are_refused(words):
    with pytest.raises(ValueError, match="question of sample '0' has no token"):
        encode(words, sample_of("one fox slept .", ""), chat=False)
    with pytest.raises(ValueError, match="must be a fast one"):
        encode(SimpleNamespace(is_fast=False), sample_of("a", "b"), chat=False)


# --- registry --------------------------------------------------------------------------------------------------------


def test_the_registry_knows_every_task_by_its_own_name():
    known = registry()
    assert all(name == task.name for name, task in known.items())
    assert len(known) == 11 + 1 + 11 + 1 + 21
    groups = [find_tasks([group]) for group in GROUPS]
    assert [len(group) for group in groups] == [11, 21]


def test_names_are_found_once_and_unknown_ones_refused():
    names = [task.name for task in find_tasks(["vt", "ruler", "needle"])]
    assert names[0] == "vt"
    assert len(names) == len(set(names)) == 12
    with pytest.raises(ValueError, match="tasks='niah_singel_1': did you mean 'niah_single_1'"):
        find_tasks(["niah_singel_1"])
    with pytest.raises(ValueError, match="at least one task"):
        find_tasks([])


GENERATED = [name for name in registry() if not name.startswith("longbench")]


@each_value(name=GENERATED, kind=["words", "pieces"])
def test_generated_prompts_fill_the_length_asked_for_with_any_tokenizer(name, kind, request):
    if "needle" not in name:
        pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kvpass[eval]'")
    tokenizer, task = request.getfixturevalue(kind), registry()[name]
    samples = task.samples(tokenizer, 1024, 3, seed=5)
    assert samples[:1] == task.samples(tokenizer, 1024, 1, seed=5)
    assert {text_of(sample) for sample in samples}.isdisjoint(map(text_of, task.samples(tokenizer, 1024, 1, seed=6)))
    assert len(samples) == len({sample.id for sample in samples}) == 3
    for sample in samples:
        wanted = sample.labels.get("length", 1024)
        tokens = len(encode(tokenizer, sample, chat=task.chat))
        assert 0.9 * wanted < tokens <= wanted
        if kind == "words" and "needle" in name:  # each word is a token
            assert tokens == wanted and sample.max_new_tokens == len(" , ".join(sample.answers).split()) + 1
        assert task.metric(" , ".join(sample.answers), sample) == 1.0
        assert task.metric("", sample) == 0.0


@pytest.mark.parametrize("name", GENERATED)
def test_impossible_numbers_are_refused(words, name):
    with pytest.raises(ValueError, match=r"tokens=\d+: "):
        registry()[name].samples(words, 24, 1, 0)


# --- needle ----------------------------------------------------------------------------------------------------------


def test_several_needles_share_a_context_and_each_is_asked_for_once(words):
    samples = registry()["multi_needle"].samples(words, 300, 16, 0)
    contexts = Counter(sample.context for sample in samples)
    assert set(contexts.values()) == {4}
    assert len({(sample.context, sample.question) for sample in samples}) == 16
    assert len({sample.context for sample in registry()["needle"].samples(words, 300, 6, 0)}) == 6


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_the_grid_puts_the_fact_at_every_depth_of_every_length(kind, request):
    tokenizer = request.getfixturevalue(kind)
    cells = len(LENGTHS) * len(DEPTHS)
    samples = registry()["needle_grid"].samples(tokenizer, 800, cells, 0)
    assert Counter((s.labels["length"], s.labels["depth"]) for s in samples) == Counter(
        {(round(part * 800), depth): 1 for part in LENGTHS for depth in DEPTHS}
    )
    for sample in samples:
        lead, sentences = sample.question.removeprefix(" question "), re.findall(r"[^.]+\.", sample.context)
        (place,) = [i for i, sentence in enumerate(sentences) if sentence.strip().startswith(lead)]
        assert place / (len(sentences) - 1) == pytest.approx(sample.labels["depth"], abs=1 / len(sentences))


# --- manual ----------------------------------------------------------------------------------------------------------


def test_each_answer_of_the_manual_stands_in_the_chapter_that_is_asked_about_and_is_asked_once(pieces):
    samples = registry()["manual"].samples(pieces, 8000, 40, 0)
    assert len({sample.question for sample in samples}) == len(samples) == 40
    (text,) = {sample.context for sample in samples}
    chapters = dict(re.findall(r"Chapter \d+: the ([\w ]+)\n\n(.*)", text))
    for sample in samples:
        (thing,) = [thing for thing in chapters if re.search(rf"the {thing}\b(?! of hall)", sample.question)]
        sentences = re.split(r"(?<=\.) ", chapters[thing])
        (fact,) = [sentence for sentence in sentences if re.search(rf"(?<!\w){sample.answers[0]}(?!\w)", sentence)]
        shared = {word for word in re.findall(r"\w+", sample.question) if word in fact}
        assert shared - {"the", "is", "of"} > {thing}, "what is asked is said there, of this thing"
    prompts = [encode(pieces, sample, chat=True) for sample in samples]
    assert len({prompt.head for prompt in prompts}) == 1, "read once for all questions"


def test_a_long_manual_goes_on_in_further_halls_and_many_questions_in_further_manuals(pieces):
    long, many = (registry()["manual"].samples(pieces, tokens, 30, 0) for tokens in (16000, 1000))
    assert "of hall 2" in long[0].context
    assert len({sample.context for sample in many}) > 1 and len({sample.id for sample in many}) == 30


NEEDLE = re.compile(r"A magic (number|uuid) of (\S+) is (\S+)\.")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
NIAH = {  # needles (None: all of the text) and answers
    "single_1": (1, 1),
    "single_2": (1, 1),
    "single_3": (1, 1),
    "multikey_1": (4, 1),
    "multikey_2": (None, 1),
    "multikey_3": (None, 1),
    "multivalue": (4, 4),
    "multiquery": (4, 4),
    "requests": (4, 1),
}


@pytest.mark.parametrize("name", NIAH)
def test_the_answers_are_what_the_needles_say_of_the_keys_asked_for(pieces, name):
    count, answers = NIAH[name]
    key_form = UUID if name == "multikey_3" else r"[a-z-]+"
    value_form = UUID if name in ("single_3", "multikey_3") else r"\d{7}"
    for sample in registry()[f"niah_{name}"].samples(pieces, 1500, 4, 0):
        needles = NEEDLE.findall(sample.context)
        assert len(needles) == count or (count is None and len(needles) > 15)
        values = [value for _, _, value in needles]
        assert len(set(values)) == len(values)
        assert all(re.fullmatch(key_form, key) and re.fullmatch(value_form, value) for _, key, value in needles)
        asked = {key for _, key, _ in needles if re.search(rf"\b{key}\b", sample.question)}
        said = {value for _, key, value in needles if key in asked}
        assert said == set(sample.answers)
        assert len(sample.answers) == answers
        assert all(key in sample.answer_prefix for key in asked)
        assert not any(value in sample.question + sample.answer_prefix for value in said)


def test_each_needle_of_a_text_is_asked_for_alone(pieces):
    samples = registry()["niah_requests"].samples(pieces, 1000, 6, 0)
    first, second = samples[:4], samples[4:]
    assert len({sample.context for sample in first}) == len({sample.context for sample in second}) == 1
    assert {sample.answers[0] for sample in first} == {value for *_, value in NEEDLE.findall(first[0].context)}
    assert first[0].context != second[0].context
    assert len({sample.id for sample in samples}) == 6
    heads = [encode(pieces, sample, chat=False).head for sample in first]
    assert all(head == heads[0] for head in heads), "what scope context compresses"


def test_needles_lie_all_over_the_text(pieces):
    samples = registry()["niah_single_2"].samples(pieces, 400, 40, 0)
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


pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kvpass[eval]'")


@pytest.fixture
def folder(tmp_path):
    """A data folder with made-up rows: one data set plain, one compressed, one with two questions."""
    place = tmp_path / "longbench"
    place.mkdir()
    row = {"input": "who?", "context": "A fox.", "answers": ["fox", "a fox"], "length": 2, "all_classes": None}
    (place / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"input": "what?"}) + "\n")
    with gzip.open(place / "trec.jsonl.gz", "wt") as file:
        file.write(json.dumps(row | {"answers": ["Food"], "all_classes": ["Food", "Date"]}) + "\n")
    return tmp_path


def test_longbench_rows_become_the_prompt_of_the_harness_cut_behind_the_context(words, folder):
    task = registry(folder)["longbench_hotpotqa"]
    first, second = task.samples(words, 512, 9, 0)
    assert first.context == second.context
    assert first.context.startswith("Answer the question based on the given passages. Only give me the answer")
    assert first.context.endswith("The following are given passages.\nA fox.")
    assert first.question.endswith("\n\nQuestion: who?\nAnswer:")
    assert second.question == first.question.replace("who?", "what?")
    assert (first.id, first.answers, first.max_new_tokens) == ("0", ("fox", "a fox"), 32)
    assert len(task.samples(words, 512, 1, 0)) == 1
    assert task.chat and task.metric("A FOX!", first) == 1.0
    classed = registry(folder)["longbench_trec"]  # a few-shot prompt is not a chat; classes reach the metric
    (sample,) = classed.samples(words, 512, 9, 0)
    assert not classed.chat
    assert (classed.metric("\nFood\nDate", sample), classed.metric("Food or Date", sample)) == (1.0, 0.5)


ROW = {"input": "who?", "context": "A fox.", "answers": ["fox"], "length": 2, "all_classes": None}


def test_an_answer_that_is_a_text_is_read_and_a_line_that_is_no_row_refused_by_file_and_number(words, folder):
    """What else is read and refused of lines: test_own_data.py."""
    file, task = folder / "longbench" / "qasper.jsonl", registry(folder)["longbench_qasper"]
    for left_out in ROW:
        line = json.dumps({name: value for name, value in ROW.items() if name != left_out})
        file.write_text(f"{json.dumps(ROW | {'answers': 'fox'})}\n\n{line}\n")
        assert task.samples(words, 512, 1, 0)[0].answers == ("fox",)
        with pytest.raises(ValueError, match=r"longbench.qasper\.jsonl, line 3: is no row of LongBench: "):
            task.samples(words, 512, 2, 0)


@pytest.mark.parametrize(
    ("name", "content"),
    [("qasper.jsonl", b"\xff\n"), ("qasper.jsonl.gz", gzip.compress(json.dumps(ROW).encode(), mtime=0)[:-9])],
)
def test_a_file_that_cannot_be_read_is_named(words, folder, name, content):
    (folder / "longbench" / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(name)}: cannot be read: "):
        registry(folder)["longbench_qasper"].samples(words, 512, 2, 0)


def test_every_data_set_of_the_harness_has_one_border_between_context_and_question():
    assert len(longbench.NAMES) == 21
    for name in longbench.NAMES:
        config = longbench.harness_task(name)
        assert config["doc_to_text"].count("{{context}}") == 1 and config["task"] == f"longbench_{name}"
        assert set(re.findall(r"{{(\w+)}}", config["doc_to_text"])) <= {"context", "question"}


def test_longbench_categories_are_the_groups_of_the_harness():
    import lm_eval
    import yaml

    groups = {}
    for path in (Path(lm_eval.__file__).parent / "tasks" / "longbench").glob("_longbench_*.yaml"):
        if "group_alias" in (group := yaml.safe_load(path.read_text())) and not group["group"].endswith("_e"):
            groups[group["group"]] = {name.removeprefix("longbench_") for name in group["task"]}
    assert sorted(map(sorted, groups.values())) == sorted(map(sorted, longbench.CATEGORIES.values()))


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
    assert [sample.question.split("Question: ")[1] for sample in samples] == ["who?\nAnswer:"] * 2
    assert asked == [("Xnhyacinth/LongBench", "musique", "test")]
    with pytest.raises(ValueError, match="data set 'lcc': not in data_dir, and not on the hub: no net"):
        registry(folder)["longbench_lcc"].samples(words, 512, 2, 0)


def test_the_last_separator_counts():
    text = f"one{SEPARATOR} two three{SEPARATOR} four"
    assert split_at_separator(text) == ("one two three", " four")
    assert without_separator(text) == "one two three four"

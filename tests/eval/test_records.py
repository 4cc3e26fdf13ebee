"""The file of answered samples, and rows made of it."""

import dataclasses
import resource

import msgspec
import pytest
from rich.console import Console

from kvpass.eval.records import Question, Record, RecordFile, results_tables, summarize
from kvpass.eval.runner import Kept

ANSWERED = Question(
    task="t", sample="0", policy="p", budget="1", scope="prompt", num_uncompressed_tokens=1, model="m", code="c",
    backend="eager", device="cpu", seed=0, max_new_tokens=3, stops=[4], libraries={"torch": "2"}, prompt="d",
)  # fmt: skip
KEPT = Kept(**dict.fromkeys((field.name for field in dataclasses.fields(Kept)), 1))


def record(key: str, *, scope="prompt", budget="1", score=1.0, prediction="1") -> Record:
    question = msgspec.structs.replace(ANSWERED, scope=scope, budget=budget)
    return Record(
        key=key, label="p", question=question, answers=["1"], prediction=prediction, score=score, generated_tokens=1,
        kept=KEPT, labels={"depth": 0.25, "length": 3},
    )  # fmt: skip


def test_a_record_file_gives_back_what_was_added_and_cuts_off_a_torn_line(tmp_path):
    path = tmp_path / "samples.jsonl"
    file = RecordFile(path)
    added = [record("a", prediction="1\n\u2028é"), record("b"), record("a", score=0.0)]
    for one in added:
        file.add(one)
    whole = path.read_bytes()
    assert whole.count(b"\n") == 3
    path.write_bytes(whole + b'{"key": "c", "sco')
    read = RecordFile(path)
    assert path.read_bytes() == whole
    assert read.records == {"a": added[2], "b": added[1]}


def test_a_record_that_the_disk_takes_a_part_of_is_an_error_and_leaves_the_file_alone(tmp_path):
    path = tmp_path / "samples.jsonl"
    file = RecordFile(path)
    file.add(record("a"))
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) * 3 // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            file.add(record("b"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    file.add(record("c"))
    assert list(RecordFile(path).records) == ["a", "c"] == list(file.records)


WITHOUT_A_SCORE = msgspec.json.encode({k: v for k, v in msgspec.to_builtins(record("b")).items() if k != "score"})


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"score": 1}', b"1", WITHOUT_A_SCORE])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(msgspec.json.encode(record("a")) + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 2: not a record of this version"):
        RecordFile(path)


def test_a_row_is_the_mean_of_its_condition_alone():
    rows = summarize([record("a"), record("b", score=0.5), record("c", scope="context"), record("d", budget="2")])
    found = [(row.scope, row.budget, row.samples, row.score) for row in rows]
    assert found == [("prompt", "1", 2, 0.75), ("context", "1", 1, 1.0), ("prompt", "2", 1, 1.0)]


def test_an_attention_mass_that_one_sample_lacks_has_no_mean():
    def held(mass):
        return msgspec.structs.replace(record("a"), kept=dataclasses.replace(KEPT, attention_mass=mass))

    rows = [summarize([held(0.5), held(second)])[0] for second in (0.75, None)]
    assert [row.kept.attention_mass for row in rows] == [0.625, None]
    lines = results_tables(rows).markdown().splitlines()
    column = lines[0].split(" | ").index("attention mass")
    assert [line.split(" | ")[column] for line in lines[2:]] == ["62.5%", "-"]


def test_longbench_has_a_mean_of_each_category_with_every_task_counted_once(capsys):
    def answered(task: str, *scores: float, budget="0.5"):
        question = msgspec.structs.replace(ANSWERED, task=task, budget=budget)
        return [msgspec.structs.replace(record("a", score=score), question=question) for score in scores]

    plain = answered("niah_single_1", 0.0)
    half = [*answered("longbench_qasper", 0.25), *answered("longbench_lcc", 0.125)]
    half += answered("longbench_narrativeqa", 1.0, 1.0, 0.25)  # more samples, no more weight
    quarter = answered("longbench_qasper", 0.5, budget="0.25") + answered("longbench_narrativeqa", 0.25, budget="0.25")
    rows = summarize([*plain, *half, *quarter])
    text = results_tables(rows).markdown()
    _, table = text.split("**LongBench by category: means of the tasks that were run**\n\n")
    assert table.splitlines() == [
        "| category (tasks) | scope | policy | budget | score % |",
        "| --- | --- | --- | --- | ---: |",
        "| single-doc QA (2 of 4) | prompt | p | 0.5 | 50.00 |",
        "| single-doc QA (2 of 4) | prompt | p | 0.25 | 37.50 |",
        "| code (1 of 2) | prompt | p | 0.5 | 12.50 |",
    ]
    for width in (80, 40):
        Console(width=width).print(results_tables(rows))
        out = capsys.readouterr().out.partition("LongBench by category")[2]
        assert "37.50" in out and "no room" not in out, "it has no column that is left out"
    assert "LongBench" not in results_tables(summarize(plain)).markdown()


@pytest.mark.parametrize("policy", ["lava", "cake:window=8,tau1=1.6,tau2=0.4"])
def test_a_narrow_terminal_shows_what_was_asked_and_the_score_and_leaves_out_bytes_first(policy, capsys):
    (row,) = summarize([record("a")])
    row = dataclasses.replace(row, task="niah_multikey_1", scope="context", policy=policy, budget="0.125")
    for width in (200, 80):
        Console(width=width).print(results_tables([row]))
        out = capsys.readouterr().out
        said = out.partition("no room for")[0]
        words = ("niah_multikey_1", "context", policy, "0.125", "100.00")
        assert all(word in said for word in words) and "…" not in out
        assert ("KiB" in said) == (width == 200)
        assert ("no room for: cache KiB, kept KiB" in out) == (width < 200)


def test_every_field_of_a_question_is_part_of_its_key():
    for name, value in msgspec.structs.asdict(ANSWERED).items():
        other = {str: "other", int: 9, list: [7], dict: {"torch": "3"}}[type(value)]
        assert msgspec.structs.replace(ANSWERED, **{name: other}).key != ANSWERED.key, name

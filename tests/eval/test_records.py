"""The file of answered samples, and rows made of it."""

from __future__ import annotations

import json

import pytest

from kvpass.eval.records import RecordFile, record_key, summarize


def record(key: str, **more):
    numbers = dict.fromkeys(
        ("budget_entries", "budget_bytes", "kept_entries", "kept_fraction", "kept_bytes", "cache_bytes"), 1.0
    )
    return {"key": key, "task": "t", "label": "p", "budget": "1", "scope": "prompt", "score": 1.0, **numbers, **more}


def test_a_record_file_gives_back_what_was_added_and_cuts_off_a_torn_line(tmp_path):
    path = tmp_path / "samples.jsonl"
    file = RecordFile(path)
    added = [record("a", prediction="1\n\u2028é"), record("b", prediction="\ud83d"), record("a", score=0.0)]
    for one in added:
        file.add(one)
    whole = path.read_bytes()
    assert whole.count(b"\n") == 3
    path.write_bytes(whole + b'{"key": "c", "sco')
    read = RecordFile(path)
    assert path.read_bytes() == whole
    assert read.records == {"a": added[2], "b": added[1]}
    assert "a" in read
    assert "c" not in read


WITHOUT_A_SCORE = json.dumps({name: value for name, value in record("b").items() if name != "score"}).encode()


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"score": 1}', b"1", WITHOUT_A_SCORE])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(json.dumps(record("a")).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 2"):
        RecordFile(path)


def test_a_row_is_the_mean_of_its_condition_alone():
    rows = summarize([record("a"), record("b", score=0.5), record("c", scope="context"), record("d", budget="2")])
    assert [(row.scope, row.budget, row.samples, row.score) for row in rows] == [
        ("prompt", "1", 2, 0.75),
        ("context", "1", 1, 1.0),
        ("prompt", "2", 1, 1.0),
    ]


def test_a_key_needs_every_field():
    with pytest.raises(KeyError):
        record_key({"task": "t"})

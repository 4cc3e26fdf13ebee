"""The file of answered samples."""

import resource

import msgspec
import pytest

from answered import ANSWERED, record
from kvpass.eval.records import RecordFile


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


@pytest.mark.parametrize("line", [b"[]", b'{"score": 1}', b"1", WITHOUT_A_SCORE])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(msgspec.json.encode(record("a")) + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 2: not a record of this version"):
        RecordFile(path)


LINES = [msgspec.json.encode(record(key)) + b"\n" for key in "abc"]


@pytest.mark.parametrize(
    ("damaged", "left"),
    [
        (LINES[0] + LINES[1][:-40] + b"\n" + LINES[2], "ac"),  # a part, then the next run's line
        (LINES[0] + LINES[1][:-40] + LINES[2], "ac"),  # a part, then a whole line behind it
        (LINES[0] + LINES[1][:1] + b"\n" + LINES[2], "ac"),
        (LINES[0] + 200 * b"\0" + b"\n" + LINES[2], "ac"),  # a file system that lost what was written
        (LINES[0] + b'{"key":"\xff"}\n' + LINES[2], "ac"),
        (b"\n" + LINES[0] + LINES[1], "ab"),
    ],
)
def test_a_record_cut_short_is_left_out_with_a_printed_line_and_no_other_one(tmp_path, capsys, damaged, left):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(damaged)
    assert "".join(RecordFile(path, writes=False).records) == left
    assert path.read_bytes() == damaged
    number = 1 if left == "ab" else 2
    assert f"samples.jsonl, line {number}: cut short, left out" in capsys.readouterr().err
    file = RecordFile(path)
    assert path.read_bytes() == b"".join(line for line, key in zip(LINES, "abc", strict=True) if key in left)
    file.add(record("d"))
    capsys.readouterr()
    assert "".join(RecordFile(path).records) == left + "d"
    assert capsys.readouterr().err == ""


def test_every_field_of_a_question_is_part_of_its_key():
    for name, value in msgspec.structs.asdict(ANSWERED).items():
        other = {str: "other", int: 9, list: [7], dict: {"torch": "3"}, bool: False}[type(value)]
        assert msgspec.structs.replace(ANSWERED, **{name: other}).key != ANSWERED.key, name

"""The file of answered samples, which makes runs resumable."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.console import Console

from kvpass.eval.runner import Kept
from kvpass.replace_file import write_shared


class Question(msgspec.Struct, kw_only=True, frozen=True):
    """What decides an answer; model, code and prompt as digests, the policy with all its options."""

    task: str
    sample: str
    policy: str
    budget: str
    scope: str
    num_uncompressed_tokens: int
    length: int
    chat: bool
    model: str
    code: str
    backend: str
    device: str
    seed: int
    max_new_tokens: int
    stops: list[int]
    libraries: dict[str, str]
    prompt: str

    @property
    def key(self) -> str:
        """A digest, by which a sample already answered is known."""
        return hashlib.blake2s(msgspec.json.encode(self, order="sorted"), digest_size=12).hexdigest()

    @property
    def setting(self) -> tuple[str | int | bool, ...]:
        """What the questions of one table have in common."""
        uncompressed = self.num_uncompressed_tokens
        return self.model, self.length, self.seed, self.chat, uncompressed, self.backend, self.device


class Record(msgspec.Struct, kw_only=True, frozen=True):
    """One answered sample.

    Attributes:
        label: the policy as it was typed. run: the run of the manifest that answered. context_end: the last characters
            of the context. prompt_tokens: with those that were cut. kept: what compression left of the prompt.
    """

    key: str
    label: str
    run: str
    question: Question
    question_text: str
    context_end: str
    prompt_tokens: int
    cut_tokens: int
    answers: list[str]
    prediction: str
    score: float
    generated_tokens: int
    kept: Kept
    labels: dict[str, int | float | str]


class RecordFile:
    """A file of JSON lines, one per sample.

    Each line is written in one append; of equal keys the last line counts. A last line that an interruption left
    without its end is removed when the file is opened, and so is, with a printed line, one that is no JSON. Without
    ``writes`` the file stays as it is, and new records are only remembered.

    Raises:
        ValueError: a line is no record of this version; path and line are named.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self.records: dict[str, Record] = {}
        content = path.read_bytes() if path.is_file() else b""
        whole = []
        for number, line in enumerate(content.split(b"\n")[:-1], 1):
            if not _is_json(line):
                said = f"{path}, line {number}: cut short, left out; 'kvpass eval' answers its sample again"
                Console(stderr=True).print(said, markup=False, highlight=False, soft_wrap=True)
                line = line[max(line.rfind(_BEGIN), 0) :]  # a whole record that was appended to a part of another
            if _is_json(line):
                self._remember(self._decoded(line, number))
                whole.append(line + b"\n")
        if writes and (sound := b"".join(whole)) != content:
            write_shared(path, sound)

    def _decoded(self, line: bytes, number: int) -> Record:
        try:
            return msgspec.json.decode(line, type=Record)
        except msgspec.ValidationError as error:
            place = f"{self.path}, line {number}"
            raise ValueError(
                f"{place}: not a record of this version of kvpass eval ({error}); give another output"
            ) from error

    def _remember(self, record: Record) -> None:
        self.records.pop(record.key, None)  # the newest is the last
        self.records[record.key] = record

    def add(self, record: Record) -> None:
        """Append a record; it is on disk when this returns, or the file is as before if this raises."""
        if self.writes:
            with self.path.open("ab", buffering=0) as file:
                size, line = file.tell(), msgspec.json.encode(record) + b"\n"
                try:
                    while line:  # a disk that is nearly full takes a part, and fails at the next
                        line = line[file.write(line) :]
                    os.fsync(file)
                except BaseException:
                    file.truncate(size)
                    raise
        self._remember(record)


_BEGIN = b'{"key":"'
"""How the line of a record begins."""


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except ValueError:
        return False
    return True


Identity = tuple[object, ...]
"""Setting, task, sample, scope, label and budget of a record."""


def identity(record: Record) -> Identity:
    question = record.question
    return question.setting, question.task, question.sample, question.scope, record.label, question.budget


def newest(records: Iterable[Record]) -> dict[Identity, Record]:
    """Of the records of one identity, which differ in what the code, a calibration or the task's data were, the last.

    A policy that was typed in two ways has the label that was typed last.
    """
    records = list(records)
    labels = {(record.question.policy, record.question.code): record.label for record in records}
    named = (
        msgspec.structs.replace(record, label=labels[record.question.policy, record.question.code])
        for record in records
    )
    return {identity(record): record for record in named}

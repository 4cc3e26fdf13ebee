"""``kvpass eval``: what it refuses, resuming, keys, tables, command line."""

import copy
import csv
import json
import shutil
import sys
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import kvpass
from command_line import invoke
from eval_models import MODEL, TOKENIZER, model_folder
from kvpass import POLICIES
from kvpass.calibration.fit import Calibration
from kvpass.compiler.prompt import PromptReader
from kvpass.eval import run
from kvpass.eval.options import EvalOptions
from kvpass.eval.records import RecordFile
from kvpass.eval.results import read_records
from kvpass.eval.run import Evaluation
from kvpass.eval.runner import Runner
from kvpass.eval.tasks import encode
from kvpass.eval.tasks.needle import Needle
from tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("compile_once")


def options(folder, **changes):
    given = {"model": model_folder(), "policies": "full,snapkv:window=8", "budgets": "0.2,0.5", "scopes": "prompt"}
    given |= {"samples": 6, "length": 150, "output": folder, "batch": 3, "backend": "eager"}
    return EvalOptions(**given | changes)


# --- the run ---------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def count_requests(monkeypatch, *, limit: int | None = None):
    """Requests the model gets from now on; the file refuses all records after ``limit``."""
    asked, added, answers, add = [], [], Runner.greedy, RecordFile.add

    def counted(self, prompts, limits, stops, conditions):
        asked.extend(len(conditions) * list(prompts))
        return answers(self, prompts, limits, stops, conditions)

    def limited(self, record):
        if limit is not None and len(added) == limit:
            raise Interrupted
        added.append(record)
        add(self, record)

    monkeypatch.setattr(Runner, "greedy", counted)
    monkeypatch.setattr(RecordFile, "add", limited)
    return asked


def test_an_interrupted_run_goes_on_where_it_stopped_and_a_finished_one_runs_nothing(tmp_path, monkeypatch):
    once = Evaluation(options(tmp_path / "once")).run()
    with monkeypatch.context() as patch:
        count_requests(patch, limit=8)  # full's six and two of snapkv's first six
        with pytest.raises(Interrupted):
            Evaluation(options(tmp_path / "twice")).run()
    file = tmp_path / "twice" / "samples.jsonl"
    assert len(file.read_bytes().splitlines()) == 8
    (run,) = json.loads((tmp_path / "twice" / "manifest.json").read_text())["runs"].values()
    assert not run["finished"]
    with file.open("ab") as torn:
        torn.write(b'{"key": "half a li')
    with monkeypatch.context() as patch:
        asked = count_requests(patch)
        twice = Evaluation(options(tmp_path / "twice")).run()
        assert len(asked) == 18 - 8
    assert twice == once
    before = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(kvpass, "compile", None)  # nothing is even compiled
        asked = count_requests(patch)
        assert Evaluation(options(tmp_path / "twice")).run() == once
        assert asked == []
    assert file.read_bytes() == before


def test_a_sweep_reads_each_prompt_once_and_answers_as_one_condition_alone(tmp_path, monkeypatch):
    changes = {"policies": "full,snapkv:window=8,tova:window=8", "scopes": "prompt,context", "samples": 2}
    read, read_prompt = [], PromptReader.__call__
    monkeypatch.setattr(PromptReader, "__call__", lambda *args: read.append(len(args[1])) or read_prompt(*args))
    with monkeypatch.context() as patch:
        patch.setattr(run, "MOST_TOGETHER", 1)
        alone = Evaluation(options(tmp_path / "alone", **changes)).run()
    single = len(read)
    lines = (tmp_path / "alone" / "samples.jsonl").read_bytes().splitlines(keepends=True)
    done = [line for line in lines if json.loads(line)["question"]["budget"] == "0.2"]
    for folder, already in (("all", []), ("missing", done)):
        read.clear()
        (tmp_path / folder).mkdir()
        shutil.copy(tmp_path / "alone" / "manifest.json", tmp_path / folder)
        (tmp_path / folder / "samples.jsonl").write_bytes(b"".join(already))
        assert Evaluation(options(tmp_path / folder, **changes)).run() == alone
        assert sorted((tmp_path / folder / "samples.jsonl").read_bytes().splitlines(keepends=True)) == sorted(lines)
        assert len(read) == single / 5 and set(read) == {3 if already else 5}


def test_records_tables_and_manifest_say_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(Needle, "metric", lambda self, prediction, sample: len(prediction) % 4 / 4)
    monkeypatch.setattr(sys, "argv", ["/bin/kvpass", "eval", f"--output={tmp_path}", "--policies", "full"])
    (results,) = Evaluation(options(tmp_path, policies="full", scopes="prompt,context")).run()
    rows = results.rows
    records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(records) == 12
    assert len({record["key"] for record in records}) == 12
    assert all(record["score"] == len(record["prediction"]) % 4 / 4 for record in records)
    assert [(row["scope"], row["samples"]) for row in rows] == [("context", 6), ("prompt", 6)]
    for row in rows:
        own = [record for record in records if record["question"]["scope"] == row["scope"]]
        assert row["score"].mean == sum(record["score"] for record in own) / 6
        assert row["score"].low < row["score"].mean <= row["score"].high <= 1
    markdown = [line for line in (tmp_path / "results.md").read_text().splitlines() if line.startswith("|")]
    assert len(markdown) == 2 + len(rows)
    assert all(line.count("|") == markdown[0].count("|") for line in markdown)
    table = [*csv.DictReader((tmp_path / "results.csv").open())]
    assert [(line["scope"], float(line["score"])) for line in table] == [
        (row["scope"], row["score"].mean) for row in rows
    ]
    assert all(row["kept_fraction"] == 1.0 and row["budget_bytes"] == row["kept_bytes"] for row in rows)
    (run,) = json.loads((tmp_path / "manifest.json").read_text())["runs"].values()
    assert run["finished"]
    assert run["versions"]["kvpass"] == kvpass.__version__
    assert run["settings"]["seed"] == 0
    assert run["settings"]["policies"] == "full"
    assert run["command"] == ["kvpass", "eval", f"--output={tmp_path.name}", "--policies", "full"]
    assert not any(str(tmp_path) in (tmp_path / name).read_text() for name in ("manifest.json", "results.md"))


def test_a_second_run_adds_to_the_tables_of_the_folder(tmp_path, monkeypatch):
    (first,) = Evaluation(options(tmp_path, policies="full", samples=2)).run()
    (both,) = Evaluation(options(tmp_path, policies="snapkv:window=8", budgets="0.5", samples=2)).run()
    assert [row["policy"] for row in both.rows] == ["full", "snapkv:window=8"] and both.rows[0] == first.rows[0]
    assert both.rows[1]["against full"].mean == both.rows[1]["score"].mean - both.rows[0]["score"].mean
    longer = Evaluation(options(tmp_path, policies="full", samples=2, length=151)).run()
    assert [one.setting["length"] for one in longer] == [150, 151]
    assert [len(one.rows) for one in longer] == [2, 1]
    assert (tmp_path / "results.md").read_text().count(f"- model {Path(model_folder()).name}, ") == 2
    assert len(json.loads((tmp_path / "manifest.json").read_text())["runs"]) == 3
    result = invoke("table", tmp_path, columns=200)
    assert result.output.split("written:")[0].count("snapkv:window=8") == 1


def test_a_metric_or_an_answer_that_changed_changes_the_stored_score(tmp_path, monkeypatch):
    asked = options(tmp_path, policies="full", samples=2)
    Evaluation(asked).run()
    lines = (tmp_path / "samples.jsonl").read_bytes().splitlines()
    monkeypatch.setattr(Needle, "metric", lambda self, prediction, sample: 0.25)
    with monkeypatch.context() as patch:
        patch.setattr(kvpass, "compile", None)  # nothing is answered again
        (results,) = Evaluation(asked).run()
        assert results.rows[0]["score"].mean == 0.25
        records = RecordFile(tmp_path / "samples.jsonl").records.values()
        assert [record.score for record in records] == [0.25, 0.25]
        assert len((tmp_path / "samples.jsonl").read_bytes().splitlines()) == len(lines) + 2
        Evaluation(asked).run()
        assert len((tmp_path / "samples.jsonl").read_bytes().splitlines()) == len(lines) + 2


def test_of_what_an_older_version_of_the_code_answered_the_one_asked_for_last_counts(tmp_path, monkeypatch):
    asked = options(tmp_path, policies="full", samples=2)
    monkeypatch.setattr(run, "source_digest", lambda: "old")
    Evaluation(asked).run()
    monkeypatch.setattr(run, "source_digest", lambda: "new")
    Evaluation(asked).run()

    def counted():
        return {record.question.code for record in read_records(tmp_path)}

    assert counted() == {"new"}
    monkeypatch.setattr(run, "source_digest", lambda: "old")
    Evaluation(asked).run()
    assert counted() == {"old"}


def test_a_sample_says_its_question_and_what_was_cut(tmp_path, monkeypatch):
    asked = options(tmp_path, policies="full", samples=1, length=150)
    monkeypatch.setattr(run, "encode", lambda *args, limit, **settings: encode(*args, limit=100, **settings))
    Evaluation(asked).run()
    (record,) = read_records(tmp_path)
    whole = Needle("multi_needle").samples(TOKENIZER, 150, 1, 0)[0]
    assert (record.prompt_tokens - record.cut_tokens, record.cut_tokens) == (100, record.prompt_tokens - 100)
    assert 0 < record.cut_tokens <= 50
    assert record.question_text == whole.question + whole.answer_prefix
    assert whole.context.endswith(record.context_end) and len(record.context_end) == 200
    assert "1 of 1 prompts cut, by" in (tmp_path / "results.md").read_text()


def conditions_of(folder, **changes):
    made = Evaluation(options(folder, **changes)).conditions
    return {question.key for condition in made for question in condition.questions}


def test_whatever_changes_an_answer_changes_the_key(tmp_path, monkeypatch):
    base = conditions_of(tmp_path, policies="snapkv:window=8")
    assert len(base) == 12 and base == conditions_of(tmp_path, policies="snapkv:window=8")
    changes = {"policies": "snapkv:window=8,kernel_size=5", "budgets": "0.21,0.51", "scopes": "context", "seed": 1}
    changes |= {"length": 151, "num_uncompressed_tokens": 2, "dtype": "bfloat16"}
    for name, value in changes.items():
        other = conditions_of(tmp_path, **{"policies": "snapkv:window=8", name: value})
        assert base.isdisjoint(other), name
    elsewhere = {"stop_tokens": lambda model, tokenizer: frozenset({2, 5}), "version": lambda name: "0.1"}
    for name, value in elsewhere.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"kvpass.eval.run.{name}", value)
            assert base.isdisjoint(conditions_of(tmp_path, policies="snapkv:window=8")), name


WITH_FILE = {
    "kvzap": "kvzap:weights={},window=8",
    "expected_attention": "expected_attention:statistics={},window=8",
    "triattention": "triattention:statistics={},window=8",
    "duo_attention": "duo_attention:head_map={},window=8",
    "two policies": "snapkv:window=8,decode_policy=triattention,decode_statistics={}",
}


def test_every_policy_with_a_file_is_known_by_its_contents(tmp_path):
    """A calibration made anew, under the same path, is answered anew; elsewhere it is the same."""
    texts = {name for name, kind in POLICIES.items() if any("path of a file" in said(kind, f) for f in fields(kind))}
    assert {*WITH_FILE} - {"two policies"} == texts | {"duo_attention"}, "whose contents are the option"
    numbers = {name: torch.ones(1, 1) for name in ("bias", "r2", "head_shares", "head_maxima")}
    file, folder = tmp_path / "maps", tmp_path / "published"
    folder.mkdir()
    keys = defaultdict(list)
    for number in (1.0, 2.0):
        numbers["head_maxima"] = torch.full((1, 1), number)
        weight = torch.full((1, 1, 32), number)
        Calibration(weight=weight, **numbers, queries={}, model="m", texts="t", fitted=3).save(file)
        copy = shutil.copy(file, folder / "model.safetensors")
        for name, policy in WITH_FILE.items():
            paths = file, folder if name == "kvzap" else copy
            first, second = (conditions_of(tmp_path, samples=1, policies=policy.format(path)) for path in paths)
            assert first == second, name
            keys[name].append(first)
    for name, (once, anew) in keys.items():
        assert once and once.isdisjoint(anew), name


def said(kind, field) -> str:
    """What an option's check says to a number."""
    try:
        field.metadata["check"](field.name, 1.5)
    except (KeyError, ValueError) as error:
        return str(error)
    return ""


def test_weights_with_other_values_are_answered_anew(tmp_path):
    model, keys = copy.deepcopy(MODEL), []
    for scale in (1.0, 1.0, 1.01):
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(scale)
        model.save_pretrained(tmp_path / "model")
        TOKENIZER.save_pretrained(tmp_path / "model")
        keys.append(conditions_of(tmp_path, model=str(tmp_path / "model")))
    assert keys[0] == keys[1] and keys[0].isdisjoint(keys[2])


def test_without_pandas_or_scipy_a_run_does_not_begin(tmp_path, monkeypatch):
    for name in ("pandas", "scipy"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            result = invoke("eval", "builtin", "--output", tmp_path / "out")
        assert result.exit_code == 2
        assert f"needs the package '{name}': pip install 'kvpass[eval]'" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes", [{"batch": 2}, {"samples": 5}, {"policies": "snapkv:window=8"}])
def test_what_changes_no_answer_keeps_the_key(tmp_path, changes):
    assert conditions_of(tmp_path, **changes) <= conditions_of(tmp_path)


def test_a_prefill_is_part_of_the_name_and_of_the_key(tmp_path):
    model = tiny_model("llama", layers=3, vocab_size=len(TOKENIZER), eos_token_id=4)
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    sparse = "minference:vertical_size=30,slash_size=100"
    given = {"model": str(tmp_path / "model"), "tasks": "needle", "policies": "full", "samples": 1, "length": 700}
    Evaluation(options(tmp_path, **given, prefill=f"full,{sparse}", scopes="prompt")).run()
    records = read_records(tmp_path)
    assert [record.label for record in records] == ["full", f"{sparse} full"]
    assert len({record.key for record in records}) == 2
    assert f"{sparse} full" in (tmp_path / "results.md").read_text()

"""``kvpass eval``: answers against transformers and against batch 1, resuming, keys, tables, command line."""

from __future__ import annotations

import csv
import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import kvpass
from kvpass import builtin
from kvpass.cli import app
from kvpass.eval import run
from kvpass.eval.answer import Answerer, Request
from kvpass.eval.records import RecordFile, record_key, summarize
from kvpass.eval.run import EvalSettings, Evaluation, PolicySpec, parse_policies, set_budget
from kvpass.eval.tasks import encode, registry


@pytest.fixture(scope="module")
def compiled():
    return {}


@pytest.fixture(autouse=True)
def compile_once(compiled, monkeypatch):
    """Most of the time would go into tracing the same policies again."""
    original = kvpass.compile

    def remembered(model, *, policy, budget, backend):
        assert backend == "eager"
        if policy not in compiled:
            compiled[policy] = original(model, policy=policy, budget=budget, backend=backend)
        set_budget(compiled[policy], budget)
        return compiled[policy]

    monkeypatch.setattr(kvpass, "compile", remembered)


@pytest.fixture(scope="module")
def loaded():
    return builtin.load()


@pytest.fixture(scope="module")
def requests(loaded):
    """Eight prompts; the last four share a context; the first and the last but one have a longer question."""
    _, tokenizer = loaded
    samples = registry()["needle"].samples(tokenizer, 128, 2, 0) + registry()["needle"].samples(tokenizer, 150, 2, 1)
    samples += registry()["multi_needle"].samples(tokenizer, 160, 4, 2)
    for index in (0, 6):
        samples[index] = dataclasses.replace(samples[index], question=f" the end .{samples[index].question}")
    return [Request(prompt=encode(tokenizer, s, chat=False), max_new_tokens=s.max_new_tokens) for s in samples]


def answerer(loaded, policy, budget=None, *, batch=3, hold=1):
    model, tokenizer = loaded
    (spec,) = parse_policies(policy)
    fast = kvpass.compile(model, policy=spec.resolve(), budget=budget, backend="eager")
    stops = run.stop_tokens(model, tokenizer)
    return Answerer(model=fast, tokenizer=tokenizer, stops=stops, batch=batch, hold=hold)


def all_answers(given, requests, scope):
    found = [pair for answers in given.answers(requests, scope) for pair in answers]
    assert sorted(index for index, _ in found) == list(range(len(requests)))
    return [answer for _, answer in sorted(found, key=lambda pair: pair[0])]


def settings(folder, **changes):
    given = {
        "model": "builtin",
        "tasks": ("multi_needle",),
        "policies": parse_policies("full,snapkv:window=8"),
        "budgets": (0.2, 0.5),
        "scopes": ("prompt",),
        "samples": 6,
        "length": 150,
        "output": folder,
        "batch": 3,
        "backend": "eager",
    }
    return EvalSettings(**{**given, **changes})


def quiet() -> Console:
    return Console(quiet=True)


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generated(loaded, requests):
    """What transformers generates, prompt by prompt."""
    model, tokenizer = loaded
    texts = []
    for request in requests:
        ids = torch.tensor([request.prompt.ids])
        out = model.generate(ids, max_new_tokens=request.max_new_tokens, do_sample=False)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


@pytest.mark.parametrize(("scope", "hold"), [("prompt", 1), ("prompt", 0), ("prompt", 3), ("context", 1)])
def test_without_a_budget_answers_are_those_of_transformers(loaded, requests, generated, scope, hold):
    given = answerer(loaded, "full", hold=hold)
    answers = all_answers(given, requests, scope)
    assert [answer.text for answer in answers] == generated
    for request, answer in zip(requests, answers, strict=True):
        tokens = len(request.prompt.context) if scope == "context" else len(request.prompt) - hold
        assert answer.kept.tokens == answer.kept.entries == answer.kept.budget_entries == tokens
        assert answer.kept.fraction == 1.0
        assert given.compressed_tokens(request.prompt, scope) == tokens


@pytest.mark.parametrize("scope", ["prompt", "context"])
def test_a_row_of_a_compressed_batch_answers_what_it_does_alone(loaded, requests, scope):
    alone = all_answers(answerer(loaded, "lava:window=8", 0.3, batch=1), requests, scope)
    together = all_answers(answerer(loaded, "lava:window=8", 0.3), requests, scope)
    for one, other in zip(alone, together, strict=True):
        assert one.text == other.text
        assert (one.kept.tokens, one.kept.bytes, one.tokens) == (other.kept.tokens, other.kept.bytes, other.tokens)
        assert one.kept.entries == one.kept.budget_entries == int(0.3 * one.kept.tokens)
        assert one.kept.bytes == one.kept.budget_bytes == one.kept.entries * 4 * 2 * (64 + 64) * 4
        assert one.kept.fraction == pytest.approx(one.kept.entries / one.kept.tokens)
        assert one.kept.cache_bytes >= one.kept.bytes


def test_the_held_token_makes_the_first_generated_token_feel_the_compression(loaded, requests, generated):
    firsts = [text.split()[0] for text in generated]
    heard = []
    for hold in (0, 1):
        answers = all_answers(answerer(loaded, "streaming_llm", 12, hold=hold), requests, "prompt")
        heard.append([answer.text.split()[0] for answer in answers])
    assert heard[0] == firsts  # taken from the prefill, before anything was dropped
    assert heard[1] != firsts


def test_every_context_is_compressed_once_and_batches_are_filled_up(loaded, requests, monkeypatch):
    given = answerer(loaded, "lava:window=8", 0.5)
    fed: list[tuple[int, ...]] = []
    forward = given.model.forward

    def watched(ids, *rest, **more):
        fed.append(tuple(ids.shape))
        return forward(ids, *rest, **more)

    monkeypatch.setattr(given.model, "forward", watched)
    all_answers(given, requests, "context")
    longer, question = len(requests[0].prompt.question), len(requests[1].prompt.question)
    assert (longer, question) == (9, 6)
    contexts = [(3, 150 - question), (3, 160 - question)]  # two of 128 and one of 150; one of 150 and the shared one
    assert [shape for shape in fed if shape[1] > 1] == [
        contexts[0], (3, longer), (3, question),
        contexts[1], (3, question), (3, question), (3, longer), (3, question),
    ]  # fmt: skip


def test_a_budget_changes_without_compiling_anything_again(loaded, requests):
    given = answerer(loaded, "snapkv:window=8", 0.2)
    kept, graphs = [], []
    for budget in (0.2, 0.6, 40, "64KiB"):
        set_budget(given.model, budget)
        kept.append(all_answers(given, requests[:3], "prompt")[0].kept.entries)
        graphs.append(len(given.model.report().compiled))
    assert len(set(graphs)) == 1
    assert kept == [26, 78, 40, 64 * 1024 // (4 * 2 * 128 * 4)]
    with pytest.raises(ValueError, match="must be at least window"):
        set_budget(given.model, 8)


def test_numbers_out_of_range_are_refused():
    for name in ("batch", "hold"):
        with pytest.raises(ValueError, match=f"{name}=-1"):
            Answerer(model=None, tokenizer=SimpleNamespace(), stops=frozenset(), **{name: -1})


# --- settings --------------------------------------------------------------------------------------------------------


def test_policies_are_read_with_their_options():
    read = parse_policies("full, cake:tau1=1.6,tau2=0.4,snapkv:window=8,pool=avg,h2o:evict_during_decode=False")
    assert [spec.name for spec in read] == ["full", "cake", "snapkv", "h2o"]
    assert dict(read[1].options) == {"tau1": 1.6, "tau2": 0.4}
    assert dict(read[2].options) == {"window": 8, "pool": "avg"}
    assert dict(read[3].options) == {"evict_during_decode": False}
    assert str(read[1]) == "cake:tau1=1.6,tau2=0.4"
    assert parse_policies(",".join(map(str, read))) == read
    assert read[2].resolve() == kvpass.policies.resolve("snapkv", window=8, pool="avg")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "name at least one policy"),
        ("window=8,snapkv", "option 'window=8' has no policy"),
        ("snapkv:window", "'window' must be an option such as"),
        ("snapkw", "did you mean 'snapkv'"),
        ("snapkv:windo=8", "windo=8: not an option"),
        ("cake", "tau1=None"),
    ],
)
def test_policies_that_cannot_be_read_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_policies(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "samples=0"),
        ({"length": 1}, "length=1"),
        ({"batch": 0}, "batch=0"),
        ({"hold": -1}, "hold=-1"),
        ({"scopes": ("answer",)}, "scope='answer'"),
        ({"scopes": ()}, "scope=''"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"budgets": ()}, "budgets=''"),
        ({"budgets": (1.5,)}, "budget=1.5"),
        ({"budgets": (8,)}, r"budget=8: must be at least window \+ 1 = 9"),
        ({"budgets": (0.05,)}, "policy 'snapkv', scope 'prompt': budget 0.05 is 7 entries"),
        ({"hold": 150}, "hold=150: leaves nothing of a prompt of 150 tokens"),
        ({"tasks": ("haystack",)}, "tasks='haystack'"),
        ({"model": "/no/such/model"}, "model='/no/such/model'"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_it_begins(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        Evaluation(settings(tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_folders_are_checked(tmp_path):
    with pytest.raises(ValueError, match="data_dir="):
        settings(tmp_path, data_dir=tmp_path / "no")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file, must be a folder"):
        settings(tmp_path / "file")


# --- the run ---------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def count_requests(monkeypatch, *, limit: int | None = None):
    """Requests the model gets from now on; the file refuses all records after ``limit``."""
    asked: list[Request] = []
    answers, add = Answerer.answers, RecordFile.add
    added = []

    def counted(self, requests, scope):
        asked.extend(requests)
        return answers(self, requests, scope)

    def limited(self, record):
        if limit is not None and len(added) == limit:
            raise Interrupted
        added.append(record)
        add(self, record)

    monkeypatch.setattr(Answerer, "answers", counted)
    monkeypatch.setattr(RecordFile, "add", limited)
    return asked


def test_an_interrupted_run_goes_on_where_it_stopped_and_a_finished_one_runs_nothing(tmp_path, monkeypatch):
    once = Evaluation(settings(tmp_path / "once")).run(quiet())
    with monkeypatch.context() as patch:
        count_requests(patch, limit=8)  # full's six and two of snapkv's first six
        with pytest.raises(Interrupted):
            Evaluation(settings(tmp_path / "twice")).run(quiet())
    file = tmp_path / "twice" / "samples.jsonl"
    assert len(file.read_bytes().splitlines()) == 8
    assert not json.loads((tmp_path / "twice" / "manifest.json").read_text())["finished"]
    with file.open("ab") as torn:
        torn.write(b'{"key": "half a li')
    with monkeypatch.context() as patch:
        asked = count_requests(patch)
        twice = Evaluation(settings(tmp_path / "twice")).run(quiet())
        assert len(asked) == 18 - 8
    assert twice == once
    before = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(kvpass, "compile", None)  # nothing is even compiled
        asked = count_requests(patch)
        assert Evaluation(settings(tmp_path / "twice")).run(quiet()) == once
        assert asked == []
    assert file.read_bytes() == before


def test_records_tables_and_manifest_say_the_same(tmp_path):
    rows = Evaluation(settings(tmp_path, policies=parse_policies("full"), scopes=("prompt", "context"))).run(quiet())
    records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(records) == 12
    assert len({record["key"] for record in records}) == 12
    assert all(record["score"] == (record["prediction"] == f"{record['answers'][0]} .") for record in records)
    assert [(row.scope, row.samples) for row in rows] == [("prompt", 6), ("context", 6)]
    for row in rows:
        own = [record for record in records if record["scope"] == row.scope]
        assert row.score == sum(record["score"] for record in own) / 6
        assert row.low < row.score <= row.high <= 1
    with (tmp_path / "results.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [(line["scope"], float(line["score"]), float(line["kept_bytes"])) for line in read] == [
        (row.scope, row.score, row.kept_bytes) for row in rows
    ]
    markdown = (tmp_path / "results.md").read_text().splitlines()
    assert len(markdown) == 2 + len(rows)
    assert all(line.count("|") == markdown[0].count("|") for line in markdown)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["finished"]
    assert manifest["versions"]["kvpass"] == kvpass.__version__
    assert manifest["settings"]["seed"] == 0
    assert manifest["settings"]["policies"] == ["full"]
    assert [(line["kept_fraction"], line["budget_bytes"]) for line in manifest["results"]] == [
        (1.0, row.kept_bytes) for row in rows
    ]
    assert str(tmp_path) not in (tmp_path / "manifest.json").read_text()


def conditions_of(folder, **changes):
    return {key for condition in Evaluation(settings(folder, **changes)).conditions for key in condition.keys}


@pytest.mark.parametrize(
    "changes",
    [
        {"policies": parse_policies("snapkv:window=8,kernel_size=5")},
        {"budgets": (0.21, 0.51)},
        {"scopes": ("context",)},
        {"seed": 1},
        {"length": 151},
        {"hold": 2},
        {"dtype": "bfloat16"},
    ],
)
def test_whatever_changes_an_answer_changes_the_key(tmp_path, changes):
    base = conditions_of(tmp_path, policies=parse_policies("snapkv:window=8"))
    other = conditions_of(tmp_path, **{"policies": parse_policies("snapkv:window=8"), **changes})
    assert len(base) == 12
    assert base.isdisjoint(other)


@pytest.mark.parametrize(
    "changes", [{"batch": 2}, {"samples": 5}, {"policies": (PolicySpec("snapkv", (("window", 8),)),)}]
)
def test_what_changes_no_answer_keeps_the_key(tmp_path, changes):
    assert conditions_of(tmp_path, **changes) <= conditions_of(tmp_path)


def test_other_weights_have_another_fingerprint(loaded):
    model, _ = loaded
    before = run.fingerprint(model)
    assert run.fingerprint(builtin.load()[0]) == before
    weight = next(model.parameters())
    with torch.no_grad():
        weight[0, 0] += 1
        changed = run.fingerprint(model)
        weight[0, 0] -= 1
    assert changed != before


# --- records ---------------------------------------------------------------------------------------------------------


def record(key: str, **more):
    numbers = dict.fromkeys(
        ("budget_entries", "budget_bytes", "kept_entries", "kept_fraction", "kept_bytes", "cache_bytes"), 1.0
    )
    return {"key": key, "task": "t", "label": "p", "budget": "1", "scope": "prompt", "score": 1.0, **numbers, **more}


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
    assert "a" in read
    assert "c" not in read


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"score": 1}', b"1"])
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


# --- command line ----------------------------------------------------------------------------------------------------


def test_the_command_runs_a_grid_and_draws_it(tmp_path):
    words = "eval builtin --tasks needle_grid --policies streaming_llm --budgets 0.5 --scope prompt --samples 20"
    words += f" --length 240 --batch 3 --backend eager --output {tmp_path}"
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, words.split())
    assert result.exit_code == 0, result.output
    assert "needle_grid" in result.output
    assert (tmp_path / "needle_grid.png").read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    deep = [record["score"] for record in records if record["labels"]["depth"] == 1.0]
    middle = [record["score"] for record in records if record["labels"]["depth"] == 0.25]
    assert sum(deep) > sum(middle)  # recent tokens are all it keeps


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--tasks haystack", "tasks='haystack'"),
        ("--policies snapkw", "did you mean 'snapkv'"),
        ("--budgets nan", "budget=nan"),
        ("--scope answer", "scope='answer'"),
        ("--backend jit", "backend='jit'"),
        ("--samples 0", "samples=0"),
        ("--data-dir /no/such/folder", "data_dir='/no/such/folder'"),
        ("--tasks longbench_lcc", "data_dir=None"),
    ],
)
def test_a_bad_value_is_one_line_and_exit_code_2(tmp_path, words, part):
    result = CliRunner().invoke(app, ["eval", "builtin", "--output", str(tmp_path / "out"), *words.split()])
    assert result.exit_code == 2
    assert part in result.stderr
    assert result.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()

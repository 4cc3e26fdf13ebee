"""Tables, pictures and texts of a folder of ``kvpass eval``."""

import csv
import dataclasses
import io
import json
import random
import re

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from answered import KEPT, RUNS, record
from command_line import invoke
from kvpass.eval import results
from kvpass.eval.results import csv_of, markdown_of, plot, read_results, results_of
from kvpass.eval.statistics import mean_difference, mean_of, mean_score


def results_of_one(records, **changes):
    (found,) = results_of(records, RUNS, **changes)
    return found


def rows_of(records, **changes):
    return results_of_one(records, **changes).rows


def condition(row):
    return row["task"], row["scope"], row["policy"], row["budget"]


def write_folder(folder, records):
    (folder / "samples.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in records))
    (folder / "manifest.json").write_text(json.dumps({"runs": RUNS}))
    return folder


CONDITIONS = [
    ("full", "all"),
    ("lava", "0.25"),
    ("lava", "0.5"),
    ("mine:Own:a=1,b=2", "0.25"),
    ("streaming", "all"),
]


def made(seed=0, tasks=("t", "u"), samples=9, missing=0.0):
    """Records of policies and budgets with scores between 0 and 1, shuffled; some are missing."""
    draw = random.Random(seed)
    records = [
        record(label=label, budget=budget, task=task, sample=str(sample), scope=scope, score=round(draw.random(), 2))
        for task in tasks
        for scope in ("prompt", "context")
        for label, budget in CONDITIONS
        for sample in range(samples)
        if draw.random() >= missing
    ]
    draw.shuffle(records)
    return records


def test_rows_against_brute_force():
    records = made(missing=0.3)
    scores = {(*asked(one), one.question.sample): one.score for one in records}
    rows = rows_of(records, against=["lava"])
    assert len(rows) == 2 * 2 * 5 + 2 * 5
    for row in rows:
        task, scope, policy, budget = condition(row)
        tasks = [task] if row["tasks"] == 1 else ["t", "u"]
        own = [{key[4]: scores[key] for key in scores if key[:4] == (one, scope, policy, budget)} for one in tasks]
        assert row["samples"] == sum(map(len, own))
        assert row["score"] == mean([mean_score([*found.values()]) for found in own])
        for name, other in (("full", "all"), ("lava", budget)):
            base = [{key[4]: scores[key] for key in scores if key[:4] == (one, scope, name, other)} for one in tasks]
            pairs = [[a[key] - b[key] for key in {*a} & {*b}] for a, b in zip(own, base, strict=True)]
            has_none = policy == name or (name == "lava" and budget == "all")
            expected = None if has_none or not all(pairs) else mean([mean_difference(one) for one in pairs])
            assert row[f"against {name}"] == expected


def mean(estimates):
    return estimates[0] if len(estimates) == 1 else mean_of(estimates)


def asked(one):
    return one.question.task, one.question.scope, one.label, one.question.budget


def test_the_order_of_records_is_of_no_account():
    records = made()
    assert rows_of(records) == rows_of(records[::-1])
    order = [condition(row) for row in rows_of(records)]
    tasks = ("t", "u", "mean of 2 tasks")
    assert {*order[:5]} == {("t", "context", *one) for one in CONDITIONS} and order[0][2] == "full"
    assert [one[0] for one in order] == [task for task in tasks for _ in range(10)]


def test_scores_are_compared_with_a_sample_of_the_same_prompt_only():
    full = [record(label="full", budget="all", sample=str(sample), score=1.0) for sample in range(3)]
    changed = [
        record(sample="0", score=0.0),
        record(sample="1", score=0.5, prompt="other"),
        record(sample="3", score=0.5),
    ]
    (_, row) = rows_of([*full, *changed])
    assert row["samples"] == 3
    assert row["against full"] == mean_difference([-1.0])


def test_of_records_made_with_other_code_or_calibration_the_newest_counts():
    old = [record(sample=str(sample), score=0.0) for sample in range(4)]
    new = [record(sample="1", code="other"), record(sample="2", policy="other calibration")]
    (row,) = rows_of([*old, *new])
    assert (row["samples"], row["score"].mean) == (4, 0.5)
    (row,) = rows_of([*new, *old])
    assert (row["samples"], row["score"].mean) == (4, 0.0)


def test_a_policy_typed_in_two_ways_is_one_row_and_two_policies_of_one_name_are_two():
    typed = [record(label="lava", policy="same", sample="0"), record(label="lava:window=32", policy="same", sample="1")]
    assert [condition(row)[2] for row in rows_of(typed)] == ["lava:window=32"]
    own = [record(label="a:Own", policy="own", code="1"), record(label="b:Own", policy="own", code="2")]
    assert [condition(row)[2] for row in rows_of(own)] == ["a:Own", "b:Own"]


@pytest.mark.parametrize("change", [{"model": "n"}, {"length": 200}, {"seed": 1}, {"chat": False}, {"device": "cuda"}])
def test_models_lengths_and_seeds_are_never_mixed(change):
    both = results_of([record(score=0.0), record(score=1.0, **change)], RUNS)
    assert sorted(row["score"].mean for one in both for row in one.rows) == [0.0, 1.0]
    assert len({one.heading[0] for one in both}) == 2
    lines = [*csv.DictReader(io.StringIO(csv_of(both)))]
    assert len(lines) == 2
    assert markdown_of(both).count("| task |") == 2


def test_only_what_answered_all_tasks_has_a_mean_over_them():
    records = [record(task="t", score=0.25), record(task="u", score=0.75), record(task="t", budget="2")]
    records += [record(task="t", scope="context")]
    means = [(condition(row), row["score"].mean, row["samples"]) for row in rows_of(records) if row["tasks"] > 1]
    assert means == [(("mean of 2 tasks", "prompt", "p", "1"), 0.5, 2)]


def test_an_attention_mass_that_one_sample_lacks_has_no_mean():
    def with_mass(mass, sample):
        return msgspec.structs.replace(record(sample=sample), kept=dataclasses.replace(KEPT, attention_mass=mass))

    for second, shown in ((0.75, "62.5%"), (None, "-")):
        lines = markdown_of(results_of([with_mass(0.5, "0"), with_mass(second, "1")], RUNS)).splitlines()[-3:]
        assert lines[2].split(" | ")[lines[0].split(" | ").index("attention mass")] == shown


def test_above_a_table_stand_model_length_command_version_and_what_was_cut():
    records = [record(sample=str(sample), cut_tokens=cut, label=label) for label in ("p", "full")
               for sample, cut in enumerate((0, 30, 70))]  # fmt: skip
    head = markdown_of(results_of(records, RUNS)).partition("\n\n|")[0].splitlines()
    assert head == [
        "- model tiny, dtype float32, fingerprint m, length 100, seed 0, chat True, num_uncompressed_tokens 1, "
        "backend eager, device cpu",
        "- 2 of 3 prompts cut, by 50 tokens on average",
        "- kvpass 0.1.0, code 01234567",
        "- kvpass eval tiny --policies 'a,b c'",
    ]


def test_longbench_has_a_mean_of_each_category_with_every_task_counted_once(capsys):
    def answered(task: str, *scores: float, budget="0.5"):
        return [
            record(task=task, sample=str(sample), score=score, budget=budget) for sample, score in enumerate(scores)
        ]

    plain = answered("niah_single_1", 0.0)
    half = [*answered("longbench_qasper", 0.25), *answered("longbench_lcc", 0.125)]
    half += answered("longbench_narrativeqa", 1.0, 1.0, 0.25)  # more samples, no more weight
    quarter = answered("longbench_qasper", 0.5, budget="0.25") + answered("longbench_narrativeqa", 0.25, budget="0.25")
    one = results_of_one([*plain, *half, *quarter])
    _, table = one.tables().markdown().split("**LongBench by category: means of the tasks that were run**\n\n")
    head, divider, *lines = table.splitlines()
    assert (head, divider) == (
        "| category (tasks) | scope | policy | budget | score % |",
        "| --- | --- | --- | --- | ---: |",
    )
    assert sorted(lines) == [
        "| code (1 of 2) | prompt | p | 0.5 | 12.50 |",
        "| single-doc QA (2 of 4) | prompt | p | 0.25 | 37.50 |",
        "| single-doc QA (2 of 4) | prompt | p | 0.5 | 50.00 |",
    ]
    for width in (80, 40):
        Console(width=width).print(one.tables())
        out = capsys.readouterr().out.partition("LongBench by category")[2]
        assert "37.50" in out and "no room" not in out, "it has no column that is left out"
    assert "LongBench" not in results_of_one(plain).tables().markdown()


@pytest.mark.parametrize(
    "policy", ["lava", "cake:window=8,tau1=1.6,tau2=0.4", "my_policies:LogNorm:window=32,kernel=31"]
)
def test_a_narrow_terminal_shows_names_whole_and_the_interval_and_leaves_out_bytes_first(policy, capsys):
    asked = {"task": "niah_multikey_1", "scope": "context", "budget": "0.125"}
    full = record(label="full", task="niah_multikey_1", scope="context", budget="all")
    one = results_of_one([full, *(record(label=policy, sample=str(sample), **asked) for sample in range(3))])
    for width in (200, 80):
        Console(width=width).print(one.tables())
        out = capsys.readouterr().out
        said, _, left_out = out.partition("no room for")
        words = (
            "niah_multikey_1",
            "context",
            "0.125",
            "100.00",
            "95 % interval",
            "43.8-100.0",
            *re.findall(r"[^,:]+", policy),
        )
        assert all(word in said for word in words) and "…" not in out
        assert (policy in said) == (width == 200 or policy == "lava")
        assert ("KiB" in said, "against full" in said) == (width == 200, width == 200)
        assert left_out.startswith(": cache KiB, kept KiB") == (width < 200)
        assert all(len(line) <= width for line in out.splitlines())


# --- commands --------------------------------------------------------------------------------------------------------


def table(folder, *words, code=0, columns=200):
    result = invoke("table", folder, *words, columns=columns)
    assert result.exit_code == code, result.output
    return result.output if code == 0 else result.stderr


def test_the_table_of_a_folder_has_every_record_in_csv_latex_markdown_and_in_a_terminal(tmp_path):
    records = made(seed=1, tasks=("t",))
    folder = write_folder(tmp_path, records)
    rows = rows_of(records)
    lines = [*csv.DictReader(io.StringIO(table(folder, "--csv")))]
    assert [tuple(line[name] for name in results.DIMENSIONS) for line in lines] == [condition(row) for row in rows]
    for line, row in zip(lines, rows, strict=True):
        said = [float(line[name]) for name in ("score", "score low", "score high", "kept_bytes")]
        assert said == [*dataclasses.astuple(row["score"]), 1.0]
        difference = [line[f"against full{end}"] for end in ("", " low", " high")]
        assert difference == (
            3 * [""] if row["policy"] == "full" else [*map(str, dataclasses.astuple(row["against full"]))]
        )
    markdown = table(folder, "--markdown")
    assert markdown == markdown_of(read_results(folder))
    assert sum(line.startswith("|") for line in markdown.splitlines()) == 2 + len(rows)
    first = rows[1]["score"]
    for text in (markdown, table(folder), table(folder, "--latex")):
        assert f"{100 * first.mean:.2f}" in text and f"{100 * first.low:.1f}-{100 * first.high:.1f}" in text
    assert "full" in table(folder, "--latex") and r"\toprule" in table(folder, "--latex")
    assert "name one of --csv" in table(folder, "--csv", "--latex", code=2)


def test_policies_against_tasks_are_a_table_of_scores_and_one_of_differences(tmp_path):
    records = [one for one in made(seed=2) if one.question.scope == "prompt"]
    folder = write_folder(tmp_path, records)
    rows = {condition(row): row for row in rows_of(records)}
    by_score, by_difference = (
        table(folder, "--columns", "task", "--markdown").split("**score %**")[1].split("**against full**")
    )
    for text, name in ((by_score, "score"), (by_difference, "against full")):
        head, _, *lines = [line.strip("| ").split(" | ") for line in text.strip().splitlines()]
        assert head == ["policy", "budget", "t", "u", "mean of 2 tasks"]
        assert len(lines) == 5
        for policy, budget, *cells in lines:
            for task, cell in zip(head[2:], cells, strict=True):
                estimate = rows[task, "prompt", policy, budget][name]
                numbers = () if estimate is None else (100 * one for one in dataclasses.astuple(estimate))
                form = "{:.2f} ({:.1f}-{:.1f})" if name == "score" else "{:+.2f} ({:+.1f} to {:+.1f})"
                assert cell == (form.format(*numbers) if estimate else "-")
    lines = [*csv.DictReader(io.StringIO(table(folder, "--rows", "budget,task", "--columns", "policy", "--csv")))]
    out = table(folder, "--columns", "task", columns=60)
    assert "no room for: mean of 2 tasks" in out and "mine:Own:a=1," in out and "…" not in out
    by_key = {(line["budget"], line["task"]): line for line in lines}
    assert len(by_key) == len(lines) == 9
    assert float(by_key["0.25", "t"]["score high lava"]) == rows["t", "prompt", "lava", "0.25"]["score"].high
    assert by_key["all", "t"]["score lava"] == ""


def test_against_adds_a_column_and_refuses_a_policy_that_the_folder_lacks(tmp_path):
    folder = write_folder(tmp_path, made(seed=3, tasks=("t",)))
    assert "against lava" in table(folder, "--against", "lava") and "against lava" not in table(folder)
    assert "policy 'snapkv': the folder has" in table(folder, "--against", "snapkv", code=2)
    assert "rows='x': must be one of task, scope" in table(folder, "--rows", "x", "--columns", "task", code=2)
    assert "columns='': must be one of" in table(folder, "--rows", "policy", code=2)


def test_a_folder_without_records_or_with_records_of_no_run_is_an_error(tmp_path):
    assert "has no records of kvpass eval" in table(tmp_path, code=2)
    folder = write_folder(tmp_path, made())
    (folder / "manifest.json").write_text('{"runs": {}}')
    assert "manifest.json: lacks run 'r'" in table(folder, code=2)
    (folder / "manifest.json").write_text("{")
    assert "manifest.json: is no manifest" in table(folder, code=2)


def test_a_picture_has_a_panel_for_each_policy_own_ones_first(tmp_path, monkeypatch):
    drawn = []

    class Recorded(Figure):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            drawn.append(self)

    monkeypatch.setattr(results, "import_figure", lambda: Recorded)
    records = [kept_at(one) for one in made(seed=4)]
    found = results_of(records, RUNS)
    rows = {condition(row): row for row in found[0].rows}
    plot(found, tmp_path / "all.svg")
    axes = drawn[-1].axes
    assert [axis.get_title() for axis in axes] == ["mine:Own:a=1,\nb=2", "streaming", "lava"]
    lines = {line.get_label(): np.array(line.get_xydata()) for line in axes[2].lines}
    for scope in ("prompt", "context"):
        points = [rows["mean of 2 tasks", scope, "lava", budget]["score"] for budget in ("0.25", "0.5")]
        np.testing.assert_allclose(lines[f"scope {scope}"], [[25, 100 * points[0].mean], [50, 100 * points[1].mean]])
        full = 100 * rows["mean of 2 tasks", scope, "full", "all"]["score"].mean
        assert {y for _, y in lines[f"full, scope {scope}"]} == {full}
        ends = {round(100 * end, 6) for point in points for end in (point.low, point.high)}
        bands = [
            {round(float(y), 6) for path in one.get_paths() for _, y in path.vertices} for one in axes[2].collections
        ]
        assert ends in bands
    write_folder(tmp_path, records)
    for suffix, begin in ((".svg", b"<?xml"), (".pdf", b"%PDF"), (".png", b"\x89PNG")):
        output = tmp_path / "new" / f"picture{suffix}"
        result = invoke("plot", tmp_path, "-o", output, "--policies", "lava", "--task", "u")
        assert result.exit_code == 0, result.output
        assert output.read_bytes().startswith(begin)
        assert [axis.get_title() for axis in drawn[-1].axes] == ["lava"]
    for words, said in (
        ("-o x.jpg", "output='.jpg'"),
        ("--task v", "task='v'"),
        ("--policies snapkv", "policy 'snapkv'"),
    ):
        result = invoke("plot", tmp_path, *words.split())
        assert (result.exit_code, said in result.stderr) == (2, True), result.output


def kept_at(one):
    share = 1.0 if one.question.budget == "all" else float(one.question.budget)
    return msgspec.structs.replace(
        one, kept=dataclasses.replace(KEPT, kept_fraction=share, budget_entries=round(100 * share))
    )


def test_show_prints_what_was_asked_answered_and_expected(tmp_path):
    right, wrong = record(sample="0"), record(sample="1", score=0.25, prediction="2\x1b[31m", cut_tokens=3)
    folder = write_folder(tmp_path, [right, wrong, record(label="full", task="u", sample="7")])
    assert invoke("show", folder).output.count("question ") == 3
    out = invoke("show", folder, "--wrong").output
    assert out.splitlines()[:7] == [
        "sample    t 1, scope prompt, p, budget 1",
        "kept      1.0 of 1 entries (100.0% of the bytes), prompt of 103 tokens, 3 cut from its middle",
        "context   ... 'it is 1'",
        "question  'what?'",
        r"answer    '2\x1b[31m'",
        "expected  '1'",
        "score     0.25",
    ]
    assert invoke("show", folder, "--task", "u,v").output.count("u 7") == 1
    assert invoke("show", folder, "--policy", "full").output.count("question ") == 1
    assert "policy 'lava': the folder has p, full" in invoke("show", folder, "--policy", "lava").stderr

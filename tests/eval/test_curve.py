"""``kvpass curve``: every policy is in it, and picture, table and samples belong together."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import kvpass
from kvpass.cli.main import app
from kvpass.eval.experiments.curve import curve_settings, curve_table, default_policies
from kvpass.eval.plots import plot_curve, plot_grid
from kvpass.eval.records import Row
from kvpass.policies import Policy

pytestmark = pytest.mark.usefixtures("compile_once")


def row(policy: str, budget: str, scope: str, score: float) -> Row:
    fraction = 1.0 if budget == "all" else float(budget)
    sizes = dict.fromkeys(("budget_entries", "budget_bytes", "kept_entries", "kept_bytes", "cache_bytes"), 1.0)
    low, high = max(0.0, score - 0.1), min(1.0, score + 0.1)
    return Row(
        task="t", policy=policy, budget=budget, scope=scope, samples=10, score=score, low=low, high=high,
        kept_fraction=fraction, **sizes,
    )  # fmt: skip


ROWS = [
    row("full", "all", "prompt", 1.0),
    row("lava", "0.03", "prompt", 0.5),
    row("lava", "1.0", "prompt", 0.875),
    row("full", "all", "context", 0.9),
    row("lava", "0.03", "context", 0.25),
]


def test_every_registered_policy_is_in_the_curve_and_fits_in_3_percent_of_its_prompts():
    specs = default_policies()
    assert specs[0].name == "full"
    assert {spec.name for spec in specs} == set(kvpass.POLICIES)
    for spec in specs:
        assert isinstance(spec.resolve(), Policy)
        assert not spec.resolve().needs_budget or spec.resolve().window + 1 <= 0.03 * 500


def test_the_table_has_a_block_a_scope_a_line_a_policy_and_a_column_a_budget():
    lines = curve_table(ROWS).splitlines()
    assert "Scope `prompt`, 10 questions a point:" in lines
    assert "| policy | 3% | 100% |" in lines
    assert "| `lava` | 50.0 (40-60) | 87.5 (78-98) |" in lines
    assert "| `full` | 100.0 (90-100) | 100.0 (90-100) |" in lines
    assert "| `lava` | 25.0 (15-35) |" in lines
    for line in lines:
        assert line.count("|") in (0, 3, 4)


def test_the_picture_has_a_panel_a_scope_with_every_line_and_its_interval(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    errorbar = Axes.errorbar

    def record(self, x, y, *, yerr, label, **more):
        drawn.append((self.get_title(), label, [round(value, 6) for value in y], yerr))
        return errorbar(self, x, y, yerr=yerr, label=label, **more)

    monkeypatch.setattr(Axes, "errorbar", record)
    plot_curve(ROWS, tmp_path / "curve.png", title="a title")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [values for _, _, values, _ in drawn] == [[50.0, 87.5], [25.0]]
    low, high = drawn[0][3]
    assert low == pytest.approx([10.0, 10.0])
    assert high == pytest.approx([10.0, 10.0])


def test_the_grid_has_the_mean_of_every_cell_depths_down_and_lengths_across(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    imshow = Axes.imshow
    monkeypatch.setattr(Axes, "imshow", lambda self, x, **more: drawn.append(x.tolist()) or imshow(self, x, **more))
    cells = [(128, 0.0, 1), (128, 0.0, 0), (256, 0.0, 0), (128, 1.0, 1), (256, 1.0, 0), (256, 1.0, 0)]
    records = [
        SimpleNamespace(
            label="lava",
            question=SimpleNamespace(budget="9", scope=scope),
            score=score,
            labels={"length": length, "depth": depth},
        )
        for scope in ("prompt", "context")
        for length, depth, score in cells[: 6 if scope == "prompt" else 5]
    ]
    plot_grid(records, tmp_path / "grid.png", title="a title")
    assert drawn[0] == drawn[1] == [[50.0, 0.0], [100.0, 0.0]]
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_draws_what_it_measured_and_goes_on_with_more_samples(tmp_path):
    words = f"--length 160 --budgets 0.12,1.0 --policies full,streaming_llm --batch 2 --output {tmp_path}".split()
    for samples in (2, 4):
        result = CliRunner().invoke(app, ["curve", "--samples", str(samples), *words])
        assert result.exit_code == 0, result.output
        records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
        assert len(records) == len({record["key"] for record in records}) == 2 * samples * 3
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "curve.md").read_text()
    assert table in result.output
    cells = dict(re.findall(r"\| `(\w+)` \| (.*) \|", table.split("Scope `context`")[0]))
    full = [
        record["score"] for record in records if record["label"] == "full" and record["question"]["scope"] == "prompt"
    ]
    assert f"{100 * sum(full) / len(full):.1f} (" in cells["full"]
    small, large = (float(cell.split()[0]) for cell in cells["streaming_llm"].split(" | "))
    assert small < large == float(cells["full"].split()[0])  # contract 1: at 100 % it is the full cache


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--samples 0", "samples=0"),
        ("--budgets 0.01", "budget 0.01 is 5 entries"),
        ("--backend jit", "backend='jit'"),
        ("--length 60", "tokens=60"),
    ],
)
def test_a_bad_value_is_one_line_and_exit_code_2(tmp_path, words, part):
    result = CliRunner().invoke(app, ["curve", "--output", str(tmp_path / "out"), *words.split()])
    assert result.exit_code == 2
    assert part in result.stderr
    assert result.stderr.startswith("error: ")


def test_settings_of_the_curve_are_those_of_a_run(tmp_path):
    made = curve_settings(output=tmp_path, samples=3, length=200, seed=7)
    assert (made.samples, made.length, made.seed, made.output) == (3, 200, 7, tmp_path)
    assert len(made.policies) == len(kvpass.POLICIES)

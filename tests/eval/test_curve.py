"""``kvpass curve``: every policy is in it, and picture, table and samples belong together."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from rich.console import Console

import kvpass
from command_line import invoke
from kvpass import builtin
from kvpass.eval.experiments.curve import (
    _cell,
    agreement,
    curve_run,
    curve_tables,
    default_policies,
    formats_table,
)
from kvpass.eval.options import CurveOptions, EvalOptions
from kvpass.eval.plots import plot_curve, plot_formats, plot_grid
from kvpass.eval.records import Row, mass_text
from kvpass.eval.runner import Kept
from kvpass.policies import Policy

pytestmark = pytest.mark.usefixtures("compile_once")


def row(policy: str, budget: str, scope: str, score: float) -> Row:
    fraction = 1.0 if budget == "all" else float(budget)
    kept = dict.fromkeys((field.name for field in fields(Kept)), 1.0)
    kept |= {"kept_fraction": fraction, "attention_mass": None if budget == "0.03" else 0.625}
    low, high = max(0.0, score - 0.1), min(1.0, score + 0.1)
    return Row(
        task="t", policy=policy, budget=budget, scope=scope, samples=10, score=score, low=low, high=high,
        kept=Kept(**kept),
    )  # fmt: skip


ROWS = [
    row("full", "all", "prompt", 1.0),
    row("lava", "0.03", "prompt", 0.5),
    row("lava", "1.0", "prompt", 0.875),
    row("full", "all", "context", 0.9),
    row("lava", "0.03", "context", 0.25),
]


def test_formats_of_entries_are_compared_by_bytes_and_by_their_answers(tmp_path):
    def record(label: str, sample: str, prediction: str):
        asked = SimpleNamespace(budget="0.03", scope="prompt", sample=sample)
        return SimpleNamespace(label=label, question=asked, prediction=prediction)

    answers = [("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")]
    records = [record("lava", sample, said) for sample, said in answers]
    records += [record("int8 lava", sample, "3" if sample == "d" else said) for sample, said in answers]
    same = agreement(records)
    assert same == {("int8 lava", "0.03", "prompt"): 0.75}
    rows = [ROWS[1], replace(ROWS[1], policy="int8 lava", kept=replace(ROWS[1].kept, kept_bytes=0.5))]
    lines = formats_table(rows, same).markdown().splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["int8 lava", "lava"]
    assert lines[2].endswith("| 75.0 |")
    plot_formats(rows, tmp_path / "formats.png", title="formats")
    assert (tmp_path / "formats.png").stat().st_size > 1000


def test_every_policy_for_any_model_is_in_the_curve_and_fits_in_3_percent_of_its_prompts(tmp_path):
    specs = curve_run(CurveOptions(samples=1, scopes="prompt", output=tmp_path)).policies
    assert specs[0].name == "full"
    assert {spec.name for spec in specs} == {
        name for name, policy in kvpass.POLICIES.items() if not policy.of_one_model
    }
    for spec in specs:
        assert isinstance(spec.resolve(), Policy)
        assert not spec.resolve().needs_budget or spec.resolve().window + 1 <= 0.03 * 500


def test_the_table_has_a_block_a_scope_a_line_a_policy_and_a_column_a_budget():
    lines = curve_tables(ROWS, "scores", _cell).markdown().splitlines()
    assert "**scope prompt: scores**" in lines
    assert "| policy | 3% | 100% |" in lines
    assert "| lava | 50.0 (40-60) | 87.5 (78-98) |" in lines
    assert "| full | 100.0 (90-100) | 100.0 (90-100) |" in lines
    assert "| lava | 25.0 (15-35) |" in lines
    lines += curve_tables(ROWS, "attention", mass_text).markdown().splitlines()
    assert "**scope context: attention**" in lines
    assert "| lava | - | 62.5% |" in lines and "| full | 62.5% |" in lines
    for line in lines:
        assert line.count("|") in (0, 3, 4)


@pytest.fixture
def figures(monkeypatch):
    """Figures that were written."""
    from matplotlib.figure import Figure

    written = []
    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: written.append(self) or savefig(self, *a, **k))
    return written


def test_the_picture_has_a_panel_a_scope_and_policy_with_its_line_and_interval(tmp_path, figures):
    plot_curve(ROWS, tmp_path / "curve.png", title="a title")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    assert len(figure.axes) == 2 and {panel.get_xscale() for panel in figure.axes} == {"log"}
    for panel, values in zip(figure.axes, ([50.0, 87.5], [25.0]), strict=True):
        (line,) = panel.containers
        assert line[0].get_ydata() == pytest.approx(values)
        ends = [segment[:, 1].tolist() for segment in line[2][0].get_segments()]
        assert [pytest.approx(end) for end in ends] == [[value - 10, value + 10] for value in values]
    dotted = [[one.get_ydata().tolist() for one in panel.lines if one.get_linestyle() == ":"] for panel in figure.axes]
    assert dotted == [[[62.5]], []]  # not known at 3 %


def test_of_many_policies_four_have_panels_and_the_others_a_band(tmp_path, figures):
    scores = {"tova": 0.1, "lava": 0.9, "snapkv": 0.8, "h2o": 0.4, "pyramidkv": 0.7, "streaming_llm": 0.2}
    rows = [
        row(f"{name}:window=8", budget, "prompt", score)
        for name, score in scores.items()
        for budget in "0.1 0.5".split()
    ]
    plot_curve(rows, tmp_path / "curve.png", title="a title")
    (figure,) = figures
    names = ("lava", "snapkv", "pyramidkv", "streaming_llm")
    assert [panel.get_title() for panel in figure.axes] == [f"{name}:window=8" for name in names]
    for panel in figure.axes:
        (band,) = panel.collections[:1]
        heights = band.get_paths()[0].vertices[:, 1]
        assert (heights.min(), heights.max()) == (10.0, 40.0)


def test_the_grid_has_the_mean_of_every_cell_depths_down_and_lengths_across(tmp_path, monkeypatch, figures):
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
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["1/2", "0/1", "1/1", "0/2"]
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_draws_what_it_measured_and_goes_on_with_more_samples(tmp_path):
    words = f"--length 160 --budgets 0.12,1.0 --policies full,streaming_llm --batch 2 --output {tmp_path}".split()
    for samples in (1, 2):
        result = invoke("curve", "--samples", samples, *words)
        assert result.exit_code == 0, result.output
        records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
        assert len(records) == len({record["key"] for record in records}) == 2 * samples * 3
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "curve.md").read_text()
    assert all(word in result.output for word in ("scope prompt", "scope context", "streaming_llm", "12%"))
    cells = dict(re.findall(r"\| (\w+) \| (.*) \|", table.split("scope context")[0]))
    full = [
        record["score"] for record in records if record["label"] == "full" and record["question"]["scope"] == "prompt"
    ]
    assert f"{100 * sum(full) / len(full):.1f} (" in cells["full"]
    small, large = (float(cell.split()[0]) for cell in cells["streaming_llm"].split(" | "))
    assert small < large == float(cells["full"].split()[0])  # contract 1: at 100 % it is the full cache


def test_a_policy_without_a_window_gets_one_that_fits_and_the_table_says_which(tmp_path):
    words = f"--samples 1 --length 256 --budgets 0.06 --scope prompt --policies lava --output {tmp_path}"
    result = invoke("curve", *words.split())
    assert result.exit_code == 0, result.output
    assert "lava:window=8" in result.output and "| lava:window=8 |" in (tmp_path / "curve.md").read_text()


def test_a_narrow_terminal_shows_every_policy_and_budget(capsys):
    rows = [
        row(f"lava:window={n}", str(budget), "prompt", 0.5) for n in (8, 16) for budget in (0.03, 0.06, 0.12, 0.25, 0.5)
    ]
    Console(width=80).print(curve_tables(rows, "scores", _cell))
    out = capsys.readouterr().out
    assert "lava:window=16" in out and "50%" in out and "…" not in out
    assert re.findall(r"lava:window=8 +(.*?)  ", out) == ["50.0"] and out.count("40-60") == len(rows)


@pytest.mark.parametrize("command", ["demo", "curve"])
def test_without_matplotlib_a_command_that_draws_says_what_to_install_and_computes_nothing(
    tmp_path, monkeypatch, command
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.chdir(tmp_path)
    result = invoke(command)
    assert result.exit_code == 2, result.output
    assert result.stderr == "error: pictures need matplotlib: pip install 'kvpass[plots]'\n"
    assert list(tmp_path.iterdir()) == []


def test_options_of_the_curve_are_those_of_a_run(tmp_path):
    given = CurveOptions(output=tmp_path, budgets="0.5", scopes="prompt", samples=3, length=200, seed=7)
    made = curve_run(given)
    assert made.options == EvalOptions(**vars(given) | {"policies": made.options.policies})
    assert max(spec.resolve().window for spec in made.policies if spec.resolve().needs_budget) == 8
    other = curve_run(replace(given, model=str(builtin.path()), samples=1))
    assert other.policies == default_policies()

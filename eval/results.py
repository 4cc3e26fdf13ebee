"""What a folder of ``kvpass eval`` says: tables, pictures and texts, made of all its records."""

from __future__ import annotations

import itertools
import math
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from kvpass.config import one_of
from kvpass.eval.options import names
from kvpass.eval.policy_spec import parse_policies
from kvpass.eval.records import Record, RecordFile, newest
from kvpass.eval.statistics import Estimate, mean_difference, mean_of, mean_score
from kvpass.eval.tables import Tables
from kvpass.eval.tasks.base import library
from kvpass.eval.tasks.longbench import CATEGORIES
from kvpass.policies import POLICIES
from kvpass.replace_file import SHARED, replacing
from kvpass.report import import_figure

DIMENSIONS = ("task", "scope", "policy", "budget")
_LAST = ("cache KiB", "kept KiB", "entries", "attention mass", "kept")
_INTERVAL = "95 % interval"
_PANELS = 4
"""Panels in a line."""


@dataclass(frozen=True)
class Results:
    """The scores of one model, length and seed.

    Attributes:
        setting: what the rows have in common. heading: how they were made, a line each.
        rows: one for each of :data:`DIMENSIONS`; ``tasks`` is above 1 in means over tasks. ``score`` and ``against
            <policy>``, the paired difference, are estimates in [-1, 1]; other fields are means of :class:`Kept`. None:
            there is none, or a sample has none.
    """

    setting: Mapping[str, Any]
    heading: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    baselines: Sequence[str]

    def tables(self, rows: str = "", columns: str = "") -> Tables:
        """A line for each row; or scores, then differences, by ``rows`` and ``columns``, which are dimensions.

        Raises:
            ValueError: rows without columns, or something that is no dimension.
        """
        cells = [_cells(row, self.baselines) for row in self.rows]
        differences = [f"against {name}" for name in self.baselines]
        if not (rows or columns):
            tables = [("", [*cells[0]], [[*line.values()] for line in cells]), *_categories(self.rows)]
            spare = [*_LAST, *reversed(differences), "n", _INTERVAL]
            return Tables(tables, left=len(DIMENSIONS), spare=spare, heading=self.heading)
        tables = []
        for value in ("score %", *differences):
            for line in cells if value == "score %" else ():
                line[value] += f" ({line[_INTERVAL]})"
            table = _pivot(cells, rows, columns, value).fillna("")
            left, table = table.index.nlevels, table.reset_index()
            tables.append((value, [*table.columns], table.to_numpy().tolist()))
        return Tables(tables, left=left, spare=tables[0][1][: left - 1 : -1], heading=self.heading)


def read_runs(folder: Path, records: Iterable[Record]) -> dict[str, Any]:
    """The runs of a folder's manifest; ``ValueError`` if it cannot be read or lacks one that made a record."""
    path = folder / "manifest.json"
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path}: is no manifest of kvpass eval ({error})") from None
    runs: dict[str, Any] = manifest.get("runs", {})
    if missing := {record.run for record in records} - {*runs}:
        raise ValueError(f"{path}: lacks run {min(missing)!r}, which made records of the folder; give another output")
    return runs


def read_records(folder: Path) -> list[Record]:
    """The newest records of a folder; ``ValueError`` if there are none."""
    if records := RecordFile(folder / "samples.jsonl", writes=False).records:
        return [*newest(records.values()).values()]
    raise ValueError(f"{folder}: has no records of kvpass eval")


def read_results(folder: Path, against: str | None = None) -> list[Results]:
    """The results of a folder, compared with ``full`` and another policy; ``ValueError`` if it has no such records."""
    records = read_records(folder)
    others = [] if against is None else policies_of(against, [record.label for record in records])
    return results_of(records, read_runs(folder, records), others)


def results_of(records: Iterable[Record], runs: Mapping[str, Any], against: Sequence[str] = ()) -> list[Results]:
    """Results of each setting; ``runs`` are those of the manifest, ``against`` policies to compare with."""
    settings: defaultdict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in newest(records).values():
        settings[record.question.setting].append(record)
    return [_results(group, runs, [*dict.fromkeys(["full", *against])]) for _, group in sorted(settings.items())]


def _results(records: Sequence[Record], runs: Mapping[str, Any], baselines: Sequence[str]) -> Results:
    made, question = [runs[name] for name in dict.fromkeys(record.run for record in records)], records[0].question
    setting = {"model": made[0]["model"]["name"], "dtype": made[0]["model"]["dtype"], "fingerprint": question.model}
    for name in ("length", "seed", "chat", "num_uncompressed_tokens", "backend", "device"):
        setting[name] = getattr(question, name)
    prompts = {(record.question.task, record.question.sample): record.cut_tokens for record in records}
    cut = [tokens for tokens in prompts.values() if tokens]
    heading = [
        ", ".join(f"{name} {value}" for name, value in setting.items()),
        f"{len(cut)} of {len(prompts)} prompts cut" + (f", by {fmean(cut):.0f} tokens on average" if cut else ""),
        *dict.fromkeys(f"kvpass {run['versions']['kvpass']}, code {run['versions']['source'][:8]}" for run in made),
        *dict.fromkeys(shlex.join(run["command"]) for run in made),
    ]
    order = ("task", "scope", "policy", "budget_entries")
    rows = [*_rows(records, baselines)]
    rows.sort(key=lambda row: (row["tasks"] > 1, *((row[name] != "full", row[name]) for name in order)))
    return Results(setting, heading, rows, [name for name in baselines if any(row[f"against {name}"] for row in rows)])


def _rows(records: Iterable[Record], baselines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of each task, and of each scope with several tasks the mean over them where all were answered."""
    answered: defaultdict[Any, defaultdict[str, dict[Any, Record]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        question = record.question
        by_task = answered[question.scope, record.label, question.budget]
        by_task[question.task][question.sample, question.prompt] = record
    for (scope, policy, budget), by_task in answered.items():
        rows = []
        for task, own in by_task.items():
            row = {"task": task, "scope": scope, "policy": policy, "budget": budget, "tasks": 1, "samples": len(own)}
            row["score"] = mean_score([record.score for record in own.values()])
            for name in baselines:
                other = answered.get((scope, name, budget)) or answered.get((scope, name, "all"))
                base = other.get(task, {}) if other is not None and name != policy else {}
                pairs = [own[sample].score - base[sample].score for sample in own if sample in base]
                row[f"against {name}"] = mean_difference(pairs) if pairs else None
            rows.append(row | _means([asdict(record.kept) for record in own.values()]))
        yield from rows
        if len(rows) == len({task for key in answered if key[0] == scope for task in answered[key]}) > 1:
            total = sum(row["samples"] for row in rows)
            yield _means(rows) | {"task": f"mean of {len(rows)} tasks", "tasks": len(rows), "samples": total}


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean of each number or estimate, None where one is None; of names the first."""
    means: dict[str, Any] = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        mean = mean_of if isinstance(first, Estimate) else fmean
        means[name] = None if None in values else first if isinstance(first, str) else mean(values)
    return means


def _cells(row: Mapping[str, Any], baselines: Sequence[str]) -> dict[str, str]:
    def percent(name: str, form: str) -> str:
        estimate = row[name]
        return "-" if estimate is None else form.format(*(100 * value for value in astuple(estimate)))

    mass = row["attention_mass"]
    return {
        **{name: row[name] for name in DIMENSIONS},
        "n": str(row["samples"]),
        "score %": percent("score", "{:.2f}"),
        _INTERVAL: percent("score", "{1:.1f}-{2:.1f}"),
        **{f"against {name}": percent(f"against {name}", "{:+.2f} ({:+.1f} to {:+.1f})") for name in baselines},
        "attention mass": "-" if mass is None else f"{mass:.1%}",
        "entries": f"{row['kept_entries']:.1f}",
        "kept": f"{row['kept_fraction']:.1%}",
        "kept KiB": f"{row['kept_bytes'] / 1024:.1f}",
        "cache KiB": f"{row['cache_bytes'] / 1024:.1f}",
    }


def _categories(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """A table of LongBench's tasks, by category; none without them."""
    scores: defaultdict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["task"].startswith("longbench_"):
            condition = row["scope"], row["policy"], row["budget"]
            scores[condition][row["task"].removeprefix("longbench_")] = 100 * row["score"].mean
    lines = []
    for (category, members), (condition, by_task) in itertools.product(CATEGORIES.items(), scores.items()):
        if answered := [by_task[name] for name in members if name in by_task]:
            lines.append([f"{category} ({len(answered)} of {len(members)})", *condition, f"{fmean(answered):.2f}"])
    title = "LongBench by category: means of the tasks that were run"
    return [(title, ["category (tasks)", *DIMENSIONS[1:], "score %"], lines)] if lines else []


def _pivot(lines: Sequence[Mapping[str, Any]], rows: str, columns: str, values: Any) -> Any:
    """A pandas ``DataFrame``; what is neither rows nor columns and has several values divides rows too."""
    frame, others = library("pandas").DataFrame(lines), [*lines[0]]
    others = others[: others.index("budget") + 1]
    first = [one_of("rows", name, DIMENSIONS) for name in names(rows or "policy")]
    column = one_of("columns", columns, DIMENSIONS)
    index = first + [name for name in others if name not in first and frame[name].nunique() > 1]
    index = [name for name in index if name != column] or ["scope"]
    return frame.pivot_table(values, index, column, aggfunc="first", sort=False)


def markdown_of(results: Iterable[Results], rows: str = "", columns: str = "") -> str:
    return "\n".join(one.tables(rows, columns).markdown() for one in results)


def latex_of(results: Iterable[Results], rows: str = "", columns: str = "") -> str:
    """Tables for LaTeX's package booktabs; headings and titles are comments."""
    frame, parts = library("pandas").DataFrame, []
    for one in results:
        parts += [f"% {line}\n" for line in one.heading]
        for title, header, cells in one.tables(rows, columns).tables:
            parts += [f"% {title}\n", frame(cells, columns=header).to_latex(index=False, escape=True)]
    return "".join(parts)


def csv_of(results: Iterable[Results], rows: str = "", columns: str = "") -> str:
    """Numbers from 0 to 1 or bytes, with the setting in each line."""
    lines = []
    for one in results:
        estimates = ["score", *(f"against {name}" for name in one.baselines)]
        for row in one.rows:
            line = dict(one.setting)
            for name, value in row.items():
                if name in estimates:
                    values = (None, None, None) if value is None else astuple(value)
                    line |= zip((name, f"{name} low", f"{name} high"), values, strict=True)
                else:
                    line[name] = value
            lines.append(line)
    frame = library("pandas").DataFrame(lines)
    if rows or columns:
        frame = _pivot(lines, rows, columns, [name for name in frame if name.startswith(("score", "against "))])
        frame.columns = map(" ".join, frame.columns)
    return str(frame.to_csv(index=bool(rows or columns)))


def policies_of(text: str, labels: Iterable[str]) -> list[str]:
    """The labels of policies as typed for ``kvpass eval``; ``ValueError`` if one of them is not among the labels."""
    labels, chosen = list(dict.fromkeys(labels)), []
    for typed in [text] if text in labels else map(str, parse_policies(text)):
        found = [label for label in labels if typed in (label, label.split()[-1])]  # with any format of entries
        if not found:
            raise ValueError(f"policy {typed!r}: the folder has {', '.join(labels)}")
        chosen += found
    return chosen


def plot(results: Sequence[Results], output: Path, *, policies: str = "", task: str = "") -> None:
    """Write a picture of scores against what was kept, a panel for each policy, its format by the suffix.

    Args:
        policies: all but ``full`` if empty; those of one's own come first. task: the mean of all tasks if empty.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a suffix or policy that does not exist, or no policy that answered the task, or all of them.
    """
    figure_type, suffix = import_figure(), one_of("output", output.suffix, (".svg", ".pdf", ".png"))
    labels = dict.fromkeys(row["policy"] for one in results for row in one.rows)
    chosen = policies_of(policies, labels) if policies else [label for label in labels if label != "full"]
    panels = []
    chosen.sort(key=lambda label: label.split()[-1].partition(":")[0] in POLICIES)
    for one, label in itertools.product(results, chosen):
        tasks = [row["task"] for row in one.rows]
        if task not in tasks and (task or (len({*tasks}) > 1 and one.rows[-1]["tasks"] == 1)):
            have = ", ".join(dict.fromkeys(tasks))
            raise ValueError(f"task={task!r}: no policy answered it (all tasks, if not given); name one of {have}")
        drawn = [row for row in one.rows if row["task"] == (task or tasks[-1])]
        if any(row["policy"] == label for row in drawn):
            panels.append((label, drawn, f"{one.setting['model']}, {one.setting['length']}\n" * (len(results) > 1)))
    if not panels:
        raise ValueError("there is no policy to draw beside 'full'")
    columns = min(_PANELS, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = figure_type(figsize=(1 + 2.8 * columns, 1 + 2.6 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axis, (label, drawn, title) in zip(axes, panels, strict=False):
        axis.set_title(title + label.replace(",", ",\n"), fontsize="small")
        for (scope, policy), rows in itertools.groupby(drawn, lambda row: (row["scope"], row["policy"])):
            kept, score, low, high = 100 * np.array([(row["kept_fraction"], *astuple(row["score"])) for row in rows]).T
            color = {"prompt": "C0", "context": "C1"}[scope]
            if policy == "full":
                axis.axhline(score[0], color=color, linestyle="--", label=f"full, scope {scope}")
            elif policy == label:
                axis.plot(kept, score, "o-", color=color, label=f"scope {scope}")
                axis.fill_between(kept, low, high, color=color, alpha=0.2)
                axis.vlines(kept, low, high, color=color, linewidth=1)  # of a single budget
        axis.legend(fontsize="x-small")
    for axis in axes[len(panels) :]:
        axis.remove()
    figure.supxlabel("kept, % of the bytes of the full cache")
    figure.supylabel(f"score %, {panels[0][1][0]['task']}")
    with replacing(output, SHARED) as file:
        figure.savefig(file, format=suffix[1:], dpi=200)


def shown(record: Record) -> str:
    """A record as text: what was asked, answered, expected and kept."""
    question, kept = record.question, record.kept
    condition = f"scope {question.scope}, {record.label}, budget {question.budget}"
    entries = f"{kept.kept_entries:.1f} of {kept.compressed_tokens} entries ({kept.kept_fraction:.1%} of the bytes)"
    lines = {
        "sample": f"{question.task} {question.sample}, {condition}",
        "kept": f"{entries}, prompt of {record.prompt_tokens} tokens, {record.cut_tokens} cut from its middle",
        "context": f"... {record.context_end!r}",
        "question": repr(record.question_text),
        "answer": repr(record.prediction),
        "expected": " | ".join(map(repr, record.answers)),
        "score": f"{record.score:.2f}",
    }
    return "".join(f"{name:9} {line}\n" for name, line in lines.items())

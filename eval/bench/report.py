"""A result of the bench as people read it: tables on the terminal, Markdown, pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from kvpass.eval.tables import FirstThatFits, fitting_table, markdown_table
from kvpass.report import import_figure

Record = dict[str, Any]
Column = tuple[str, Callable[[Record], str]]

_MARKERS = "osD^v<>Pp*hX"


def _of(number: float | None, form: str, unit: float = 1.0, mark: str = "") -> str:
    return "-" if number is None else format(number / unit, form) + mark


def _quartiles(spread: dict[str, float], form: str) -> str:
    low, median, high = (format(spread[name], form) for name in ("q1", "median", "q3"))
    return f"{median}\n{low}-{high}"


SPEED: tuple[Column, ...] = (
    ("prefill\ns", lambda r: _quartiles(r["prefill_s"], ".3g")),
    ("\nx full", lambda r: _of(r["prefill_ratio"].get("full"), ".2f")),
    ("scoring\n%", lambda r: _of((r["scoring"] or {}).get("share"), ".2f", 1e-2)),
    ("decode\nms/token", lambda r: _quartiles(r["decode_ms"], ".2f")),
    ("over\nhf-eager", lambda r: _of(r["decode_speedup"].get("hf-eager"), ".1f", mark="x")),
    ("over\nhf-static", lambda r: _of(r["decode_speedup"].get("hf-static"), ".1f", mark="x")),
    ("of the\nbound, %", lambda r: _of(r["share_of_bound"], ".0f", 1e-2)),
)
MEMORY: tuple[Column, ...] = (
    ("tokens\nper s", lambda r: _of(r["tokens_per_s"], ".4g")),
    ("generate\nms/token", lambda r: _of(r.get("generate_ms"), ".2f")),
    ("cache\nMiB", lambda r: _of(r["cache_bytes"], ".2f", 2**20)),
    ("peak\nGiB", lambda r: _of(r["peak_bytes"], ".2f", 2**30)),
    ("largest\nbatch", lambda r: _of(r["largest_batch"], ".0f")),
    ("compile\ns", lambda r: _of(r["compile_s"], ".1f")),
    ("first\nsteps ms", lambda r: _of(_first_steps(r), ".1f")),
)
_SPARE = ("peak\nGiB", "largest\nbatch", "of the\nbound, %", "\nx full")
"""Left out of the tables of a narrow terminal, the first ones first."""
LEGEND = (
    "Medians and quartiles of interleaved repeats. x full: prefill time over that of the compiled full prefill. "
    "generate: a token of the model's generate on the same cache, its Python included. scoring: share of the prefill "
    "that compression takes, attention of the prompt apart (one profiled run). over: decode speed over that system. "
    "of the bound: bytes a step must read (each weight once, the entries held) over the measured copy bandwidth, as a"
    " share of the time taken; what fits in the processor's own cache can beat it. cache: storages, at the end. peak:"
    " allocator's count, weights included. largest batch: rows whose caches and steps fit beside the weights, by "
    "their bytes. compile: first run less a median run, Inductor's cache empty unless said otherwise. first steps: "
    "those on a new cache, CUDA graph capture included, not in the medians."
)


def tables(result: dict[str, Any]) -> Group:
    """Two tables for each context and batch, then what the columns mean."""
    parts: list[Any] = []
    for run in result["runs"]:
        parts += [
            _table(run, SPEED, title(result, run)),
            _table(run, MEMORY, None),
            *(Text(f"{record['name']}: {record['failure']}") for record in run["systems"] if record["failure"]),
        ]
    return Group(*parts, Text(conditions(result)), Text(LEGEND))


def _table(run: dict[str, Any], columns: Sequence[Column], heading: str | None) -> FirstThatFits:
    header = ["system", *(name for name, _ in columns)]
    rows = ([record["name"], *(_cell(record, cell) for _, cell in columns)] for record in run["systems"])
    return fitting_table(header, rows, spare=_SPARE, padding=0, title=heading, title_justify="left")


def _cell(record: Record, cell: Callable[[Record], str]) -> str:
    return "failed" if record["failure"] else cell(record)


def _first_steps(record: Record) -> float | None:
    steps = [sum(repeat) for repeat in record["first_steps_ms"]]
    return sorted(steps)[len(steps) // 2] if any(steps) else None


def title(result: dict[str, Any], run: dict[str, Any]) -> str:
    model, budget = result["model"], run["budget"]
    return (
        f"{model['name']}, {model['dtype']}: prompt {run['context']} tokens, batch {run['batch']}; budget "
        f"{budget['entries']} entries per KV head per layer = {budget['bytes'] / 2**20:.2f} MiB a row"
    )


def conditions(result: dict[str, Any]) -> str:
    """Machine, versions and amount of measurement, in a sentence or two."""
    found, used = result["machine"], result["versions"]
    said = (
        f"{found.get('name', found['cpu'])}, {found['threads']} threads, {found['capability']}, copies at "
        f"{found['copy_bandwidth'] / 1e9:.0f} GB/s; torch {used['torch']}, transformers {used['transformers']}. "
        f"{result['repeats']} repeats x {result['new_tokens']} decode steps."
    )
    if result["shared_prompt"]:
        said += " One row was prefilled and its cache repeated for the batch."
    if result["warm_cache"]:
        said += " Inductor's cache was not emptied."
    return said + "".join(f" Not measured: {name} ({reason})." for name, reason in result["left_out"].items())


def markdown(result: dict[str, Any]) -> str:
    """All columns of all runs, as Markdown tables."""
    parts = []
    columns = (*SPEED, *MEMORY)
    header = ["system", *(" ".join(name.split()) for name, _ in columns)]
    for run in result["runs"]:
        rows = [[record["name"], *(_in_line(_cell(record, cell)) for _, cell in columns)] for record in run["systems"]]
        parts += [f"**{title(result, run)}**\n", markdown_table(header, rows)]
        parts += [f"{record['name']}: {record['failure']}\n" for record in run["systems"] if record["failure"]]
    return "\n".join([*parts, conditions(result), "", LEGEND, ""])


def _in_line(cell: str) -> str:
    """What stands in a second line goes into parentheses."""
    first, _, second = cell.partition("\n")
    return f"{first} ({second})" if second else first


def _decode_ms(record: Record) -> list[float]:
    return [record["decode_ms"][name] for name in ("q1", "median", "q3")]


PICTURES: dict[str, tuple[str, Callable[[Record], list[float]]]] = {
    "ms-per-token": ("decode, ms per token: median, quartiles", _decode_ms),
    "memory": ("cache, MiB", lambda record: [record["cache_bytes"] / 2**20] * 3),
}
"""Name of a picture -> label of its axis, and what is drawn: low end, middle, high end."""


def plot(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Plot milliseconds per token and cache memory against context, one picture per batch.

    Args:
        results: of one model and device; of a system with the same context and batch, a later one wins over an earlier.

    Returns:
        the pictures written, ``<what>-batch<rows>.png``.

    Raises:
        ImportError: without matplotlib.
    """
    figure_type = import_figure()
    from matplotlib.ticker import StrMethodFormatter

    batches: dict[int, dict[int, dict[str, Record]]] = {}
    for result in results:
        for run in result["runs"]:
            records = batches.setdefault(run["batch"], {}).setdefault(run["context"], {})
            records.update({record["name"]: record for record in run["systems"]})
    written = []
    for batch, contexts in sorted(batches.items()):
        chosen = dict(sorted(contexts.items()))
        names = list(dict.fromkeys(name for records in chosen.values() for name in records))
        for what, (label, value) in PICTURES.items():
            figure = figure_type(figsize=(7, 4.5), layout="constrained")
            axes = figure.subplots()
            for index, name in enumerate(names):
                points = [
                    (context * 1.02**index, *value(records[name]))  # side by side
                    for context, records in chosen.items()
                    if name in records and not records[name]["failure"]
                ]
                if points:
                    at, low, middle, high = map(list, zip(*points, strict=True))
                    spread = [
                        [m - v for m, v in zip(middle, low, strict=True)],
                        [v - m for m, v in zip(middle, high, strict=True)],
                    ]
                    marker = _MARKERS[index % len(_MARKERS)]
                    axes.errorbar(at, middle, yerr=spread, label=name, marker=marker, markersize=4, capsize=4)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
            axes.set_xticks(list(chosen), [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in chosen])
            axes.set_xlabel("prompt, tokens")
            axes.set_ylabel(label)
            axes.set_title(f"{results[0]['model']['name']}, {results[0]['model']['dtype']}, batch {batch}")
            axes.grid(alpha=0.3)
            figure.legend(loc="outside right upper")
            path = folder / f"{what}-batch{batch}.png"
            figure.savefig(path, dpi=120)
            written.append(path)
    return written

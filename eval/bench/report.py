"""Every result of the bench as people read it: tables on the terminal, or in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from kvpass.eval.bench import kernels
from kvpass.eval.bench.run import Result
from kvpass.eval.tables import Tables

Column = tuple[str, Callable[[Result], str]]


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
    ("compile\ns", lambda r: _of(r["compile_s"], ".1f")),
    ("first\nsteps ms", lambda r: _of(statistics.median_high(map(sum, r["first_steps_ms"])) or None, ".1f")),
)
PROMPT: tuple[Column, ...] = (
    ("prefill\ns", lambda r: _of(r["prefill_s"]["median"], ".3g")),
    *(
        (header, lambda r, name=name, form=form, unit=unit: _of((r["attention"] or {}).get(name), form, unit))
        for header, name, form, unit in (
            ("attention\ns", "attend_s", ".3g", 1.0),
            ("selection\ns", "select_s", ".3g", 1.0),
            ("blocks\n%", "blocks", ".1f", 1e-2),
            ("covered\n%", "covered", ".1f", 1e-2),
        )
    ),
)
"""Shown where a prefill selects blocks of attention."""
_SPARE = ("peak\nGiB", "of the\nbound, %", "\nx full")
"""Left out of the tables of a narrow terminal, the first ones first."""
LEGEND = (
    "Medians and quartiles of interleaved repeats. x full: prefill time over that of the compiled full prefill. "
    "generate: a token of the model's generate on the same cache, its Python included. scoring: share of the prefill "
    "that compression takes, attention of the prompt apart (one profiled run). over: decode speed over that system. "
    "of the bound: bytes a step must read (each weight once, the entries held) over the measured copy bandwidth, as a"
    " share of the time taken; for many rows the products with the weights, at the measured rate of a large one, in "
    "place of their bytes. What fits in the processor's own cache can beat it. cache: storages, at the end. peak:"
    " allocator's count, weights included. compile: first run less a median run, Inductor's cache empty unless said "
    "otherwise. first steps: those on a new cache, CUDA graph capture included, not in the medians. attention, "
    "selection: seconds in one profiled prefill. blocks: share of those below the diagonal that are computed, in the "
    "layers that select. covered: share of the attention that their keys hold, of 64 queries of each head."
)


def comparison(result: Result) -> Tables:
    """Two tables for each context and batch, with what their columns mean."""
    tables, failures, model = [], [], result["model"]
    for run in result["runs"]:
        budget = run["budget"]
        title = (
            f"{model['name']}, {model['dtype']}: prompt {run['context']} tokens, batch {run['batch']}; "
            f"budget {budget['entries']} entries per KV head per layer = {budget['bytes'] / 2**20:.2f} MiB a row"
        )
        selects = any((record.get("attention") or {}).get("select_s") for record in run["systems"])
        for columns, heading in ((SPEED, title), (MEMORY, ""), *([(PROMPT, "")] if selects else [])):
            header = ["system", *(name for name, _ in columns)]
            rows = [
                [record["name"], *("failed" if record["failure"] else cell(record) for _, cell in columns)]
                for record in run["systems"]
            ]
            tables.append((heading, header, rows))
        failures += [f"{record['name']}: {record['failure']}" for record in run["systems"] if record["failure"]]
    return Tables(tables, (*failures, _conditions(result), LEGEND), spare=_SPARE)


def _conditions(result: Result) -> str:
    machine, versions = result["machine"], result["versions"]
    text = (
        f"{machine.get('name', machine['cpu'])}, {machine['threads']} threads, {machine['capability']}, "
        f"copies at {machine['copy_bandwidth'] / 1e9:.0f} GB/s; torch {versions['torch']}, transformers "
        f"{versions['transformers']}. {result['repeats']} repeats x {result['new_tokens']} decode steps."
    )
    if result["shared_prompt"]:
        text += " One row was prefilled and its cache copied for each row of the batch."
    if result["warm_cache"]:
        text += " Inductor's cache was not emptied."
    return text


def show(result: Result) -> Tables:
    """Return as tables what ``kvpass bench``, the bench of the kernels or ``make gpu-check`` wrote."""
    if "stages" in result:
        rows = [[name, stage["status"], stage["said"]] for name, stage in result["stages"].items()]
        return Tables([("", ["stage", "status", "last line"], rows)], left=3)
    return kernels.shown(result) if "decode" in result else comparison(result)

"""``kvpass curve``: accuracy against budget on one task, every policy, both scopes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from kvpass.eval.options import CurveOptions, EvalOptions, names
from kvpass.eval.plots import plot_curve, plot_formats
from kvpass.eval.policy_spec import PolicySpec, parse_policies
from kvpass.eval.records import Record, Row, mass_text
from kvpass.eval.run import Evaluation
from kvpass.eval.tables import Tables
from kvpass.eval.tasks import find_tasks
from kvpass.policies import POLICIES
from kvpass.report import import_figure

WINDOW = 8
"""Of policies that observe or protect a window, on the built-in model: 32 is more than 3 % of its short prompts."""

CAKE_TEMPERATURES = (("tau1", 1.6), ("tau2", 0.4))
"""Published for Llama-3.1-8B at 1024; none are for the built-in model."""


def default_policies() -> tuple[PolicySpec, ...]:
    """Registered policies, full first, with CAKE's temperatures; not those made for one model."""
    general = [name for name, policy in POLICIES.items() if not policy.of_one_model]
    full_first = sorted(general, key=lambda name: (POLICIES[name].needs_budget, name))
    return tuple(PolicySpec(name, CAKE_TEMPERATURES if name == "cake" else ()) for name in full_first)


def curve_run(options: CurveOptions) -> Evaluation:
    """Check the run that is drawn: of all policies if none is given.

    On the built-in model the window is ``WINDOW`` where none is typed.

    Raises:
        ImportError: without matplotlib. ValueError: more than one task, or what a run refuses.
    """
    import_figure()
    if len(find_tasks(names(options.tasks))) > 1:
        raise ValueError(f"task={options.tasks!r}: stands for several tasks, name one")
    specs = default_policies() if options.policies is None else parse_policies(options.policies)
    if options.model == "builtin":
        specs = tuple(spec.with_window(WINDOW) for spec in specs)
    return Evaluation(EvalOptions(**vars(options) | {"policies": ",".join(map(str, specs))}))


def draw_curve(evaluation: Evaluation) -> None:
    """Answer what a checked run asks, draw ``curve.png``, write ``curve.md`` and print the scores."""
    s, rows, console = evaluation.options, evaluation.run(), Console()
    title = f"{s.model}: {rows[0].task}, {s.length} tokens, {rows[0].samples} questions a point, 95 % intervals"
    several = len(evaluation.formats) > 1
    (plot_formats if several else plot_curve)(rows, s.output / "curve.png", title=title)
    scores = curve_tables(rows, f"{rows[0].samples} questions a point", _cell)
    tables = [scores, curve_tables(rows, "window's attention in the kept entries", mass_text)]
    if several:
        tables.append(formats_table(rows, agreement(evaluation.records())))
        console.print(f"answers as with entries='model': {s.output / 'curve.md'}", highlight=False)
    (s.output / "curve.md").write_text("\n".join(each.markdown() for each in tables), encoding="utf-8")
    console.print(scores)
    console.print(f"written: {s.output / 'curve.png'}, curve.md, samples.jsonl, manifest.json", highlight=False)


def curve_tables(rows: Sequence[Row], what: str, cell: Callable[[Row], str]) -> Tables:
    """A table for each scope, policies down, budgets across.

    Args:
        what: is in the cells. cell: text of one.
    """
    tables = []
    for scope in dict.fromkeys(row.scope for row in rows):
        own = [row for row in rows if row.scope == scope]
        budgets = list(dict.fromkeys(row.budget for row in own if row.budget != "all"))
        cells = {(row.policy, row.budget): cell(row) for row in own}
        lines = [
            [policy, *(cells.get((policy, b), cells.get((policy, "all"), "")) for b in budgets)]
            for policy in dict.fromkeys(row.policy for row in own)
        ]
        tables.append((f"scope {scope}: {what}", ["policy", *map(_heading, budgets)], lines))
    return Tables(tables)


def agreement(records: Sequence[Record]) -> dict[tuple[str, str, str], float]:
    """Share of the answers that are those of the same policy, budget and scope with entries in the model's dtype.

    Returns:
        by label, budget and scope, for labels with another format.
    """
    answers: dict[tuple[str, str, str], dict[str, str]] = {}
    for record in records:
        asked = record.question
        answers.setdefault((record.label, asked.budget, asked.scope), {})[asked.sample] = record.prediction
    found = {}
    for (label, budget, scope), given in answers.items():
        plain = answers.get((label.partition(" ")[2], budget, scope))
        if plain is not None:
            found[label, budget, scope] = sum(plain[sample] == answer for sample, answer in given.items()) / len(given)
    return found


def formats_table(rows: Sequence[Row], same: Mapping[tuple[str, str, str], float]) -> Tables:
    """Bytes and accuracy of each format of kept entries, fewest bytes first.

    Args:
        same: as :func:`agreement` gives it.
    """
    lines = []
    for row in sorted(rows, key=lambda row: (row.scope, row.kept.kept_bytes)):
        agreed = same.get((row.policy, row.budget, row.scope))
        unchanged = "" if agreed is None else f"{100 * agreed:.1f}"
        condition = [row.scope, row.policy, _heading(row.budget)]
        lines.append([*condition, f"{row.kept.kept_bytes / 1024:.0f}", _cell(row), unchanged])
    header = ["scope", "policy", "budget", "kept KiB", "score %", "answers unchanged %"]
    return Tables([("", header, lines)], left=3)


def _heading(budget: str) -> str:
    try:
        share = float(budget)
    except ValueError:
        return budget
    return f"{share:.0%}" if "." in budget else budget


def _cell(row: Row) -> str:
    return f"{100 * row.score:.1f}\n{100 * row.low:.0f}-{100 * row.high:.0f}"

"""Pictures of results: score against budget, and the needle grid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpass.eval.records import Record, Row
from kvpass.report import import_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HIGHLIGHTED = ("lava", "snapkv", "pyramidkv", "streaming_llm")
"""Of many policies, those that have a panel of their own."""


def plot_curve(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Plot score against kept share: a line of panels per scope, a panel per policy, the others in grey.

    A dotted line is the share of the window's attention that the kept entries hold, where it is known.

    Args:
        rows: of one task; those whose budget is ``all`` become a dashed line. Of more than four policies, the first of
            ``HIGHLIGHTED`` that are among them have panels; a band goes from the least to the most of the others.
    """
    figure_type = import_figure()
    scopes = list(dict.fromkeys(row.scope for row in rows))
    drawn = list(dict.fromkeys(row.policy for row in rows if row.budget != "all"))
    chosen = sorted(drawn, key=lambda policy: [policy.partition(":")[0] != name for name in HIGHLIGHTED])[:4]
    columns = max(1, len(chosen))
    figure = figure_type(figsize=(3 * columns + 0.5, 2.6 * len(scopes) + 0.9), layout="constrained")
    axes = figure.subplots(len(scopes), columns, sharex=True, sharey=True, squeeze=False)
    for scope, line_of_panels in zip(scopes, axes, strict=True):
        lines: dict[str, list[Row]] = {policy: [] for policy in drawn}
        for row in sorted(rows, key=lambda row: row.kept.kept_fraction):
            if row.scope == scope and row.budget != "all":
                lines[row.policy].append(row)
        for index, panel in enumerate(line_of_panels):
            others = [lines[policy] for policy in drawn if policy not in chosen]
            _plot_policy(panel, lines[chosen[index]] if chosen else [], others, f"C{index}")
            for row in rows:
                if row.scope == scope and row.budget == "all":
                    panel.axhline(100 * row.score, linestyle="--", color="black", linewidth=1, label=row.policy)
            if scope == scopes[0] and chosen:
                panel.set_title(chosen[index], fontsize=10, color=f"C{index}", fontweight="bold")
            panel.grid(alpha=0.3)
        line_of_panels[0].set_ylabel(f"scope = {scope}\nexact answers, %")
    for panel in axes[-1]:
        panel.set_xlabel("entries kept, %")  # not of the figure: it would lie on the legend
    panel = axes[0][0]
    if drawn:
        panel.set_xscale("log")
        ticks = sorted({round(100 * row.kept.kept_fraction) for row in rows if row.budget != "all"})
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.minorticks_off()
    panel.set_ylim(-3, 103)
    handles, labels = panel.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower right", ncols=len(labels), fontsize=8, frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def plot_formats(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Plot score against the bytes of kept entries: a panel per scope, a line per policy and entry format."""
    figure_type = import_figure()
    scopes = list(dict.fromkeys(row.scope for row in rows))
    figure = figure_type(figsize=(4.2 * len(scopes) + 0.5, 3.6), layout="constrained")
    axes = figure.subplots(1, len(scopes), sharey=True, squeeze=False)[0]
    for scope, panel in zip(scopes, axes, strict=True):
        for policy in dict.fromkeys(row.policy for row in rows):
            line = sorted(
                (row for row in rows if (row.scope, row.policy) == (scope, policy)), key=lambda r: r.kept.kept_bytes
            )
            _with_intervals(panel, [row.kept.kept_bytes / 1024 for row in line], line, label=policy)
        panel.set(title=f"scope = {scope}", xlabel="KiB of kept entries, scales included", xscale="log", ylim=(-3, 103))
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("exact answers, %")
    axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _plot_policy(panel: Axes, chosen: Sequence[Row], others: Sequence[Sequence[Row]], color: str) -> None:
    """The others in grey, with the band from their least to their most, and the chosen with its intervals."""
    spans: dict[str, list[Row]] = {}
    for line in others:
        panel.plot(
            [100 * row.kept.kept_fraction for row in line], [100 * row.score for row in line], color="0.7", lw=0.6
        )
        for row in line:
            spans.setdefault(row.budget, []).append(row)
    if spans:
        at = [100 * sum(row.kept.kept_fraction for row in span) / len(span) for span in spans.values()]
        least, most = ([100 * edge(row.score for row in span) for span in spans.values()] for edge in (min, max))
        panel.fill_between(at, least, most, color="0.93", label=f"{len(others)} other policies")
    if chosen:
        _with_intervals(panel, [100 * row.kept.kept_fraction for row in chosen], chosen, color=color)
        masses = [
            (100 * row.kept.kept_fraction, 100 * row.kept.attention_mass)
            for row in chosen
            if row.kept.attention_mass is not None
        ]
        if masses:
            panel.plot(*zip(*masses, strict=True), linestyle=":", color=color, label="window's attention kept")


def _with_intervals(panel: Axes, x: Sequence[float], line: Sequence[Row], **style: Any) -> None:
    """Scores with their intervals."""
    spread = [[100 * (row.score - row.low) for row in line], [100 * (row.high - row.score) for row in line]]
    score = [100 * row.score for row in line]
    panel.errorbar(x, score, yerr=spread, marker="o", markersize=4, capsize=2, elinewidth=0.8, **style)


def plot_grid(records: Sequence[Record], path: Path, *, title: str) -> None:
    """Mean score by length and depth: a heat map for each policy, budget and scope.

    Args:
        records: of tasks whose samples have the labels ``length`` and ``depth``.
    """
    figure_type = import_figure()
    import numpy as np

    lengths, depths = (sorted({float(record.labels[name]) for record in records}) for name in ("length", "depth"))
    cells: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        cells.setdefault((record.label, record.question.budget, record.question.scope), []).append(record)
    columns = min(4, len(cells))
    lines = -(-len(cells) // columns)
    figure = figure_type(figsize=(3.4 * columns + 1, 2.6 * lines + 0.8), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, ((label, budget, scope), own) in zip(axes, cells.items(), strict=False):
        total, count = np.zeros((len(depths), len(lengths))), np.zeros((len(depths), len(lengths)))
        for record in own:
            cell = depths.index(float(record.labels["depth"])), lengths.index(float(record.labels["length"]))
            total[cell] += record.score
            count[cell] += 1
        with np.errstate(invalid="ignore"):
            image = panel.imshow(100 * total / count, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
        for (y, x), of in np.ndenumerate(count):
            if of:
                share = total[y, x] / of
                style = "white" if share in (0, 1) else "black"
                panel.text(x, y, f"{total[y, x]:.3g}/{of:.0f}", ha="center", va="center", fontsize=7, color=style)
        panel.set_xticks(range(len(lengths)), [f"{length:.0f}" for length in lengths])
        panel.set_yticks(range(len(depths)), [f"{100 * depth:.0f}" for depth in depths])
        panel.set_title(f"{label}\nbudget {budget}, scope {scope}", fontsize=8)
        panel.set_xlabel("prompt tokens", fontsize=8)
        panel.set_ylabel("depth, %", fontsize=8)
        panel.tick_params(labelsize=7)
    for panel in axes[len(cells) :]:
        panel.axis("off")
    figure.colorbar(image, ax=list(axes), label="exact answers, %")
    figure.suptitle(f"{title} (in a cell: right/asked)")
    figure.savefig(path, dpi=150)

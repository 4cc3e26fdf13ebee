"""Pictures of results: score against budget, and the needle grid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvpass.eval.records import Record, Row

_MARKERS = "osD^v<>Pp*hX8Hd"


def plot_curve(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Plot score against kept share, one panel per scope, one line per policy.

    Points of one budget are drawn side by side, so that their bars can be told apart.

    Args:
        rows: of one task; those whose budget is ``all`` become a dashed line.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    scopes = list(dict.fromkeys(row.scope for row in rows))
    policies = list(dict.fromkeys(row.policy for row in rows if row.budget != "all"))
    colors = colormaps["tab20"].colors  # type: ignore[attr-defined]
    figure = Figure(figsize=(6.5 * len(scopes) + 2.5, 5.5), layout="constrained")
    axes = figure.subplots(1, len(scopes), sharey=True, squeeze=False)[0]
    for panel, scope in zip(axes, scopes, strict=True):
        for index, policy in enumerate(policies):
            line = sorted(
                (row for row in rows if (row.scope, row.policy) == (scope, policy) and row.budget != "all"),
                key=lambda row: row.kept_fraction,
            )
            shift = 1.012 ** (index - (len(policies) - 1) / 2)
            panel.errorbar(
                [100 * row.kept_fraction * shift for row in line],
                [100 * row.score for row in line],
                yerr=[
                    [100 * (row.score - row.low) for row in line],
                    [100 * (row.high - row.score) for row in line],
                ],
                label=policy,
                color=colors[index % len(colors)],
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=5,
                linewidth=1.2,
                elinewidth=0.7,
                capsize=2,
            )
        for row in rows:
            if row.scope == scope and row.budget == "all":
                panel.axhline(100 * row.score, linestyle="--", color="black", linewidth=1, label=row.policy)
        panel.set_xscale("log")
        ticks = sorted({round(100 * row.kept_fraction) for row in rows if row.budget != "all"})
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.minorticks_off()
        panel.set_xlabel("entries kept, % of the compressed part (points of one budget side by side)")
        panel.set_title(f"scope = {scope}")
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("exact answers, %")
    axes[0].set_ylim(-3, 103)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def plot_grid(records: Sequence[Record], path: Path, *, title: str) -> None:
    """Mean score by length and depth: a heat map for each policy, budget and scope.

    Args:
        records: of tasks whose samples have the labels ``length`` and ``depth``.
    """
    import numpy as np
    from matplotlib.figure import Figure

    lengths, depths = (sorted({float(record.labels[name]) for record in records}) for name in ("length", "depth"))
    cells: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        cells.setdefault((record.label, record.question.budget, record.question.scope), []).append(record)
    columns = min(4, len(cells))
    lines = -(-len(cells) // columns)
    figure = Figure(figsize=(3.4 * columns + 1, 2.6 * lines + 0.8), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, ((label, budget, scope), own) in zip(axes, cells.items(), strict=False):
        total, count = np.zeros((len(depths), len(lengths))), np.zeros((len(depths), len(lengths)))
        for record in own:
            cell = depths.index(float(record.labels["depth"])), lengths.index(float(record.labels["length"]))
            total[cell] += record.score
            count[cell] += 1
        with np.errstate(invalid="ignore"):
            image = panel.imshow(100 * total / count, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
        panel.set_xticks(range(len(lengths)), [f"{length:.0f}" for length in lengths])
        panel.set_yticks(range(len(depths)), [f"{100 * depth:.0f}" for depth in depths])
        panel.set_title(f"{label}\nbudget {budget}, scope {scope}", fontsize=8)
        panel.set_xlabel("prompt tokens", fontsize=8)
        panel.set_ylabel("depth, %", fontsize=8)
        panel.tick_params(labelsize=7)
    for panel in axes[len(cells) :]:
        panel.axis("off")
    figure.colorbar(image, ax=list(axes), label="exact answers, %")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)

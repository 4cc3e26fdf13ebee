"""``kvpass results``: measure and write the page of experiments on the built-in model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from kvpass import builtin
from kvpass.compiler.backend import Compiler
from kvpass.eval.bench.report import show
from kvpass.eval.bench.run import Bench, BenchSettings
from kvpass.eval.environment import fingerprint, machine, source_digest, versions
from kvpass.eval.experiments.curve import curve_settings, curve_table, default_policies, draw_curve
from kvpass.eval.experiments.output_loss import PolicyLoss, measure_output_loss
from kvpass.eval.needle.text import sample
from kvpass.eval.policy_spec import PolicySpec
from kvpass.eval.records import Row, results_markdown
from kvpass.eval.run import EvalSettings, Evaluation
from kvpass.eval.tables import markdown_table
from kvpass.progress import progress_console

GRID_POLICIES = ("full", "lava", "ada_snapkv", "streaming_llm")
GRID_BUDGET = 0.12
LOSS_POLICIES = tuple(
    "lava lava_uniform ada_snapkv snapkv streaming_llm knorm keydiff lagkv criticalkv defensivekv".split()
)
LOSS_BUDGETS = (0.06, 0.12, 0.25)
LOSS_WINDOW = 8
LOSS_TASK = "multiquery"


@dataclass(frozen=True, kw_only=True)
class ResultsSettings:
    """One page.

    Attributes:
        output: folder of ``results.md``, ``curve.png`` and ``needle_grid.png``.
        work: folder of answers and figures; what is there, and was made by the present code, is not made again.
        samples, length: of each point of the curve. policies: of the curve and of the costs.
        grid_samples, grid_length: of the needle grid. loss_prompts: texts, of ``length`` tokens.
        bench_model, bench_context, repeats: of the costs. backend: of the costs; answers are computed without Inductor.
    """

    output: Path
    work: Path
    samples: int = 200
    length: int = 512
    policies: tuple[PolicySpec, ...] = field(default_factory=default_policies)
    grid_samples: int = 100
    grid_length: int = 2048
    loss_prompts: int = 50
    bench_model: str = "small-mha"
    bench_context: int = 4096
    repeats: int = 3
    backend: Compiler = "inductor"


class Results:
    """A checked page.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(self, settings: ResultsSettings) -> None:
        s = self.settings = settings
        self._curve = Evaluation(
            curve_settings(output=s.work / "curve", samples=s.samples, length=s.length, policies=s.policies)
        )
        self._grid = Evaluation(
            EvalSettings(
                model="builtin",
                tasks=("needle_grid",),
                policies=tuple(map(PolicySpec, GRID_POLICIES)),
                budgets=(GRID_BUDGET,),
                output=s.work / "grid",
                samples=s.grid_samples,
                length=s.grid_length,
                batch=5,
                backend="eager",
            )
        )
        self._bench = BenchSettings(
            model=s.bench_model,
            contexts=(s.bench_context,),
            policies=tuple(spec for spec in s.policies if spec.name != "full"),
            systems=("hf-eager", "full"),
            repeats=s.repeats,
            backend=s.backend,
        )

    def run(self, console: Console) -> Path:
        """Measure what is missing and write the page; returns its path."""
        s = self.settings
        for folder in (s.work, s.output):
            folder.mkdir(parents=True, exist_ok=True)
        curve, grid = draw_curve(self._curve, console), self._grid.run(progress_console())
        text = _page(s, curve, grid, self._losses(), self._costs())
        shutil.copyfile(s.work / "curve" / "curve.png", s.output / "curve.png")
        shutil.copyfile(s.work / "grid" / "needle_grid.png", s.output / "needle_grid.png")
        page = s.output / "results.md"
        page.write_text(text.rstrip() + "\n", encoding="utf-8")
        return page

    def _losses(self) -> list[PolicyLoss]:
        s = self.settings
        model, tokenizer = builtin.load()
        texts = [sample(LOSS_TASK, s.length, seed) for seed in range(s.loss_prompts)]
        ids = [tokenizer(text.ask(text.questions[0]), return_tensors="pt").input_ids for text in texts]
        specs = [PolicySpec(name).with_window(LOSS_WINDOW) for name in LOSS_POLICIES]
        measured = measure_output_loss(model, ids, specs, LOSS_BUDGETS)
        total = len(specs) * len(LOSS_BUDGETS)
        return list(track(measured, "output loss", total=total, console=progress_console(), transient=True))

    def _costs(self) -> dict[str, Any]:
        path = self.settings.work / "bench.json"
        result: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        if not result.get("complete") or result["versions"]["source"] != source_digest():
            result = Bench(self._bench).run(progress_console())
            path.write_text(json.dumps(result, indent=1) + "\n")
        return result


def _page(
    s: ResultsSettings, curve: Sequence[Row], grid: Sequence[Row], losses: Sequence[PolicyLoss], costs: dict[str, Any]
) -> str:
    used, model, place = versions(), builtin.load()[0], machine(torch.device("cpu"))
    return f"""# Results

Written by `kvpass results` on {datetime.now(UTC).date()}; nothing here was typed by hand. {place["cpu"]},
{place["threads"]} thread(s), fp32; kvpass {used["kvpass"]} (source {used["source"]}), torch {used["torch"]},
transformers {used["transformers"]}. The model is the built-in one ({model.num_parameters():,} parameters, fingerprint
{fingerprint(model)}), trained to find values in a text by their names; its card says what it can and cannot do.
What holds for it need not hold for a large model on natural text.

## Accuracy against budget

Texts of {s.length} tokens hide eight facts among decoys; {curve[0].samples} questions a point, exact answers
in percent, 95 % Wilson intervals (questions that share a text are taken as independent). Scope `prompt`: the
question is compressed with the text, all but its last token. Scope `context`: the text is compressed before
the question is known. Budgets are shares of the entries; at 100 % every policy is `full` (contract 1).
Options other than defaults stand behind the names.

![accuracy against budget](curve.png)

{curve_table(curve)}
{_ordering(curve)}

## Needle by length and depth

One fact at five depths of texts of up to {s.grid_length} tokens, budget {GRID_BUDGET:.0%}, default options.

![needle grid](needle_grid.png)

{results_markdown(grid)}
## Layer attention output loss

How far the attention output of the first token after compression moves, L1 norm (LAVa, arXiv 2509.09754,
Lemma 1 and Table 14), for one question in each of {s.loss_prompts} such texts, every layer on its own.

{_loss_table(losses)}

## What each policy costs

Random weights: this is about speed and bytes, not about answers. Policies that evict while decoding
(`cake`, `h2o`, `tova`, `streaming_llm`) score their entries at every step, so they decode slower. `r_kv` and
`triattention` do so once in `buffer` steps.

{show(costs).markdown()}
"""


def _ordering(rows: Sequence[Row]) -> str:
    """A sentence a scope: policies by their mean over the budgets below the whole cache."""
    lines = []
    for scope in dict.fromkeys(row.scope for row in rows):
        scores: dict[str, list[float]] = {}
        for row in rows:
            if row.scope == scope and row.budget != "all":
                scores.setdefault(row.policy, []).append(100 * row.score)
        means = sorted(((sum(values) / len(values), policy) for policy, values in scores.items()), reverse=True)
        ranked = ", ".join(f"{policy} {mean:.1f}" for mean, policy in means)
        lines.append(f"Mean over these budgets, scope `{scope}`: {ranked}.\n")
    return "\n".join(lines)


def _loss_table(found: Sequence[PolicyLoss]) -> str:
    columns = ["budget", "policy", "first layer", "last layer", f"mean of {found[0].losses.shape[1]}"]
    rows = []
    for loss in found:
        layers = loss.by_layer
        figures = (f"{float(figure):.2f}" for figure in (layers[0], layers[-1], layers.mean()))
        rows.append([f"{loss.budget:.0%}", f"`{loss.policy}`", *figures])
    lines = [markdown_table(columns, rows, left=2)]
    for budget in dict.fromkeys(loss.budget for loss in found):
        at = {loss.policy.partition(":")[0]: loss for loss in found if loss.budget == budget}
        less, half, share = at["lava"].less_than(at["ada_snapkv"])
        lines.append(
            f"At {budget:.0%}, summed over layers, `lava` loses {abs(less):.1f} +- {half:.1f} "
            f"{'less' if less > 0 else 'more'} than `ada_snapkv` (95 %, paired), and less on {share:.0%} of them.\n"
        )
    return "\n".join(lines)

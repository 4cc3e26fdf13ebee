"""The certificate of a prompt: what was kept per layer and head, what it weighs, how much attention it holds."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table

from kvpass.backend import CompileRecord
from kvpass.config import Budget
from kvpass.policies.base import Policy
from kvpass.prompt_record import PromptRecord


@dataclass(frozen=True, eq=False, kw_only=True)
class Report:
    """What the last prompt kept and what was compiled for it. Prints as a table.

    Attributes:
        policy, budget: the rules. prompt: what they kept. compiled: one record per compiled graph.
    """

    policy: Policy
    budget: Budget | None
    prompt: PromptRecord
    compiled: Sequence[CompileRecord]

    @property
    def lengths(self) -> torch.Tensor:
        """Entries kept right after the prompt, window included, int64 ``[B, L, K]``."""
        return self.prompt.kept + self.prompt.window[:, None, None]

    @property
    def prompt_lengths(self) -> torch.Tensor:
        """Real tokens of each row, int64 ``[B]``."""
        return self.prompt.columns - self.prompt.start

    @property
    def bytes_kept(self) -> torch.Tensor:
        """Bytes of the kept entries, int64 ``[B, L, K]``; ``nbytes`` adds spare slots, tail capacity and indices."""
        return self.lengths * self.prompt.geometry.entry_bytes

    @property
    def bytes_full(self) -> int:
        """Bytes of the entries a full cache would hold for the same prompts, padding not counted."""
        g = self.prompt.geometry
        return int(self.prompt_lengths.sum()) * g.layers * g.kv_heads * g.entry_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON; tensors as nested lists ``[B][L][K]``."""
        return {
            "policy": self.policy.name,
            "policy_options": asdict(self.policy),
            "budget": None if self.budget is None else asdict(self.budget),
            "budget_entries": self.prompt.entries.tolist(),
            "prompt_tokens": self.prompt_lengths.tolist(),
            "geometry": asdict(self.prompt.geometry),
            "lengths": self.lengths.tolist(),
            "bytes_kept": self.bytes_kept.tolist(),
            "nbytes": self.prompt.nbytes,
            "bytes_full": self.bytes_full,
            "window_attention_mass": self.prompt.mass.tolist(),
            "layer_weights": self.prompt.weights.tolist(),
            "compiled": [asdict(record) for record in self.compiled],
        }

    def __rich__(self) -> Group:
        lengths, mass = self.lengths.double(), self.prompt.mass.double()
        table = Table(title=f"kvpass: {self.policy.name}, budget {self.budget}")
        for name in ("layer", "entries / head", "min", "max", "KiB", "attention mass", "min mass"):
            table.add_column(name, justify="right")
        for layer in range(lengths.shape[1]):
            table.add_row(
                str(layer),
                f"{float(lengths[:, layer].mean()):.1f}",
                str(int(lengths[:, layer].min())),
                str(int(lengths[:, layer].max())),
                f"{int(self.bytes_kept[:, layer].sum()) / 1024:.1f}",
                f"{float(mass[:, layer].mean()):.4f}",
                f"{float(mass[:, layer].min()):.4f}",
            )
        kept, full = int(self.lengths.sum()), self.bytes_full // self.prompt.geometry.entry_bytes
        lines = [
            f"rows: {lengths.shape[0]}, prompt tokens: {', '.join(map(str, self.prompt_lengths.tolist()))}",
            f"entries kept: {kept} of {full} ({kept / full:.1%}); cache occupies {self.prompt.nbytes} bytes, "
            f"a full one would hold {self.bytes_full}",
        ]
        if self.policy.parity == "code":
            lines.append("parity='code': released rules, which may keep more or fewer entries than the budget")
        lines += [
            f"compiled {record.phase} (batch {record.batch}, {record.compiler}): {record.sites} attention sites "
            f"rewritten, {record.seconds:.1f} s"
            for record in self.compiled
        ]
        return Group(table, *lines)

    def __str__(self) -> str:
        console = Console(width=100, file=io.StringIO())
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip()

    def plot(self, path: str | Path, *, row: int = 0) -> Path:
        """Write a picture: lengths as a heat map (layers x KV heads), and the positions kept along the prompt.

        Args:
            path: where to write; the suffix decides the format (PNG, PDF, SVG).
            row: row of the batch.
        """
        from matplotlib.figure import Figure

        lengths = self.lengths[row]
        layers, heads = lengths.shape
        figure = Figure(figsize=(12, 1.5 + 0.35 * max(layers, 6)), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[1, 2])
        image = left.imshow(lengths.numpy(force=True), aspect="auto", cmap="viridis")
        figure.colorbar(image, ax=left, label="entries kept")
        left.set(xlabel="KV head", ylabel="layer", title=f"{self.policy.name}, budget {self.budget}")
        left.set_xticks(range(heads))
        left.set_yticks(range(layers))
        tokens = int(self.prompt_lengths[row])
        bins = min(tokens, 256)
        share = torch.zeros(layers, bins)
        for layer in range(layers):
            begin, end = (int(self.prompt.offsets[row, edge]) for edge in (layer * heads, (layer + 1) * heads))
            window = torch.arange(tokens - int(self.prompt.window[row]), tokens).repeat(heads)
            kept = torch.cat([self.prompt.positions[row, begin:end].cpu().long(), window])
            share[layer] = torch.bincount(kept * bins // tokens, minlength=bins) / (heads * tokens / bins)
        image = right.imshow(
            share.numpy(),
            aspect="auto",
            cmap="magma",
            vmin=0,
            vmax=1,
            interpolation="nearest",
            extent=(0, tokens, layers - 0.5, -0.5),
        )
        right.set_yticks(range(layers))
        figure.colorbar(image, ax=right, label="share of positions kept")
        right.set(xlabel="position in the prompt", ylabel="layer", title="what was kept")
        figure.savefig(path, dpi=120)
        return Path(path)

"""Report of a prompt: entries and bytes kept per layer and head, and their attention mass."""

from __future__ import annotations

import html
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table
from torch import Tensor

from kvpass.cache.prompt_record import PromptRecord, layer_ids, scatter_to_layers
from kvpass.compiler.backend import CompileRecord, rows_text
from kvpass.config import Budget
from kvpass.operands import BITS
from kvpass.policies.base import Policy
from kvpass.ranks import Ranks
from kvpass.replace_file import SHARED, replacing


def import_figure() -> Any:
    """Return the class that pictures are made of.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'kvpass[plots]'") from error
    return Figure


@dataclass(frozen=True, eq=False, kw_only=True)
class Report:
    """Entries kept of the last prompt, and graphs compiled for it. Prints as a table.

    Attributes:
        prompt: what was kept. compiled: one record per compiled graph. ranks: processes that share the heads; all
            numbers are of all heads. attention: numbers of the layers with attention in the model's own count, where
            other layers are recurrent; None: all have attention. expanded: why the model's latents are cached as
            expanded heads; None if they are not, or it has none.
    """

    prompt: PromptRecord
    compiled: Sequence[CompileRecord]
    ranks: Ranks
    attention: tuple[int, ...] | None
    expanded: str | None

    @property
    def policy(self) -> Policy:
        """The policy that decided what is kept."""
        return self.prompt.policy

    @property
    def budget(self) -> Budget | None:
        """The budget of the prompt; None for a policy that keeps everything."""
        return self.prompt.budget

    def _name(self, layer: int) -> str:
        """What the model itself calls an attention op's layer, as far as each layer has one op."""
        groups = [store.group for store in self.prompt.full_layers] + list(self.prompt.sliding_layers)
        ops = sum(len(group.layers) for group in groups)
        return str(layer if self.attention is None or ops != len(self.attention) else self.attention[layer])

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Index of each layer that shares the budget, among all attention ops, ascending."""
        return layer_ids([store.group for store in self.prompt.full_layers])

    @property
    def lengths(self) -> Tensor:
        """Entries kept right after the prompt, window included, int64 ``[B, L, K]``, layers as in ``layer_ids``.

        Heads that a layer of another KV geometry lacks count 0, here and in ``bytes_kept``. If all layers have sliding
        windows, L and K are 0, here and elsewhere.
        """
        return self._by_layer([self.prompt.lengths(store) for store in self.prompt.full_layers], 0)

    @property
    def attention_mass(self) -> Tensor:
        """Share of the window's attention in the kept entries, fp32 ``[B, L, K]``; NaN: no head."""
        return self._by_layer([store.mass for store in self.prompt.full_layers], float("nan"))

    @property
    def output_errors(self) -> Tensor | None:
        """Relative errors of attention outputs, fp32 ``[2, B, L, K]``, by eviction and after compaction.

        Root mean squares over held-out queries that repeat the prompt, divided by those of the outputs; 0: nothing was
        dropped. None without ``compact=True``.
        """
        if not self.policy.compact:
            return None
        parts = [store.output_errors for store in self.prompt.full_layers if store.output_errors is not None]
        both = [(part[1:] / part[:1].clamp(min=1e-30)).sqrt().transpose(1, 2) for part in parts]
        return torch.stack([self._by_layer([part[i] for part in both], 0) for i in range(2)])

    @property
    def prompt_lengths(self) -> Tensor:
        """Real tokens of each row, int64 ``[B]``."""
        return self.prompt.columns - self.prompt.start

    @property
    def bytes_kept(self) -> Tensor:
        """Bytes of the kept entries, int64 ``[B, L, K]``; ``nbytes`` adds spare slots, tail capacity and indices."""
        return self._by_layer([self.prompt.bytes_kept(store) for store in self.prompt.full_layers], 0)

    @property
    def bytes_full(self) -> int:
        """Bytes of a full cache of the layers that share the budget, without padding."""
        return int(self.prompt_lengths.sum()) * sum(x.group.geometry.token_bytes() for x in self.prompt.full_layers)

    @property
    def imbalance(self) -> Tensor:
        """Entries of the fullest process over the average of all, fp64 ``[B, L]``; 1 where one process has all heads.

        The fullest process decides how long a layer of a decode step takes.
        """
        size = self.ranks.size
        parts = []
        for store in self.prompt.full_layers:
            of_process = self.prompt.lengths(store).double().unflatten(2, (size, -1)).sum(3)
            parts.append((of_process.amax(2) / of_process.mean(2).clamp(min=1e-9))[..., None])
        return self._by_layer(parts, 1).flatten(1)

    def _by_layer(self, parts: Sequence[Tensor], fill: float) -> Tensor:
        rows = self.prompt.start.numel()
        return scatter_to_layers([store.group for store in self.prompt.full_layers], parts, fill, (rows, 0, 0))

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON; tensors as nested lists ``[B][L][K]``, ``layer_weights`` as ``[B][L]``."""
        return {
            "policy": self.policy.name,
            "policy_options": asdict(self.policy),
            "budget": None if self.budget is None else asdict(self.budget),
            "entry_format": self.prompt.entry_format,
            "budget_entries": self.prompt.entries.tolist(),
            "prompt_tokens": self.prompt_lengths.tolist(),
            "pools": [asdict(store.group) for store in self.prompt.full_layers],
            "rings": [asdict(group) for group in self.prompt.sliding_layers],
            "layers": list(self.layer_ids),
            "model_layers": [int(self._name(layer)) for layer in self.layer_ids],
            "lengths": self.lengths.tolist(),
            "bytes_kept": self.bytes_kept.tolist(),
            "nbytes": self.prompt.nbytes,
            "ring_nbytes": self.prompt.ring_nbytes,
            "state_nbytes": self.prompt.state_nbytes,
            "protected": self.prompt.protected,
            "image_entries": self.prompt.entries_of_images(),
            "bytes_full": self.bytes_full,
            "window_attention_mass": self.attention_mass.tolist(),
            "output_errors": None if self.output_errors is None else self.output_errors.tolist(),
            "layer_weights": self._by_layer([x.weights[..., None] for x in self.prompt.full_layers], 0)
            .flatten(1)
            .tolist(),
            "expanded": self.expanded,
            "processes": self.ranks.size,
            "imbalance": self.imbalance.tolist(),
            "compiled": [asdict(record) for record in self.compiled],
        }

    def __rich__(self) -> Group:
        return Group(self._table(), *self._sentences())

    def _table(self) -> Table:
        table = Table(title=f"kvpass: {self.policy.name}, budget {self.budget}")
        for name in ("layer", "entries / head", "min", "max", "KiB", "attention mass", "min mass"):
            table.add_column(name, justify="right")
        geometries = {layer: store.group.geometry for store in self.prompt.full_layers for layer in store.group.layers}
        kept, masses, sizes = self.lengths, self.attention_mass, self.bytes_kept.sum((0, 2)).tolist()
        for i, layer in enumerate(self.layer_ids):
            lengths, mass = (x[:, i, : geometries[layer].kv_heads].double() for x in (kept, masses))
            table.add_row(
                self._name(layer),
                f"{lengths.mean():.1f}",
                f"{lengths.min():.0f}",
                f"{lengths.max():.0f}",
                f"{sizes[i] / 1024:.1f}",
                f"{mass.mean():.4f}",
                f"{mass.min():.4f}",
            )
        for ring in self.prompt.sliding_layers:
            for layer in ring.layers:
                kind = "chunk" if ring.chunked else "ring"
                table.add_row(self._name(layer), f"{kind} of {ring.sliding_window}", "", "", "", "", "")
        return table

    def _sentences(self) -> Iterator[str]:
        """What is kept and lost, what the budget does not count, where things are, rules, and compiled graphs."""
        rows, tokens = self.prompt_lengths.tolist(), int(self.prompt_lengths.sum())
        yield f"rows: {len(rows)}, prompt tokens: {', '.join(map(str, rows))}"
        if self.prompt.full_layers:
            total = int(self.lengths.sum())
            full = tokens * sum(len(x.group.layers) * x.group.geometry.kv_heads for x in self.prompt.full_layers)
            yield (
                f"entries kept: {total} of {full} ({total / full:.1%}); cache occupies {self.prompt.nbytes} bytes, "
                f"a full one would hold {self.bytes_full}"
            )
            if self.prompt.images is not None:
                images = self.prompt.entries_of_images()
                of_images = full * int(self.prompt.images.sum()) // tokens
                yield f"of images: {images} of {of_images} entries; of text: {total - images} of {full - of_images}"
        if self.prompt.computed is not None:
            by, shares = self.prompt.computed
            share = sum(share.item() for share in shares.values()) / len(shares)
            yield (
                f"prefill={by!r}: {share:.1%} of the blocks of attention were computed in {len(shares)} "
                "attention layers, everything in the others"
            )
        if self.prompt.entry_format != "model":
            yield (
                f"entries={self.prompt.entry_format!r}: entries are {BITS[self.prompt.entry_format]}-bit codes with a "
                "scale for key and value"
            )
        if (errors := self.output_errors) is not None and errors.numel():
            before, after = errors.flatten(1).mean(1).tolist()
            yield (
                f"compact=True: error of attention outputs {after:.1%}, by eviction alone {before:.1%} (mean of layers "
                "and heads, of held-out queries that repeat the prompt)"
            )
        if self.prompt.protected:
            beside = (
                "; layers with a sliding window keep their newest tokens alone" if self.prompt.sliding_layers else ""
            )
            yield f"protected: {self.prompt.protected} of {tokens} tokens, in every head of these layers{beside}"
        if self.prompt.sliding_layers:
            count = sum(len(ring.layers) for ring in self.prompt.sliding_layers)
            yield (
                f"{count} layers with a sliding window or chunks are outside the budget: {self.prompt.ring_nbytes} "
                "bytes of rings"
            )
        if self.prompt.state_nbytes:
            yield f"recurrent layers are outside the budget: {self.prompt.state_nbytes} bytes of states"
        if self.ranks.several:
            most = self.imbalance.amax().item() if self.imbalance.numel() else 1.0
            yield (
                f"{self.ranks.size} processes share the heads; of a layer, the fullest holds up to {most:.2f} times "
                "the average"
            )
        if self.expanded is not None:
            yield f"latents are cached as expanded heads: {self.expanded}"
        if self.policy.parity == "code":
            yield "parity='code': released rules, which may keep more or fewer entries than the budget"
        for record in self.compiled:
            yield (
                f"compiled {record.phase} of {rows_text(record.batch)} ({record.compiler}): {record.sites} attention "
                f"sites rewritten, {record.shape}, {record.seconds:.1f} s"
            )

    def __str__(self) -> str:
        text = io.StringIO()
        Console(width=100, file=text).print(self)
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """Return the text as a notebook shows it."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def plot(
        self,
        path: str | Path,
        *beside: Report,
        row: int = 0,
        marks: Mapping[str, Sequence[int]] | None = None,
        titles: Sequence[str] = (),
    ) -> Path:
        """Write a picture: heat maps of lengths (layers x KV heads), and the positions kept. Dark is much.

        Args:
            path: where to write; the suffix decides the format (PNG, PDF, SVG).
            beside: reports of the same prompt under other policies, drawn beside this one in the same colours.
            row: row of the batch. marks: positions to point at, by the name that stands at the first.
            titles: one for each report, above the positions.
        Raises:
            ImportError: without matplotlib. ValueError: all layers have sliding windows, or the prompts differ.
        """
        figure_type = import_figure()
        from matplotlib.colors import PowerNorm

        if not self.prompt.full_layers:
            raise ValueError("nothing to plot: all layers have sliding windows")
        reports = (self, *beside)
        if any(not torch.equal(report.prompt_lengths, self.prompt_lengths) for report in beside):
            raise ValueError("these reports are not of the same prompt")
        lengths = torch.stack([report.lengths[row] for report in reports]).numpy(force=True)
        count, layers, tokens = len(reports), len(self.layer_ids), int(self.prompt_lengths[row])
        figure = figure_type(figsize=(8 + 4 * count, 1.5 + 0.35 * max(layers, 6)), layout="constrained")
        axes = figure.subplots(1, 2 * count, sharey=True, width_ratios=[1] * count + [2] * count)
        axes[0].set(ylabel="layer", yticks=range(layers), yticklabels=map(self._name, self.layer_ids))
        titles = titles or ["what was kept"] * count
        style = {"aspect": "auto", "cmap": "viridis_r", "interpolation": "nearest"}
        for report, title, kept, left, right in zip(reports, titles, lengths, axes[:count], axes[count:], strict=True):
            heads = left.imshow(kept, vmin=lengths.min(), vmax=lengths.max(), **style)
            left.set(xlabel="KV head", xticks=range(kept.shape[1]))
            left.set_title(f"{report.policy.name}, budget {report.budget}")
            places = right.imshow(
                report._shares(row, min(tokens, 128)).numpy(),  # white: none
                norm=PowerNorm(0.5, 0, 1),  # a small budget keeps little of every bin
                extent=(0, tokens, layers - 0.5, -0.5),
                **style,
            )
            right.set_xlabel("position in the prompt")
            right.set_title(title, pad=24, fontsize="medium", parse_math=False)  # above the names of marks
            for (name, at), color in zip((marks or {}).items(), ("tab:red", "tab:gray", "tab:purple"), strict=False):
                right.scatter(at, [-0.5] * len(at), s=60, c=color, marker="v", clip_on=False, zorder=3, label=name)
                right.annotate(name, (at[0], -0.5), (0, 7), textcoords="offset points", ha="center", color=color)
        figure.colorbar(heads, ax=axes[:count], label="entries kept")
        figure.colorbar(places, ax=axes[count:], label="share of positions kept")
        with replacing(path, SHARED) as file:
            figure.savefig(file, dpi=120, format=Path(path).suffix[1:] or "png")
        return Path(path)

    def _shares(self, row: int, bins: int) -> Tensor:
        """Share of the positions kept in each bin of the prompt, ``[L, bins]``; NaN: none."""
        tokens, window = int(self.prompt_lengths[row]), int(self.prompt.window[row])
        parts = []
        for store in self.prompt.full_layers:
            heads = store.group.geometry.kv_heads
            newest = torch.arange(tokens - window, tokens, device="cpu").repeat(heads)
            ends = store.offsets[row, ::heads].tolist()
            kept = [torch.cat([store.positions[row, a:b].cpu().long(), newest]) for a, b in itertools.pairwise(ends)]
            counts = torch.stack([torch.bincount(x * bins // tokens, minlength=bins) for x in kept])
            parts.append(counts[None] / (heads * tokens / bins))
        shares = self._by_layer(parts, 0)[0]
        return shares.where(shares > 0, float("nan"))

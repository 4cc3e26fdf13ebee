"""DuoAttention: some heads keep the whole prompt, the others its first and its newest tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.calibrated import contents_of
from kvpass.policies.head_splits import AdaptiveHeads, HeadSplit
from kvpass.policies.layer_splits import LayerSplit, zero_unseen_layers
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_choice, check_int, check_text, option
from kvpass.policies.scheduler import invert, places

HeadMap: TypeAlias = Sequence[Sequence[float]]
"""A number for each KV head of each layer; heads of higher ones are full first."""
Rows: TypeAlias = tuple[tuple[float, ...], ...]
"""The same as a value."""

VALUES, SIZES = "full_attention_heads.tsv", "config.json"
"""Files of a published head map."""
Rule = Literal["maxima", "distances"]  # tensor of a file of kvpass calibrate, behind head_


def check_head_map(name: str, value: object) -> None:
    """Raise unless the value is rows of finite numbers, equally many in each."""
    rows = list(value) if isinstance(value, tuple | list) else []
    widths = {len(row) if isinstance(row, tuple | list) else 0 for row in rows}
    if len(widths) != 1 or 0 in widths:
        raise ValueError(
            f"{name}={value!r}: must be a file of 'kvpass calibrate', the folder of a published head map ({VALUES} and "
            f"{SIZES}), or a row of numbers for each layer, one for each KV head"
        )
    for row in rows:
        for number in row:
            if type(number) not in (int, float) or not abs(number) <= sys.float_info.max:
                raise ValueError(f"{name}: {number!r} must be a finite number")


def read_head_map(folder: str) -> tuple[Rows, int, int]:
    """Return the numbers of a published head map, clipped to [0, 1], and its numbers of first and newest tokens."""
    values, sizes = Path(folder, VALUES), Path(folder, SIZES)
    try:
        lines = [line.split("\t") for line in values.read_text("utf-8-sig").splitlines() if line.strip()]
        numbers = [[float(text) for text in line] for line in lines]
        config = json.loads(sizes.read_text("utf-8-sig"))
        first, newest = config["sink_size"], config["recent_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"head_map={folder!r}: must be a file of 'kvpass calibrate', or a folder with {VALUES}, a line for each "
            f"layer and in it a number for each KV head, and {SIZES} with sink_size and recent_size: "
            f"{type(error).__name__}: {error}"
        ) from None
    check_head_map(f"head_map={folder!r}", numbers)
    return tuple(tuple(min(max(x, 0.0), 1.0) for x in row) for row in numbers), first, newest


def fitted_head_map(path: str, rule: object) -> tuple[HeadMap, str | None]:
    """Return a head map in a file of ``kvpass calibrate`` by this rule, and the digest of its model's weights."""
    check_choice("rule", rule, Rule)
    name = f"head_{rule}"
    contents = contents_of("head_map", path, name, torch.device("cpu"))
    if name not in contents.tensors:
        raise ValueError(
            f"head_map={path!r}: holds no {name}: a newer 'kvpass calibrate' writes head_maxima, and head_distances "
            "for models whose rotary embedding it finds"
        )
    return contents.tensors[name].tolist(), contents.model


@dataclass(frozen=True)
class HeadMapLayers(LayerSplit):
    """What the heads of a layer keep: the first tokens, and all for which their places in the map are early enough."""

    head_map: Rows
    sinks: int

    def places(self, layers: int, kv_heads: int, device: torch.device) -> Tensor:
        """Return the place of each head when they are ordered by falling numbers, int64 ``[L, K]``."""
        rows, width = len(self.head_map), len(self.head_map[0])
        if (rows, width) != (layers, kv_heads):
            raise ValueError(
                f"head_map is of {rows} layers of {width} KV heads, but the model has {layers} layers of {kv_heads} "
                "KV heads under the budget"
            )
        numbers = torch.tensor(self.head_map, dtype=torch.float64, device="cpu")
        return places(numbers.flatten()).view(layers, kv_heads).to(device)

    def budgets(self, weights: Tensor, entries: Tensor, available: Tensor, kv_heads: int, seen: int) -> Tensor:
        layers = weights.shape[1]
        place = self.places(layers, kv_heads, entries.device)
        each = torch.minimum(entries, available)
        first = each.clamp(max=self.sinks)
        rest = (available - first)[:, None, None]
        left = ((each - first) * (layers * kv_heads))[:, None, None] - place * rest
        return zero_unseen_layers(seen, first[:, None] * kv_heads + torch.minimum(left.clamp(min=0), rest).sum(2))

    def overspend(self, entries: int, num_layers: int, kv_heads: int) -> int:
        self.places(num_layers, kv_heads, torch.device("cpu"))  # before a prompt is read
        return 0


@dataclass(frozen=True, kw_only=True)
class DuoAttention(Policy):
    """Keep the whole prompt in some heads, its ends in the others: DuoAttention (Xiao et al. 2024, arXiv 2410.10819).

    A head map, which its authors train for a model, gives a number to every KV head. Every head keeps the first
    ``sinks`` tokens and the newest ``window``. What the budget leaves goes to the head of the highest number until it
    keeps the whole prompt, then to the next one; the last that gets something keeps its newest tokens. Equal numbers:
    lower layer, then lower head first. So the budget says how many heads are full: with n of L * K, in entries per head
    about ``(n * N + (L * K - n) * (sinks + window)) / (L * K)`` for N tokens. A budget below ``sinks + window`` keeps
    fewer first tokens.

    ``head_map`` is a file of ``kvpass calibrate`` for this model; a folder in the published format, whose
    ``config.json`` gives ``sinks`` and ``window`` where they are left out; or the numbers themselves. Layers are those
    under the budget, in order. The file has the numbers of two rules, means over texts:

    * ``"maxima"``: the most that a repetition of the text attends to one of its entries (head scores of KVzip's
      authors, arXiv 2505.23416).
    * ``"distances"``: the mean query at position 499 attends to the mean key at positions 0 to 499, RoPE applied; mean
      over the positions of the cumulative sum, and over the group (kvpress's DuoAttention "on the fly").

    Departures: the authors name the part of the heads that are not full; here the budget decides, and is met exactly.
    While decoding every head appends, as in kvpress; the authors' other heads roll on.

    Args:
        head_map: see above; one row a layer, one number a KV head.
        sinks: first tokens that every head keeps. rule: which numbers of a file of ``kvpass calibrate``.
        of_model: digest of the weights of the model that the map is for, which such a file gives; None: of any.
    """

    name = "duo_attention"
    inputs = frozenset({"prompt", "heads"})

    window: int = 256
    head_map: str | HeadMap = option((), check_head_map)
    sinks: int = option(128, check_int, 0)
    rule: Rule = option("maxima", check_choice, Rule)
    of_model: str | None = option(None, check_text, "the digest of a model's weights")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "head_map", tuple(tuple(map(float, row)) for row in self.head_map))

    @classmethod
    def read(cls, options: Mapping[str, object]) -> Mapping[str, object]:
        path = options.get("head_map")
        if isinstance(path, str) and Path(path).is_file():
            head_map, model = fitted_head_map(path, options.get("rule", "maxima"))
            return {**options, "head_map": head_map, "of_model": model}
        if "rule" in options:
            raise ValueError(
                f"rule={options['rule']!r}: is of a file of 'kvpass calibrate': give head_map=FILE with it"
            )
        if path is None:
            return options
        if not isinstance(path, str):
            return {"of_model": None, **options}
        head_map, first, newest = read_head_map(path)
        return {"sinks": first, "window": newest, "of_model": None, **options, "head_map": head_map}

    def made_for(self) -> str | None:
        return self.of_model

    def score(self, obs: Observation) -> Tensor:
        heads = obs.kv_heads * obs.ranks.size
        of_process = slice(obs.first_head, obs.first_head + obs.kv_heads)
        places_of_layer = self.layers().places(obs.num_layers, heads, obs.keys.device)[obs.layer]
        place = invert(places_of_layer.argsort())[of_process, None]
        position = obs.positions[..., : obs.evictable]
        newer = position / max(obs.evictable, 1)
        worth = torch.where(position < self.sinks, heads + 1 + self.sinks - position, heads - place + newer)
        return worth.float().expand(obs.keys.shape[0], -1, -1)

    def heads(self) -> HeadSplit:
        return AdaptiveHeads(0.0)

    def layers(self) -> HeadMapLayers:
        return HeadMapLayers(cast(Rows, self.head_map), self.sinks)

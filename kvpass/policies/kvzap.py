"""KVzap: a small fitted map tells from a token alone how much a repetition of the text would attend to it."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from kvpass.policies.base import Policy
from kvpass.policies.calibrated import SHARES, Contents, contents_of
from kvpass.policies.decode_rules import DecodeRule, Slots, evictable_slots
from kvpass.policies.head_splits import AdaptiveHeads, HeadSplit, UniformHeads
from kvpass.policies.layer_splits import GlobalLayers, LayerSplit, UniformLayers
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_bool, check_choice, check_float, check_int, check_text, option
from kvpass.policies.scheduler import places
from kvpass.policies.scores import sinks_first
from kvpass.ranks import ONE_PROCESS, Ranks

_LEAST_SHARE = 1e-6
_WANTED = (
    "must hold for each layer one linear map, module_list.0.weight and module_list.0.bias and so on, or two, "
    "module_list.0.0 and module_list.0.2, as 'kvpass calibrate' and nvidia/KVzap-* have them"
)


class Surrogate(NamedTuple):
    """Contents of a file: maps from what enters attention to the log of KVzip+'s scores.

    For each layer under the budget it is one linear map, or two with a GELU between them: weight ``[out, in]`` and bias
    ``[out]``, the last with K rows; fp32.
    """

    layers: tuple[tuple[tuple[Tensor, Tensor], ...], ...]
    head_shares: Tensor | None  # share of the entries for each head, [L, K]; None in NVIDIA's files
    model: str | None  # digest of the weights of the model that it was fitted for; None in NVIDIA's files

    def check(self, path: str, layers: int, kv_heads: int, hidden: int | None = None) -> None:
        """Raise ValueError unless it is of so many layers and KV heads, and of tokens of so many numbers."""
        sizes = len(self.layers), len(self.layers[0][-1][1]), self.layers[0][0][0].shape[1]
        if sizes != (layers, kv_heads, sizes[2] if hidden is None else hidden):
            raise ValueError(
                f"weights={path!r}: of {sizes[0]} layers of {sizes[1]} KV heads and tokens of {sizes[2]} numbers, but "
                f"the model has {layers} layers of {kv_heads} KV heads under the budget"
                + ("" if hidden is None else f" and tokens of {hidden} numbers")
            )


@dataclass(frozen=True, kw_only=True)
class KVzap(Policy):
    """Keep what a fitted map says a repetition of the text would attend to: KVzap (arXiv 2601.07891).

    The score of a token in a KV head is ``W x + b`` of what enters the attention layer for it (or
    ``W2 gelu(W1 x + b1) + b2``). The map is fitted to the log of :class:`KVzipPlus`'s score, so it asks for no replay,
    and no later token changes the score of an earlier one. The best scores of all layers and heads stay, the first
    ``sinks`` tokens before others, and the newest ``window``.

    With a ``threshold``, as in the paper, entries with a lower score are not kept even if the budget has room: how much
    is kept follows from the text, and the budget is the most (1.0: all). The paper has -3 to -6 for Qwen3-8B and -6 to
    -9 for Llama-3.1-8B. A prompt's pool is as large as the budget until it has been read.

    With ``evict_during_decode`` a token of an answer gets its score when it enters, and competes with the entries of
    its head when it leaves the newest ``window``: the lowest score goes, so that each head keeps its size. With a
    threshold, lower scores go whether there is room or not; what the prompt has left of the budget is room for others,
    the same in each head.

    Departures: without a threshold the budget is met exactly. The first tokens are protected, since the fit leaves them
    out; so is a prompt of one token.

    Args:
        window: newest tokens, always kept.
        weights: file of ``kvpass calibrate``, or file or folder of a published model (``nvidia/KVzap-*``).
        sinks: first tokens, kept before others.
        split: what competes: ``"layers"`` all entries, ``"heads"`` those of a layer, ``"none"`` those of a head, or
            ``"file"``: those of a head, which keeps its share by the file (``kvpass calibrate`` writes shares).
        threshold: lowest score that is kept, a logarithm; None: the budget alone decides. Needs ``split="layers"``.
        evict_during_decode: False: decoding only appends. ``split="file"`` needs False.
    """

    name = "kvzap"
    inputs = frozenset({"token_scores"})

    window: int = 128
    weights: str | None = option(None, check_text)
    sinks: int = option(4, check_int, 0)
    split: Literal["layers", "heads", "none", "file"] = option(
        "layers", check_choice, ("layers", "heads", "none", "file")
    )
    threshold: float | None = option(None, check_float, -math.inf)
    evict_during_decode: bool = option(False, check_bool)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is None:
            raise ValueError(
                "weights=None: must be a file of 'kvpass calibrate' for this model, or file or folder of nvidia/KVzap-*"
            )
        if self.threshold is not None and self.split != "layers":
            raise ValueError(f"threshold={self.threshold} with split={self.split!r}: must be with split='layers'")
        if self.evict_during_decode and self.split == "file":
            raise ValueError("evict_during_decode=True with split='file': must be with another split")

    def made_for(self) -> str | None:
        return self._surrogate(torch.device("cpu")).model

    def _surrogate(self, device: torch.device) -> Surrogate:
        assert self.weights is not None
        surrogate = _surrogate(contents_of("weights", self.weights, ("module_list.", SHARES), device))
        if self.split == "file" and surrogate.head_shares is None:
            raise ValueError(f"weights={self.weights!r}: holds no head shares for split='file'; take another split")
        return surrogate

    def token_scores(self, x: Tensor, layer: int, num_layers: int, kv_heads: int, ranks: Ranks) -> Tensor:
        surrogate = self._surrogate(x.device)
        surrogate.check(str(self.weights), num_layers, kv_heads * ranks.size, x.shape[2])
        *inner, (weight, bias) = surrogate.layers[layer]
        x = x.float()
        for first, offset in inner:
            x = gelu(x @ first.T + offset)
        return (x @ ranks.local_shard(weight, 0).T + ranks.local_shard(bias, 0)).transpose(1, 2)

    def score(self, obs: Observation) -> Tensor:
        scores = prompt_scores(obs, self.sinks)[..., : obs.evictable]
        if self.split != "file" or obs.length == 1:
            return scores
        # The best of ``share / (r + 1 / 2)`` of entry r of each head are as many of each as its share says
        # (Sainte-Lague's rule), and what a head has no entries for goes to the others.
        surrogate = self._surrogate(scores.device)
        surrogate.check(str(self.weights), obs.num_layers, obs.kv_heads * obs.ranks.size)
        assert surrogate.head_shares is not None
        share = obs.ranks.local_shard(surrogate.head_shares[obs.layer], 0).clamp(min=_LEAST_SHARE)
        scores = share[:, None] / (places(scores) + 0.5)
        return sinks_first(scores, obs.positions[..., : obs.evictable], self.sinks)

    def heads(self) -> HeadSplit:
        return UniformHeads() if self.split == "none" else AdaptiveHeads(0.0)

    def layers(self) -> LayerSplit:
        if self.split not in ("layers", "file"):
            return UniformLayers(self.parity)
        return GlobalLayers() if self.threshold is None else GlobalLayers(self.threshold)

    def decode_rule(self) -> DecodeRule | None:
        return OwnScores(window=self.window, options=self) if self.evict_during_decode else None

    def decode_quota(self, kept: Tensor, entries: Tensor, available: Tensor, ranks: Ranks = ONE_PROCESS) -> Tensor:
        """As in the base class; with a threshold what it has left of the budget is shared by all heads."""
        if self.threshold is None:
            return super().decode_quota(kept, entries, available)
        of_all = ranks.gather(kept, 2)
        heads = of_all.shape[0] * of_all.shape[2]
        left = (entries * heads - of_all.sum((0, 2))).clamp(min=0)
        return kept + left[:, None] // heads


@dataclass(frozen=True, kw_only=True)
class OwnScores(DecodeRule):
    """KVzap while decoding: each entry keeps the score that it got as a new token."""

    reads_tokens = True
    numbers_per_entry = 1  # the score

    options: KVzap

    def start(self, obs: Observation, scores: Tensor) -> Tensor:
        return prompt_scores(obs, self.options.sinks)[None]

    def observe(self, attention: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        assert slots.token_scores is not None
        new = sinks_first(slots.token_scores[..., None], slots.position, self.options.sinks)
        state = torch.where(slots.is_new, new, slots.decode_state)
        return state[0], state

    def quota_now(self, quota: Tensor, due: Tensor | None, worth: Tensor, position: Tensor) -> Tensor:
        if self.options.threshold is None:
            return quota
        enough = evictable_slots(position, self.window) & (worth >= self.options.threshold)
        return torch.minimum(quota, enough.sum(2))


def prompt_scores(obs: Observation, sinks: int) -> Tensor:
    """Return the score of each token of a prompt, fp32 ``[B, K, N]``."""
    if obs.length == 1:  # a prompt of one token keeps it
        return sinks_first(obs.keys.new_zeros(obs.keys.shape[:3], dtype=torch.float32), obs.positions, 1)
    return sinks_first(obs.token_scores, obs.positions, sinks)


@functools.cache
def _surrogate(file: Contents) -> Surrogate:
    """Return the maps in a file; ValueError: it holds something else."""
    tensors = dict(file.tensors)
    shares = tensors.pop(SHARES, None)
    parts = [""] if "module_list.0.weight" in tensors else ["0.", "2."]
    names = [
        [(f"module_list.{layer}.{part}weight", f"module_list.{layer}.{part}bias") for part in parts]
        for layer in range(max(len(tensors) // (2 * len(parts)), 1))
    ]
    if tensors.keys() != {name for layer in names for pair in layer for name in pair}:
        raise ValueError(f"weights={file.path!r}: {_WANTED}")
    layers = tuple(tuple((tensors[weight], tensors[bias]) for weight, bias in layer) for layer in names)
    shapes = {tuple(tuple(x.shape) for pair in layer for x in pair) for layer in layers}
    fits = len(shapes) == 1 and all(w.dim() == 2 and bias.shape == w.shape[:1] for w, bias in layers[0])
    fits = fits and all(after.shape[1] == before.shape[0] for (before, _), (after, _) in pairwise(layers[0]))
    if not fits or (shares is not None and shares.shape != (len(layers), *layers[0][-1][1].shape)):
        raise ValueError(f"weights={file.path!r}: shapes do not fit together; it {_WANTED}")
    return Surrogate(layers, shares, file.model)

"""KVzip: how much the entries are attended to while the model repeats the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.head_splits import AdaptiveHeads, HeadSplit, UniformHeads
from kvpass.policies.layer_splits import GlobalLayers, LayerSplit, UniformLayers
from kvpass.policies.observation import Observation
from kvpass.policies.options import check_choice, check_ids, check_int, option
from kvpass.policies.replay import Replay, repetitions
from kvpass.policies.scores import above_all, sinks_first


@dataclass(frozen=True, kw_only=True)
class KVzip(Policy):
    """Keep what the model needs to repeat the prompt: KVzip (Kim et al. 2025, arXiv 2505.23416).

    After the prompt, its tokens run once more behind it, ``chunk`` at a time, each chunk against all entries: first
    tokens that ask for a repetition, then the chunk itself. The score of an entry of the chunk is the most attention
    that any of these tokens and any query head of the group pays it; the softmax is over the first ``sinks`` entries,
    the chunk's and the tokens of the replay. The best scores of all layers and heads stay.

    The first ``sinks`` entries stay and are not repeated: make it the length of a system prompt. What is asked for
    later plays no part. All tokens run twice, so a prompt takes several times as long. Layers are replayed as they are
    prefilled, so the whole cache is never held.

    Departures: the authors keep one entry fewer than their ratio says, and lose all ties; here the budget is met.
    kvpress scores in chunks from the first token on. Decoding appends in all of them.

    Args:
        window: 0 as in the paper; a positive number protects that many newest tokens.
        sinks: first tokens, kept before others. chunk: tokens that are repeated at once.
        prompt_ids: token ids that ask to repeat the text. again_ids: in their place before the second chunk and later
            ones, where the last ``overlap`` tokens of the chunk before follow: asks to go on from there. suffix_ids:
            end of the request and begin of the answer, as the model's chat template has them. Without any, the chunks
            alone are repeated.
        split: what competes: ``"layers"`` all entries, ``"heads"`` those of a layer, ``"none"`` those of a head.
    """

    name = "kvzip"
    inputs = frozenset({"replays"})

    window: int = 0
    sinks: int = option(4, check_int, 0)
    chunk: int = option(2000, check_int, 1)
    overlap: int = option(8, check_int, 0)
    prompt_ids: tuple[int, ...] = option((), check_ids)
    again_ids: tuple[int, ...] = option((), check_ids)
    suffix_ids: tuple[int, ...] = option((), check_ids)
    split: Literal["layers", "heads", "none"] = option("layers", check_choice, ("layers", "heads", "none"))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompt_ids", "again_ids", "suffix_ids"):  # a spec has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def replays(self, ids: Tensor) -> Sequence[Replay]:
        asked = self.prompt_ids, self.again_ids, self.suffix_ids
        return repetitions(ids, self.sinks, self.chunk, self.overlap, asked)

    def score(self, obs: Observation) -> Tensor:
        if obs.length <= max(self.sinks, 1):  # nothing is replayed
            return above_all(obs.positions)[..., : obs.evictable].expand(*obs.keys.shape[:2], -1)
        return sinks_first(obs.replayed_attention, obs.positions, self.sinks)[..., : obs.evictable]

    def heads(self) -> HeadSplit:
        return UniformHeads() if self.split == "none" else AdaptiveHeads(0.0)

    def layers(self) -> LayerSplit:
        return GlobalLayers() if self.split == "layers" else UniformLayers(self.parity)


@dataclass(frozen=True, kw_only=True)
class KVzipPlus(KVzip):
    """Weigh what a repetition attends to by what it adds: KVzip+ (kvpress 0.5.5, on KVzip, arXiv 2505.23416).

    As :class:`KVzip`, but before the maximum over tokens and query heads h, the attention that a token pays an entry is
    multiplied by the L2 norm of ``W_h v``, W_h being the columns of the output projection that read query head h, and
    divided by the L2 norm of what enters the attention layer for that token.

    Departure: a token whose norm is 0 pays nothing; kvpress divides by 0.
    """

    name = "kvzip_plus"
    inputs = frozenset({"replays", "norms", "projection"})

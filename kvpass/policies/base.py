"""Base class of policies: score x head split x layer split x decode rule, one frozen value."""

from __future__ import annotations

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from kvpass.policies.decode_rules import DecodeRule
from kvpass.policies.head_splits import AdaptiveHeads, HeadSplit, UniformHeads
from kvpass.policies.layer_splits import GlobalLayers, LayerSplit, UniformLayers, zero_unseen_layers
from kvpass.policies.observation import Observation
from kvpass.policies.options import Parity, check_bool, check_choice, check_int, check_options, option
from kvpass.policies.replay import Replay, repetitions
from kvpass.policies.scores import PROTECTED
from kvpass.ranks import ONE_PROCESS, Ranks

Input = Literal[
    "question", "queries", "heads", "prompt", "column_sum", "keys", "projection", "rotation", "replays", "norms",
    "token_scores",
]  # fmt: skip
"""What a score may follow from: :attr:`Policy.inputs`."""


def with_options(name: str, options: Mapping[str, object]) -> str:
    """Return ``lava``, or ``lava {"alpha": 0.5}`` with options."""
    return f"{name} {json.dumps(options, sort_keys=True)}" if options else name


def short_text(rule: Any) -> str:
    """Return the name of a policy, or another dataclass with a name, and its options without those by default."""
    fields = [(field, getattr(rule, field.name)) for field in dataclasses.fields(rule)]
    return with_options(rule.name, {field.name: value for field, value in fields if value != field.default})


def name_and_options(text: str) -> tuple[Any, dict[str, Any]]:
    """Return the name and the options in a :attr:`Policy.spec` or :attr:`Policy.text`; ValueError: it is neither."""
    name, _, rest = text.partition(" ")
    options = json.loads((rest or "{}") if name.isidentifier() else text)
    if not isinstance(options, dict):
        raise ValueError(f"policy={text!r}: must be the spec of a policy")
    return name if name.isidentifier() else options.pop("policy", None), options


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Rule that decides which entries of the prompt to keep.

    A subclass must define :meth:`score`, how much each evictable entry of one attention op is worth. It may define
    :meth:`heads` and :meth:`layers`, which are uniform by default, and a :meth:`decode_rule`, if it evicts while
    decoding. All are pure tensor functions, without host synchronisation. From heads and layers follow

    * :meth:`layer_weight`: how much of the budget the layer should get; None if that does not depend on the prompt.
    * :meth:`rank`: the order in which the entries of one attention op enter as the layer's share grows.
    * :meth:`layer_budgets`: how many entries each layer may hold, given the layers prefilled so far.

    The scheduler keeps an entry of layer l exactly if ``rank < layer_budgets[l]``. Therefore cascading (truncating
    earlier layers as later ones arrive) equals deciding once at the end.

    Args:
        window: last prompt tokens, which observe and are always kept.
        parity: ``"paper"`` (default) never exceeds the budget and repairs remainders; ``"code"`` reproduces the
            released code, which misses its budget in either direction.
        compact: change the kept entries so that they stand for those that are dropped; the prompt is read once more,
            and repeated. See :mod:`kvpass.policies.compaction`.
    """

    name: ClassVar[str]
    needs_budget: ClassVar[bool] = True
    divisible: ClassVar[bool] = False
    """Whether it is right where several processes share the heads of a layer: where it compares heads, it must use
    ``obs.all_heads``. A class of your own says so itself, its subclasses again."""
    inputs: ClassVar[Set[Input]] = frozenset({"question", "queries", "heads"})
    """What :meth:`score` follows from besides values and the attention of the window's rows, of one KV head alone.

    * ``"question"``: what the end of a prompt asks; the score is poor where that is not yet known.
    * ``"heads"``: other KV heads. ``"prompt"``: all entries of the prompt; nothing is meant where some are missing.
    * ``"queries"``: those from before the window, too; see :attr:`query_rows`. ``"column_sum"``: the attribute of
      ``obs``, summed while the prompt is attended; it need not be said with ``"queries"``.
    * ``"keys"``: for more than attention; a model with ALiBi is refused, as kvpass stores positions in its keys.
    * ``"projection"``, ``"rotation"``: the output projection of the layer, its rotary embedding (``obs.frequencies``);
      a model in which it is not found is refused.
    * ``"replays"``: ``obs.replayed_attention``, what the tokens of :meth:`replays` attend to; with ``"norms"`` and
      ``"projection"`` weighed by norms. ``"token_scores"``: the attribute of ``obs``, from :meth:`token_scores`. For
      the last two what enters attention must be found in the model, which is else refused.

    A class that defines :meth:`score` says them anew, or has these defaults.
    """

    window: int = option(32, check_int, 0)
    parity: Parity = option("paper", check_choice, Parity)
    compact: bool = option(False, check_bool)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "score" in vars(cls) and "inputs" not in vars(cls):
            cls.inputs = Policy.inputs

    def __post_init__(self) -> None:
        check_options(self)
        if self.compact and (not self.needs_budget or self.decode_rule() is not None):
            does = "evicts while decoding" if self.needs_budget else "drops nothing"
            raise ValueError(f"compact=True with policy {self.name!r}: it {does}; take one that drops entries once")
        # layers() raises where an option of a split is missing
        if self.compares_layers and self.heads() != AdaptiveHeads(0.0):
            raise ValueError(f"policy {self.name!r}: GlobalLayers() needs heads() to be AdaptiveHeads(0.0)")

    @classmethod
    def read(cls, options: Mapping[str, object]) -> Mapping[str, object]:
        """Return options that a user gives as the class takes them, with the contents of files that they name.

        Those of a saved cache are not read: they name no files.
        """
        return options

    @abstractmethod
    def score(self, obs: Observation) -> Tensor:
        """Worth of each evictable entry, fp32 ``[B, K, M]`` (M = N - window); higher = keep; finite."""

    def checked_score(self, obs: Observation) -> Tensor:
        """Return :meth:`score`; NaN becomes the lowest number. ValueError: a tensor of another shape."""
        scores = self.score(obs)
        self._check_shape("score() gave", scores, (obs.keys.shape[0], obs.kv_heads, obs.evictable))
        return scores.float().nan_to_num(nan=torch.finfo(torch.float32).min)

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The policies that it is made of: itself, or one for the prompt and one for decoding."""
        return (self,)

    @property
    def is_right_divided(self) -> bool:
        """Whether it is right where several processes share the heads: ours are, others say so themselves."""
        kinds = [type(part) for part in self.parts]
        return all(kind.__module__.startswith("kvpass.policies.") or vars(kind).get("divisible") for kind in kinds)

    def heads(self) -> HeadSplit:
        return UniformHeads()

    def layers(self) -> LayerSplit:
        return UniformLayers(self.parity)

    @property
    def compares_layers(self) -> bool:
        """Whether scores of all layers compete; the weights of layers are then counts of their best entries."""
        return isinstance(self.layers(), GlobalLayers)

    @property
    def stat_planes(self) -> int:
        """Numbers of each entry of a prompt: attention mass, of the decode rule, the score if all layers compete."""
        rule = self.decode_rule()
        return 1 + (0 if rule is None else rule.numbers_per_entry) + self.compares_layers

    @property
    def cascades(self) -> bool:
        """Whether the shares of layers follow from the prompt, so that each layer read may take from those before."""
        return getattr(self.layers(), "cascades", True)

    @property
    def least_score(self) -> float:
        """Lowest score that is kept where scores of all layers compete; ``-inf``: the budget alone decides the size."""
        layers = self.layers()
        return layers.least if isinstance(layers, GlobalLayers) else -math.inf

    @property
    def replays_prompt(self) -> bool:
        """Whether tokens run behind the prompt: for its score, or because the kept entries are compacted."""
        return "replays" in self.inputs or self.compact

    def replays(self, ids: Tensor) -> Sequence[Replay]:
        """Return what runs behind a prompt: before it is scored if ``"replays"`` is an input, and for ``compact``.

        ``ids``: tokens of prompts of one length, int64 ``[B, N]``, without padding.
        """
        return repetitions(ids)

    def token_scores(self, x: Tensor, layer: int, num_layers: int, kv_heads: int, ranks: Ranks) -> Tensor:
        """Return numbers that depend on each token alone, fp32 ``[B, K, T]``, for policies of that input.

        It is called for blocks of tokens; ``obs.token_scores`` has them together.

        Args:
            x: what enters the attention layer, ``[B, T, hidden]``; anything in padding. kv_heads: of this process.
            layer, num_layers, ranks: as in :class:`~kvpass.policies.observation.Observation`.
        """
        raise NotImplementedError(
            f"policy {self.name!r} has the input 'token_scores' and does not define token_scores()"
        )

    def made_for(self) -> str | None:
        """Return the digest of the weights of the model that its options are made for; None: not known, or any.

        ``kvpass.compile`` and ``set_policy`` refuse another model.
        """
        return None

    def decode_rule(self) -> DecodeRule | None:
        """Return the rule for eviction while decoding; None: tokens are only appended."""
        return None

    @final
    def layer_weight(self, obs: Observation, scores: Tensor) -> Tensor | None:
        """Return this layer's relative share of the budget, fp64 ``[B]``; NaN and negative become 0. None if fixed.

        ValueError: the layer split gave a tensor of another shape.
        """
        weight = self.layers().weight(obs, scores)
        if weight is None:
            return None
        self._check_shape("the weight of a layer is", weight, (obs.keys.shape[0],))
        return weight.double().nan_to_num(nan=0.0).clamp(min=0.0)

    def _check_shape(self, gave: str, value: object, expected: tuple[int, ...]) -> None:
        if not isinstance(value, Tensor) or tuple(value.shape) != expected:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"policy {self.name!r}: {gave} {shape}, must be {list(expected)}")

    @final
    def rank(self, scores: Tensor, entries: Tensor) -> Tensor:
        """Return the order of entry: an entry is kept if its layer may hold more than ``rank`` entries.

        Args:
            scores: fp32 ``[B, K, N]``; ``-inf`` marks what is not evictable (padding and window), in any columns, and
                ``inf`` what is protected: it has rank -1.
            entries: evictable entries per KV head per layer on average (budget - window), int64 ``[B]``.
        Returns:
            int32 ``[B, K, N]``, counted over all KV heads. Within a row, ineligible columns rank after every eligible
            one. Under exact rules the ranks of a row are a permutation; ties go to the lower position, then to the
            lower head.
        """
        return self.heads().rank(scores, entries).masked_fill(scores == PROTECTED, -1)

    @final
    def layer_budgets(
        self,
        weights: Tensor,
        entries: Tensor,
        available: Tensor,
        kv_heads: int,
        seen: int,
        certain: Tensor | None = None,
    ) -> Tensor:
        """Return the entries each layer may hold, over all its KV heads, int64 ``[B, L]``.

        Args:
            weights: from :meth:`layer_weight`, fp64 ``[B, L]``; zero for layers ``>= seen``.
            entries: as in :meth:`rank`.
            available: evictable positions of each row, ``max(real length - window, 0)``, int64 ``[B]``.
            seen: layers prefilled so far. If ``seen == L`` the result is the final, exact schedule. If ``seen < L`` it
                bounds the final number of every seen layer from above, and the sum over seen layers is at most
                :meth:`capacity`.
            certain: entries of each head in every layer that are kept in any case, of those that ``entries`` and
                ``available`` count, int64 ``[B]``: the split divides the others. Where layers compete, the weights
                count them.
        """
        if certain is None or self.compares_layers:
            return self.layers().budgets(weights, entries, available, kv_heads, seen)
        left = (entries - certain).clamp(min=0)  # a window of before may hold more than the budget has room for
        others = self.layers().budgets(weights, left, available - certain, kv_heads, seen)
        return zero_unseen_layers(seen, others + (certain * kv_heads)[:, None])

    @final
    def capacity(self, entries: int, num_layers: int, kv_heads: int) -> int:
        """Pool slots that no cascade stage exceeds, for ``entries`` evictable entries per KV head and layer."""
        spare = self.layers().overspend(entries, num_layers, kv_heads)
        return entries * num_layers * kv_heads + spare + num_layers * self.heads().overspend(entries, kv_heads)

    def decode_quota(self, kept: Tensor, entries: Tensor, available: Tensor, ranks: Ranks = ONE_PROCESS) -> Tensor:
        """Return how many entries a head may hold while decoding, besides those its decode rule protects.

        The quota of a prompt that fits in its budget is the budget; otherwise it is what prefill kept.

        Args:
            kept: evictable entries that prefill kept in each layer and head of this process, int64 ``[L, B, K]``.
            entries, available: int64 ``[B]``. ranks: processes that share the heads.
        """
        return torch.where((available <= entries)[:, None], entries[:, None], kept)

    @property
    def query_rows(self) -> int | None:
        """How many of the last prompt queries the policy reads besides the window's and the last; None: all of them.

        So many queries of a layer are kept until the policy has scored it.
        """
        return None if "queries" in self.inputs else 0

    @property
    def queries_read(self) -> int | None:
        """By how many of the last prompt queries the policy scores, those of :attr:`query_rows` included; None: all."""
        return None if self.query_rows is None else max(self.query_rows, self.window, 1)

    @cached_property
    def spec(self) -> str:
        """Canonical text form, with every option; ``kvpass.policies.from_spec`` reads it."""
        return json.dumps({"policy": self.name, **dataclasses.asdict(self)}, sort_keys=True)

    @cached_property
    def text(self) -> str:
        """Short text form, without options that have their defaults; ``kvpass.policies.from_spec`` reads it too."""
        return short_text(self)

"""``kvpass.calibrate``: what policies need to know of a model, from texts.

Each text runs once, as ``[header, text; request to repeat it, text]`` in the model's chat template, compressed by
three policies that note what they are given of each layer:

* For ``kvzap``, x enters attention and is fitted to y, the log of KVzip+'s score (KVzap, arXiv 2601.07891): the most
  attention that the repetition pays an entry, weighed by norms. Held are sums over tokens of ``x x'`` and ``x y'``.
* For ``duo_attention``, the most attention that it pays in each head, and how far mean queries look back.
* For ``expected_attention`` and ``triattention``, sums over tokens of queries before RoPE, their moduli and products.

Numbers are fp64.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpass.api import compile as compile_model
from kvpass.cache.fingerprint import weights_digest
from kvpass.calibration.texts import generated_texts
from kvpass.errors import UnsupportedAttentionError
from kvpass.frontends.transformers import CompressedModel
from kvpass.policies import POLICIES, register_policy
from kvpass.policies.base import Policy
from kvpass.policies.calibrated import COVARIANCE, DISTANCES, MAXIMA, MEAN, MODEL, MODULUS, SHARES
from kvpass.policies.kvzip import KVzip, KVzipPlus
from kvpass.policies.observation import Observation, with_rope
from kvpass.policies.options import check_float, check_int, option
from kvpass.progress import progress_bar, progress_console
from kvpass.ranks import Ranks
from kvpass.replace_file import write_shared

_REQUEST = "\n\nRepeat the previous context exactly."
_MARK = "\ufffckvpass text\ufffc"
_SKIPPED = 4  # first tokens, which attention pays whatever they say
_LEAST = 1e-12  # score of which the log is taken
_HELD_OUT = 4  # of so many pieces of text one is not fitted, but tells R2
_PLANNED = 0.25  # part of the entries that KVzip+ keeps where shares of heads are counted
_LOOKED_BACK = 500  # positions over which a mean query attends to mean keys


@dataclass(frozen=True)
class Calibration:
    """What :func:`calibrate` returns: one file of it serves the policies of a model that need one.

    Attributes:
        weight, bias: maps of ``kvzap``, ``[L, K, hidden]`` and ``[L, K]``, layers under the budget. r2: share of the
            variance that they explain in texts that were held out, ``[L, K]``. head_shares: of the entries that KVzip+
            keeps at a quarter, the part of each head, mean over the fitted texts, ``[L, K]``. head_maxima: see
            :class:`kvpass.policies.duo_attention.DuoAttention`, ``[L, K]``. queries: by name, ``head_distances
            [L, K]``, see there; and of all queries before RoPE ``query_mean [L, K, G, D]``, ``query_modulus
            [L, K, G, D / 2]``, mean modulus of channels j and ``j + D / 2`` as a complex number, and
            ``query_covariance [L, K, G, D, D]``. It is empty where the rotary embedding is not found. model, texts:
            digests. fitted: tokens.
    """

    weight: Tensor
    bias: Tensor
    r2: Tensor
    head_shares: Tensor
    head_maxima: Tensor
    queries: Mapping[str, Tensor]
    model: str
    texts: str
    fitted: int

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, whose maps have the names of NVIDIA's files; raises ``OSError``."""
        tensors = {SHARES: self.head_shares, MAXIMA: self.head_maxima, "r2": self.r2, **self.queries}
        for layer, (weight, bias) in enumerate(zip(self.weight, self.bias, strict=True)):
            tensors |= {f"module_list.{layer}.weight": weight, f"module_list.{layer}.bias": bias}
        facts = {MODEL: self.model, "kvpass_texts": self.texts, "fitted_tokens": str(self.fitted)}
        write_shared(path, save({name: x.float().contiguous().cpu() for name, x in tensors.items()}, metadata=facts))


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    texts: Sequence[str] | None = None,
    tokens: int = 1000,
    ridge: float = 30.0,
) -> Calibration:
    """Fit a file for policies of this model: ``kvpass.calibrate(model, tokenizer).save("kvzap.safetensors")``.

    It is for ``weights`` of ``kvzap``, ``head_map`` of ``duo_attention``, ``statistics`` of ``expected_attention`` and
    ``triattention``. Each piece of text runs through the model once, twice its length. The model does not change.

    Args:
        model: a decoder of transformers, in eval mode, not compiled by kvpass.
        texts: what to fit on, as mixed as what will be compressed; None: generated ones. Eight pieces or more.
        tokens: of a piece; longer texts are cut into several. Scores depend on it: about the length to be compressed.
        ridge: added to the diagonal of ``x x'``, summed over tokens.
    Raises:
        ValueError: an argument is out of range, or too little text.
        UnsupportedAttentionError: kvpass does not find in this model what policy ``kvzip_plus`` or ``kvzap`` reads.
    """
    if isinstance(model, CompressedModel):
        raise ValueError(f"{type(model).__name__} is compiled by kvpass; calibrate the original model")
    check_int("tokens", tokens, 32)
    check_float("ridge", ridge, 0.0, open_low=True)
    pieces = _pieces(tokenizer, generated_texts() if texts is None else texts, tokens)
    held_out = pieces[_HELD_OUT - 1 :: _HELD_OUT]
    fitted = [piece for number, piece in enumerate(pieces) if number % _HELD_OUT != _HELD_OUT - 1]
    if not held_out:
        raise ValueError(f"texts: {len(pieces)} pieces of {tokens} tokens; at least {_HELD_OUT} are needed")
    sums = _Sums()
    with _observed(model) as run, progress_bar(progress_console()) as progress:
        for piece in progress.track(fitted, description="calibrate"):
            sums.fit(run(piece))
        weight, bias = sums.solve(ridge)
        for piece in progress.track(held_out, description="texts held out"):
            sums.test(run(piece), weight, bias)
    head_shares, head_maxima, *_ = torch.stack(sums.heads).mean(0)
    return Calibration(
        weight=weight,
        bias=bias,
        r2=sums.r2,
        head_shares=head_shares,
        head_maxima=head_maxima,
        queries=sums.statistics,
        model=weights_digest(model, {}, rounded=True),
        texts=hashlib.sha256(repr(pieces).encode()).hexdigest(),
        fitted=int(sums.products[0][0, -1, -1]),
    )


class Piece(NamedTuple):
    """Token ids of a piece of text: what stands before it, itself, what asks to repeat it; then it comes again."""

    header: list[int]
    text: list[int]
    request: list[int]

    @property
    def first(self) -> int:
        """Tokens at the begin that are not fitted."""
        return max(len(self.header), _SKIPPED)

    @property
    def prompt(self) -> list[int]:
        return self.header + self.text


def _pieces(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], tokens: int) -> list[Piece]:
    """Return texts in pieces of so many tokens; what is left of a text, and shorter ones, from a quarter of it on."""
    if tokenizer.chat_template is None:
        bos = tokenizer.bos_token_id
        header, request = [] if bos is None else [bos], _ids(tokenizer, _REQUEST + "\n\n")
    else:
        message = [{"role": "user", "content": _MARK + _REQUEST}]
        chat = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        header, request = (_ids(tokenizer, part) for part in chat.split(_MARK))
    parts = [
        ids[first : first + tokens]
        for ids in (_ids(tokenizer, text) for text in texts)
        for first in range(0, len(ids), tokens)
    ]
    return [Piece(header, part, request) for part in parts if 4 * len(part) >= tokens]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


class _Queries(NamedTuple):
    """Queries of a text before RoPE in one layer."""

    distances: Tensor  # [K]
    sums: tuple[Tensor, Tensor, Tensor]  # over tokens: queries [K, G, D], moduli [K, G, D / 2], products [K, G, D, D]


class _Layer(NamedTuple):
    """A text in one layer; fp64."""

    x: Tensor  # what enters attention, [N, hidden]
    y: Tensor  # log of the score, [N, K]
    most: Tensor  # attention that an entry gets, [K]
    queries: _Queries | None = None  # None where the rotary embedding is not found


class _Sums:
    """Sums over tokens in each layer: of fitted pieces, and ``tests`` of those held out.

    Attributes:
        heads: shares, maxima and distances of heads in each fitted piece, ``[3, L, K]``, or without distances.
        products: ``x x'`` and ``x y'`` where x ends with a 1, ``[L, hidden + 1, hidden + 1]``, ``[L, hidden + 1, K]``.
        tests: of ones, y, squares of y and squared errors, ``[4, L, K]``.
    """

    def __init__(self) -> None:
        self.heads: list[Tensor] = []
        self.products: list[Tensor] = []
        self.queries: list[Tensor] = []
        self.tests: list[Tensor] = []

    def fit(self, layers: Sequence[_Layer]) -> None:
        x, y, *_ = layers[0]
        columns = x.shape[1] + 1
        self.products = self.products or [x.new_zeros(len(layers), columns, n) for n in (columns, y.shape[1])]
        for layer, xx, xy in zip(layers, *self.products, strict=True):
            x = nn.functional.pad(layer.x, (0, 1), value=1.0)
            xx.addmm_(x.T, x)
            xy.addmm_(x.T, layer.y)
        heads = [_shares(torch.stack([layer.y for layer in layers])), torch.stack([layer.most for layer in layers])]
        if queries := [layer.queries for layer in layers if layer.queries is not None]:
            heads.append(torch.stack([layer.distances for layer in queries]))
            _add(self.queries, map(torch.stack, zip(*(layer.sums for layer in queries), strict=True)))
        self.heads.append(torch.stack(heads))

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Return weights ``[L, K, hidden]`` and biases ``[L, K]``; the biases are not penalised."""
        penalty = self.products[0].new_full(self.products[0].shape[1:2], ridge)
        penalty[-1] = 0
        pairs = zip(*self.products, strict=True)
        solved = torch.stack([torch.linalg.solve(xx + penalty.diag(), xy).T for xx, xy in pairs])
        return solved[..., :-1], solved[..., -1]

    def test(self, layers: Sequence[_Layer], weights: Tensor, biases: Tensor) -> None:
        sums = []
        for (x, y, *_), weight, bias in zip(layers, weights, biases, strict=True):
            errors = y - (x @ weight.T + bias)
            sums.append(torch.stack([torch.ones_like(y), y, y.square(), errors.square()]).sum(1))
        _add(self.tests, [torch.stack(sums, 1)])

    @property
    def statistics(self) -> dict[str, Tensor]:
        if not self.queries:
            return {}
        distances = torch.stack(self.heads)[:, 2].mean(0)
        mean, modulus, product = (x / self.products[0][0, -1, -1] for x in self.queries)
        covariance = product - mean[..., :, None] * mean[..., None, :]
        return {DISTANCES: distances, MEAN: mean, MODULUS: modulus, COVARIANCE: covariance}

    @property
    def r2(self) -> Tensor:
        """Share of the variance that is explained, ``[L, K]``."""
        count, y, yy, error = self.tests[0]
        return 1 - error / (yy - y.square() / count).clamp(min=1e-12)


def _add(totals: list[Tensor], parts: Iterable[Tensor]) -> None:
    totals[:] = map(torch.add, totals, parts) if totals else parts


def _shares(y: Tensor) -> Tensor:
    """Return of the best quarter of all entries the part that is of each head, ``[L, K]``, from y ``[L, N, K]``."""
    count = max(int(_PLANNED * y.numel()), 1)
    best = torch.zeros(y.numel(), dtype=torch.float64, device=y.device)
    best[y.flatten().topk(count).indices] = 1
    return best.view(y.shape).sum(1) / count


@dataclass(frozen=True, kw_only=True)
class _Tokens(KVzipPlus):
    """KVzip+, which notes what enters attention and the scores of each layer."""

    name: ClassVar[str] = "kvpass_calibration"
    inputs = frozenset({"replays", "norms", "projection", "token_scores"})
    seen: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def token_scores(self, x: Tensor, layer: int, num_layers: int, kv_heads: int, ranks: Ranks) -> Tensor:
        return x.transpose(1, 2)

    def score(self, obs: Observation) -> Tensor:
        x, most = (part[0, :, self.sinks :].T.double() for part in (obs.token_scores, obs.replayed_attention))
        self.seen.append((x, most.clamp(min=_LEAST).log()))
        return super().score(obs)


@dataclass(frozen=True, kw_only=True)
class _Attended(KVzip):
    """KVzip, which notes the highest score of each head."""

    name: ClassVar[str] = "kvpass_calibration_attended"
    inputs = frozenset({"replays"})
    seen: ClassVar[list[Tensor]] = []

    def score(self, obs: Observation) -> Tensor:
        self.seen.append(obs.replayed_attention[0, :, self.sinks :].double().amax(1))
        return super().score(obs)


@dataclass(frozen=True, kw_only=True)
class _Asking(Policy):
    """Notes the queries of each layer before RoPE; all its scores are equal."""

    name: ClassVar[str] = "kvpass_calibration_asking"
    inputs = frozenset({"queries", "rotation"})
    seen: ClassVar[list[_Queries]] = []

    window: int = 0
    sinks: int = option(0, check_int, 0)

    def score(self, obs: Observation) -> Tensor:
        cos, sin = obs.rotation(torch.arange(self.sinks, obs.length, device=obs.keys.device))
        keys = with_rope(obs.keys[0, :, self.sinks :].float(), cos, -sin).double()
        q = torch.cat([obs.unrotated_queries(head, self.sinks) for head in range(obs.kv_heads)]).double()
        moduli = torch.hypot(*q.chunk(2, -1))
        distances = _looked_back(q.mean(2), keys.mean(1), obs)
        self.seen.append(_Queries(distances, (q.sum(2), moduli.sum(2), q.mT @ q)))
        return obs.keys.new_zeros(*obs.keys.shape[:2], obs.evictable)


def _looked_back(query: Tensor, key: Tensor, obs: Observation) -> Tensor:
    """Return how far queries ``[K, G, D]`` look back over equal keys ``[K, D]``, each group's mean: ``[K]``."""
    cos, sin = obs.rotation(torch.arange(_LOOKED_BACK, device=key.device))
    queries, keys = with_rope(query, cos[-1], sin[-1]), with_rope(key[:, None], cos, sin)
    return (obs.scale * queries @ keys.mT).softmax(-1).cumsum(-1).mean((1, 2))


@contextmanager
def _observed(model: PreTrainedModel) -> Iterator[Callable[[Piece], list[_Layer]]]:
    """Give a function that runs a piece of text and returns each layer under the budget."""
    policies: list[type[Any]] = [_Tokens, _Attended, _Asking]
    for policy in policies:
        register_policy(policy)
    try:
        fast: Any = compile_model(model, policy="full", backend="eager")
        try:
            fast.compress_each(torch.zeros(1, 2, dtype=torch.int64, device=model.device), conditions=[(_Asking(), 1)])
        except UnsupportedAttentionError as error:
            warnings.warn(f"no statistics of queries and no head_distances: {error}", stacklevel=4)
            policies.remove(_Asking)
        yield partial(_run, fast, policies)
    finally:
        for policy in (_Tokens, _Attended, _Asking):
            del POLICIES[policy.name]  # not a policy to choose
            policy.seen.clear()


@torch.no_grad()
def _run(model: Any, policies: Sequence[type[Any]], piece: Piece) -> list[_Layer]:
    for policy in policies:
        policy.seen.clear()
    replays = {"sinks": piece.first, "prompt_ids": tuple(piece.request), "chunk": len(piece.prompt)}
    options = [{"sinks": piece.first} if policy is _Asking else replays for policy in policies]
    ids = torch.tensor([piece.prompt], device=model.device)
    model.compress_each(ids, conditions=[(policy(**of), 1) for policy, of in zip(policies, options, strict=True)])
    return [_Layer(x, y, *others) for (x, y), *others in zip(*(policy.seen for policy in policies), strict=True)]

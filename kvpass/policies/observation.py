"""Input of a policy: one attention op of the prompt, and its window statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvpass.operands import NO_POLICY_INPUTS, PolicyInputs
from kvpass.ranks import ONE_PROCESS, Ranks

_ROW_BLOCK = 512
_PROJECTED_ELEMENTS = 1 << 22  # elements of projected values that exist at a time


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return logits as ``softcap * tanh(logits / softcap)``, or as they are where there is no cap."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def attention_weights(logits: Tensor, hidden: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Return attention probabilities of scaled fp32 logits ``[..., N]``; the logits may be overwritten.

    Args:
        hidden: bool, broadcast to the logits of the last columns, as many as it has; True gets no attention.
        sinks: one more logit, broadcast to ``[..., 1]``, which is part of the softmax and then dropped.
    """
    logits = softcapped(logits, softcap)
    logits[..., -hidden.shape[-1] :].masked_fill_(hidden, float("-inf"))
    if sinks is None:
        return logits.softmax(-1)
    sinks = sinks.float().expand(*logits.shape[:-1], 1)
    return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]


def with_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x`` ``[..., D]`` with channels j and ``j + D / 2`` as a pair multiplied by ``(cos + i sin)[..., j]``."""
    real, imaginary = x.chunk(2, -1)
    return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], -1)


def projected_norms(values: Tensor, projection: Tensor, order: int) -> Tensor:
    """Return the norm of ``W_h v`` of that order for each query head h and value ``[B, K, N, Dv]``: ``[B, H, N]``.

    W_h are the columns of the output projection ``[hidden, H * Dv]`` that read query head h. Products are made in
    blocks of tokens, in fp32; on CUDA in the dtype of the values.
    """
    batch, kv_heads, n, dim = values.shape
    dtype = values.dtype if values.is_cuda else torch.float32
    weight = projection.to(dtype).unflatten(1, (-1, dim))
    group = weight.shape[1] // kv_heads
    tokens = max(_PROJECTED_ELEMENTS // (batch * weight.shape[0]), 1)
    norms = values.new_empty(batch, weight.shape[1], n, dtype=torch.float32)
    for head in range(weight.shape[1]):
        for first in range(0, n, tokens):
            rows = values[:, head // group, first : first + tokens].to(dtype) @ weight[:, head].T
            norms[:, head, first : first + tokens] = torch.linalg.vector_norm(
                rows, order, -1, dtype=torch.promote_types(dtype, torch.float32)
            )
    return norms


def _given(x: Tensor | None, what: str) -> Tensor:
    """Return it, or raise ValueError: ``what``, with its verb, is needed and not given."""
    if x is None:
        raise ValueError(f"{what} needed and not given")
    return x


@dataclass(frozen=True, eq=False)
class Observation:
    """One attention op after prefill.

    Attributes:
        queries: the last R queries of the prompt, RoPE applied, ``[B, H, R, D]``: those of the window and of the decode
            rule, at least one; all N if the policy's inputs have "queries"; as many as ``plan`` is given; those of the
            new turn when a cache is compressed again.
        keys: ``[B, K, N, D]``, RoPE applied; query head h reads KV head ``h // (H // K)``.
        values: ``[B, K, N, Dv]``.
        scale: factor of the attention logits.
        window: rows that observe and are always kept, ``0 <= window <= N``.
        layer: index of the attention op among those that share a pool. num_layers: their number.
        softcap: if given, logits become ``softcap * tanh(logits / softcap)``.
        sinks: one extra logit per query head, ``[H]``, which is part of the softmax and then dropped.
        asked: what the policy asks for besides, of these rows and this layer. Rows of the policy's decode rule, where
            the cache holds them, fp32 ``[B, K, G, rows, D]``, are made before the scores.
        ranks: processes that share the heads of the layer; queries, keys, values and all statistics are then those of
            this process.

    All statistics are fp32 for any input dtype, and are computed one KV head at a time, so that no ``[H, window, N]``
    tensor exists. ``a`` below is the causal softmax over all N keys, not renormalised. What needs a tensor that is not
    given raises ValueError.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    window: int
    layer: int
    num_layers: int
    softcap: float | None = None
    sinks: Tensor | None = None
    asked: PolicyInputs = NO_POLICY_INPUTS
    ranks: Ranks = ONE_PROCESS

    def all_heads(self, x: Tensor) -> Tensor:
        """Return a statistic ``[B, heads, ...]`` of all heads of the layer, from that of the heads of this process."""
        return self.ranks.gather(x, 1)

    @property
    def first_head(self) -> int:
        """Index in the layer of the first KV head of this process."""
        return self.ranks.rank * self.kv_heads

    @property
    def length(self) -> int:
        """N, prompt tokens."""
        return self.keys.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.queries.shape[1] // self.keys.shape[1]

    @property
    def evictable(self) -> int:
        """M, positions before the window."""
        return self.length - self.window

    @property
    def entries_per_head(self) -> Tensor:
        """Evictable entries per KV head per layer on average, int64 ``[B]``; not when a cache is compressed again."""
        return _given(self.asked.entries, "the budget is")

    @property
    def projection(self) -> Tensor:
        """Weight of the output projection ``[hidden, H * Dv]``, for policies with the input ``"projection"``."""
        return _given(self.asked.projection, "the output projection is")

    @property
    def frequencies(self) -> Tensor:
        """Inverse frequencies ``[D / 2]`` by which channels j and ``j + D / 2`` turn, for the input ``"rotation"``."""
        return _given(self.asked.frequencies, "the frequencies of the rotary embedding are")

    @property
    def replayed_attention(self) -> Tensor:
        """What :func:`kvpass.policies.replay.most_attended` gives of the policy's replays, fp32 ``[B, K, N]``."""
        return _given(self.asked.replayed, "replays of the prompt are")

    @property
    def token_scores(self) -> Tensor:
        """What :meth:`kvpass.policies.base.Policy.token_scores` gives of the prompt, fp32 ``[B, K, N]``."""
        return _given(self.asked.entered, "what enters attention is")

    @property
    def positions(self) -> Tensor:
        """True positions, int64 ``[1, 1, N]``."""
        return torch.arange(self.length, device=self.keys.device)[None, None]

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rotary embedding at positions ``[P]``: fp32 ``[P, D / 2]``, without a factor."""
        angles = positions.float()[:, None] * self.frequencies.float()  # fp32, as models have them
        return angles.cos(), angles.sin()

    def unrotated_queries(self, kv_head: int, first: int) -> Tensor:
        """Return queries of one KV head before RoPE, prompt rows from ``first`` on: fp32 ``[B, G, N - first, D]``.

        They are turned back by their position in the row: exact to the rounding of the queries. A factor in the
        model's cos and sin (YaRN) stays in them, and a position of the first token other than 0 stays as a rotation;
        with RoPE applied again, both are as the model has them.
        """
        cos, sin = self.rotation(torch.arange(first, self.length, device=self.keys.device))
        return with_rope(self.prompt_queries(first, self.length, kv_head), cos, -sin)

    def prompt_queries(self, first: int, last: int, kv_head: int | None = None) -> Tensor:
        """Return queries of prompt rows ``first <= i < last``, fp32 ``[B, H, rows, D]``; ``[B, G, ..]`` of one head."""
        rows = self.queries.shape[2]
        offset = self.length - rows
        if first < offset:
            raise ValueError(f"queries hold the last {rows} of {self.length} prompt rows; row {first} is needed")
        heads = slice(None) if kv_head is None else slice(kv_head * self.group, (kv_head + 1) * self.group)
        return self.queries[:, heads, first - offset : last - offset].float()

    def attention(self, kv_head: int, first: int, last: int) -> Tensor:
        """Attention of prompt rows ``first <= i < last`` to columns before ``last``, fp32 ``[B, G, rows, last]``."""
        q, k = self.prompt_queries(first, last, kv_head), self.keys[:, kv_head, :last].float()
        logits = torch.einsum("bgrd,bnd->bgrn", q, k).mul_(self.scale)
        heads = slice(kv_head * self.group, (kv_head + 1) * self.group)
        sinks = None if self.sinks is None else self.sinks[heads, None, None]
        return attention_weights(logits, self._hidden(kv_head, first, last), self.softcap, sinks)

    def _hidden(self, kv_head: int, first: int, last: int) -> Tensor:
        """Return which of the last columns before ``last`` these rows do not attend: bool ``[rows, columns]``."""
        return torch.ones(last - first, last - first, dtype=torch.bool, device=self.keys.device).triu(1)

    def window_attention(self) -> Iterator[Tensor]:
        """Yield attention of the window rows (last row if there are none), one KV head each."""
        rows = max(self.window, 1)
        for kv_head in range(self.kv_heads):
            yield self.attention(kv_head, self.length - rows, self.length)

    @cached_property
    def mean(self) -> Tensor:
        """Mean of a over the window rows, ``[B, H, N]``."""
        return torch.cat([a.mean(2) for a in self.window_attention()], 1)

    @cached_property
    def variance(self) -> Tensor:
        """Unbiased variance of a over the window rows, ``[B, H, N]``; zero when the window has one row."""
        if self.window < 2:
            return torch.zeros_like(self.mean)
        return torch.cat([a.var(2, unbiased=True) for a in self.window_attention()], 1)

    @cached_property
    def last_row(self) -> Tensor:
        """a of the last prompt row, ``[B, H, N]``."""
        rows = (self.attention(head, self.length - 1, self.length) for head in range(self.kv_heads))
        return torch.cat([a[:, :, 0] for a in rows], 1)

    @cached_property
    def entropy(self) -> Tensor:
        """Sum over the window rows of the entropy terms ``-a ln(a + 1e-10)``, ``[B, H, N]``."""
        return torch.cat([-(a * (a + 1e-10).log()).sum(2) for a in self.window_attention()], 1)

    @cached_property
    def column_sum(self) -> Tensor:
        """Sum of a over all N rows, ``[B, H, N]``."""
        return self.recent_sum(self.length) if self.asked.summed is None else self.asked.summed

    def recent_sum(self, rows: int) -> Tensor:
        """Sum of a over the last ``rows`` of the N rows, ``[B, H, N]``, streamed in blocks of rows."""
        first = max(self.length - rows, 0)
        sums = []
        for kv_head in range(self.kv_heads):
            total = self.keys.new_zeros(self.keys.shape[0], self.group, self.length, dtype=torch.float32)
            for row in range(first, self.length, _ROW_BLOCK):
                last = min(row + _ROW_BLOCK, self.length)
                total[..., :last] += self.attention(kv_head, row, last).sum(2)
            sums.append(total)
        return torch.cat(sums, 1)

    @cached_property
    def value_norm(self) -> Tensor:
        """L1 norm of each value row, ``[B, K, N]``."""
        return self.values.float().abs().sum(-1)

    @cached_property
    def projected_value_norm(self) -> Tensor:
        """Mean over the group of the L1 norm of ``W_h v``, ``[B, K, N]``: see :func:`projected_norms`."""
        return projected_norms(self.values, self.projection, 1).unflatten(1, (self.kv_heads, -1)).mean(2)

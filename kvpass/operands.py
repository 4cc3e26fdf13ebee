"""Operands of the ``kvpass::`` operators: the table of cache buffers, and tuples of operands.

Legend: B rows, T new tokens, N prompt columns, H query heads, K KV heads, D key dim, V value dim, L layers of one KV
geometry, E pool slots, C tail slots, S slots of a line, P = L*K + 1 bounds of segments.

Sizes in :data:`BUFFERS`: pool_batch: rows of the pool, as many as the batch or one for all of it; value_dim: 0 where
values are stored in the keys only; pool, tail, ring: slots there; bounds: of segments of the pool; slots: of a line;
window: at least 1; stat_planes: statistics of prompt entries; numbers_per_entry, rows_per_head: of a decode rule;
group: query heads of a KV head; programs: of an attention kernel, one for each KV head of a row; protected: columns of
the prompt, 0 where no span of it is protected.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Buffer:
    """Description of one buffer of the cache.

    Attributes:
        dims: its sizes, words of the legend or numbers, * for others. dtype: None for the dtype of keys and values.
        packed: after the prompt it holds codes where the cache has an entry format other than "model": 8 of them in as
            many bytes as a code has bits.
        written: the graphs that write it: "append", of policies that only append, and "evict", of those that evict
            while decoding. A prompt is compressed into buffers outside of graphs.
        counter: the number of new tokens is added to it after each call.
        saved: when files hold it and searches select rows of it: "always", "key scales" (where entries are codes),
            "value scales" (the same, where values are not stored in keys), "key means" (of those the policies that only
            append), "evicting" (policies that evict while decoding), "rows" (of them those whose rule has rows),
            "ring", "state", or "" for never.
        initial: its value before the prompt; None for any.
    """

    dims: str
    dtype: torch.dtype | None = None
    packed: bool = False
    written: str = ""
    counter: bool = False
    saved: str = ""
    initial: float | None = None

    @property
    def sizes(self) -> tuple[str, ...]:
        return tuple(self.dims.split())

    @property
    def row_dim(self) -> int:
        return self.sizes.index("pool_batch" if self.of_pool else "batch")

    @property
    def of_pool(self) -> bool:
        """Whether one row may serve all rows of the batch, where a policy only appends."""
        return "pool_batch" in self.sizes

    def dynamic(self, rows: int) -> set[int]:
        """Dimensions that are symbols in graphs, which then do not recompile.

        They change with the prompt, and with the number of rows unless it is 1, for which there are graphs of its own.
        """
        changing = {"pool", "tail", "slots", *(("batch", "pool_batch", "programs") if rows > 1 else ())}
        return {dim for dim, size in enumerate(self.sizes) if size in changing}

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the sizes as numbers; the pool has as many rows as the batch, unless pool_batch is given."""
        sizes = {"pool_batch": sizes["batch"], **sizes} if self.of_pool else sizes
        return tuple(int(size) if size.isdigit() else sizes[size] for size in self.sizes)

    def new(self, sizes: Mapping[str, int], device: torch.device) -> Tensor:
        """Return the buffer, which has a dtype of its own, before the prompt."""
        found = torch.empty(self.shape(sizes), dtype=self.dtype, device=device)
        return found if self.initial is None else found.fill_(self.initial)


_I32, _I64, _F32, _F64 = torch.int32, torch.int64, torch.float32, torch.float64

CODES = {"int8": torch.int8, **dict.fromkeys(("fp8", "rot4", "rot3", "rot2"), torch.uint8)}
"""Dtype of the entries of each entry format but "model"; those of "fp8" are the bits of torch.float8_e4m3fn."""
BITS = {"int8": 8, "fp8": 8, "rot4": 4, "rot3": 3, "rot2": 2}
"""Bits of a code of each."""
_UPPER = {
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}
LEVELS = {bits: (*(-level for level in reversed(upper)), *upper) for bits, upper in _UPPER.items()}
"""Numbers that the codes 0, 1, .. of so many bits stand for, ascending."""


@functools.cache
def levels(bits: int, device: torch.device) -> Tensor:
    """Return :data:`LEVELS` as fp32 ``[2^bits]``."""
    return torch.tensor(LEVELS[bits], dtype=torch.float32, device=device)


BUFFERS = {
    # of all layers: the first real column of each row, and the columns seen
    "first": Buffer("batch", _I64),
    "seen": Buffer("", _I64),
    # layers that share the budget: one set for each KV geometry
    "pool_k": Buffer("pool_batch pool key_dim", packed=True, written="evict", saved="always"),
    "pool_v": Buffer("pool_batch pool value_dim", packed=True, written="evict", saved="always"),
    "pool_k_scale": Buffer("pool_batch pool", _F32, written="evict", saved="key scales"),
    "pool_v_scale": Buffer("pool_batch pool", _F32, written="evict", saved="value scales"),
    "pool_positions": Buffer("batch pool", _I32, saved="always"),
    "slots": Buffer("3 batch pool", _I32, initial=-1),
    "slot_stats": Buffer("stat_planes batch pool", _F32, initial=0),
    "layer_weights": Buffer("batch layers", _F64, initial=0),
    "window_stats": Buffer("stat_planes batch layers kv_heads window", _F32, initial=0),
    "offsets": Buffer("batch bounds", _I32, saved="always"),
    "tail_k": Buffer("layers batch kv_heads tail key_dim", packed=True, written="append evict", saved="always"),
    "tail_v": Buffer("layers batch kv_heads tail value_dim", packed=True, written="append evict", saved="always"),
    "tail_k_scale": Buffer("layers batch kv_heads tail", _F32, written="append evict", saved="key scales"),
    "tail_v_scale": Buffer("layers batch kv_heads tail", _F32, written="append evict", saved="value scales"),
    "tail_start": Buffer("batch", _I64, saved="always"),
    "tail_used": Buffer("", _I64, counter=True),
    "key_mean": Buffer("layers batch kv_heads key_dim", _F32, saved="key means", initial=0),
    "entries": Buffer("batch", _I64),
    "protected": Buffer("batch protected", torch.bool, initial=0),
    "arrivals": Buffer("programs 64", _I32, initial=0),  # written, but as before at the end of each call
    "row_index": Buffer("*", _I64),  # of vLLM alone
    "output_errors": Buffer("3 layers batch kv_heads", _F32, initial=0),  # of compaction, written in a prompt
    # policies that evict while decoding
    "slot_positions": Buffer("layers batch kv_heads slots", _I32, written="evict", saved="evicting"),
    "decode_state": Buffer("numbers_per_entry layers batch kv_heads slots", _F32, written="evict", saved="evicting"),
    "quota": Buffer("layers batch kv_heads", _I64, saved="evicting"),
    "next_position": Buffer("batch", _I64, counter=True, saved="evicting"),
    "rule_rows": Buffer("layers batch kv_heads group rows_per_head key_dim", _F32, written="evict", saved="rows"),
    # recompression after an extension
    "recompress_scores": Buffer("batch layers kv_heads slots", _F32, written="append", initial=-torch.inf),  # all heads
    "recompress_masses": Buffer("batch layers kv_heads slots", _F32, written="append", initial=0),
    "recompress_weights": Buffer("batch layers", _F64, written="append", initial=0),
    "recompress_window": Buffer("batch", _I64),
    # layers with a sliding window
    "ring_k": Buffer("layers batch kv_heads ring key_dim", written="append evict", saved="ring"),
    "ring_v": Buffer("layers batch kv_heads ring value_dim", written="append evict", saved="ring"),
    # recurrent layers: the sizes of a row are those of the state
    "held": Buffer("batch *", saved="state"),
    "made": Buffer("batch *"),
}
"""All cache tensors that a graph reads or writes, or that a file holds beside the counters."""


class PrefillBuffers(NamedTuple):
    """Buffers that a prompt is compressed into.

    slots: planes owner, order of entry, position of each slot; slot_stats, window_stats: planes attention mass, numbers
    of the decode rule, score where layers compete; entries: evictable entries per KV head per layer of each row.
    protected: columns that are kept in any case. rule_rows: as in :class:`EvictBuffers`. output_errors: where kept
    entries are compacted, of each head.
    """

    pool_k: Tensor
    pool_v: Tensor
    slots: Tensor
    slot_stats: Tensor
    layer_weights: Tensor
    window_stats: Tensor
    tail_k: Tensor
    tail_v: Tensor
    offsets: Tensor
    entries: Tensor
    protected: Tensor | None = None
    rule_rows: Tensor | None = None
    output_errors: Tensor | None = None


class Entries(NamedTuple):
    """Keys ``[.., n, D]`` and values ``[.., n, V]`` in some slots of pool or tail, as they are stored.

    Codes have scales, fp32 ``[.., n]``: a key is what its codes stand for (:mod:`kvpass.ops.entry_formats`), times its
    scale. Values without columns are the first numbers of the keys, and have no scales.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def at(self, index: Any) -> Entries:
        """Return those that an index selects, as views."""
        return Entries(*(None if x is None else x[index] for x in self))  # type: ignore[arg-type]

    @property
    def tensors(self) -> list[Tensor]:
        """Those that there are, as operators take them."""
        return [x for x in self if x is not None]


class AppendBuffers(NamedTuple):
    """Cache of a policy that only appends.

    A pool of one row serves all rows of the batch: several questions about one document. offsets cut the pool into
    segments; slots ``tail_start[b] .. tail_used - 1`` of the tail hold entries. On CUDA only: counters by which the
    last program of a KV head and block of query rows finds out that it is the last, zeros ``[B*K, 64]``.
    key_mean: subtracted from the keys of a head before they became codes, fp32 ``[L, B, K, D]``.
    row_index: where vLLM's requests lie in any rows of one array, the row of each row of the call, int64. Then
    tail_used is of each row, int64 ``[B]``, and the rows of pool and tails need not lie side by side.
    """

    pool: Entries
    offsets: Tensor
    tail: Entries
    tail_start: Tensor
    tail_used: Tensor
    arrivals: Tensor | None = None
    key_mean: Tensor | None = None
    row_index: Tensor | None = None

    @property
    def operands(self) -> tuple[Any, ...]:
        """The operands of ``attend_cache``, of a cache without a row_index."""
        entries = self.pool.tensors, self.offsets, self.tail.tensors
        return *entries, self.tail_start, self.tail_used, self.arrivals, self.key_mean


class EvictBuffers(NamedTuple):
    """Cache of a policy that evicts while decoding.

    slot_positions: true position of the entry in each slot, or negative; decode_state: numbers of the decode rule for
    each, 0 in slots without an entry, and where a cache has protected tokens, 1 for those; quota: entries a head may
    hold besides its newest; next_position: of the first new token. rule_rows: for rules that have rows.
    """

    pool: Entries
    offsets: Tensor
    tail: Entries
    slot_positions: Tensor
    decode_state: Tensor
    quota: Tensor
    next_position: Tensor
    rule_rows: Tensor | None = None

    @property
    def operands(self) -> tuple[Any, ...]:
        """The operands of ``attend_evict``."""
        slots = [x for x in (self.slot_positions, self.decode_state, self.rule_rows) if x is not None]
        return self.pool.tensors, self.offsets, self.tail.tensors, slots, [self.quota, self.next_position]


class RecompressBuffers(NamedTuple):
    """Scores, masses and layer weights for recompression; recompress_window: newest tokens kept in each row."""

    recompress_scores: Tensor
    recompress_masses: Tensor
    recompress_weights: Tensor
    recompress_window: Tensor


class RingBuffers(NamedTuple):
    """Cache of layers with a sliding window or chunks; column c is in slot ``c % R``."""

    ring_k: Tensor
    ring_v: Tensor


class Attention(NamedTuple):
    """Attention op over new tokens: q ``[B, H, T, D]``, k ``[B, K, T, D]``, v ``[B, K, T, V]``.

    In prefill q may hold the last T of N tokens only: then k is ``[B, K, N, D]``, v ``[B, K, N, V]``.
    ``softcap``: logits become ``softcap * tanh(logit / softcap)``. ``sinks`` ``[H]``: one more logit per query head, in
    the denominator only.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def rows(self, rows: slice, columns: slice) -> Attention:
        part = (rows, slice(None), columns)
        return self._replace(q=self.q[part], k=self.k[part], v=self.v[part])

    def from_column(self, rows: slice, first: int) -> Attention:
        """Return the call for some rows of the batch, without the columns before ``first``; q must have one after."""
        before = max(first - (self.k.shape[2] - self.q.shape[2]), 0)
        return self._replace(q=self.q[rows, :, before:], k=self.k[rows, :, first:], v=self.v[rows, :, first:])

    def chunks(self, size: int) -> Iterator[Attention]:
        """Yield a call for each chunk of ``size`` columns that q has tokens of, with the keys of that chunk alone."""
        n = self.k.shape[2]
        before = n - self.q.shape[2]
        for first in range(before - before % size, n, size):
            keys = slice(first, min(first + size, n))
            rows = slice(max(first - before, 0), keys.stop - before)
            yield self._replace(q=self.q[:, :, rows], k=self.k[:, :, keys], v=self.v[:, :, keys])


class BlockSelection(NamedTuple):
    """What is computed of the causal attention of a prompt: blocks of tokens, and single columns besides.

    blocks: of queries and of keys, bool ``[B, H, blocks, blocks]``, of one size that the call knows, counted from the
    first real token of a row. columns: int32 ``[B, H, C]``, ascending; those from N on are none.
    """

    blocks: Tensor
    columns: Tensor

    def of(self, rows: slice, tokens: int, block: int) -> BlockSelection:
        """Return the selection of some rows, which have so many tokens."""
        count = -(-tokens // block)
        return BlockSelection(self.blocks[rows, :, :count, :count].contiguous(), self.columns[rows].contiguous())


class Expansion(NamedTuple):
    """What makes the keys and values of all heads of latent rows.

    up ``[H * (nope + Dv), R]``: for each head the weights of keys, then those of values. nope: columns of a key that
    are made of the latent, the first R columns of a row; the others are the row's own, the same for all heads.
    """

    up: Tensor
    nope: int


class PolicyInputs(NamedTuple):
    """What policies may ask for besides the attention op of a prompt; None: not asked for, or not known.

    projection: weight of the output projection ``[hidden, H * Dv]``, query head h read by the columns from ``h * Dv``
    on. frequencies: inverse frequencies of the rotary embedding ``[D / 2]``. entries: evictable entries per KV head per
    layer of each row, int64 ``[B]``. summed: attention summed over all rows, fp32 ``[B, H, N]``. replayed: the most
    attention of a replay, fp32 ``[B, K, N]``. rule_rows: of :class:`EvictBuffers`; those of the layer are written.
    entered: the policy's ``token_scores``, fp32 ``[B, K, N]``. protected: of :class:`PrefillBuffers`.
    """

    projection: Tensor | None = None
    frequencies: Tensor | None = None
    entries: Tensor | None = None
    summed: Tensor | None = None
    replayed: Tensor | None = None
    rule_rows: Tensor | None = None
    entered: Tensor | None = None
    protected: Tensor | None = None

    def of(self, layer: int, rows: slice, column: int) -> PolicyInputs:
        """Return the same for some rows of the batch, from a column on; of ``rule_rows`` those of the layer."""
        entries = None if self.entries is None else self.entries[rows]
        by_column = (self.summed, self.replayed, self.entered)
        summed, replayed, entered = (None if x is None else x[rows, :, column:] for x in by_column)
        rule_rows = None if self.rule_rows is None else self.rule_rows[layer, rows]
        return self._replace(entries=entries, summed=summed, replayed=replayed, rule_rows=rule_rows, entered=entered)


NO_POLICY_INPUTS = PolicyInputs()


class PartialAttention(NamedTuple):
    """Attention of some queries to some keys: output ``[.., T, V]`` and natural log-sum-exp fp32 ``[.., T]``."""

    out: Tensor
    lse: Tensor

    def merged(self, other: PartialAttention) -> PartialAttention:
        """Return the attention of the same queries to the keys of both; softmax in fp32."""
        lse = torch.logaddexp(self.lse, other.lse)
        out = self.out * (self.lse - lse).exp()[..., None] + other.out * (other.lse - lse).exp()[..., None]
        return PartialAttention(out.to(self.out.dtype), lse)

    def with_sinks(self, sinks: Tensor) -> PartialAttention:
        """Return it with one more logit of each query head ``[H]`` in the denominator; ``out`` is written."""
        logits = sinks.float()[:, None]
        return PartialAttention(
            self.out.mul_(torch.sigmoid(self.lse - logits)[..., None]), torch.logaddexp(self.lse, logits)
        )


class Candidates(NamedTuple):
    """Entries of one layer's prompt, with scores.

    k ``[B, K, N, D]``, v ``[B, K, N, V]``, scores fp32 ``[B, K, N]`` (``-inf``: not evictable), stats fp32
    ``[F, B, K, N]``, weight fp64 ``[B]``; start: first real column of each row, int64 ``[B]``, on the same device.
    """

    k: Tensor
    v: Tensor
    scores: Tensor
    stats: Tensor
    weight: Tensor
    start: Tensor

    def stored_in(self, buffers: PrefillBuffers) -> Candidates:
        """Return them with the columns of the values that the buffers have: none where values are stored in keys."""
        return self._replace(v=self.v[..., : buffers.pool_v.shape[2]])


class SlotCache(NamedTuple):
    """Reused slots: per KV head a line of S slots, its pool segment, then its C tail slots.

    pool and offsets are None if lines have no pool. position int32 ``[B, K, S]``: true position of the entry in each
    slot, or negative. now: true position of the new token, int64 ``[B]``; None if the new entry is not recorded and
    position stays.
    """

    pool: Entries | None
    offsets: Tensor | None
    tail: Entries
    position: Tensor
    now: Tensor | None = None


def names_of(kind: Any) -> list[str]:
    """Return the names in :data:`BUFFERS` of the fields of a tuple of buffers; those of entries are several."""
    entries = {side: [f"{side}_{name}" for name in Entries._fields] for side in ("pool", "tail")}
    return [name for field in kind._fields for name in entries.get(field, [field])]


def by_name(held: Any) -> dict[str, Any]:
    """Return a tuple of buffers by their names in :data:`BUFFERS`."""
    found: dict[str, Any] = {}
    for field, x in held._asdict().items():
        if isinstance(x, Entries):
            found |= {f"{field}_{name}": part for name, part in x._asdict().items()}
        else:
            found[field] = x
    return found


def from_names(kind: Any, buffers: Mapping[str, Any], prefix: str = "") -> Any:
    """Return a tuple of buffers of that kind from those of such names, behind a prefix; None where there is none."""
    values = {field: buffers.get(prefix + field) for field in kind._fields}
    for side in values.keys() & {"pool", "tail"}:
        entries: list[Any] = [buffers.get(f"{prefix}{side}_{name}") for name in Entries._fields]
        values[side] = None if entries[0] is None else Entries(*entries)
    return kind(**values)


def written_in(kind: str) -> set[str]:
    """Return the buffers that graphs of this kind write."""
    return {name for name, buffer in BUFFERS.items() if kind in buffer.written.split()}


def dynamic_dims(state: Iterable[str], rows: int) -> dict[str, set[int]]:
    """Return dynamic dimensions of cache tensors in a call of ``rows``, by name, such as ``store0_pool_k``."""
    return {name: BUFFERS[name.partition("_")[2] or name].dynamic(rows) for name in state}

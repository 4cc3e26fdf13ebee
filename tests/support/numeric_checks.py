"""Comparisons that name the tensor, and attention in float64 with the rounding error that a kernel may have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvpass.config import EntryFormat
from kvpass.operands import (
    BITS,
    BUFFERS,
    LEVELS,
    AppendBuffers,
    Attention,
    Entries,
    PrefillBuffers,
    by_name,
    from_names,
)
from kvpass.ops.entry_formats import dequantise, packed
from kvpass.rotation import rotated, rotated_back, rotation


def assert_close(label: str, actual: Tensor, expected: Tensor, *, atol: float, rtol: float = 0.0) -> None:
    """``torch.testing.assert_close`` whose message begins with the name of the tensor."""
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol, msg=lambda text: f"{label}: {text}")


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operator made."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.nbytes = max(self.nbytes, value.untyped_storage().nbytes())
        return result


def logits_before(model: Any, ids: Tensor, said: Tensor, **given: Any) -> Tensor:
    """Logits ``[B, T, vocabulary]`` that a model gives before each token of an answer ``[B, T]`` to ``ids``."""
    with torch.no_grad():
        out = model(ids, **given)
        logits = [out.logits[:, -1:]]
        for token in said[:, :-1].split(1, 1):
            out = model(token, past_key_values=out.past_key_values)
            logits.append(out.logits[:, -1:])
    return torch.cat(logits, 1)


def assert_best(label: str, said: Tensor, logits: Tensor, *, margin: float) -> None:
    """Whether every token of an answer ``[B, T]`` has the largest logit, or one within the margin of it.

    On a GPU a row's logits depend on the batch it is in, and where two are as good as equal either may be said.
    """
    short = logits.amax(-1) - logits.gather(-1, said[..., None])[..., 0]
    worst = float(short.max())
    assert worst <= margin, f"{label}: a token is {worst:.1e} below the best one, at {(short > margin).nonzero()[0]}"


def observe(ops: Any, call: Attention, start: Tensor, first: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Attention output of a prompt, and what a policy makes of it, by the module ``ops``."""
    out, lse = ops.attend_prompt(call, start)
    return out, *ops.score_layer(call, lse, start, first, *rest)


def prefill_buffers(
    policy: Any,
    entries: int | Tensor,
    layers: int,
    rows: int,
    kv_heads: int,
    dims: tuple[int, int],
    tail: int,
    *,
    slots: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> PrefillBuffers:
    """What a prompt is cascaded into, before its first layer; keys and values are NaN.

    Args:
        entries: of every row, or of each. dims: of keys and values. tail: slots of tails. slots: of the pool; by
            default exactly those that the policy states.
    """
    limits = torch.as_tensor(entries).repeat(rows) if isinstance(entries, int) else entries
    slots = slots or policy.capacity(int(limits.max()), layers, kv_heads)
    sizes = {"batch": rows, "pool": slots, "layers": layers, "kv_heads": kv_heads, "tail": tail}
    sizes |= {"key_dim": dims[0], "value_dim": dims[1], "bounds": layers * kv_heads + 1}
    sizes |= {"stat_planes": policy.stat_planes, "window": max(policy.window, 1)}
    made = {}
    for name in PrefillBuffers._fields[: PrefillBuffers._fields.index("entries")]:
        buffer = BUFFERS[name]
        initial = torch.nan if buffer.dtype is None else buffer.initial or 0
        made[name] = torch.full(buffer.shape(sizes), initial, dtype=buffer.dtype or dtype, device=device)
    return PrefillBuffers(**made, entries=limits.to(device))


def strided(x: Tensor) -> Tensor:
    """The same ``[B, heads, N, D]`` as a part of a larger tensor."""
    wide = torch.randn(x.shape[0], 9, 2 * x.shape[2] + 6, x.shape[3] + 9, device=x.device, dtype=x.dtype)
    return wide[:, 1 : 1 + x.shape[1], 3 : 3 + 2 * x.shape[2] : 2, 5 : 5 + x.shape[3]].copy_(x)


EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Exact:
    """What float64 gives, and how far from it rounding may take a computation in float32, number by number.

    The rounding errors of a sum of n terms add up like random steps: ``EPS * sqrt(n)`` times the sum of the terms'
    sizes is about four standard deviations of one that is computed term by term, and any order does better.
    """

    value: Tensor
    error: Tensor

    @staticmethod
    def cat(parts: Sequence[Exact], dim: int = 0) -> Exact:
        return Exact(*(torch.cat([getattr(part, name) for part in parts], dim) for name in ("value", "error")))

    def tokens(self, at: slice) -> Exact:
        """Of some places of the third axis."""
        return Exact(self.value[:, :, at], self.error[:, :, at])

    def view(self, *shape: int) -> Exact:
        return Exact(self.value.reshape(shape), self.error.reshape(shape))


def assert_rounded(label: str, actual: Tensor, exact: Exact) -> None:
    """Whether a tensor is the exact one but for rounding, that to its own dtype included."""
    assert actual.shape == exact.value.shape, f"{label}: shape {tuple(actual.shape)} for {tuple(exact.value.shape)}"
    allowed = exact.error + torch.finfo(actual.dtype).eps / 2 * exact.value.abs().nan_to_num(posinf=0.0)
    away = (actual.cpu().double() - exact.value).abs()
    wrong = ~((actual.cpu() == exact.value) | (away <= allowed))
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{label}: {int(wrong.sum())} of {wrong.numel()} numbers are off, the first at {at}: "
            f"{actual[at]} for {exact.value[at]}, and rounding is worth {allowed[at]:.1e}"
        )


@dataclass(frozen=True)
class ExactAttention:
    """Output ``[..., T, Dv]``, log-sum-exp ``[..., T]`` and weights ``[..., T, S]`` of an attention."""

    out: Exact
    lse: Exact
    weights: Exact


def exact_attention(
    call: Attention,
    hidden: Tensor | None = None,
    *,
    rounds_weights: int = 0,
    rounds_keys: bool = False,
    dtype: torch.dtype | None = None,
) -> ExactAttention:
    """Attention from its definition. On the CPU; the leading axes of keys and values broadcast.

    Args:
        call: q ``[..., H, T, D]``, k ``[..., K, S, D]``, v ``[..., K, S, Dv]``, without heads too; sinks ``[H]``.
        hidden: bool ``[..., T, S]``, by default nothing.
        rounds_weights: how often the computation may round weights or values to ``dtype``, by default that of the
            values. rounds_keys: whether it may round keys to it, once.
    """
    q, k, v, scale, softcap, sinks = call
    once = torch.finfo(dtype or v.dtype).eps / 2
    half = rounds_weights * once
    q, k, v = (x.cpu().double() for x in (q, k, v))
    if k.ndim > 2:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    logits = q @ k.mT * scale
    size = q.abs() @ k.abs().mT * abs(scale)
    if softcap is not None:
        capped = torch.tanh(logits / softcap)
        logits, size = softcap * capped, size * (1 - capped**2) + softcap
    if hidden is not None:
        logits, size = logits.masked_fill(hidden, -torch.inf), size.masked_fill(hidden, 0.0)
    seen = logits.isfinite().sum(-1).double()
    if sinks is not None:
        extra = sinks.cpu().double()[:, None].expand(logits.shape[:-1])[..., None]
        logits, size = torch.cat([logits, extra], -1), torch.cat([size, extra.abs()], -1)
    lse = logits.logsumexp(-1)
    weights = (logits - lse[..., None]).exp().nan_to_num()[..., : v.shape[-2]]
    out = weights @ v
    # An error d_j of a logit moves the output by w_j d_j (v_j - out); the mean of |v_j - out| is at most the deviation.
    shift = (EPS * (q.shape[-1] ** 0.5 + 2) + rounds_keys * once) * size.amax(-1)
    total = EPS * (seen**0.5 + 4)  # relative, of a sum over the columns and of the exponentials in it
    deviation = (weights @ v**2 - out**2).clamp(min=0.0).sqrt()
    return ExactAttention(
        Exact(out, shift[..., None] * deviation + (total[..., None] + half) * (weights @ v.abs())),
        Exact(lse, shift + total + EPS * lse.abs().nan_to_num(posinf=0.0)),
        Exact(weights, (2 * shift + total)[..., None] * weights),
    )


def hidden_in_prompt(
    queries: Tensor, columns: Tensor, start: Tensor, window: int | None = None, *, chunked: bool = False
) -> Tensor:
    """What queries at some columns may not see, bool ``[B, 1, T, S]``: the future and padding.

    Args:
        start: first real column of each row. window: nor what is as far away; if chunked, what is in another chunk of
            as many tokens, counted from the first real one.
    """
    away, start = queries[:, None] - columns, start.cpu()[:, None]
    seen = (away >= 0) & (columns >= start[:, None])
    if chunked:
        assert window is not None
        own, others = ((x - start).div(window, rounding_mode="floor") for x in (queries, columns))
        seen &= own[:, :, None] == others[:, None]
    elif window is not None:
        seen &= away < window
    return ~seen[:, None]


@dataclass(frozen=True)
class PromptCase:
    """Sizes and options of an attention over a prompt: ``n`` tokens, head dims ``d`` and ``dv``."""

    n: int
    d: int
    heads: int = 2
    kv_heads: int = 1
    dv: int | None = None
    starts: tuple[int, ...] = (0,)
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "config")
        return "-".join(f"{name}{value}" for name, value in given if value not in (None, False))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v stored as ``[B, N, heads, dim]``, as projections give them; start; sinks."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        sizes = ((self.heads, self.d), (self.kv_heads, self.d), (self.kv_heads, self.dv or self.d))
        q, k, v = (
            torch.randn(len(self.starts), self.n, *size, device=device, dtype=self.dtype).transpose(1, 2)
            for size in sizes
        )
        sinks = torch.randn(self.heads, device=device) * 3 if self.sinks else None
        return q, k, v, torch.tensor(self.starts, device=device), sinks

    def call(self) -> tuple[Attention, Tensor]:
        """The same as a call with the usual scale, and start."""
        q, k, v, start, sinks = self.tensors()
        return Attention(q, k, v, self.d**-0.5, self.softcap, sinks), start


def rounded(x: Tensor, entry_format: EntryFormat) -> Tensor:
    """Entries ``[.., D]`` after a round trip, by the formula."""
    bits = BITS[entry_format]
    if bits == 8:
        scale = x.abs().amax(-1, keepdim=True) / (127 if entry_format == "int8" else 448)
        scaled = x / scale.where(scale > 0, 1.0)
        return (scaled.round() if entry_format == "int8" else scaled.to(torch.float8_e4m3fn).to(x.dtype)) * scale
    level, y = torch.tensor(LEVELS[bits], dtype=x.dtype), rotated(x)
    size = y.square().mean(-1, keepdim=True).sqrt()
    near = level[(y[..., None] / size[..., None] - level).abs().argmin(-1)]
    return rotated_back(near * (y * near).sum(-1, keepdim=True) / near.square().sum(-1, keepdim=True))


@dataclass
class CacheCase:
    """Arguments of one call that attends a cache; what no implementation may read is NaN.

    Where ``pool_v`` and ``tail_v`` have no columns, values are stored in the keys.
    """

    call: Attention
    held: Any
    layer: int
    entry_format: EntryFormat = "model"

    @property
    def arguments(self) -> tuple[Attention, Any, int]:
        return self.call, self.held, self.layer

    def changed(self, **given: Any) -> Self:
        """The case with other fields of the call, other buffers of the cache, or another layer."""
        of_call = {name: given.pop(name) for name in Attention._fields if name in given}
        layer = given.pop("layer", self.layer)
        held = from_names(type(self.held), by_name(self.held) | given)
        return replace(self, call=self.call._replace(**of_call), held=held, layer=layer)

    def packed(self, entry_format: EntryFormat) -> Self:
        """The case with a cache of codes."""
        if entry_format == "model":
            return self
        return replace(self, held=packed(self.held, entry_format), entry_format=entry_format)

    def floats(self, name: str) -> Tensor:
        """A buffer in float64, with what codes stand for."""
        held = by_name(self.held)
        x, scale = held[name], held[f"{name}_scale"]
        if scale is None:
            return x.double()
        found = dequantise(x, scale.double(), (self.call.k if name.endswith("k") else self.call.v).shape[3])
        return rotated_back(found) if BITS[self.entry_format] < 8 else found


def _rotated_back(out: Exact, v: Tensor) -> Exact:
    """The output for values like ``v``, from that for rotated ones, both in its dtype.

    Each number is a sum over the channels of the rotated output, whose errors add up like random steps: those of
    attention and of rounding there, and those of the rotation's own numbers. So a small number may be as far off as
    its neighbours.
    """
    once = torch.finfo(v.dtype).eps / 2 * out.value.abs()
    squares = rotation(out.value.shape[-1], v.device, torch.float64)[: v.shape[-1]].square()
    errors = (out.error + once).square() + once.square()
    return Exact(rotated_back(out.value, v.shape[-1]), (errors @ squares.T).sqrt())


class DecodeCase(CacheCase):
    """Arguments of ``attend_cache``; ``held`` are ``AppendBuffers``."""

    def copied(self) -> DecodeCase:
        """The case with tails of its own."""
        tail = Entries(*(x.clone() for x in self.held.tail.tensors))
        return replace(self, held=self.held._replace(tail=tail))

    def with_pool_of_first_row(self, copies: int) -> DecodeCase:
        """The case with the pool of the first row for all rows, held so many times, and tails of its own."""
        tables: dict[str, Any] = {"offsets": self.held.offsets[:1].repeat(len(self.held.offsets), 1)}
        pool = Entries(*(torch.cat([x[:1]] * copies) for x in self.held.pool.tensors))
        copied = self.copied().changed(**tables)
        return replace(copied, held=copied.held._replace(pool=pool))

    @property
    def _new(self) -> tuple[Any, ...]:
        """Index of the new entries in tails."""
        used = int(self.held.tail_used)
        return self.layer, slice(None), slice(None), slice(used, used + self.call.q.shape[2])

    @property
    def buffers(self) -> list[Tensor]:
        """What a call may write, and what it must not."""
        return [*self.held.pool.tensors, *self.held.tail.tensors]

    @property
    def kept(self) -> list[Tensor]:
        """What no call changes: the buffers, zeros in the slots of the new entries."""
        found = [x.clone() for x in self.buffers]
        for x in found:
            if x.ndim >= 4:
                x[self._new] = 0
        return [x.view(torch.uint8) for x in found]

    def check_appended(self) -> None:
        """The new entries are in the tail: as they are, or as codes that stand for what the formula gives."""
        for name, new in (("tail_k", self.call.k), ("tail_v", self.call.v)):
            if by_name(self.held)[name].shape[-1] == 0:
                continue
            found = self.floats(name)[self._new]
            if self.entry_format == "model":
                assert torch.equal(found, new.double()), name
                continue
            # of 8 bits a code is one division, which is the same in fp32 everywhere
            x = new.float() if BITS[self.entry_format] == 8 else new.double()
            expected = rounded(x, self.entry_format).double()
            if new.dtype == torch.float32:
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            else:  # kernels on CUDA rotate in the dtype of the call: a number between two levels may go to either
                assert float((found - expected).norm() / expected.norm()) < 0.05, name

    def check(self, way: Callable[[DecodeCase], Tensor], *, rounds_weights: bool = False) -> None:
        """Output exact but for rounding; the new entries are in the tail; nothing else changed by a bit."""
        before, given = self.kept, self.copied()
        found = way(given)
        assert found.shape == (*self.call.q.shape[:3], self.call.v.shape[3]) and found.dtype == self.call.q.dtype
        assert found.transpose(1, 2).is_contiguous()
        given.check_appended()
        assert_rounded(way.__name__, found, given.exact(rounds_weights=rounds_weights))
        assert all(map(torch.equal, given.kept, before)), way.__name__

    def exact(self, *, rounds_weights: bool = False) -> Exact:
        """Output ``[B, H, T, Dv]``, one row and KV head after another; of a cache of codes when these are appended."""
        (q, k, v, scale, softcap, sinks), held = self.call, self.held
        (rows, heads, tokens, _), kv_heads = q.shape, k.shape[1]
        group, used = heads // kv_heads, int(held.tail_used)
        in_keys, are_codes = held.pool.v.shape[2] == 0, self.entry_format != "model"
        roundings = rounds_weights * (2 if are_codes else 1)  # values too, when they leave their codes
        rotates = BITS.get(self.entry_format, 8) < 8
        pool_k, tail_k = self.floats("pool_k"), self.floats("tail_k")
        pool_v, tail_v = (pool_k, tail_k) if in_keys else (self.floats("pool_v"), self.floats("tail_v"))
        if not are_codes:
            tail_k, tail_v = tail_k.clone(), tail_v.clone()
            tail_k[self._new] = k.double()
            if not in_keys:
                tail_v[self._new] = v.double()
            else:
                tail_v = tail_k
        outs = []
        for row, head in itertools.product(range(rows), range(kv_heads)):
            segment = slice(*held.offsets[row, self.layer * kv_heads + head :][:2].tolist())
            in_tail = (self.layer, row, head, slice(int(held.tail_start[row]), used + tokens))
            keys = torch.cat([pool_k[row, segment], tail_k[in_tail]])
            values = torch.cat([pool_v[row, segment], tail_v[in_tail]])
            values = rotated(values) if rotates else values[:, : v.shape[3]]
            of_head = slice(head * group, (head + 1) * group)
            call = Attention(q[row, of_head], keys, values, scale, softcap, None if sinks is None else sinks[of_head])
            found = exact_attention(
                call,
                torch.arange(len(keys)) > torch.arange(len(keys) - tokens, len(keys))[:, None],
                rounds_weights=roundings,
                rounds_keys=rounds_weights and rotates,
                dtype=q.dtype,
            )
            outs.append(_rotated_back(found.out, v) if rotates else found.out)
        return Exact.cat(outs).view(rows, heads, tokens, -1)


def decode_case(
    lengths: list[list[int]],
    *,
    group: int = 2,
    dim: int = 32,
    value_dim: int | None = None,
    tokens: int = 1,
    slots: int = 24,
    used: int = 5,
    start: list[int] | None = None,
    layers: int = 3,
    layer: int = 1,
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
    sinks: bool = False,
    scale: float | None = None,
    seed: int = 0,
    in_keys: bool = False,
) -> DecodeCase:
    """Random arguments on the CPU.

    Args:
        lengths: pool entries of the attended layer, by row and KV head; the other layers hold a few of NaN.
        group: query heads of a KV head. dim, value_dim: head dims; tokens: new ones; scale: by default ``dim**-0.5``.
        in_keys: values are the first columns of the keys, and stored there only.
        slots: of the tail, of which those from ``start[row]`` up to ``used`` hold entries.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, kv_heads = len(lengths), len(lengths[0])
    first = [0] * rows if start is None else start

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    segments = torch.full((rows, layers, kv_heads), 2)
    segments[:, layer] = torch.tensor(lengths)
    offsets = torch.nn.functional.pad(segments.flatten(1).cumsum(1), (1, 0)).int()
    entries = int(offsets[:, -1].max()) + 3
    pools, tails = [], []
    for size in (dim, dim if value_dim is None else value_dim):
        pool = torch.full((rows, entries, size), torch.nan, dtype=dtype)
        tail = torch.full((layers, rows, kv_heads, slots, size), torch.nan, dtype=dtype)
        for row in range(rows):
            begin, end = offsets[row, layer * kv_heads], offsets[row, (layer + 1) * kv_heads]
            pool[row, begin:end] = random(int(end - begin), size)
            tail[layer, row, :, first[row] : used] = random(kv_heads, used - first[row], size)
        pools.append(pool)
        tails.append(tail)
    q, k, v = (
        random(rows, tokens, heads, size).transpose(1, 2)
        for heads, size in ((group * kv_heads, dim), (kv_heads, dim), (kv_heads, pools[1].shape[2]))
    )
    if in_keys:
        v = k[..., : v.shape[3]]
        pools[1], tails[1] = pools[1][..., :0].contiguous(), tails[1][..., :0].contiguous()
    extra = random(group * kv_heads) * 3 if sinks else None
    call = Attention(q, k, v, dim**-0.5 if scale is None else scale, softcap, extra)
    tables = AppendBuffers(Entries(*pools), offsets, Entries(*tails), torch.tensor(first), torch.tensor(used))
    return DecodeCase(call, tables, layer)

"""Budget, geometry and layout: the values from which every size in kvpass is computed."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from kvpass.operands import BITS

MAX_ENTRIES = 2**31 - 1
"""Largest prompt length, since positions are int32. A larger budget also keeps everything."""

Block = Literal["auto"] | int
"""Tokens of a block in which a prompt is prefilled, at least 2."""

Compiler = Literal["inductor", "eager"]
""""eager" runs the rewritten graphs as they are."""

EntryFormat = Literal["model", "int8", "fp8", "rot4", "rot3", "rot2"]
"""How a cache holds entries when the prompt has been read: in the model's dtype, or as codes of 8, 4, 3 or 2 bits with
one fp32 scale for K and one for V; those of 4 and fewer are of rotated vectors."""

COMPILERS: tuple[Compiler, ...] = ("inductor", "eager")
ENTRY_FORMATS: tuple[EntryFormat, ...] = ("model", "int8", "fp8", "rot4", "rot3", "rot2")

SCALE_BYTES = 4
MOST_CODES_ON_CUDA = 256
"""Widest vectors of codes that kernels on CUDA read."""

T = TypeVar("T")


def one_of(name: str, value: object, choices: Iterable[T]) -> T:
    """Return the choice that the value of an argument is; raise ValueError if it is none of them."""
    for choice in choices:
        if isinstance(value, type(choice)) and value == choice:  # 1 is not True
            return choice
    raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(str, choices))}")


_BYTE_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BYTES = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Shape of the KV entries of some attention ops, the same in each.

    ``values_in_keys``: the value row is the first ``value_dim`` columns of the key row, and stored there only.
    """

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    itemsize: int
    values_in_keys: bool = False

    @property
    def stored_value_dim(self) -> int:
        """Columns of a value row that are stored apart from the key row."""
        return 0 if self.values_in_keys else self.value_dim

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of buffers, by their names in :data:`kvpass.operands.BUFFERS`."""
        sizes = {"layers": self.layers, "kv_heads": self.kv_heads, "bounds": self.layers * self.kv_heads + 1}
        return sizes | {"key_dim": self.key_dim, "value_dim": self.stored_value_dim}

    def entry_bytes(self, entry_format: EntryFormat = "model") -> int:
        """Bytes of one entry in that format, its scales included: one key row and its value row of one KV head."""
        columns = self.key_dim + self.stored_value_dim
        if entry_format == "model":
            return columns * self.itemsize
        scales = 1 if self.values_in_keys else 2
        return columns * BITS[entry_format] // 8 + scales * SCALE_BYTES

    def check_format(self, entry_format: EntryFormat, device: torch.device) -> None:
        """Raise ValueError if a cache on this device cannot hold entries of this shape in that format."""
        if entry_format != "model" and device.type == "cuda" and max(self.key_dim, self.value_dim) > MOST_CODES_ON_CUDA:
            raise ValueError(
                f"entries={entry_format!r}: keys have {self.key_dim} numbers, values {self.value_dim}, and kernels on "
                f"CUDA read codes of at most {MOST_CODES_ON_CUDA}; give entries='model'"
            )
        if BITS.get(entry_format, 8) < 8 and (self.key_dim % 8 or self.value_dim % 8):
            raise ValueError(
                f"entries={entry_format!r}: head dimensions must be multiples of 8, and keys have {self.key_dim} "
                f"numbers, values {self.value_dim}; give entries='int8' or 'fp8'"
            )

    def token_bytes(self, entry_format: EntryFormat = "model") -> int:
        """Bytes of one token in a full cache of these attention ops, in that format."""
        return self.layers * self.kv_heads * self.entry_bytes(entry_format)


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that share a pool or, with a sliding window, a ring; ``layers`` are model-wide indices.

    ``chunked``: the window is the size of chunks, counted from a row's first token, and each attends to itself alone.
    """

    geometry: Geometry
    layers: tuple[int, ...]
    sliding_window: int | None = None
    chunked: bool = False


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """A state of a recurrent layer, outside the budget."""

    layer: int  # in the model's own count
    name: str  # conv0, recurrent0, ...
    shape: tuple[int, ...]  # of one row
    dtype: str  # of torch

    @classmethod
    def of(cls, layer: int, name: str, state: torch.Tensor) -> StateShape:
        dtype = str(state.dtype).removeprefix("torch.")
        return cls(layer=layer, name=name, shape=tuple(map(int, state.shape[1:])), dtype=dtype)


class PoolFacts(NamedTuple):
    """Of the layers of a pool: query heads that read a KV head (of the first), and whether logits are plain products.

    Plain: without soft-capping and sinks, so that what all keys of a head have in common changes no softmax.
    """

    group: int
    plain: bool


@dataclass(frozen=True)
class Layout:
    """Grouping of layers: pools (one per KV geometry), rings (one per geometry and sliding window); recurrent states.

    Raises:
        ValueError: a size is below 1, or the groups do not hold each attention op of a model once, in ascending order.
    """

    pools: tuple[LayerGroup, ...]
    rings: tuple[LayerGroup, ...]
    states: tuple[StateShape, ...] = ()

    def __post_init__(self) -> None:
        groups = (*self.pools, *self.rings)
        sites = [site for group in groups for site in group.layers]
        if sorted(sites) != list(range(len(sites))) or any(sorted(g.layers) != list(g.layers) for g in groups):
            raise ValueError("each attention op of a model must be in one group, in ascending order")
        for group in groups:
            g = group.geometry
            if g.layers != len(group.layers):
                raise ValueError(f"a geometry of {g.layers} layers for a group of {len(group.layers)}")
            if min(g.layers, g.kv_heads, g.key_dim, g.value_dim, g.itemsize) < 1:
                raise ValueError(f"{g}: every size must be >= 1")
            if g.values_in_keys and (g.value_dim > g.key_dim or group.sliding_window is not None):
                raise ValueError(f"{g}: values are in keys only if they have no more columns, and never in a ring")
        if any(group.sliding_window is not None or group.chunked for group in self.pools):
            raise ValueError("layers with a sliding window or chunks must be among the rings, not the pools")
        if any(group.sliding_window is None or group.sliding_window < 1 for group in self.rings):
            raise ValueError("layers among the rings must have a sliding window >= 1")
        for state in self.states:
            if min(state.shape, default=1) < 1 or not isinstance(getattr(torch, state.dtype, None), torch.dtype):
                raise ValueError(f"{state}: every size must be >= 1, and the dtype one of torch")

    @classmethod
    def of(cls, sites: Sequence[LayerGroup], states: Sequence[StateShape] = ()) -> Layout:
        """Group the attention ops of a model, each given as a group of its own, in order of execution; states too."""
        layers: dict[LayerGroup, list[int]] = {}
        for site in sites:
            layers.setdefault(replace(site, layers=()), []).extend(site.layers)
        groups = [
            replace(group, geometry=replace(group.geometry, layers=len(members)), layers=tuple(members))
            for group, members in layers.items()
        ]
        return cls(
            pools=tuple(group for group in groups if group.sliding_window is None),
            rings=tuple(group for group in groups if group.sliding_window is not None),
            states=tuple(states),
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names in graphs and files of pools, rings and states, in this order: ``store0``, .., ``ring0``, .."""
        kinds = (("store", self.pools), ("ring", self.rings), ("state", self.states))
        return tuple(f"{kind}{i}" for kind, parts in kinds for i in range(len(parts)))

    def token_bytes(self, entry_format: EntryFormat) -> int:
        """Bytes of one token in a full cache of the layers that have a budget, in that format."""
        return sum(group.geometry.token_bytes(entry_format) for group in self.pools)


@dataclass(frozen=True)
class Budget:
    """Number of entries kept per KV head per layer on average, window included.

    The three forms of a budget are converted only here. The number is always per sequence: rows of a batch do not share
    it.

    Attributes:
        kind: ``"entries"`` (an int), ``"fraction"`` of each row's real prompt length (a float in (0, 1]) or ``"bytes"``
            of kept entries per sequence (a string such as ``"512MiB"``).
        value: entries, fraction or bytes.
    """

    kind: Literal["entries", "fraction", "bytes"]
    value: int | float

    def __post_init__(self) -> None:
        if self.kind == "fraction":
            if not 0.0 < self.value <= 1.0:
                raise ValueError(
                    f"budget={self.value}: a float is the fraction of the prompt kept and must be in (0, 1]"
                )
        elif not (isinstance(self.value, int) and self.value >= 1):
            raise ValueError(f"budget={self.value}: {self.kind} must be an int >= 1")

    @classmethod
    def parse(cls, value: Budget | int | float | str) -> Budget:
        """Read a budget as users write it; NumPy numbers count as Python's.

        Raises:
            ValueError: the value is not a positive int, a float in (0, 1] or a byte string.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            return cls("entries", int(value))
        if isinstance(value, float | np.floating):
            return cls("fraction", float(str(value)))  # as written: float(np.float32(0.29)) is less than 0.29
        if isinstance(value, str):
            return cls("bytes", read_bytes(value))
        raise ValueError(
            f"budget={value!r} of type {type(value).__name__}: expected an int >= 1, a float in (0, 1] "
            "or bytes such as '512MiB'"
        )

    def entries(self, prompt_length: int, token_bytes: int) -> int:
        """Return entries per KV head per layer for ``prompt_length`` real tokens, window included.

        At most :data:`MAX_ENTRIES`: a larger budget keeps everything.

        Args:
            token_bytes: of one token of which every head keeps the entry, over all layers that share the budget.
        """
        match self.kind:
            case "entries":
                return min(int(self.value), MAX_ENTRIES)
            case "fraction":
                return math.floor(self.value * prompt_length + 1e-9)  # 0.29 * 100 is less than 29
            case "bytes":
                return min(int(self.value) // token_bytes, MAX_ENTRIES)

    def check(self, prompt_length: int, window: int, token_bytes: int) -> int:
        """Return :meth:`entries`; of a fraction or bytes the whole prompt, if it is no longer than ``window + 1``.

        Bytes of one entry or more are that for longer prompts too, with a warning.

        Raises:
            ValueError: else fewer than ``window + 1`` entries, unless the whole prompt fits in them.
        """
        entries, least = self.entries(prompt_length, token_bytes), window + 1
        if self.kind != "entries" and prompt_length <= least:
            return max(entries, prompt_length)
        if self.kind == "bytes" and 1 <= entries < least:
            warnings.warn(f"budget {self} is {entries} entries per KV head per layer: {least} are kept", stacklevel=2)
            return least
        if entries < min(least, prompt_length):
            raise ValueError(
                f"budget {self} is {entries} entries per KV head per layer for a prompt of {prompt_length} tokens; "
                f"it must be at least window + 1 = {least}"
            )
        return entries

    def __str__(self) -> str:
        return f"{self.value}B" if self.kind == "bytes" else str(self.value)


BudgetLike: TypeAlias = Budget | int | float | str | None
"""A budget as users write it; None where a policy has none, or to take the model's."""

Spans: TypeAlias = Sequence[tuple[int, int]] | torch.Tensor | tuple[Literal["images"]]
"""Parts of a prompt: ``(start, stop)`` in tokens of each row, counted from its first real one; a mask of its columns,
bool ``[B, N]``; or ``("images",)``, the tokens of its images."""


def read_bytes(text: str, name: str = "budget") -> int:
    """Return the bytes of a text such as ``"512MiB"``; raise ValueError for any other value of that name."""
    match = _BYTES.fullmatch(text)
    number, unit = match.groups() if match else ("", "")
    if match and not unit:
        kind = "the fraction of each prompt that is kept pass a float" if "." in number else "entries pass an int"
        other = f"; for {kind}, budget={number}" if name == "budget" else ""
        raise ValueError(f"{name}={text!r}: a text is bytes and needs a unit, as in '512MiB'{other}")
    if unit.lower() not in _BYTE_UNITS:
        raise ValueError(
            f"{name}={text!r}: cannot read as bytes; write a number and one of "
            "B, kB, MB, GB, KiB, MiB, GiB, for instance '512MiB'"
        )
    size = int(Decimal(number) * _BYTE_UNITS[unit.lower()])
    if size < 1:
        raise ValueError(f"{name}={text!r}: must be at least one byte")
    return size

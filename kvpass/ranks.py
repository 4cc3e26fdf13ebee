"""Processes that share the weights of a model (tensor parallelism), and the operators by which they meet.

Both operators relate no token to another. Every process must call them in the same order. What a process may refuse
alone is done in :func:`run_on_all_ranks`, before any of them: else the others would wait for it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kvpass.torch_compat import process_group

R = TypeVar("R")


@dataclass(frozen=True)
class Ranks:
    """The processes among which the weights of a model are divided, each with as many; :data:`ONE_PROCESS`: none are.

    One process does not communicate: what it gathers, adds or exchanges is its own.

    Attributes:
        group: name of the process group. rank: of this process. size: number of processes.
    """

    group: str
    rank: int
    size: int

    @property
    def several(self) -> bool:
        return self.size > 1

    @property
    def spec(self) -> str:
        """Text from which :meth:`from_spec` makes the ranks again, as operators of a graph take them."""
        return f"{self.rank} of {self.size} in {self.group}"

    @classmethod
    @functools.cache
    def from_spec(cls, spec: str) -> Ranks:
        rank, _, size, _, group = spec.split(" ", 4)
        return cls(group, int(rank), int(size))

    def local_shard(self, x: Tensor, dim: int) -> Tensor:
        """Return the part of a tensor of all heads, along ``dim``, that belongs to this process."""
        return x.chunk(self.size, dim)[self.rank] if self.several else x

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the tensors of all processes, of one shape, joined along ``dim`` in the order of their ranks."""
        return gather_ranks(x, self.group, self.size, dim) if self.several else x

    def exchange(self, value: R) -> list[R]:
        """Return the values of several processes, in the order of their ranks."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=process_group(self.group))
        return found

    def gather_to_first(self, value: Any) -> list[Any]:
        """Return the values of all processes in the first one, in the order of their ranks; nothing in the others."""
        group = process_group(self.group)
        found = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found, dst=dist.get_global_rank(group, 0), group=group)
        return found or []

    def first_does(self, action: Callable[[], None]) -> None:
        """Have the first process do something; all return when it is done, or raise what it raised."""
        group = process_group(self.group)
        raised: list[Exception | None] = [None]
        if self.rank == 0:
            try:
                action()
            except Exception as error:
                raised = [error]
        dist.broadcast_object_list(raised, src=dist.get_global_rank(group, 0), group=group)
        if raised[0] is not None:
            raise raised[0]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the tensors of all processes."""
        return sum_ranks(x, self.group) if self.several else x


ONE_PROCESS = Ranks("", 0, 1)


def run_on_all_ranks(
    ranks: Ranks, call: str, make: Callable[[], R], facts: Callable[[R], Mapping[str, str]] = lambda made: {}
) -> R:
    """Return what ``make`` returns; if one process cannot make it, all raise the same.

    Args:
        ranks: the processes, all of which must call this. One alone only calls ``make``.
        call: what is being done, the same in all. make: must not wait for other processes. facts: of what was made, by
            name: texts that must be the same in all.
    Raises:
        ValueError: calls or facts differ, or it was raised in a process. RuntimeError: anything else was raised there.
            The message names the process, unless all raised the same: then each raises its own.
    """
    if not ranks.several:
        return make()
    error: Exception | None = None
    try:
        made = make()
        own: dict[str, str] = {"call": call, **facts(made)}
    except Exception as raised:
        error, own = raised, {"call": call}
    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    found = ranks.exchange((own, None if error is None else (kind, str(error))))
    failures = [failure for _, failure in found]
    if error is not None and all(failure == failures[0] for failure in failures):
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            kind, said = failure
            raise kind(f"in process {rank} of {ranks.size}, counted from 0: {said}") from error
    for name in own:
        values = [other.get(name, "nothing") for other, _ in found]
        if len(set(values)) > 1:
            which = next(rank for rank, value in enumerate(values) if value != values[0])
            raise ValueError(
                f"{name}: {values[0]} in process 0, {values[which]} in process {which}; processes that share a model "
                "must make the same calls with the same arguments: seed them alike before sampling"
            )
    return made


def digest(x: Tensor | None) -> str:
    """Return a short text that tells tensors apart; reads the tensor on the host."""
    if x is None:
        return "None"
    content = x.cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()
    return f"{list(x.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


@torch.library.custom_op("kvpass::gather_ranks", mutates_args=())
def gather_ranks(x: Tensor, group: str, size: int, dim: int) -> Tensor:
    """See :meth:`Ranks.gather`."""
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(found, x.contiguous(), process_group(group))
    return torch.cat(found, dim)


@gather_ranks.register_fake
def _gathered_alone(x: Tensor, group: str, size: int, dim: int) -> Tensor:
    return torch.cat([x] * size, dim)


@torch.library.custom_op("kvpass::sum_ranks", mutates_args=())
def sum_ranks(x: Tensor, group: str) -> Tensor:
    """See :meth:`Ranks.sum`."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=process_group(group))
    return total


@sum_ranks.register_fake
def _summed_alone(x: Tensor, group: str) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


ALONE = {torch.ops.kvpass.gather_ranks.default: _gathered_alone, torch.ops.kvpass.sum_ranks.default: _summed_alone}
"""What stands for each operator where a process runs an example by itself: as if all had the same tensor."""

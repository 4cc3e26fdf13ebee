"""Processes that share the attention heads of a model (tensor parallelism), and the operators by which they meet.

Both operators relate no token to another. Every process must call them in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvpass.torch_compat import process_group


@dataclass(frozen=True)
class Ranks:
    """The processes among which the heads of a model are divided, each with as many.

    Attributes:
        group: name of the process group. rank: of this process. size: number of processes.
    """

    group: str
    rank: int
    size: int

    @property
    def spec(self) -> str:
        """Text from which :meth:`from_spec` makes the ranks again, as operators of a graph take them."""
        return f"{self.rank} of {self.size} in {self.group}"

    @classmethod
    def from_spec(cls, spec: str) -> Ranks:
        """Return the ranks of a :attr:`spec`."""
        rank, _, size, _, group = spec.split(" ", 4)
        return cls(group, int(rank), int(size))

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return the part of a tensor of all heads, along ``dim``, that belongs to this process."""
        return x.chunk(self.size, dim)[self.rank]

    def most(self, number: int, device: torch.device) -> int:
        """Return the largest number of all processes; reads it on the host.

        Args:
            device: on which the processes can send tensors to each other.
        """
        return int(self.gather(torch.tensor([number], device=device), 0).max())

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the tensors of all processes, of one shape, joined along ``dim`` in the order of their ranks."""
        return gather_ranks(x, self.group, self.size, dim)

    def check_same(self, name: str, given: Tensor) -> None:
        """Check that a tensor is the same in all processes; reads it on the host.

        Raises:
            ValueError: it is not; in every process.
        """
        own = (tuple(given.shape), hashlib.sha256(given.cpu().contiguous().numpy().tobytes()).hexdigest())
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=process_group(self.group))
        if any(other != own for other in found):
            raise ValueError(
                f"{name} differ between the processes that share the heads: all must make the same calls; seed them "
                "alike before sampling"
            )

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
        return sum_ranks(x, self.group)


def processes(ranks: Ranks | None) -> int:
    """Return how many processes share the heads; 1 where there are no ranks."""
    return 1 if ranks is None else ranks.size


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


ALONE = {
    torch.ops.kvpass.gather_ranks.default: _gathered_alone,
    torch.ops.kvpass.sum_ranks.default: _summed_alone,
}
"""What stands for each operator where a process runs an example by itself: as if all had the same tensor."""

"""A prompt that runs through a decoder, and what is replayed behind it: tokens that attend to all of it.

Policies score by what replays attend to (:mod:`kvpass.policies.kvzip`), and compaction fits entries to their queries.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpass.compiler.blocks import LayerCall, LayerRun, SplitDecoder
from kvpass.graphs.canonical import SiteLocation
from kvpass.graphs.split_layers import Layer
from kvpass.operands import Attention
from kvpass.ops.reference import row_groups
from kvpass.policies.base import Policy
from kvpass.policies.replay import Replay

RowReplay = tuple[slice, int, Replay]
"""Rows, their first real column, and what they replay."""


@dataclass(eq=False)
class Fill:
    """A cache that a prompt fills: its policy, and its buffers, of :meth:`CachePrefill.buffers`."""

    policy: Policy
    state: Mapping[str, Tensor]


class Behind(NamedTuple):
    """Replays behind a prompt, of caches that ask for the same.

    Attributes:
        turns: what runs, and what of it each row observes. readers: the caches.
    """

    turns: list[tuple[LayerRun, list[RowReplay]]]
    readers: list[Fill]


class PromptRun(LayerRun):
    """A prompt that runs through a decoder, and what is replayed behind it.

    Args:
        fills: what the prompt fills. readers: those whose policies replay something. replays_of: what a policy replays
            of prompts of one length, int64 ``[B, N]``; policies that replay the same tokens share them.
    Attributes:
        states: names of the states of recurrent layers. first: first real column of each row, on the device. behind:
            what runs behind the prompt.
    """

    def __init__(
        self,
        decoder: SplitDecoder,
        fills: Sequence[Fill],
        inputs: Sequence[Any],
        block: int,
        readers: Sequence[Fill],
        replays_of: Callable[[Policy, Tensor], Sequence[Replay]],
    ) -> None:
        self.fills, state = fills, fills[0].state  # what a prompt begins with is the same for all
        columns = torch.arange(decoder.tokens(inputs), device=decoder.device)
        real = (columns >= state["first"][:, None]).long()
        super().__init__(decoder, inputs, real, block, state["start"])
        self.states = {node: f"state{place}" for place, node in enumerate(decoder.split.states)}
        self.known.update({node: state[f"{name}_held"] for node, name in self.states.items()})
        self.first = state["first"]
        found: dict[Hashable, Behind] = {}
        for fill in readers:
            ids_at = decoder.given[0]
            assert ids_at is not None, "frontends without token ids refuse policies that replay"
            ids = inputs[ids_at]
            groups = [
                (rows, column, replays_of(fill.policy, ids[rows, column:]))
                for rows, column in row_groups(self.start)
                if column < self.tokens
            ]
            key = tuple(
                (column, replay.first, replay.last, replay.sinks, *replay.ids.flatten().tolist())
                for _, column, of_rows in groups
                for replay in of_rows
            )
            if key not in found:
                found[key] = Behind(list(self._turns(fill.policy, groups, inputs, block)), [])
            found[key].readers.append(fill)
        self.behind = list(found.values())

    def _turns(
        self, policy: Policy, groups: Sequence[tuple[slice, int, Sequence[Replay]]], inputs: Sequence[Any], block: int
    ) -> Iterator[tuple[LayerRun, list[RowReplay]]]:
        """Yield what runs behind the prompt: the rows' first replays together, then their second, and so on.

        Those of fewer tokens than others are filled up at their end, which none of their tokens attends to.
        """
        decoder, n = self.decoder, self.tokens
        ids_at, positions_at = decoder.given
        assert ids_at is not None
        ids = inputs[ids_at]
        for turn in range(max((len(replays) for _, _, replays in groups), default=0)):
            parts = [(rows, column, replays[turn]) for rows, column, replays in groups if turn < len(replays)]
            tokens = max(2, *(replay.ids.shape[1] for _, _, replay in parts))
            if decoder.split.not_in_blocks:
                raise ValueError(
                    f"policy {policy.name!r} replays a prompt layer by layer, and this decoder is not split into "
                    f"layers: {decoder.split.not_in_blocks}"
                )
            if not decoder.allowed(tokens):
                raise ValueError(
                    f"policy {policy.name!r} replays {tokens} tokens behind the prompt, but the decoder is "
                    "another one for so few; take another policy"
                )
            own, given = ids.new_zeros(len(ids), tokens), list(inputs)
            for rows, _, replay in parts:
                own[rows, : replay.ids.shape[1]] = replay.ids
            given[ids_at] = own
            if positions_at is not None:
                last = inputs[positions_at][:, -1:]
                given[positions_at] = last + 1 + torch.arange(tokens, device=last.device)
            try:
                decoder.check(given)
            except ValueError as error:
                raise ValueError(f"policy {policy.name!r} replays tokens, of which {error}") from None
            yield LayerRun(decoder, given, torch.ones_like(own), block, self.start, n), parts

    def begin(self) -> None:
        """Run what comes before all layers."""
        super().begin()
        for behind in self.behind:
            for replay, _ in behind.turns:
                replay.begin()

    def run_replay(
        self,
        layer: Layer,
        prompt: Attention,
        replay: LayerRun,
        location: SiteLocation,
        of_entering: Sequence[Callable[[Tensor], Tensor]] = (),
        *,
        is_last: bool,
    ) -> LayerCall:
        """Run a replay through a layer, behind the prompt; of a layer with a sliding window without its queries."""
        replay.known.update({node: self.known[node] for node in self.states})
        return replay.attend(
            layer,
            replay.edges,
            num_queries=0 if location.ring else replay.tokens,
            results_from=replay.tokens if is_last else 0,
            behind=prompt,
            of_entering=of_entering,
        )

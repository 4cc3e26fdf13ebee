"""Prefill: a prompt runs through a decoder layer by layer, and each layer's entries are judged when it has run.

The policy judges the layer's keys and values as a whole, so the kept entries do not depend on the blocks. With
compaction the prompt then runs a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.node import map_arg
from torch.profiler import record_function

from kvpass.compiler.blocks import SplitDecoder
from kvpass.compiler.replays import Behind, Fill, PromptRun, RowReplay
from kvpass.graphs.canonical import Site, SiteLocation
from kvpass.graphs.find.rotary import rotary_frequencies
from kvpass.graphs.fx_utils import recorded
from kvpass.graphs.split_layers import Layer
from kvpass.operands import Attention, PolicyInputs, PrefillBuffers, RingBuffers
from kvpass.ops.compress import compress_layer
from kvpass.ops.reference import POSITION
from kvpass.ops.schemas import implementation
from kvpass.ops.sliding import keep_newest
from kvpass.policies.base import Policy
from kvpass.policies.compaction import fit_entries, references
from kvpass.policies.observation import projected_norms
from kvpass.policies.replay import Replayed, most_attended
from kvpass.ranks import Ranks


class Prefill(SplitDecoder):
    """A decoder that prefills prompts layer by layer, each layer in blocks of tokens."""

    def __call__(self, fills: Sequence[Fill], inputs: Sequence[Any], block: int, ranks: Ranks) -> list[Any]:
        """Fill caches with one prompt, and return what the decoder returns.

        Args:
            inputs: of the captured graph. block: tokens of a block, at least 2. ranks: processes that share the heads.
        """
        for fill in fills:
            if fill.policy.compact and any(group.geometry.values_in_keys for group in self.layout.pools):
                raise ValueError(
                    "compact=True: the cache holds latents, of which keys and values are both made; compile the model "
                    "without compact"
                )
            if max(self.readers.values()) > 1 and (fill.policy.replays_prompt or fill.policy.decode_rule() is not None):
                raise ValueError(
                    f"policy {fill.policy.spec}: several layers of this model attend to the same keys and values, and "
                    "compact=True, replays and eviction while decoding are of one layer; where the policy has the "
                    "option, give evict_during_decode=False"
                )
        prompt = _ScoredPrompt(self, fills, inputs, block, ranks)
        edges, results_from = prompt.edges, 0
        prompt.begin()
        *layers, last = self.split.layers
        for layer in layers:
            prompt.run(layer, edges)
        if not self.split.not_in_blocks:
            (logits,) = self.split.results
            if logits not in self.split.axes:  # they are of the last tokens
                edges = self.last_edges(edges, block, int(recorded(logits).shape[1]))
                writes = not set(self.split.states.values()).isdisjoint(last.after.outputs)
                results_from = 0 if writes else edges[-2]
        prompt.run(last, edges, is_last=True, results_from=results_from)
        prompt.pack()
        prompt.store_states()
        results: list[Any] = map_arg(list(self.split.results), prompt.known.__getitem__)
        compacted = [fill for fill in fills if fill.policy.compact]
        if compacted:
            del prompt
            again = _Repetition(self, compacted, inputs, block)
            again.begin()
            for layer in self.split.layers:
                again.compact(layer, is_last=layer is last)
        return results


class _Reader(NamedTuple):
    """What an attention op gives to the scores of the entries that it attends to.

    Attributes:
        q: its last queries ``[B, H, T, D]``. lse: of these ``[B, H, T]``, where it was computed. summed: column sums
            ``[B, H, N]``, if any policy reads them.
    """

    q: Tensor
    lse: Tensor | None
    summed: list[Tensor]


def _joined(readers: Sequence[_Reader], kv_heads: int) -> _Reader:
    """Return ops that read the same keys and values as one, which has the query heads of all of them."""
    first, *others = readers
    if not others:
        return first

    def side_by_side(parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([x.unflatten(1, (kv_heads, -1)) for x in parts], 2).flatten(1, 2)

    lses = [one.lse for one in readers if one.lse is not None]
    summed = [side_by_side(one.summed[0] for one in readers)] if first.summed else []
    return _Reader(side_by_side(one.q for one in readers), side_by_side(lses) if lses else None, summed)


class _ScoredPrompt(PromptRun):
    """A prompt that is being prefilled into one or more caches, whose policies score its entries."""

    def __init__(
        self, decoder: SplitDecoder, fills: Sequence[Fill], inputs: Sequence[Any], block: int, ranks: Ranks
    ) -> None:
        readers = [fill for fill in fills if "replays" in fill.policy.inputs]
        super().__init__(decoder, fills, inputs, block, readers, lambda policy, ids: policy.replays(ids))
        self.ranks, self.ops = ranks, implementation(self.first)
        self._readers: list[_Reader] = []

    def run(self, layer: Layer, edges: Sequence[int], *, is_last: bool = False, results_from: int = 0) -> None:
        """Run a layer, as :meth:`attend` does; each policy scores its entries and keeps some."""
        location, summed = self.decoder.locations[layer.site.layer], list[Tensor]()

        def add_sums(call: Attention, lse: Tensor | None) -> None:
            with record_function("kvpass::column_sums"):
                sums = self.ops.column_sums(call, lse, self.start, self.first)
                if not summed:
                    summed.append(sums.new_zeros(*sums.shape[:2], self.tokens))
                summed[0][..., : sums.shape[2]] += sums

        scored = [] if location.ring else self.fills
        on_block = add_sums if any("column_sum" in fill.policy.inputs for fill in scored) else None
        num_queries = max((self._rows_read(fill.policy) for fill in scored), default=0)
        scoring = [fill for fill in scored if "token_scores" in fill.policy.inputs]
        call, lse, found = self.attend(
            layer,
            edges,
            num_queries=num_queries,
            results_from=results_from,
            of_entering=[self._token_scores(fill.policy, layer.site, location) for fill in scoring],
            on_block=on_block,
        )
        entered, replayed = dict(zip(scoring, found, strict=True)), dict[Fill, Tensor]()
        for behind in self.behind:
            with record_function("kvpass::replay"):
                most = self._replay(layer, call, location, behind, is_last=is_last)
            replayed.update({fill: most["norms" in fill.policy.inputs] for fill in behind.readers})
        if not location.ring:
            self._readers.append(_Reader(call.q, lse, summed))
            if len(self._readers) < self.decoder.readers[layer.site.layer]:
                return
            queries, lse, summed = _joined(self._readers, call.k.shape[1])
            call, self._readers = call._replace(q=queries), []
        columns = torch.arange(self.tokens, device=call.k.device)
        for fill in self.fills:
            if location.ring:
                keep_newest(location.buffers(RingBuffers, fill.state), call.k, call.v, columns, location.layer)
                continue
            last = slice(num_queries - self._rows_read(fill.policy), None)
            own, own_lse = call._replace(q=call.q[:, :, last]), None if lse is None else lse[:, :, last]
            sums = summed[0] if "column_sum" in fill.policy.inputs else None
            inputs = {"summed": sums, "replayed": replayed.get(fill), "entered": entered.get(fill)}
            self._compress(fill, layer.site, location, own, own_lse, inputs)

    def _replay(
        self, layer: Layer, prompt: Attention, location: SiteLocation, behind: Behind, *, is_last: bool
    ) -> dict[bool, Tensor]:
        """Run replays through a layer; return the most that they attend to each entry, fp32 ``[B, K, N]``.

        Returns:
            by whether attention is weighed by norms, for those of the two that a policy reads.
        """
        kinds = {"norms" in fill.policy.inputs for fill in behind.readers}
        found = {weighs: prompt.k.new_zeros(prompt.k.shape[:3], dtype=torch.float32) for weighs in kinds}
        weighed = True in kinds and not location.ring
        value_norms = projected_norms(prompt.v, self._projection(layer.site), 2) if weighed else None
        for replay, parts in behind.turns:
            norms_of = [lambda x: torch.linalg.vector_norm(x.float(), dim=-1)] if weighed else []
            call, _, entered = self.run_replay(layer, prompt, replay, location, norms_of, is_last=is_last)
            if location.ring:
                continue
            for rows, column, part in parts:
                own = slice(0, part.ids.shape[1])
                queries, keys = call.q[rows, :, own], call.k[rows, :, self.tokens :][:, :, own]
                for weighs, most in found.items():
                    norms = entered[0][rows, own] if weighs else None
                    seen = Replayed(part.first, part.last, part.sinks, queries, keys, norms)
                    worth = value_norms[rows, :, column:] if weighs and value_norms is not None else None
                    paid = most_attended(prompt.k[rows, :, column:], [seen], *call[3:], value_norms=worth)
                    most[rows, :, column:] = torch.maximum(most[rows, :, column:], paid)
        return found

    def _compress(
        self,
        fill: Fill,
        site: Site,
        location: SiteLocation,
        call: Attention,
        lse: Tensor | None,
        found: Mapping[str, Tensor | None],
    ) -> None:
        """Score a layer's entries for one cache, and keep some; ``found``: inputs of the policy by name."""
        policy, buffers = fill.policy, location.buffers(PrefillBuffers, fill.state)
        if "keys" in policy.inputs:
            site.check_keys()
        projection = self._projection(site) if "projection" in policy.inputs else None
        frequencies = self.known[rotary_frequencies(site)] if "rotation" in policy.inputs else None
        asked = PolicyInputs(projection, frequencies, **found)
        compress_layer(self.ops, call, lse, self.start, self.first, location.layer, policy, buffers, self.ranks, asked)

    def _token_scores(self, policy: Policy, site: Site, location: SiteLocation) -> Callable[[Tensor], Tensor]:
        """Return the policy's function of what enters attention."""
        kv_heads = int(recorded(site.k).shape[1])
        return lambda x: policy.token_scores(x, location.layer, location.layers, kv_heads, self.ranks)

    def _projection(self, site: Site) -> Tensor:
        """Weight of the layer's output projection, ``[hidden, H * Dv]``."""
        several = self.decoder.readers[site.layer] > 1
        what = "one output projection behind the keys and values of a layer, and several layers attend to these"
        found = site.needed(None if several else site.output_projection, what)
        weight: Tensor = self.known[found.weight]
        return weight.T if found.inputs_first else weight

    def pack(self) -> None:
        """Bring the entries of each pool into their order."""
        with record_function("kvpass::pack"):
            for location in self.decoder.locations.values():
                if not location.ring and location.layer == 0:
                    for fill in self.fills:
                        self.ops.pack(location.buffers(PrefillBuffers, fill.state))

    def store_states(self) -> None:
        """Write what recurrent layers hold after the prompt."""
        for node, name in self.states.items():
            for fill in self.fills:
                fill.state[f"{name}_made"].copy_(self.known[node])

    def _rows_read(self, policy: Policy) -> int:
        """How many of the last queries a policy judges by."""
        rows = self.tokens if policy.query_rows is None else max(policy.query_rows, policy.window, 1)
        return min(rows, self.tokens)


class _Repetition(PromptRun):
    """A prompt that runs once more, with its repetitions behind it, to compact what was kept of it.

    The caches are filled; the fitted keys and values are written over those that they hold.
    """

    def __init__(self, decoder: SplitDecoder, fills: Sequence[Fill], inputs: Sequence[Any], block: int) -> None:
        super().__init__(decoder, fills, inputs, block, fills, lambda policy, ids: policy.reference_replays(ids))

    def compact(self, layer: Layer, *, is_last: bool) -> None:
        """Run a layer; compact what each cache holds of it."""
        location = self.decoder.locations[layer.site.layer]
        prompt = self.attend(layer, self.edges, num_queries=0, results_from=self.tokens if is_last else 0).attention
        for behind in self.behind:
            found = [
                self.run_replay(layer, prompt, replay, location, is_last=is_last).attention
                for replay, _ in behind.turns
            ]
            if location.ring:
                continue
            for fill in behind.readers:
                with record_function("kvpass::compact"):
                    self._compact(fill, prompt, location, found, [parts for _, parts in behind.turns])

    def _compact(
        self,
        fill: Fill,
        prompt: Attention,
        location: SiteLocation,
        replayed: Sequence[Attention],
        turns: Sequence[list[RowReplay]],
    ) -> None:
        """Compact what one cache holds of a layer.

        Args:
            replayed: of each turn, queries of the replays, keys and values of prompt and replays. turns: what they are.
        """
        buffers = location.buffers(PrefillBuffers, fill.state)
        errors = buffers.output_errors[:, location.layer]
        bounds, heads = buffers.offsets.tolist(), errors.shape[2]
        for row, column in enumerate(self.start.tolist()):
            window = max(self.tokens - fill.policy.window, column)
            own = [
                (call.rows(slice(row, row + 1), slice(None)), part.ids.shape[1])
                for call, parts in zip(replayed, turns, strict=True)
                for rows, _, part in parts
                if rows.start <= row < rows.stop
            ]
            for kv_head, reference in enumerate(references(own, window) if own else ()):
                first, end = bounds[row][location.layer * heads + kv_head :][:2]
                if end - first == window - column:
                    continue  # nothing was dropped
                fitted = fit_entries(
                    prompt.k[row, kv_head, column:window],
                    prompt.v[row, kv_head, column:window],
                    buffers.slots[POSITION, row, first:end].long(),
                    reference,
                    prompt.scale,
                    prompt.softcap,
                )
                buffers.pool_k[row, first:end], buffers.pool_v[row, first:end] = fitted.keys, fitted.values
                errors[:, row, kv_head] = fitted.errors

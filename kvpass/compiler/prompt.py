"""Read a prompt by its program: the methods of :class:`Prompt` are what nodes of the program call.

:mod:`kvpass.graphs.prompt_program` writes the program, :mod:`kvpass.compiler.blocks` runs a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.node import map_arg
from torch.profiler import record_function

from kvpass.block_sparse import BlockSparse
from kvpass.compiler.blocks import BegunLayer, DecoderRun, Hidden, LayerResult, SplitDecoder
from kvpass.compiler.step import Call
from kvpass.graphs.canonical import SiteLocation
from kvpass.graphs.find.rotary import rotary_frequencies
from kvpass.graphs.fx_utils import recorded
from kvpass.graphs.passes import dump_graph, program_passes, run_passes
from kvpass.graphs.prompt_program import PromptProgram, prompt_program
from kvpass.graphs.split_layers import Layer
from kvpass.operands import Attention, BlockSelection, PrefillBuffers
from kvpass.ops.reference import POSITION, attend_selected, row_groups
from kvpass.ops.schemas import implementation
from kvpass.policies import check_registered
from kvpass.policies.base import Policy
from kvpass.policies.compaction import fit_entries, references
from kvpass.policies.observation import projected_norms
from kvpass.policies.replay import Replay, Replayed, most_attended
from kvpass.progress import say_read
from kvpass.ranks import Ranks

Attended = tuple[Tensor | None, ...]
"""Operand ``attention`` of operators: queries of the last tokens, keys, values; log-sum-exp and sinks, or None."""

RowReplay = tuple[slice, int, Replay]
"""Rows, their first real column, and what they replay."""


@dataclass(eq=False)
class Fill:
    """A cache that a prompt fills: its policy, and its buffers, of :meth:`CachePrefill.buffers`."""

    policy: Policy
    state: Mapping[str, Tensor]


class PromptReader:
    """Reads prompts by programs, which it writes when they are first needed: one for each list of policies.

    Args:
        decoder: in parts. label: of the programs, where they are dumped. prefill: what selects blocks of attention;
            None: all of it is computed.
    """

    def __init__(self, decoder: SplitDecoder, label: str, prefill: BlockSparse | None = None) -> None:
        self.decoder, self.label, self.prefill = decoder, label, prefill
        self._programs: dict[Hashable, PromptProgram] = {}

    def program(self, policies: Sequence[Policy], ranks: Ranks) -> PromptProgram:
        """Return the program that fills a cache for each of the policies."""
        key = (*((type(policy), policy.spec) for policy in policies), ranks)
        if key not in self._programs:
            if any(policy.compact for policy in policies) and self.decoder.holds_latents:
                raise ValueError(
                    "compact=True: the cache holds latents, of which keys and values are both made; compile the model "
                    "without compact"
                )
            spec = ranks.spec if ranks.several else ""
            program = prompt_program(self.decoder.split, self.decoder.locations, policies, spec, self.prefill)
            label = f"{self.label}.program_{len(self._programs)}"
            dump_graph(label, program)
            run_passes(program, program_passes(), label=label)
            self._programs[key] = program
        return self._programs[key]

    def __call__(self, fills: Sequence[Fill], inputs: Sequence[Any], block: int, call: Call) -> list[Any]:
        """Fill caches with one prompt, and return what the decoder returns.

        Args:
            inputs: of the captured graph. block: tokens of a block, at least 2.
        """
        program = self.program([check_registered(fill.policy) for fill in fills], call.cache.ranks)
        prompt = Prompt(self.decoder, fills, inputs, block, call, prefill=self.prefill)
        caches = [
            [fill.state[f"{prefix}_{name}"] for name in names if f"{prefix}_{name}" in fill.state]
            for fill in fills
            for prefix, names in self.decoder.cache_operands.items()
        ]
        results: list[Any] = program.forward(prompt, prompt.start, prompt.first, *caches)
        if self.prefill is not None:
            for cache in (call.cache, *call.cache.fills):
                assert cache.prefill is not None
                cache.prefill.computed = self.prefill.text, prompt.computed
        return results


class ReplayGroup(NamedTuple):
    """Replays behind a prompt, for all caches whose policies ask for the same.

    Attributes:
        turns: what runs together, and the replays of which it is made. fills: numbers of the caches.
    """

    turns: list[tuple[DecoderRun, list[RowReplay]]]
    fills: list[int]


class Prompt:
    """A prompt that runs through a decoder in blocks of tokens, into one or more caches.

    Args:
        fills: the caches. inputs: of the captured graph. block: tokens of a block, at least 2. compacts: it runs a
            second time, and what was kept of it is fitted. prefill: what selects blocks of attention.
    Attributes:
        computed: share of the blocks of attention that were computed, of the layers where they are selected.
    """

    def __init__(
        self,
        decoder: SplitDecoder,
        fills: Sequence[Fill],
        inputs: Sequence[Any],
        block: int,
        call: Call,
        *,
        compacts: bool = False,
        prefill: BlockSparse | None = None,
    ) -> None:
        self.prefill, self.computed = prefill, dict[int, Tensor]()
        self.decoder, self.fills, self.inputs, self.block, self.call = decoder, fills, inputs, block, call
        self.ranks = call.cache.ranks
        state = fills[0].state  # what a prompt begins with is the same for all
        self.start, self.first = state["start"], state["first"]
        columns = torch.arange(decoder.tokens(inputs), device=decoder.device)
        real = (columns >= self.first[:, None]).long()
        self.states = {node: f"state{place}" for place, node in enumerate(decoder.split.states)}
        states = {node: state[f"{name}_held"] for node, name in self.states.items()}
        self.run = DecoderRun(decoder, inputs, real, block, self.start, states=states, text=call.merged)
        self.tokens, self.compacts = self.run.tokens, compacts
        self.replay_groups = list(_replay_groups(self))

    # -- the decoder --------------------------------------------------------------------------------------------------

    def begin(self) -> Hidden:
        """Run what comes before all layers."""
        return self.run.begin()

    def run_layer(
        self,
        place: int,
        hidden: Hidden,
        *,
        queries: int | None = None,
        column_sums: bool = False,
        token_scores: Sequence[int] = (),
    ) -> tuple[Hidden, Attended, Tensor | None, list[Tensor]]:
        """Run a layer over all tokens, block by block.

        Args:
            queries: how many of the last queries are returned; None: all. column_sums: attention is summed over all
                queries. token_scores: numbers of policies that score what enters attention.
        Returns:
            what later layers need; attention; the sums, fp32 ``[B, H, N]``; and the policies' scores.
        """
        layers = self.decoder.split.layers
        layer, summed = layers[place], list[Tensor]()
        say_read(self.tokens, place / len(layers))

        def add_sums(call: Attention, lse: Tensor | None) -> None:
            with record_function("kvpass::column_sums"):
                sums = implementation(call.q).column_sums(call, lse, self.start, self.first)
                if not summed:
                    summed.append(sums.new_zeros(*sums.shape[:2], self.tokens))
                summed[0][..., : sums.shape[2]] += sums

        edges, results_from = self._edges(layer)
        result = self.run.run_layer(
            layer,
            hidden,
            edges,
            num_queries=self.tokens if queries is None else min(queries, self.tokens),
            results_from=results_from,
            of_entering=[self._token_scores(self.fills[number].policy, layer) for number in token_scores],
            on_block=add_sums if column_sums else None,
        )
        q, k, v, _, _, sinks = result.attention
        return result.hidden, (q, k, v, result.lse, sinks), summed[0] if summed else None, result.entered

    def begin_layer(
        self, place: int, hidden: Hidden, *, token_scores: Sequence[int] = ()
    ) -> tuple[Attended, BegunLayer]:
        """Run what comes before the attention of a layer, for all tokens; return that; else as :meth:`run_layer`."""
        layers = self.decoder.split.layers
        say_read(self.tokens, place / len(layers))
        scoring = [self._token_scores(self.fills[number].policy, layers[place]) for number in token_scores]
        begun = self.run.begin_layer(layers[place], hidden, scoring)
        q, k, v, _, _, sinks = begun.attention
        return (q, k, v, None, sinks), begun

    def finish_layer(
        self, place: int, begun: tuple[Attended, BegunLayer], selected: Sequence[Tensor], *, queries: int | None = None
    ) -> tuple[Hidden, Attended, None, list[Tensor]]:
        """Attend to selected blocks, and run what is behind the attention of a layer. As :meth:`run_layer`."""
        assert self.prefill is not None
        selection, block, (_, begun_layer) = BlockSelection(*selected), self.prefill.block, begun
        self.computed[place] = _share(selection.blocks, self.start, self.tokens, block)
        attend = implementation(selection.blocks, self.decoder.impl).attend_blocks
        result = self.run.finish_layer(
            begun_layer,
            lambda call: attend_selected(call, self.start, selection, block, attend),
            self.tokens if queries is None else min(queries, self.tokens),
        )
        q, k, v, _, _, sinks = result.attention
        lse = result.lse if q.is_cuda else None
        return result.hidden, (q, k, v, lse, sinks), None, result.entered

    def _edges(self, layer: Layer) -> tuple[Sequence[int], int]:
        """Return where blocks of a layer begin, and the first token of which its results are needed."""
        split, edges = self.decoder.split, self.run.edges
        if layer is not split.layers[-1]:
            return edges, 0
        if self.compacts:
            return edges, self.tokens
        if split.not_in_blocks or split.results[0] in split.axes:  # logits of all tokens
            return edges, 0
        (logits,) = split.results
        edges = self.decoder.last_edges(edges, self.block, int(recorded(logits).shape[1]))
        writes = not set(split.states.values()).isdisjoint(layer.after.outputs)
        return edges, 0 if writes else edges[-2]

    def _token_scores(self, policy: Policy, layer: Layer) -> Callable[[Tensor], Tensor]:
        """Return the policy's function of what enters attention."""
        location, kv_heads = self.decoder.locations[layer.site.layer], int(recorded(layer.site.k).shape[1])
        return lambda x: policy.token_scores(x, location.layer, location.layers, kv_heads, self.ranks)

    def results(self, hidden: Hidden) -> list[Any]:
        """Return what the decoder returns."""
        known = {**self.run.node_values, **hidden}
        results: list[Any] = map_arg(list(self.decoder.split.results), known.__getitem__)
        return results

    def store_states(self, hidden: Hidden) -> None:
        """Write what recurrent layers hold after the prompt."""
        for node, name in self.states.items():
            for fill in self.fills:
                fill.state[f"{name}_made"].copy_(hidden[node])

    # -- what policies read -------------------------------------------------------------------------------------------

    def last_queries(self, attention: Attended, queries: int | None) -> Attended:
        """Return attention with fewer queries; None: those of all tokens."""
        q, k, v, lse, sinks = attention
        assert q is not None
        last = slice(0 if queries is None else max(q.shape[2] - queries, 0), None)
        return q[:, :, last], k, v, None if lse is None else lse[:, :, last], sinks

    def only_queries(self, attention: Attended) -> Attended:
        """Return attention without keys and values, for those of another layer."""
        return attention[0], None, None, *attention[3:]

    def join_readers(self, attention: Sequence[Attended], summed: Sequence[Tensor]) -> tuple[Attended, Tensor | None]:
        """Return layers that attend to the same keys and values as one, which has the query heads of all of them.

        Args:
            attention: the last one has the keys and values. summed: column sums, of each or none.
        """
        *_, (_, k, v, _, sinks) = attention
        assert k is not None
        kv_heads = k.shape[1]

        def side_by_side(parts: Iterable[Tensor | None]) -> Tensor | None:
            tensors = [x.unflatten(1, (kv_heads, -1)) for x in parts if x is not None]
            return torch.cat(tensors, 2).flatten(1, 2) if tensors else None

        queries, lse = side_by_side(reader[0] for reader in attention), side_by_side(reader[3] for reader in attention)
        return (queries, k, v, lse, sinks), side_by_side(summed)

    def projection(self, place: int) -> Tensor:
        """Weight of the layer's output projection, ``[hidden, H * Dv]``."""
        projection = self.decoder.split.layers[place].site.output_projection
        weight: Tensor = self.run.node_values[projection.weight]
        return weight.T if projection.inputs_first else weight

    def frequencies(self, place: int) -> Tensor:
        """Inverse frequencies of the layer's rotary embedding, ``[D / 2]``."""
        frequencies: Tensor = self.run.node_values[rotary_frequencies(self.decoder.split.layers[place].site)]
        return frequencies

    # -- replays ------------------------------------------------------------------------------------------------------

    def begin_replays(self) -> list[list[Hidden]]:
        """Run what comes before all layers, of what is replayed."""
        return [[run.begin() for run, _ in group.turns] for group in self.replay_groups]

    def replay_layer(
        self, place: int, replays: Sequence[Sequence[Hidden]], hidden: Hidden, attention: Attended
    ) -> tuple[list[list[Hidden]], dict[int, Tensor]]:
        """Run replays through a layer, behind the prompt.

        Args:
            replays: their hidden values, of each group and turn. hidden: of the prompt, behind the layer.
        Returns:
            their hidden values behind the layer; and by number of a policy the most that its replays attend to each
            entry, fp32 ``[B, K, N]``.
        """
        prompt = self._attention(place, attention)
        after, most = list[list[Hidden]](), dict[int, Tensor]()
        with record_function("kvpass::replay"):
            for group, before in zip(self.replay_groups, replays, strict=True):
                after_group, most_of = self._replay(place, prompt, group, before, hidden)
                after.append(after_group)
                most |= {number: most_of["norms" in self.fills[number].policy.inputs] for number in group.fills}
        return after, most

    def _attention(self, place: int, attention: Attended) -> Attention:
        (q, k, v, _, sinks), site = attention, self.decoder.split.layers[place].site
        assert q is not None and k is not None and v is not None
        return Attention(q, k, v, site.scale, site.softcap, sinks)

    def _replay(
        self, place: int, prompt: Attention, group: ReplayGroup, before: Sequence[Hidden], hidden: Hidden
    ) -> tuple[list[Hidden], dict[bool, Tensor]]:
        """As :meth:`replay_layer`, by whether attention is weighed by norms, for those of the two that are read."""
        layer = self.decoder.split.layers[place]
        ring = self.decoder.locations[layer.site.layer].ring
        weighings = {"norms" in self.fills[number].policy.inputs for number in group.fills}
        most_of = {weighs: prompt.k.new_zeros(prompt.k.shape[:3], dtype=torch.float32) for weighs in weighings}
        weighed = True in weighings and not ring
        prompt_norms = projected_norms(prompt.v, self.projection(place), 2) if weighed else None
        norms_of = [lambda x: torch.linalg.vector_norm(x.float(), dim=-1)] if weighed else []
        after: list[Hidden] = []
        for (run, row_replays), hidden_before in zip(group.turns, before, strict=True):
            result = self._behind_prompt(layer, prompt, run, hidden_before, hidden, norms_of)
            after.append(result.hidden)
            for rows, column, replay in () if ring else row_replays:
                tokens = slice(0, replay.ids.shape[1])  # without what fills them up
                queries = result.attention.q[rows, :, tokens]
                keys = result.attention.k[rows, :, self.tokens :][:, :, tokens]
                entries = prompt.k[rows, :, column:]
                for weighs, most in most_of.items():
                    norms = result.entered[0][rows, tokens] if weighs else None
                    seen = Replayed(replay.first, replay.last, replay.sinks, queries, keys, norms)
                    value_norms = prompt_norms[rows, :, column:] if weighs and prompt_norms is not None else None
                    attended = most_attended(entries, [seen], *result.attention[3:], value_norms=value_norms)
                    most[rows, :, column:] = torch.maximum(most[rows, :, column:], attended)
        return after, most_of

    def _behind_prompt(
        self,
        layer: Layer,
        prompt: Attention,
        run: DecoderRun,
        hidden_before: Hidden,
        hidden: Hidden,
        of_entering: Sequence[Callable[[Tensor], Tensor]] = (),
    ) -> LayerResult:
        """Run replays through a layer, behind the prompt; of a layer with a sliding window without their queries."""
        is_last = layer is self.decoder.split.layers[-1]
        states = {node: hidden[node] if node in hidden else self.run.node_values[node] for node in self.states}
        return run.run_layer(
            layer,
            {**hidden_before, **states},
            run.edges,
            num_queries=0 if self.decoder.locations[layer.site.layer].ring else run.tokens,
            results_from=run.tokens if is_last else 0,
            behind=prompt,
            of_entering=of_entering,
        )

    # -- compaction ---------------------------------------------------------------------------------------------------

    def repetition(self) -> Prompt:
        """Return the prompt, to be read again with its repetitions behind it, by which what was kept is fitted."""
        fills = [fill for fill in self.fills if fill.policy.compact]
        return Prompt(
            *(self.decoder, fills, self.inputs, self.block, self.call),
            compacts=True,
            prefill=self.prefill,
        )

    def compact_layer(
        self, place: int, replays: Sequence[Sequence[Hidden]], hidden: Hidden, attention: Attended
    ) -> list[list[Hidden]]:
        """Run replays through a layer, and fit what each cache holds of it to their queries.

        The fitted keys and values are written over those that the caches hold.

        Returns:
            hidden values of the replays behind the layer.
        """
        layer, prompt = self.decoder.split.layers[place], self._attention(place, attention)
        location = self.decoder.locations[layer.site.layer]
        after = list[list[Hidden]]()
        for group, before in zip(self.replay_groups, replays, strict=True):
            after_group, turns = list[Hidden](), list[tuple[Attention, list[RowReplay]]]()
            for (run, row_replays), hidden_before in zip(group.turns, before, strict=True):
                result = self._behind_prompt(layer, prompt, run, hidden_before, hidden)
                after_group.append(result.hidden)
                turns.append((result.attention, row_replays))
            after.append(after_group)
            for number in () if location.ring else group.fills:
                with record_function("kvpass::compact"):
                    self._compact(self.fills[number], prompt, location, turns)
        return after

    def _compact(
        self,
        fill: Fill,
        prompt: Attention,
        location: SiteLocation,
        turns: Sequence[tuple[Attention, list[RowReplay]]],
    ) -> None:
        """Compact what one cache holds of a layer.

        Args:
            turns: queries of replays, keys and values of prompt and replays; and the replays.
        """
        buffers = location.buffers(PrefillBuffers, fill.state)
        errors = buffers.output_errors[:, location.layer]
        bounds, heads = buffers.offsets.tolist(), errors.shape[2]
        for row, column in enumerate(self.start.tolist()):
            window = max(self.tokens - fill.policy.window, column)
            of_row = [
                (attention.rows(slice(row, row + 1), slice(None)), replay.ids.shape[1])
                for attention, row_replays in turns
                for rows, _, replay in row_replays
                if rows.start <= row < rows.stop
            ]
            for kv_head, reference in enumerate(references(of_row, window) if of_row else ()):
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


def _share(blocks: Tensor, start: Tensor, tokens: int, block: int) -> Tensor:
    """Return the share of the blocks on and below the diagonal that are selected, fp32 ``[]``."""
    counts = [-(-(tokens - column) // block) for column in start.tolist()]
    return blocks.sum() / (blocks.shape[1] * sum(count * (count + 1) // 2 for count in counts))


def _replay_groups(prompt: Prompt) -> Iterator[ReplayGroup]:
    """Yield what runs behind the prompt, once for all policies that ask for the same."""
    asked_for: dict[Hashable, tuple[Policy, list[tuple[slice, int, Sequence[Replay]]], list[int]]] = {}
    for number, fill in enumerate(prompt.fills):
        if not (prompt.compacts or "replays" in fill.policy.inputs):
            continue
        assert prompt.decoder.ids_at is not None, "frontends without token ids refuse policies that replay"
        ids = prompt.inputs[prompt.decoder.ids_at]
        by_rows = [
            (rows, column, fill.policy.replays(ids[rows, column:]))
            for rows, column in row_groups(prompt.start)
            if column < prompt.tokens
        ]
        key = tuple(
            (column, replay.first, replay.last, replay.sinks, *replay.ids.flatten().tolist())
            for _, column, replays in by_rows
            for replay in replays
        )
        asked_for.setdefault(key, (fill.policy, by_rows, []))[2].append(number)
    for policy, by_rows, numbers in asked_for.values():
        yield ReplayGroup(list(_turns(prompt, policy, by_rows)), numbers)


def _turns(
    prompt: Prompt, policy: Policy, by_rows: Sequence[tuple[slice, int, Sequence[Replay]]]
) -> Iterator[tuple[DecoderRun, list[RowReplay]]]:
    """Yield what runs behind the prompt: the rows' first replays together, then their second, and so on.

    Those of fewer tokens than others are filled up at their end, which none of their tokens attends to.
    """
    decoder, ids_at, positions_at = prompt.decoder, prompt.decoder.ids_at, prompt.decoder.positions_at
    assert ids_at is not None
    for turn in range(max((len(replays) for _, _, replays in by_rows), default=0)):
        row_replays = [(rows, column, replays[turn]) for rows, column, replays in by_rows if turn < len(replays)]
        tokens = max(2, *(replay.ids.shape[1] for _, _, replay in row_replays))
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
        inputs = list(prompt.inputs)
        ids = inputs[ids_at] = inputs[ids_at].new_zeros(len(prompt.start), tokens)
        for rows, _, replay in row_replays:
            ids[rows, : replay.ids.shape[1]] = replay.ids
        if positions_at is not None:
            last = inputs[positions_at][:, -1:]
            inputs[positions_at] = last + 1 + torch.arange(tokens, device=last.device)
        try:
            decoder.check(inputs)
        except ValueError as error:
            raise ValueError(f"policy {policy.name!r} replays tokens, of which {error}") from None
        states = {node: prompt.run.node_values[node] for node in prompt.states}
        real = torch.ones_like(ids)
        yield DecoderRun(decoder, inputs, real, prompt.block, prompt.start, prompt.tokens, states), row_replays

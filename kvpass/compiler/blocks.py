"""Prefill layer by layer, and each layer in blocks of tokens.

For each layer: for each block of the prompt, the part before attention, attention to everything up to the block, the
part after it, written into the residual stream. Then the policy judges the layer's keys and values as a whole, so the
kept entries do not depend on the blocks. Besides the residual stream and the pool, only one layer's keys and values and
the activations of one block are held.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.profiler import record_function

from kvpass.compiler.parts import Regions
from kvpass.config import Block, Layout
from kvpass.graphs.bind_state import input_named, placeholders, size_reader
from kvpass.graphs.canonical import Site, SiteLocation, batch_and_tokens, layout_of, pool_facts, site_locations
from kvpass.graphs.fx_utils import dim_of, is_scalar, recorded
from kvpass.graphs.host_weights import host_weights, is_host_weight, rooms_of
from kvpass.graphs.split import Part
from kvpass.graphs.split_layers import Layer, SplitPrompt
from kvpass.graphs.verify.tables import InputLookup
from kvpass.host_weights import HostCopies
from kvpass.operands import Attention, Candidates, Expansion, PolicyInputs, PrefillBuffers, RingBuffers
from kvpass.ops.latents import absorbed, attend_prompt
from kvpass.ops.reference import POSITION, row_groups
from kvpass.ops.schemas import implementation
from kvpass.ops.sliding import keep_newest
from kvpass.policies.base import Policy
from kvpass.policies.compaction import fit_entries, references
from kvpass.policies.observation import projected_norms
from kvpass.policies.replay import Replay, Replayed, most_attended
from kvpass.ranks import Ranks
from kvpass.torch_compat import shape_guards, symbol_bounds

AUTO_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Tokens of a block over all rows of a batch, by default. On two CPU cores 1024 was fastest (256 to 16384 tried, a
decoder with an MLP of 8192); that of CUDA is a guess."""
FEWEST_TOKENS = 128
"""Tokens of a block of each row, by default, for any batch size."""


def check_block(given: object, regions: Regions, name: str = "prefill_block") -> Block:
    """Return the option ``prefill_block``, or of another name, as given.

    Raises:
        ValueError: it is neither "auto" nor an int from 2 on, or an int where graphs are not to be split.
    """
    if given == "auto":
        return given
    if not isinstance(given, int) or isinstance(given, bool) or given < 2:
        raise ValueError(f"{name}={given!r}: must be 'auto' or a number of tokens, an int >= 2")
    if regions is False:
        raise ValueError(f"{name}={given}: needs the parts that compile_regions=False rules out")
    return given


def tokens_of(block: Block, rows: int, device: torch.device) -> int:
    """Return how many tokens of each of the rows are in a block."""
    return max(AUTO_TOKENS[device.type] // rows, FEWEST_TOKENS) if block == "auto" else block


def edges_of(tokens: int, block: int) -> list[int]:
    """Return where blocks begin, and the end; no block is a single token, unless the prompt is one."""
    edges = list(range(0, tokens, block))
    if len(edges) > 1 and tokens - edges[-1] == 1:
        edges.pop()
    return [*edges, tokens]


def nothing_seen(device: torch.device) -> Tensor:
    """Return the tokens before a prompt, from which decoders that count positions go on."""
    return torch.zeros((), dtype=torch.int64, device=device)


def lengths_allowed(gm: GraphModule, shapes: ShapeEnv | None) -> Callable[[int], bool]:
    """Return whether the decoder is the same one for so many tokens: a function of their number.

    To be called in the trace, which knows for which lengths the capture holds.
    """
    tokens = batch_and_tokens(gm)[1]
    assert shapes is not None and isinstance(tokens, sympy.Symbol), "split_layers has looked"
    lowest = symbol_bounds(shapes, tokens).lower
    guards = [guard.expr for guard in shape_guards(shapes) if guard.expr.free_symbols == {tokens}]

    @functools.cache
    def allowed(length: int) -> bool:
        at = {tokens: sympy.Integer(length)}
        return length >= lowest and all(guard.xreplace(at) == sympy.true for guard in guards)

    return allowed


class _TokenBuffer:
    """Tensors of blocks of tokens, put together along axis 2.

    Args:
        first, end: columns that are held.
    """

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end = first, end
        self._held: Tensor | None = None

    def put(self, begin: int, x: Tensor) -> None:
        """Add the columns from ``begin`` on, without those that are not held."""
        x = x[:, :, max(self.first - begin, 0) :]
        begin, count = max(begin, self.first), self.end - self.first
        if x.shape[2] == count:
            self._held = x
        elif x.shape[2] > 0:
            if self._held is None:
                self._held = x.new_empty(*x.shape[:2], count, *x.shape[3:])
            self._held[:, :, begin - self.first : begin - self.first + x.shape[2]] = x

    @property
    def began(self) -> bool:
        return self._held is not None

    def before(self, end: int) -> Tensor:
        """Return the columns before ``end``, which must be there."""
        assert self._held is not None
        return self._held[:, :, : end - self.first]


class Fill(NamedTuple):
    """A cache that a prompt fills: its policy, and its buffers, of :meth:`CompressedCache.prefill_state`."""

    policy: Policy
    state: Mapping[str, Tensor]


class BlockedPrefill:
    """A decoder that prefills prompts layer by layer, each layer in blocks of tokens.

    Args:
        gm: the graph that was split; behind the inputs of the captured graph it has what :func:`nothing_seen` returns
            and ``split.added``. layout: of its entries and states. functions: of the parts, by key. allowed: from
            :func:`lengths_allowed`. lookups: of the inputs in tables, which are checked.
    """

    def __init__(
        self,
        gm: GraphModule,
        layout: Layout,
        split: SplitPrompt,
        functions: Mapping[Hashable, Callable[..., Any]],
        allowed: Callable[[int], bool],
        lookups: Sequence[InputLookup],
    ) -> None:
        self.split, self.functions, self.allowed, self.lookups = split, functions, allowed, lookups
        self.inputs = [node for node in placeholders(gm) if node not in split.added]
        self.given = input_named(gm, "input_ids"), input_named(gm, "position_ids")
        self.constants = {
            node: operator.attrgetter(str(node.target))(gm) for node in gm.graph.nodes if node.op == "get_attr"
        }
        tokens = batch_and_tokens(gm)[1]
        self.tokens = size_reader(gm, tokens)
        self.lengths = {node for node in self.inputs if is_scalar(node) and dim_of(recorded(node)) == tokens}
        self.layout, (_, self.dtype, self.device) = layout, layout_of(gm)
        self.locations, self.pools = site_locations(self.layout), pool_facts(gm, self.layout)
        self.rooms = rooms_of([host_weights(reads) for reads in split.reads])

    def edges(self, tokens: int, block: int) -> list[int]:
        """Return where blocks begin, and the end: one block where the decoder is another one for so few tokens."""
        edges = edges_of(tokens, block)
        return edges if all(self.allowed(end - first) for first, end in pairwise(edges)) else [0, tokens]

    def check(self, inputs: Sequence[Any]) -> None:
        """Check that inputs are within the tables in which they are looked up.

        Raises:
            ValueError: one is not.
        """
        for lookup in self.lookups:
            lookup.check(inputs)

    def __call__(self, fills: Sequence[Fill], inputs: Sequence[Any], block: int, ranks: Ranks) -> Tensor:
        """Fill caches with one prompt, and return the logits.

        Args:
            inputs: of the captured graph. block: tokens of a block, at least 2. ranks: processes that share the heads.
        """
        for fill in fills:
            self._find_what_is_read(fill.policy)
            if fill.policy.compact and any(group.geometry.values_in_keys for group in self.layout.pools):
                raise ValueError(
                    "compact=True: the cache holds latents, of which keys and values are both made; compile the model "
                    "without compact, or with expanded heads"
                )
        prompt = _Prompt(self, fills, inputs, block, ranks)
        edges = prompt.edges
        prompt.begin()
        *layers, last = self.split.layers
        for layer in layers:
            prompt.run(layer, edges)
        result = self.split.result
        if result in self.split.axes:
            prompt.run(last, edges, is_last=True)
        else:
            edges = self._last_edges(edges, block, int(recorded(result).shape[1]))
            writes = not set(self.split.states.values()).isdisjoint(last.after.outputs)
            prompt.run(last, edges, is_last=True, results_from=0 if writes else edges[-2])
        prompt.pack()
        prompt.store_states()
        logits: Tensor = prompt.known[result]
        compacted = [fill for fill in fills if fill.policy.compact]
        if compacted:
            del prompt
            again = _Repetition(self, compacted, inputs, block, ranks)
            again.begin()
            for layer in self.split.layers:
                again.compact(layer, is_last=layer is last)
        return logits

    def _find_what_is_read(self, policy: Policy) -> None:
        """Find in each layer what the policy reads of the model, before anything is written.

        Raises:
            UnsupportedAttentionError: it is not there.
        """
        for layer in self.split.layers:
            if self.locations[layer.site.layer].ring:
                continue
            if policy.weighs_replays or policy.scores_tokens:
                entering = layer.site.attention_input
                assert entering is layer.entering
            if policy.reads_projection:
                weight = layer.site.output_projection.weight
                assert not is_host_weight(weight) or weight in layer.reads, "it is copied with the layer"
            if policy.reads_rotation:
                frequencies = layer.site.rotary_frequencies
                assert not is_host_weight(frequencies), "vectors are on the device"

    def _last_edges(self, edges: list[int], block: int, logits: int) -> list[int]:
        """Where blocks of the last layer begin: the last one holds all tokens of which there are logits."""
        tokens = edges[-1]
        before = tokens - max(tokens - edges[-2], logits + 1)
        return [*self.edges(before, block), tokens] if before > 1 else [0, tokens]


class _LayerCall(NamedTuple):
    """What is known after a layer has run over some tokens.

    Attributes:
        attention: keys and values of all tokens, queries of the last ones. lse: log-sum-exp of these queries, where it
            was computed. entered: what each of the given functions of what enters attention gave.
    """

    attention: Attention
    lse: Tensor | None
    entered: list[Tensor]


class _PromptRun:
    """Tokens that run through the layers of a decoder, at once or behind others.

    Args:
        inputs: of the captured graph. real: 1 for tokens, 0 for padding, int64 ``[B, tokens]``. block: tokens of a
        block. start: first real column of each row, on the CPU. seen: columns before these tokens.
    Attributes:
        known: inputs, and what passes between layers, by node; of weights that stay on the host copies of those that
            the present layer reads; states of recurrent layers as the last block left them.
    """

    def __init__(
        self, decoder: BlockedPrefill, inputs: Sequence[Any], real: Tensor, block: int, start: Tensor, seen: int = 0
    ) -> None:
        tokens = real.shape[1]
        self.decoder, self.tokens, self.start, self.seen = decoder, tokens, start, seen
        self.edges = decoder.edges(tokens, block)
        given = [*inputs, nothing_seen(decoder.device) + seen]
        self.known: dict[Node, Any] = {**decoder.constants, **dict(zip(decoder.inputs, given, strict=True))}
        self.known.update(dict.fromkeys(decoder.split.real, real))

    def begin(self) -> None:
        """Run what comes before all layers."""
        made = self._call(self.decoder.split.begin, 0, self.tokens, {})
        self.known.update({node: value.contiguous() for node, value in made.items()})  # as they are recorded

    def attend(
        self,
        layer: Layer,
        edges: Sequence[int],
        *,
        num_queries: int,
        results_from: int = 0,
        behind: Attention | None = None,
        of_entering: Sequence[Callable[[Tensor], Tensor]] = (),
        on_block: Callable[[Attention, Tensor | None], None] | None = None,
    ) -> _LayerCall:
        """Run a layer, block by block.

        Args:
            edges: where blocks begin, and the end. num_queries: how many of the last queries are returned.
            results_from: the first token of which the results of the layer are needed; earlier ones only give keys and
                values. behind: keys and values that these tokens follow. of_entering: functions of what
                enters attention, ``[B, T, hidden]``; their results, with tokens along the last axis, are returned.
            on_block: called with the attention of each block and its log-sum-exp.
        """
        site, n, seen = layer.site, self.tokens, self.seen
        queries, lses = _TokenBuffer(n - num_queries, n), _TokenBuffer(n - num_queries, n)
        keys, values = _TokenBuffer(0, seen + n), _TokenBuffer(0, seen + n)
        entered: list[list[Tensor]] = [[] for _ in of_entering]
        if behind is not None:
            keys.put(0, behind.k)
            values.put(0, behind.v)
        for first, end in pairwise(edges):
            made = self._call(layer.before, first, end, {})
            q, k, v = (self._part(node, first, end, made) for node in (site.q, site.k, site.v))
            keys.put(seen + first, k)
            values.put(seen + first, v)
            queries.put(first, q)
            if of_entering:
                assert layer.entering is not None
                x = self._part(layer.entering, first, end, made)
                for function, found in zip(of_entering, entered, strict=True):
                    found.append(function(x.view(len(q), -1, x.shape[-1])))
            sinks = None if site.sinks is None else self._part(site.sinks, first, end, made)
            expansion = None if site.up is None else Expansion(self._part(site.up, first, end, made), site.nope)
            call = Attention(q, keys.before(seen + end), values.before(seen + end), site.scale, site.softcap, sinks)
            judged = behind is None and end > n - num_queries
            if first < results_from and not judged and on_block is None:
                continue
            made[site.node], lse = attend_prompt(
                call, expansion, self.start, implementation(q), site.sliding_window, site.chunked
            )
            if lse is not None:
                lses.put(first, lse)
            if on_block is not None:
                on_block(absorbed(call, expansion), lse)
            if first >= results_from:
                made |= self._call(layer.after, first, end, made)
                self._store(layer, first, end, made)
        for node in layer.read_last:
            self.known.pop(node, None)
        return _LayerCall(
            absorbed(call._replace(q=queries.before(n)), expansion),
            lses.before(n) if lses.began else None,
            [torch.cat(found, -1) for found in entered],
        )

    def _call(self, part: Part, first: int, end: int, made: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
        """Run a part for some tokens, which follow those of its last call.

        Args:
            made: values of these tokens.
        """
        if not part.outputs:
            return {}
        given = [self._part(node, first, end, made) for node in part.inputs]
        found = dict(zip(part.outputs, self.decoder.functions[part.key](*given), strict=True))
        for before, after in self.decoder.split.states.items():
            if after in found:
                self.known[before] = found[after] = found[after].contiguous()  # it may be a view of a whole block
        return found

    def _part(self, node: Node, first: int, end: int, made: Mapping[Node, Tensor]) -> Any:
        """A value for some tokens."""
        if node in made:
            return made[node]
        if node in self.decoder.lengths:
            return end - first
        axis, value = self.decoder.split.axes.get(node), self.known[node]
        if axis is None or end - first == self.tokens:
            return value
        return value.narrow(axis, first, end - first).contiguous()

    def _store(self, layer: Layer, first: int, end: int, made: Mapping[Node, Tensor]) -> None:
        """Keep results of some tokens for the layers that follow."""
        axes = self.decoder.split.axes
        for node in layer.results:
            value, axis = made[node], axes.get(node)
            if axis is None or end - first == self.tokens:
                self.known[node] = value.contiguous()
                continue
            if first == 0:
                shape = list(value.shape)
                shape[axis] = self.tokens
                self.known[node] = self._room(layer, shape, value)
            self.known[node].narrow(axis, first, end - first).copy_(value)

    def _room(self, layer: Layer, shape: list[int], like: Tensor) -> Tensor:
        """A tensor for a result of a layer: where it is the only one, a value that is read for the last time."""
        results = [node for node in layer.results if node in self.decoder.split.axes]
        held = [x.untyped_storage().data_ptr() for x in self.known.values() if isinstance(x, Tensor)]
        for node in layer.read_last if len(results) == 1 else ():
            old = self.known[node]
            if (
                list(old.shape) == shape
                and old.dtype == like.dtype
                and held.count(old.untyped_storage().data_ptr()) == 1
            ):
                return old
        return like.new_empty(shape)


_Observed = tuple[slice, int, Replay]
"""Rows, their first real column, and what they replay."""


class _Behind(NamedTuple):
    """Replays behind a prompt, of policies that ask for the same.

    Attributes:
        turns: what runs, and what of it each row observes. readers: numbers of the fills whose policies read it.
        weighs: of each reader, whether it weighs attention by norms.
    """

    turns: list[tuple[_PromptRun, list[_Observed]]]
    readers: list[int]
    weighs: list[bool]


class _Prompt(_PromptRun):
    """A prompt that is being prefilled into one or more caches, and what is replayed behind it.

    Attributes:
        on_host: inputs that stay on the host. behind: what runs behind the prompt.
    """

    def __init__(
        self, decoder: BlockedPrefill, fills: Sequence[Fill], inputs: Sequence[Any], block: int, ranks: Ranks
    ) -> None:
        state = fills[0].state  # what a prompt begins with is the same for all
        columns = torch.arange(decoder.tokens(inputs), device=decoder.device)
        real = (columns >= state["first"][:, None]).long()
        super().__init__(decoder, inputs, real, block, state["start"])
        self.states = {node: f"state{place}" for place, node in enumerate(decoder.split.states)}
        self.known.update({node: state[f"{name}_held"] for node, name in self.states.items()})
        self.fills, self.ranks, self.first = fills, ranks, state["first"]
        self.on_host = {node: self.known[node] for node in host_weights(decoder.inputs)}
        self.copies = HostCopies(decoder.device, decoder.rooms) if decoder.rooms else None
        self.ops = implementation(self.first)
        self.behind = self._all_behind(inputs, block)

    def _all_behind(self, inputs: Sequence[Any], block: int) -> list[_Behind]:
        """Return what the policies replay; those that replay the same tokens share it."""
        found: dict[Hashable, _Behind] = {}
        for number, (policy, _) in enumerate(self.fills):
            if not self._reads_replays(policy):
                continue
            ids_at = self.decoder.given[0]
            assert ids_at is not None, "frontends without token ids refuse policies that replay"
            ids = inputs[ids_at]
            groups = [
                (rows, column, self._replays_of(policy, ids[rows, column:]))
                for rows, column in row_groups(self.start)
                if column < self.tokens
            ]
            key = tuple(
                (column, replay.first, replay.last, replay.sinks, *replay.ids.flatten().tolist())
                for _, column, replays in groups
                for replay in replays
            )
            if key not in found:
                found[key] = _Behind(list(self._replays(policy, groups, inputs, block)), [], [])
            found[key].readers.append(number)
            found[key].weighs.append(policy.weighs_replays)
        return list(found.values())

    def _reads_replays(self, policy: Policy) -> bool:
        return policy.reads_replays

    def _replays_of(self, policy: Policy, ids: Tensor) -> Sequence[Replay]:
        return policy.replays(ids)

    def _replays(
        self, policy: Policy, groups: Sequence[tuple[slice, int, Sequence[Replay]]], inputs: Sequence[Any], block: int
    ) -> Iterator[tuple[_PromptRun, list[_Observed]]]:
        """Yield what a policy replays; the rows' first replays together, then their second, and so on.

        Those of fewer tokens than others are filled up at their end, which none of their tokens attends to.

        Args:
            groups: rows, their first real column, and their replays.
        """
        decoder, n = self.decoder, self.tokens
        ids_at, positions_at = decoder.given
        assert ids_at is not None
        ids = inputs[ids_at]
        for turn in range(max((len(replays) for _, _, replays in groups), default=0)):
            parts = [(rows, column, replays[turn]) for rows, column, replays in groups if turn < len(replays)]
            tokens = max(2, *(replay.ids.shape[1] for _, _, replay in parts))
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
            yield _PromptRun(decoder, given, torch.ones_like(own), block, self.start, n), parts

    def begin(self) -> None:
        """Run what comes before all layers."""
        self._copy_weights(self.decoder.split.begin.inputs)
        super().begin()
        for replay in self._replayed_tokens:
            replay.begin()

    @property
    def _replayed_tokens(self) -> list[_PromptRun]:
        return [replay for behind in self.behind for replay, _ in behind.turns]

    def _copy_weights(self, reads: Sequence[Node]) -> None:
        """Copy what is read and stays on the host to the device."""
        weights = host_weights(reads)
        if weights:
            assert self.copies is not None
            given = [self.on_host[node] for node in weights]
            copied = dict(zip(weights, self.copies.next(given), strict=True))
            for tokens in (self, *self._replayed_tokens):
                tokens.known.update(copied)

    def run(self, layer: Layer, edges: Sequence[int], *, is_last: bool = False, results_from: int = 0) -> None:
        """Run a layer; each policy scores its entries and keeps some.

        Args:
            edges, results_from: as in :meth:`attend`.
        """
        self._copy_weights(layer.reads)
        location, summed = self.decoder.locations[layer.site.layer], list[Tensor]()

        def add_sums(call: Attention, lse: Tensor | None) -> None:
            with record_function("kvpass::column_sums"):
                sums = self.ops.column_sums(call, lse, self.start, self.first)
                if not summed:
                    summed.append(sums.new_zeros(*sums.shape[:2], self.tokens))
                summed[0][..., : sums.shape[2]] += sums

        scored_by = [] if location.ring else [fill.policy for fill in self.fills]
        on_block = add_sums if any(policy.sums_columns for policy in scored_by) else None
        num_queries = max(map(self._rows_read, scored_by), default=0)
        scoring = [number for number, policy in enumerate(scored_by) if policy.scores_tokens]
        call, lse, scored = self.attend(
            layer,
            edges,
            num_queries=num_queries,
            results_from=results_from,
            of_entering=[self._token_scores(scored_by[number], layer.site, location) for number in scoring],
            on_block=on_block,
        )
        entered = dict(zip(scoring, scored, strict=True))
        replayed: dict[int, Tensor] = {}
        for behind in self.behind:
            with record_function("kvpass::replay"):
                most = self._replay(layer, call, location, behind, is_last=is_last)
            replayed.update(
                {number: most[weighs] for number, weighs in zip(behind.readers, behind.weighs, strict=True)}
            )
        columns = torch.arange(self.tokens, device=call.k.device)
        for number, fill in enumerate(self.fills):
            if location.ring:
                keep_newest(location.buffers(RingBuffers, fill.state), call.k, call.v, columns, location.layer)
                continue
            last = slice(num_queries - self._rows_read(fill.policy), None)
            own, own_lse = call._replace(q=call.q[:, :, last]), None if lse is None else lse[:, :, last]
            sums = summed[0] if fill.policy.sums_columns else None
            found = {"summed": sums, "replayed": replayed.get(number), "entered": entered.get(number)}
            self._score_and_select(fill, layer.site, location, own, own_lse, found)

    def _replay(
        self, layer: Layer, prompt: Attention, location: SiteLocation, behind: _Behind, *, is_last: bool
    ) -> dict[bool, Tensor]:
        """Run replays through a layer; return the most that they attend to each entry, fp32 ``[B, K, N]``.

        Returns:
            by whether attention is weighed by norms, for those of the two that a policy reads.
        """
        kinds = set(behind.weighs)
        found = {weighs: prompt.k.new_zeros(prompt.k.shape[:3], dtype=torch.float32) for weighs in kinds}
        weighed = True in kinds and not location.ring
        value_norms = projected_norms(prompt.v, self._projection(layer.site), 2) if weighed else None
        for replay, parts in behind.turns:
            norms_of = [lambda x: torch.linalg.vector_norm(x.float(), dim=-1)] if weighed else []
            call, _, entered = self._run_replay(layer, prompt, replay, location, norms_of, is_last=is_last)
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

    def _run_replay(
        self,
        layer: Layer,
        prompt: Attention,
        replay: _PromptRun,
        location: SiteLocation,
        of_entering: Sequence[Callable[[Tensor], Tensor]] = (),
        *,
        is_last: bool,
    ) -> _LayerCall:
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

    def _score_and_select(
        self,
        fill: Fill,
        site: Site,
        location: SiteLocation,
        call: Attention,
        lse: Tensor | None,
        found: Mapping[str, Tensor | None],
    ) -> None:
        """Score a layer's entries for one cache, and keep some; ``found``: inputs of the policy by name."""
        policy, buffers, layer = fill.policy, location.buffers(PrefillBuffers, fill.state), location.layer
        projection = self._projection(site) if policy.reads_projection else None
        frequencies = self.known[site.rotary_frequencies] if policy.reads_rotation else None
        rows = fill.state.get(f"{location.prefix}_rule_rows")
        policy_inputs = PolicyInputs(projection, frequencies, buffers.entries, rule_rows=rows, **found)
        with record_function("kvpass::score_layer"):
            scores, stats, weight = self.ops.score_layer(
                call, lse, self.start, self.first, layer, location.layers, policy, policy_inputs, self.ranks
            )
        candidates = Candidates(call.k, call.v, scores, stats, weight, self.first)
        with record_function("kvpass::cascade_step"):
            self.ops.cascade_step(buffers, candidates.stored_in(buffers), layer, policy, self.ranks)

    def _token_scores(self, policy: Policy, site: Site, location: SiteLocation) -> Callable[[Tensor], Tensor]:
        """Return the policy's function of what enters attention."""
        kv_heads = int(recorded(site.k).shape[1])
        return lambda x: policy.token_scores(x, location.layer, location.layers, kv_heads, self.ranks)

    def _projection(self, site: Site) -> Tensor:
        """Weight of the layer's output projection, ``[hidden, H * Dv]``."""
        found = site.output_projection
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


class _Repetition(_Prompt):
    """A prompt that runs once more, with its repetitions behind it, to compact what was kept of it.

    The caches are filled; the fitted keys and values are written over those that they hold.
    """

    def _reads_replays(self, policy: Policy) -> bool:
        return True

    def _replays_of(self, policy: Policy, ids: Tensor) -> Sequence[Replay]:
        return policy.reference_replays(ids)

    def compact(self, layer: Layer, *, is_last: bool) -> None:
        """Run a layer; compact what each cache holds of it."""
        self._copy_weights(layer.reads)
        location = self.decoder.locations[layer.site.layer]
        prompt = self.attend(layer, self.edges, num_queries=0, results_from=self.tokens if is_last else 0).attention
        for behind in self.behind:
            found = [
                self._run_replay(layer, prompt, replay, location, is_last=is_last).attention
                for replay, _ in behind.turns
            ]
            if location.ring:
                continue
            for number in behind.readers:
                with record_function("kvpass::compact"):
                    self._compact(self.fills[number], prompt, location, found, [parts for _, parts in behind.turns])

    def _compact(
        self,
        fill: Fill,
        prompt: Attention,
        location: SiteLocation,
        replayed: Sequence[Attention],
        turns: Sequence[list[_Observed]],
    ) -> None:
        """Compact what one cache holds of a layer.

        Args:
            replayed: of each turn, queries of the replays, keys and values of prompt and replays. turns: what they are.
        """
        buffers = location.buffers(PrefillBuffers, fill.state)
        errors = fill.state[f"{location.prefix}_output_errors"][:, location.layer]
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

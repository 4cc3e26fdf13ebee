"""Run a decoder layer by layer, and each layer in blocks of tokens.

For each layer: for each block, the part before attention, attention to everything up to the block, the part after it,
written into the residual stream. Besides the residual stream only one layer's keys and values and the activations of
one block are held. No policy is known here: operators of the program score what a layer returns.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import record_function

from kvpass.adapt.images import Merged
from kvpass.config import Block, Layout
from kvpass.graphs.bind_state import backend_mode, ids_and_positions, placeholders, size_reader
from kvpass.graphs.canonical import Site, batch_and_tokens, layout_of, pool_facts, site_locations
from kvpass.graphs.fx_utils import dim_of, is_scalar, recorded
from kvpass.graphs.split import Part
from kvpass.graphs.split_layers import Layer, SplitPrompt
from kvpass.graphs.verify.tables import InputLookup
from kvpass.operands import Attention, Expansion, RingBuffers
from kvpass.ops.latents import absorbed, attend_prompt
from kvpass.ops.prompt_operators import POOL_OPERANDS
from kvpass.ops.schemas import implementation

AUTO_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Tokens of a block over all rows of a batch, by default. On two CPU cores 1024 was fastest (256 to 16384 tried, a
decoder with an MLP of 8192); that of CUDA is a guess."""
FEWEST_TOKENS = 128
"""Tokens of a block of each row, by default, for any batch size."""


def check_block(given: object, name: str = "prefill_block") -> Block:
    """Return the option ``prefill_block``, or of another name, as given."""
    if given == "auto":
        return given
    if not isinstance(given, int) or isinstance(given, bool) or given < 2:
        raise ValueError(f"{name}={given!r}: must be 'auto' or a number of tokens, an int >= 2")
    return given


def tokens_of(block: Block, rows: int, device: torch.device) -> int:
    """Return how many tokens of each of the rows are in a block."""
    return max(AUTO_TOKENS[device.type] // rows, FEWEST_TOKENS) if block == "auto" else block


def _lengths_allowed(gm: GraphModule, split: SplitPrompt) -> Callable[[int], bool]:
    """Return whether fewer tokens than those of a prompt may run through the same decoder: a function of their number.

    The trace knows for which lengths the capture holds.
    """
    if split.not_in_blocks:
        return lambda length: False
    tokens, shapes = batch_and_tokens(gm)[1], backend_mode().shape_env
    assert shapes is not None and isinstance(tokens, sympy.Symbol), "split_layers has looked"
    lowest = shapes.bound_sympy(tokens).lower
    guards = [guard.expr for guard in shapes.guards if guard.expr.free_symbols == {tokens}]

    @functools.cache
    def allowed(length: int) -> bool:
        at = {tokens: sympy.Integer(length)}
        return length >= lowest and all(guard.xreplace(at) == sympy.true for guard in guards)

    return allowed


class _TokenBuffer:
    """Tensors of blocks of tokens, put together along axis 2, of the columns from ``first`` to ``end``."""

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


class _Held:
    """What is held of a layer that runs over blocks of tokens: queries of the last ones, all keys and values.

    Args:
        num_queries, functions, behind: as in :meth:`DecoderRun.run_layer`.
    """

    def __init__(
        self,
        run: DecoderRun,
        num_queries: int,
        functions: Sequence[Callable[[Tensor], Tensor]],
        behind: Attention | None = None,
    ) -> None:
        n, columns = run.tokens, run.seen + run.tokens
        self.queries, self.functions = _TokenBuffer(n - num_queries, n), functions
        self.keys, self.values = _TokenBuffer(0, columns), _TokenBuffer(0, columns)
        self._entered: list[list[Tensor]] = [[] for _ in functions]
        if behind is not None:
            self.keys.put(0, behind.k)
            self.values.put(0, behind.v)

    def enter(self, x: Tensor) -> None:
        """Add a block of what enters attention."""
        for function, numbers in zip(self.functions, self._entered, strict=True):
            numbers.append(function(x))

    def of_entering(self) -> list[Tensor]:
        """Return what each of the functions gave."""
        return [torch.cat(numbers, -1) for numbers in self._entered]


class SplitDecoder:
    """A decoder in parts: what comes before all layers, and of each layer what comes before and after attention.

    To be made in the trace of the graph.

    Args:
        gm: the graph that was split; behind the inputs of the captured graph it has the tokens seen before, int64
            ``[]``, from which decoders that count positions go on, and ``split.added``. layout: of its entries and
            states. functions: of the parts, by key. lookups: of the inputs in tables, which are checked.
            impl: of attention, see :func:`kvpass.ops.schemas.implementation`.
    """

    def __init__(
        self,
        gm: GraphModule,
        layout: Layout,
        split: SplitPrompt,
        functions: Mapping[Hashable, Callable[..., Any]],
        lookups: Sequence[InputLookup],
        impl: str,
    ) -> None:
        self.split, self.functions, self.lookups, self.impl = split, functions, lookups, impl
        self.allowed = _lengths_allowed(gm, split)
        self.inputs = [node for node in placeholders(gm) if node not in split.added]
        self.ids_at, self.positions_at = ids_and_positions(gm)
        attributes = gm.graph.find_nodes(op="get_attr")
        self.constants = {node: operator.attrgetter(str(node.target))(gm) for node in attributes}
        tokens = batch_and_tokens(gm)[1]
        self.tokens = size_reader(gm, tokens)
        self.lengths = {node for node in self.inputs if is_scalar(node) and dim_of(recorded(node)) == tokens}
        self.layout, (_, self.dtype, self.device) = layout, layout_of(gm)
        self.locations, self.pools = site_locations(self.layout), pool_facts(gm, self.layout)
        self.holds_latents = any(group.geometry.values_in_keys for group in layout.pools)
        operands = {True: RingBuffers._fields, False: POOL_OPERANDS}
        self.cache_operands = {location.prefix: operands[location.ring] for location in self.locations.values()}

    def edges(self, tokens: int, block: int) -> list[int]:
        """Return where blocks begin, and the end; no block is a single token, unless the prompt is one.

        One block where the decoder is another one for so few tokens.
        """
        edges = [*range(0, tokens, block), tokens]
        if len(edges) > 2 and tokens - edges[-2] == 1:
            del edges[-2]
        return edges if all(self.allowed(end - first) for first, end in pairwise(edges)) else [0, tokens]

    def check(self, inputs: Sequence[Any]) -> None:
        """Check that inputs are within the tables in which they are looked up."""
        for lookup in self.lookups:
            lookup.check(inputs)

    def last_edges(self, edges: list[int], block: int, logits: int) -> list[int]:
        """Where blocks of the last layer begin: the last one holds all tokens of which there are logits."""
        tokens = edges[-1]
        before = tokens - max(tokens - edges[-2], logits + 1)
        return [*self.edges(before, block), tokens] if before > 1 else [0, tokens]


Hidden = dict[Node, Any]
"""Values that pass between layers, by node: the residual stream, what all layers read, states of recurrent layers."""


class LayerResult(NamedTuple):
    """What a layer gives that has run over some tokens.

    Attributes:
        hidden: for the next layer. attention: keys and values of all tokens, queries of the last ones. lse: log-sum-exp
            of these queries, where it was computed. entered: what each function of what enters attention gave.
    """

    hidden: Hidden
    attention: Attention
    lse: Tensor | None
    entered: list[Tensor]


class BegunLayer(NamedTuple):
    """A layer of which the part before attention has run.

    Attributes:
        attention: of all tokens. run, blocks: values of the layer, and of each block of tokens. entered: as in
            :class:`LayerResult`.
    """

    layer: Layer
    attention: Attention
    run: _LayerRun
    blocks: list[dict[Node, Tensor]]
    entered: list[Tensor]


class DecoderRun:
    """Tokens that run through the layers of a decoder, at once or behind others.

    Args:
        inputs: of the captured graph. real: 1 for tokens, 0 for padding, int64 ``[B, tokens]``. block: tokens of a
            block. start: first real column of each row, on the CPU. seen: columns before these tokens. states: of
            recurrent layers, before these tokens. text: of which images are a part, if it is one.
    Attributes:
        node_values: inputs and constants, by node: all that parts read but what they compute.
    """

    def __init__(
        self,
        decoder: SplitDecoder,
        inputs: Sequence[Any],
        real: Tensor,
        block: int,
        start: Tensor,
        seen: int = 0,
        states: Mapping[Node, Tensor] = MappingProxyType({}),
        text: Merged | None = None,
    ) -> None:
        self.decoder, self.tokens, self.start, self.seen = decoder, real.shape[1], start, seen
        self.sees = (None, None) if text is None else (text.sees, text.sees_near)
        in_blocks = all(sees is None for sees in self.sees)
        self.edges = decoder.edges(self.tokens, block) if in_blocks else [0, self.tokens]
        inputs = [*inputs, torch.full((), seen, dtype=torch.int64, device=decoder.device)]
        self.node_values: Hidden = {**decoder.constants, **dict(zip(decoder.inputs, inputs, strict=True))}
        self.node_values |= dict.fromkeys(decoder.split.real, real) | dict(states)

    def begin(self) -> Hidden:
        """Run what comes before all layers."""
        run = _LayerRun(self, {})
        made = run.run_part(self.decoder.split.begin, 0, self.tokens, {})
        return {**run.hidden, **{node: value.contiguous() for node, value in made.items()}}  # as they are recorded

    def run_layer(
        self,
        layer: Layer,
        hidden: Hidden,
        edges: Sequence[int],
        *,
        num_queries: int,
        results_from: int = 0,
        behind: Attention | None = None,
        of_entering: Sequence[Callable[[Tensor], Tensor]] = (),
        on_block: Callable[[Attention, Tensor | None], None] | None = None,
    ) -> LayerResult:
        """Run a layer, block by block.

        Args:
            hidden: what the layers before it gave. edges: where blocks begin, and the end. num_queries: how many of
                the last queries are returned. results_from: the first token of which the results of the layer are
                needed; earlier ones only give keys and values. behind: keys and values that these tokens follow.
            of_entering: functions of what enters attention, ``[B, T, hidden]``; their results, with tokens along the
                last axis, are returned. on_block: called with the attention of each block and its log-sum-exp.
        Raises:
            UnsupportedAttentionError: what enters attention is not found.
        """
        run, site, n = _LayerRun(self, hidden), layer.site, self.tokens
        held, lses = _Held(self, num_queries, of_entering, behind), _TokenBuffer(n - num_queries, n)
        for first, end in pairwise(edges):
            call, made = self._begin_block(run, layer, held, first, end)
            ops = implementation(call.q, self.decoder.impl)
            expansion = None if site.up is None else Expansion(run.value(site.up, first, end, made), site.nope)
            needs_lse = behind is None and end > n - num_queries
            if first < results_from and not needs_lse and on_block is None:
                continue
            with record_function("kvpass::attend_prompt"):
                made[site.node], lse = attend_prompt(
                    call, expansion, self.start, ops, site.sliding_window, site.chunked
                )
                self._attend_images(site, call, made[site.node])
            if lse is not None:
                lses.put(first, lse)
            if on_block is not None:
                on_block(absorbed(call, expansion), lse)
            if first >= results_from:
                made |= run.run_part(layer.after, first, end, made)
                run.store(layer, first, end, made)
        whole = absorbed(call._replace(q=held.queries.before(n)), expansion)
        return LayerResult(run.left(layer), whole, lses.before(n) if lses.began else None, held.of_entering())

    def begin_layer(
        self, layer: Layer, hidden: Hidden, of_entering: Sequence[Callable[[Tensor], Tensor]] = ()
    ) -> BegunLayer:
        """Run the part of a layer that is before attention, for all tokens; arguments as in :meth:`run_layer`."""
        run, held = _LayerRun(self, hidden), _Held(self, self.tokens, of_entering)
        needed, blocks = {*layer.after.inputs, *layer.results}, list[dict[Node, Tensor]]()
        for first, end in pairwise(self.edges):
            call, made = self._begin_block(run, layer, held, first, end)
            blocks.append({node: value for node, value in made.items() if node in needed})
        call = call._replace(q=held.queries.before(self.tokens))
        return BegunLayer(layer, call, run, blocks, held.of_entering())

    def finish_layer(
        self, begun: BegunLayer, attend: Callable[[Attention], tuple[Tensor, Tensor | None]], num_queries: int
    ) -> LayerResult:
        """Attend to all tokens of a layer at once, and run what is behind attention; the rest as :meth:`run_layer`."""
        layer, call, run, blocks, entered = begun
        with record_function("kvpass::attend_prompt"):
            out, lse = attend(call)
            self._attend_images(layer.site, call, out)
        for (first, end), made in zip(pairwise(self.edges), blocks, strict=True):
            made[layer.site.node] = out[:, :, first:end].transpose(1, 2).contiguous().transpose(1, 2)
            made |= run.run_part(layer.after, first, end, made)
            run.store(layer, first, end, made)
            made.clear()
        last = slice(self.tokens - num_queries, None)
        lse = None if lse is None else lse[:, :, last]
        return LayerResult(run.left(layer), call._replace(q=call.q[:, :, last]), lse, entered)

    def _begin_block(
        self, run: _LayerRun, layer: Layer, held: _Held, first: int, end: int
    ) -> tuple[Attention, dict[Node, Tensor]]:
        """Run what is before attention, for a block; return its attention to all up to it, and what was made."""
        site, made = layer.site, run.run_part(layer.before, first, end, {})
        q, k, v = (run.value(node, first, end, made) for node in (site.q, site.k, site.v))
        if held.functions:
            x = run.value(site.attention_input, first, end, made)
            held.enter(x.view(len(q), -1, x.shape[-1]))
        held.keys.put(self.seen + first, k)
        held.values.put(self.seen + first, v)
        held.queries.put(first, q)
        k, v = held.keys.before(self.seen + end), held.values.before(self.seen + end)
        sinks = None if site.sinks is None else run.value(site.sinks, first, end, made)
        return Attention(q, k, v, site.scale, site.softcap, sinks), made

    def _attend_images(self, site: Site, call: Attention, out: Tensor) -> None:
        """Attend again, into ``out``, where tokens of images see later ones."""
        sees = self.sees[site.sliding_window is not None]
        if sees is not None:
            _attend_later(call, sees, out)


def _attend_later(call: Attention, sees: Tensor, out: Tensor) -> None:
    """Attend again, into ``out``, where tokens of a prompt see later ones: ``sees`` bool ``[B, N, N]``."""
    if call.softcap is not None or call.sinks is not None:
        raise ValueError("tokens of an image that see later ones, with soft-capping or sinks: use the uncompiled model")
    (q, k, v, scale, *_), at = call, sees.triu(1).any(2).any(0)
    out[:, :, at] = scaled_dot_product_attention(q[:, :, at], k, v, sees[:, None, at], scale=scale, enable_gqa=True)


class _LayerRun:
    """A layer that runs over blocks of tokens, or what comes before all layers.

    Attributes:
        hidden: what the layers before it gave, and what it has made for later ones.
    """

    def __init__(self, run: DecoderRun, hidden: Hidden) -> None:
        self.decoder, self.tokens, self.hidden = run.decoder, run.tokens, dict(hidden)
        self.node_values = run.node_values

    def run_part(self, part: Part, first: int, end: int, made: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
        """Run a part for some tokens, which follow those of its last call; ``made``: their values so far."""
        if not part.runs:
            return {}
        operands = [self.value(node, first, end, made) for node in part.inputs]
        # compiled for two tokens or more; the graph itself holds for one too
        function = part.gm.forward if self.tokens == 1 else self.decoder.functions[part.key]
        results = dict(zip(part.outputs, function(*operands), strict=True))
        for before, after in self.decoder.split.states.items():
            if after in results:
                # it may be a view of a whole block
                self.hidden[before] = results[after] = results[after].contiguous()
        return results

    def value(self, node: Node, first: int, end: int, made: Mapping[Node, Tensor]) -> Any:
        """Return the value of a node for some tokens."""
        if node in made:
            return made[node]
        if node in self.decoder.lengths:
            return end - first
        axis = self.decoder.split.axes.get(node)
        value = self.hidden[node] if node in self.hidden else self.node_values[node]
        if axis is None or end - first == self.tokens:
            return value
        return value.narrow(axis, first, end - first).contiguous()

    def left(self, layer: Layer) -> Hidden:
        """Return the values without those that no later layer reads."""
        return {node: value for node, value in self.hidden.items() if node not in layer.read_last}

    def store(self, layer: Layer, first: int, end: int, made: Mapping[Node, Tensor]) -> None:
        """Keep results of some tokens for the layers that follow."""
        axes = self.decoder.split.axes
        for node in layer.results:
            value, axis = made[node], axes.get(node)
            if self.decoder.split.not_in_blocks:
                self.hidden[node] = value  # as it is recorded
            elif axis is None or end - first == self.tokens:
                self.hidden[node] = value.contiguous()
            else:
                if first == 0:
                    shape = list(value.shape)
                    shape[axis] = self.tokens
                    self.hidden[node] = self._room(layer, shape, value)
                self.hidden[node].narrow(axis, first, end - first).copy_(value)

    def _room(self, layer: Layer, shape: list[int], like: Tensor) -> Tensor:
        """A tensor for a result of a layer: where it is the only one, a value that is read for the last time."""
        results = [node for node in layer.results if node in self.decoder.split.axes]
        # weights may be tensors that wrap others, whose own storage has no address
        values = [*self.node_values.values(), *self.hidden.values()]
        storages = [x.untyped_storage()._cdata for x in values if isinstance(x, Tensor)]
        for node in layer.read_last if len(results) == 1 else ():
            old = self.hidden[node]
            alone = storages.count(old.untyped_storage()._cdata) == 1
            if list(old.shape) == shape and old.dtype == like.dtype and alone:
                return old
        return like.new_empty(shape)

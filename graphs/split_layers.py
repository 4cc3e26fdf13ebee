"""Split the decoder of a prompt into layers, each of which can run over one block of tokens after the other.

Before, in a decoder of L layers::

    x = embedding(ids); cos = ...(positions); [q, k, v = ...(x); out = kvpass.site(q, k, v); x = x + ...(out)] * L; ...

After::

    begin:  x, cos                          once, for all tokens
    layer:  before: q, k, v = ...(x, cos)   site: out = attention(q, k, v)   after: x = x + ...(out)

A layer ends where the values that later ones need take the fewest bytes: mostly the residual stream alone. Nothing but
attention and states of recurrent layers relate tokens to tokens, as ``self_check`` showed; only positions may be looked
at together, in ``begin``. A part with recurrent layers takes the states before a block and returns those after it.

A graph for which that does not hold is cut before and behind each attention op, and runs over all tokens at once::

    layer 1:  before: everything up to q, k, v   site   after: everything up to q, k, v of layer 2
    layer 2:                                     site   after: ...
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.graphs.bind_state import append_input, placeholders
from kvpass.graphs.canonical import (
    ABSORBED_QUERY,
    READ_STATE,
    REAL_TOKENS,
    SITE,
    WRITE_STATE,
    Site,
    batch_and_tokens,
    find_sites,
    state_of,
)
from kvpass.graphs.fx_utils import (
    Dim,
    argument_of,
    dim_of,
    is_module_tensor,
    is_scalar,
    mutated_inputs,
    reached,
    recorded,
    replace_node,
    shape_of,
    storage_of,
    symbols_of,
)
from kvpass.graphs.insert_nodes import insert_function
from kvpass.graphs.model_parts import attention_input
from kvpass.graphs.split import CannotSplitError, Part, make_parts

_MANY = 1024  # the number of tokens for which bytes are compared
_TOO_MANY = 1e15


@dataclass(frozen=True)
class Layer:
    """One attention op, with what comes before and after it until the next layer."""

    before: Part
    site: Site
    after: Part
    results: tuple[Node, ...] = ()  # values that later layers need, or what the decoder returns
    read_last: frozenset[Node] = frozenset()  # values of earlier layers that no later one needs
    entering: Node | None = None  # what enters attention, where it is found

    @property
    def reads(self) -> tuple[Node, ...]:
        """What the parts, the site and the policy read."""
        entering = () if self.entering is None else (self.entering,)
        return *self.before.inputs, *self.site.node.all_input_nodes, *entering, *self.after.inputs


@dataclass(frozen=True)
class SplitPrompt:
    """A decoder in layers."""

    begin: Part  # runs once
    layers: Sequence[Layer]
    results: Sequence[Any]  # of the decoder; in blocks logits alone
    axes: Mapping[Node, int]  # token axis of values that have one
    states: Mapping[Node, Node]  # of recurrent layers, before a block and after it, in the order of Layout.states
    real: Sequence[Node]  # inputs that are 1 for tokens and 0 for padding, [B, tokens]
    not_in_blocks: str = ""  # why it runs over all tokens at once; "" where it can run in blocks

    @property
    def parts(self) -> list[Part]:
        return [self.begin, *(part for layer in self.layers for part in (layer.before, layer.after))]

    @property
    def added(self) -> list[Node]:
        """The inputs that the graph had not, in their order."""
        return [*self.states, *self.real]


def split_layers(gm: GraphModule, seen: Node) -> SplitPrompt:
    """Split a canonical graph, which is changed: values that pass between layers are recorded as contiguous.

    The decoder counts its positions from ``seen``. CannotSplitError: a value that is not one for each token is needed
    in two layers, a layer writes into a tensor of another, or the decoder returns something else than logits.
    """
    tokens = batch_and_tokens(gm)[1]
    if not isinstance(tokens, sympy.Symbol):
        raise CannotSplitError("the decoder was captured for one number of tokens")
    results = gm.graph.output_node().all_input_nodes
    if len(results) != 1 or len(shape_of(results[0]) or ()) != 3:
        raise CannotSplitError("the decoder does not return logits alone")
    (logits,) = results
    states, real = _take_states(gm), _take_real_tokens(gm)
    _attend_expanded(gm)
    inputs = {node for node in placeholders(gm) if not (is_module_tensor(node) or is_scalar(node) or node is seen)}
    _read_length_from_input(gm, tokens)
    position_ids = {node for node in inputs if argument_of(node) == "position_ids"}
    sites = find_sites(gm)
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_") and not is_scalar(node)]
    layer_of = dict.fromkeys(calls, -1)
    hidden = _dependent(calls, inputs - position_ids)
    positional = _dependent(calls, {*position_ids, seen}) - hidden
    once = reached(positional, lambda node: [made for made in node.all_input_nodes if made in layer_of])
    order = [node for node in calls if node not in once]
    cuts = _cuts(order, hidden, tokens, states.keys())
    for layer, (first, end) in enumerate(pairwise([*cuts, len(order)])):
        layer_of.update(dict.fromkeys(order[first:end], layer))
    _check_writes(gm, layer_of)

    entered = {attention_input(site.q, site.k, site.v): site.node for site in sites}  # policies read it with attention
    between = [
        node
        for node in calls
        if any(layer_of.get(user, -1) > layer_of[node] for user in (*_users(node), entered.get(node, node)))
    ]
    _make_contiguous(between, hidden, positional, tokens)
    axes = {node: axis for node in (*placeholders(gm), *between) if (axis := _token_axis(node, tokens)) is not None}
    if _token_axis(logits, tokens) is not None:
        axes[logits] = 1

    pieces: list[Node | list[Node]] = [[node for node in calls if layer_of[node] == -1]]
    for site, (first, end) in zip(sites, pairwise([*cuts, len(order)]), strict=True):
        middle = order.index(site.node)
        pieces += [order[first:middle], site.node, order[middle + 1 : end]]
    begin, layers = _layers(gm, sites, pieces)
    if any(node.op.startswith("call_") for node in begin.inputs):
        raise CannotSplitError("sizes of positions are read from a layer")
    return SplitPrompt(begin, _with_lives(layers, {logits}), [logits], axes, states, real)


def _make_contiguous(between: Sequence[Node], hidden: Set[Node], positional: Set[Node], tokens: Dim) -> None:
    """Record values that pass between layers as contiguous; raise if one is not a value for each token."""
    for node in between:
        value = recorded(node)
        by_token = node in hidden | positional if _token_axis(node, tokens) is not None else node not in hidden
        if not isinstance(value, Tensor) or not by_token:
            raise CannotSplitError(f"{node.name} is needed in two layers and is not one value for each token")
        with value.fake_mode:  # type: ignore[attr-defined]
            node.meta["example_value"] = torch.empty(value.shape, dtype=value.dtype, device=value.device)


def split_at_attention(gm: GraphModule, reason: str) -> SplitPrompt:
    """Split a canonical graph, which is changed, at its attention ops; ``reason``: why it does not run in blocks."""
    _attend_expanded(gm)
    results: Any = gm.graph.output_node().args[0]
    states, real = _take_states(gm), _take_real_tokens(gm)
    sites = find_sites(gm)
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    cuts = [calls.index(site.node) for site in sites]
    pieces: list[Node | list[Node]] = [[], calls[: cuts[0]]]  # nothing runs once
    for first, end in pairwise([*cuts, len(calls)]):
        pieces += [calls[first], calls[first + 1 : end], []]  # what comes after attention leads up to the next one
    begin, layers = _layers(gm, sites, pieces[:-1])
    return SplitPrompt(begin, _with_lives(layers, set(results)), results, {}, states, real, reason)


def _layers(gm: GraphModule, sites: Sequence[Site], pieces: Sequence[Node | list[Node]]) -> tuple[Part, list[Layer]]:
    """Return what runs once, and the layers.

    ``pieces``: nodes of what runs once, then for each layer those before its attention op, the op, and those after it.
    CannotSplitError: as :func:`~kvpass.graphs.split.make_parts`; or what comes after an attention op writes into its
    queries, keys or values, of which entries are kept when it has run.
    """
    for site, after in zip(sites, pieces[3::3], strict=True):
        assert isinstance(after, list)
        kept = {storage_of(operand) for operand in (site.q, site.k, site.v)}
        for node in after:
            if not kept.isdisjoint(map(storage_of, mutated_inputs(node))):
                raise CannotSplitError(f"{node.name} writes into queries, keys or values")
    entering = [attention_input(site.q, site.k, site.v) for site in sites]
    parts: list[Any] = make_parts(gm, pieces, [node for node in entering if node is not None])
    layers = [
        Layer(before, site, after, entering=node)
        for before, site, after, node in zip(parts[1::3], sites, parts[3::3], entering, strict=True)
    ]
    return parts[0], layers


def _take_states(gm: GraphModule) -> dict[Node, Node]:
    """Make the states that recurrent layers read inputs, those that they write results; return both."""
    before, written = dict[tuple[int, str], Node](), dict[tuple[int, str], Node]()
    for node in gm.graph.find_nodes(op="call_function", target=READ_STATE):
        if state_of(node) not in before:
            before[state_of(node)] = append_input(gm, f"state{len(before)}_held", recorded(node))
        replace_node(node, before[state_of(node)])
    for node in gm.graph.find_nodes(op="call_function", target=WRITE_STATE):
        (written[state_of(node)],) = node.all_input_nodes
        gm.graph.erase_node(node)
    output = gm.graph.output_node()
    output.args = ([*output.all_input_nodes, *written.values()],)
    return {node: written[state] for state, node in before.items()}


def _take_real_tokens(gm: GraphModule) -> list[Node]:
    """Make what tells tokens from padding an input: a block does not show where its rows begin."""
    inputs = list[Node]()
    for node in gm.graph.find_nodes(op="call_function", target=REAL_TOKENS):
        inputs.append(append_input(gm, f"real{len(inputs)}", recorded(node)))
        replace_node(node, inputs[-1])
    return inputs


def _attend_expanded(gm: GraphModule) -> None:
    """Give attention ops on latent rows the queries of expanded heads, and let them return the output of these."""
    for site in find_sites(gm):
        if site.q.target is not ABSORBED_QUERY:
            continue
        (expanded,) = site.node.users
        q, up, nope = site.q.args
        with gm.graph.inserting_before(site.node):
            attention = insert_function(site.node, SITE, q, *site.node.args[1:], up=up, nope=nope, **site.node.kwargs)
        replace_node(expanded, attention)
        gm.graph.erase_node(site.node)
        gm.graph.erase_node(site.q)


def _read_length_from_input(gm: GraphModule, tokens: Dim) -> None:
    """Replace the prompt's length, where it is read from the size of a tensor, by the input that is the length."""
    sizes = [node for node in gm.graph.nodes if isinstance(recorded(node), torch.SymInt)]
    lengths = [node for node in sizes if dim_of(recorded(node)) == tokens]
    for node in lengths:
        if node.op.startswith("call_") and lengths[0].op == "placeholder":
            replace_node(node, lengths[0])


def _dependent(calls: Sequence[Node], inputs: Collection[Node]) -> set[Node]:
    """Return the inputs, and the calls whose elements or shapes depend on theirs."""
    users, sharing = set(calls), defaultdict[object, list[Node]](list)
    for node in calls:
        sharing[storage_of(node)].append(node)

    def dependents(node: Node) -> list[Node]:
        written = [other for operand in mutated_inputs(node) for other in sharing[storage_of(operand)]]
        return [*written, *users.intersection(node.users)]

    return reached(inputs, dependents)


def _users(node: Node) -> Iterator[Node]:
    """Yield the users of a node, and in place of sizes that are read from it the users of these."""
    for user in node.users:
        if is_scalar(user):
            yield from _users(user)
        else:
            yield user


def _cuts(order: Sequence[Node], hidden: Collection[Node], tokens: Dim, states: Set[Node]) -> list[int]:
    """Return where layers begin: at the fewest bytes of values that are needed later, as late as possible.

    The first begins when there is an embedding, before a state is read. A state is needed to the end, so recurrent
    layers belong to the attention that follows them.
    """
    place = {node: index for index, node in enumerate(order)}
    added = [0.0] * (len(order) + 2)
    for index, node in enumerate(order):
        last = max((place.get(user, len(order)) for user in _users(node)), default=index)
        size = _bytes(node, hidden, tokens)
        added[index + 1] += size
        added[last + 1] -= size
    alive = list(accumulate(added))
    sites = [index for index, node in enumerate(order) if node.target is SITE]
    floats = (i for i, node in enumerate(order) if shape_of(node) is not None and recorded(node).is_floating_point())
    embedding = next(i for i in floats if order[i] in hidden)
    readers = (i for i, node in enumerate(order) if not states.isdisjoint(node.all_input_nodes))
    first_end = min(sites[0], next(readers, sites[0]))
    return [
        max(range(first + 1, last + 1), key=lambda place: (-alive[place], place))
        for first, last in [(embedding, first_end), *pairwise(sites)]
    ]


def _bytes(node: Node, hidden: Collection[Node], tokens: Dim) -> float:
    """Return the bytes of a value for many tokens; a lot for one that cannot pass between layers."""
    value, shape = recorded(node), shape_of(node)
    if value is None:
        return 0
    if shape is None or (node not in hidden and symbols_of([tokens]) & symbols_of(shape)):
        return _TOO_MANY
    sizes = (dim if isinstance(dim, int) else dim.xreplace(dict.fromkeys(dim.free_symbols, _MANY)) for dim in shape)
    return math.prod(map(int, sizes)) * value.itemsize


def _check_writes(gm: GraphModule, layer_of: Mapping[Node, int]) -> None:
    """Raise if a call writes into a tensor that an input or another layer holds too."""
    holders: dict[object, set[int]] = defaultdict(set)
    for node in gm.graph.nodes:
        holders[storage_of(node)].add(layer_of.get(node, -2))
    for node, layer in layer_of.items():
        if any(holders[storage_of(operand)] != {layer} for operand in mutated_inputs(node)):
            raise CannotSplitError(f"{node.name} writes into a tensor of another part")


def _token_axis(node: Node, tokens: Dim) -> int | None:
    """Return the axis of a tensor that has an index for each token, None if no size depends on their number."""
    symbols, shape = symbols_of([tokens]), shape_of(node) or ()
    axes = [axis for axis, dim in enumerate(shape) if symbols & symbols_of([dim])]
    if len(axes) > 1 or any(shape[axis] != tokens for axis in axes):
        raise CannotSplitError(f"{node.name} has no axis of one index for each token")
    return axes[0] if axes else None


def _with_lives(layers: Sequence[Layer], results: Set[Node]) -> list[Layer]:
    """Note which values each layer makes for later ones or as results of the decoder, and which it reads last."""
    with_lives, later = [], set(results)
    for layer in reversed(layers):
        values = dict.fromkeys([*layer.before.outputs, layer.site.node, *layer.after.outputs])
        read = {node for node in layer.reads if node not in values}
        last = frozenset(node for node in read - later if node.op.startswith("call_"))
        with_lives.append(replace(layer, results=tuple(node for node in values if node in later), read_last=last))
        later |= read
    return with_lives[::-1]

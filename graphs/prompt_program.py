"""The program of a prompt: a graph of the layers of a decoder, and of what a policy keeps of each.

For ``lava`` and a decoder of L layers, as ``print(model.program())`` shows it::

    hidden = begin()
    for each layer i:
        hidden, attention = run_layer(i, hidden)               the decoder, in blocks of tokens
        scored = score_layer(attention, cache, i)              what each entry is worth, and the layer's weight
        shares = cascade_step(cache, scored, i)                how many entries the layers 0..i may hold from now on
        ranking = rank_heads(cache, scored)                    in which order those of the layer enter
        gather_layer(cache, attention, scored, shares, ranking, i)
    pack(cache)

Programs differ where papers do: ``fixed_shares`` in place of ``cascade_step`` (pyramidkv), or neither where all layers
have the same share (snapkv); no ``rank_heads`` where all heads have the same number; ``replay_layer`` behind each
``run_layer`` (kvzip); ``begin_layer``, ``select_blocks`` and ``finish_layer`` in place of ``run_layer`` where not all
attention of a layer is computed (``prefill="xattention"``); a second reading of the prompt with ``compact_layer``
(``compact=True``). Layers with a sliding window have ``keep_newest`` alone. A program for several policies scores each
layer for all of them.

The methods of ``prompt`` are those of :class:`kvpass.compiler.prompt.Prompt`, which run parts compiled by Inductor.
Everything else is an operator of :mod:`kvpass.ops.prompt_operators`.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from kvpass.block_sparse import BlockSparse
from kvpass.graphs.canonical import POSITIONS_IN_KEYS, Site, SiteLocation
from kvpass.graphs.find.rotary import rotary_frequencies
from kvpass.graphs.split_layers import Layer, SplitPrompt
from kvpass.ops import prompt_operators  # noqa: F401 (registers the operators)
from kvpass.policies.base import Policy
from kvpass.policies.head_splits import UniformHeads
from kvpass.policies.layer_splits import UniformLayers


class PromptProgram(GraphModule):
    """The program of a prompt; its text has one line for each node."""

    def __str__(self) -> str:
        code = re.sub(r";  [^\n]*", "", self.code.strip())  # where values are freed
        return re.sub(r"torch\.ops\.kvpass\.(\w+)\.default", r"kvpass.\1", code)


def prompt_program(
    split: SplitPrompt,
    locations: Mapping[int, SiteLocation],
    policies: Sequence[Policy],
    ranks: str = "",
    prefill: BlockSparse | None = None,
) -> PromptProgram:
    """Return the program that reads a prompt and fills one cache for each policy.

    Args:
        locations: of the entries of the layers. ranks: spec of processes that share the heads, "" for one process.
            prefill: what selects blocks of attention; None: all of it is computed.
    Raises:
        UnsupportedAttentionError: a policy reads something of the model that is not found in it.
        ValueError: a policy does not go with the model.
    """
    program = _Program(split.layers, locations, policies, ranks, prefill)
    hidden = program.read_prompt()
    results = program.call("results", hidden)
    if split.states:
        program.call("store_states", hidden)
    for fill in range(len(policies)):
        for prefix in program.pools:
            program.operate("pack", fill, None, program.caches[fill, prefix])
    if any(policy.compact for policy in policies):
        program.compact()
    program.graph.output(results)
    return PromptProgram(nn.Module(), program.graph)


def sparse_layers(prefill: BlockSparse, layers: Sequence[Layer], policies: Sequence[Policy]) -> frozenset[int]:
    """Return the layers of which selected blocks are computed; the others attend to everything.

    These are the first ``dense_layers``; those with a sliding window or with latents; and the last one, of which only
    the last queries attend at all.

    Raises:
        ValueError: there is none, or a policy reads the attention of all queries.
    """
    for policy in policies:
        prefill.check_policy(policy)
    sites = [layer.site for layer in layers[:-1]]
    sparse = [place for place, site in enumerate(sites) if site.sliding_window is None and site.up is None]
    sparse = [place for place in sparse if place >= prefill.dense_layers]
    if not sparse:
        raise ValueError(
            f"prefill={prefill.name!r}: no layer of this model can take it; the first {prefill.dense_layers}, the last "
            "one, and layers with a sliding window or latents attend to everything"
        )
    return frozenset(sparse)


_RESULTS = {"hidden": "queries", "attention": "queries", "summed": "column_sums", "entered": "token_scores"}
"""What ``run_layer`` returns, in its order, and the option with which it is there."""


class _Program:
    """A program that is being written.

    Numbers of a layer: ``place`` among the layers of the decoder; ``layer.site.layer`` of its entries, which several
    layers may attend to; ``location.layer`` of these entries in their pool. ``fill`` is the number of a policy and its
    cache.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        locations: Mapping[int, SiteLocation],
        policies: Sequence[Policy],
        ranks: str,
        prefill: BlockSparse | None,
    ) -> None:
        self.graph, self.layers, self.locations, self.policies = Graph(), layers, locations, policies
        self.ranks = {"ranks": ranks} if ranks else {}
        self.prefill = prefill
        self.sparse = frozenset[int]() if prefill is None else sparse_layers(prefill, layers, policies)
        queries = [policy.queries_read for policy in policies]
        self.queries = None if None in queries else max(number or 0 for number in queries)
        self.scoring_tokens = [fill for fill, policy in enumerate(policies) if "token_scores" in policy.inputs]
        self.readers = Counter(layer.site.layer for layer in layers)  # ops that attend to one layer's entries
        self.prompt, self.start, self.first = map(self.graph.placeholder, ("prompt", "start", "first"))
        prefixes = dict.fromkeys(location.prefix for location in locations.values())
        names = {prefix: f"cache_{prefix}" if len(prefixes) > 1 else "cache" for prefix in prefixes}
        self.pools = dict.fromkeys(location.prefix for location in locations.values() if not location.ring)
        self.caches = {
            (fill, prefix): self.graph.placeholder(self.named(name, fill))
            for fill in range(len(policies))
            for prefix, name in names.items()
        }

    def named(self, name: str, fill: int, place: int | None = None) -> str:
        """Return the name of a node for a policy, and of a layer if given."""
        name = name if place is None else f"{name}_{place}"
        return name if len(self.policies) == 1 else f"{name}_for_{fill}"

    def call(self, method: str, *operands: Any, name: str = "", **options: Any) -> Node:
        """Add a call of a method of the prompt."""
        return self.graph.create_node("call_method", method, (self.prompt, *operands), options, name or method)

    def operate(self, name: str, fill: int, place: int | None, *operands: Any, **options: Any) -> Node:
        """Add a call of an operator for a policy, and of a layer if given."""
        target = getattr(torch.ops.kvpass, name).default
        return self.graph.create_node("call_function", target, operands, options, self.named(name, fill, place))

    def pick(self, node: Node, index: int, name: str) -> Node:
        """Add what reads one of several results."""
        return self.graph.create_node("call_function", operator.getitem, (node, index), name=name)

    def run_layer(self, place: int, hidden: Node, again: str = "", **options: Any) -> tuple[Node, dict[str, Node]]:
        """Add a layer; return its hidden values, and by name what policies read of it."""
        if place in self.sparse:
            run = self._run_sparse(place, hidden, again, **options)
        else:
            run = self.call("run_layer", place, hidden, name=f"run_layer_{place}{again}", **options)
        read = {
            name: self.pick(run, index, f"{name}_{place}{again}")
            for index, (name, option) in enumerate(_RESULTS.items())
            if option in options
        }
        return read.pop("hidden"), read

    def _run_sparse(self, place: int, hidden: Node, again: str, **options: Any) -> Node:
        """Add a layer of whose attention selected blocks are computed."""
        scoring = {"token_scores": options.pop("token_scores")} if "token_scores" in options else {}
        begun = self.call("begin_layer", place, hidden, name=f"begin_layer_{place}{again}", **scoring)
        assert self.prefill is not None
        operands = self.pick(begun, 0, f"entering_{place}{again}"), self.start, self.prefill.text
        queries = max(policy.queries_read or policy.window for policy in self.policies)
        numbers: dict[str, Any] = {"queries": queries, "scale": self.layers[place].site.scale}
        target, name = torch.ops.kvpass.select_blocks.default, f"select_blocks_{place}{again}"
        selected = self.graph.create_node("call_function", target, operands, numbers, name)
        return self.call("finish_layer", place, begun, selected, name=f"finish_layer_{place}{again}", **options)

    def read_prompt(self) -> Node:
        """Add the layers, and what is kept of each; return the hidden values behind the last one."""
        hidden, replays = self.call("begin"), None
        if any("replays" in policy.inputs for policy in self.policies):
            replays = self.call("begin_replays")
        waiting = list[dict[str, Node]]()  # earlier layers that attend to the same entries
        for place, layer in enumerate(self.layers):
            location = self.locations[layer.site.layer]
            last_reader = len(waiting) + 1 == self.readers[layer.site.layer]
            options: dict[str, Any] = {"queries": 0 if location.ring else self.queries}
            if not location.ring and any("column_sum" in policy.inputs for policy in self.policies):
                options["column_sums"] = True
            if not location.ring and last_reader and self.scoring_tokens:
                options["token_scores"] = tuple(self.scoring_tokens)
            hidden, read = self.run_layer(place, hidden, **options)
            if replays is not None:
                operands = place, replays, hidden, read["attention"]
                replay = self.call("replay_layer", *operands, name=f"replay_layer_{place}")
                replays = self.pick(replay, 0, f"replays_{place}")
                read["replayed"] = self.pick(replay, 1, f"most_{place}")
            if location.ring:
                for fill in range(len(self.policies)):
                    cache = self.caches[fill, location.prefix]
                    self.operate("keep_newest", fill, place, cache, read["attention"], location.layer)
            elif not last_reader:
                waiting.append(read | {"attention": self.call("only_queries", read["attention"])})
            else:
                if waiting:
                    read, waiting = read | self._joined(place, [*waiting, read]), []
                for fill in range(len(self.policies)):
                    self._keep(place, layer, location, fill, read)
        return hidden

    def _joined(self, place: int, readers: Sequence[Mapping[str, Node]]) -> dict[str, Node]:
        """Add what joins the layers that attend to the same entries."""
        names = ("attention", "summed")
        operands = [[reader[name] for reader in readers if name in reader] for name in names]
        joined = self.call("join_readers", *operands, name=f"join_readers_{place}")
        return {
            name: self.pick(joined, index, f"{name}_of_all_{place}")
            for index, name in enumerate(names)
            if name in readers[0]
        }

    def _keep(self, place: int, layer: Layer, location: SiteLocation, fill: int, read: Mapping[str, Node]) -> None:
        """Add what scores a layer for one cache, and keeps entries of it."""
        policy, cache, attention = self.policies[fill], self.caches[fill, location.prefix], read["attention"]
        queries, text = policy.queries_read, policy.text
        if queries != self.queries:
            attention = self.call("last_queries", attention, queries, name=self.named("queries", fill, place))
        options: dict[str, Any] = {"scale": layer.site.scale}
        if layer.site.softcap is not None:
            options["softcap"] = layer.site.softcap
        options |= self._policy_inputs(place, layer.site, fill, read) | self.ranks
        of_layer, keep = (self.first, location.layer, text), dict[str, Node]()
        operands = (attention, self.start, self.first, cache, location.layer, text)
        scored = self.operate("score_layer", fill, place, *operands, **options)
        if policy.cascades:
            keep["shares"] = self.operate("cascade_step", fill, place, cache, scored, *of_layer, **self.ranks)
        elif not isinstance(policy.layers(), UniformLayers):
            keep["shares"] = self.operate("fixed_shares", fill, place, cache, scored, *of_layer)
        if not isinstance(policy.heads(), UniformHeads):
            keep["ranking"] = self.operate("rank_heads", fill, place, cache, scored, text)
        self.operate("gather_layer", fill, place, cache, attention, scored, *of_layer, **keep, **self.ranks)

    def _policy_inputs(self, place: int, site: Site, fill: int, read: Mapping[str, Node]) -> dict[str, Node]:
        """Add what a policy reads of a layer besides attention; raise UnsupportedAttentionError if it is not found."""
        policy, inputs, shared = self.policies[fill], dict[str, Node](), self.readers[site.layer] > 1
        if shared and (policy.replays_prompt or policy.decode_rule() is not None):
            raise ValueError(
                f"policy {policy.spec}: several layers of this model attend to the same keys and values, and "
                "compact=True, replays and eviction while decoding are of one layer; where the policy has the "
                "option, give evict_during_decode=False"
            )
        if "keys" in policy.inputs:
            keys = None if POSITIONS_IN_KEYS in site.node.meta else site.k
            site.needed(keys, "the keys of the model alone, and with ALiBi keys hold the position of their token too")
        if "projection" in policy.inputs:
            what = "one output projection behind the keys and values of a layer, and several layers attend to these"
            site.needed(None if shared else site.output_projection, what)
            inputs["projection"] = self.call("projection", place, name=self.named("projection", fill, place))
        if "rotation" in policy.inputs:
            rotary_frequencies(site)
            inputs["frequencies"] = self.call("frequencies", place, name=self.named("frequencies", fill, place))
        if "column_sum" in policy.inputs:
            inputs["summed"] = read["summed"]
        if "replays" in policy.inputs:
            inputs["replayed"] = self.pick(read["replayed"], fill, self.named("replayed", fill, place))
        if "token_scores" in policy.inputs:
            index = self.scoring_tokens.index(fill)
            inputs["entered"] = self.pick(read["entered"], index, self.named("token_scores", fill, place))
        return inputs

    def compact(self) -> None:
        """Add a second reading of the prompt, which fits what was kept of it."""
        self.prompt = self.call("repetition")
        hidden, replays = self.call("begin"), self.call("begin_replays")
        for place in range(len(self.layers)):
            hidden, read = self.run_layer(place, hidden, "_again", queries=0)
            operands = place, replays, hidden, read["attention"]
            replays = self.call("compact_layer", *operands, name=f"compact_layer_{place}")

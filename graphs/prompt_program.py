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
``run_layer`` (kvzip); a second reading of the prompt with ``compact_layer`` (``compact=True``). Layers with a sliding
window have ``keep_newest`` alone. A program for several policies scores each layer for all of them.

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

from kvpass.graphs.canonical import Site, SiteLocation
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
    split: SplitPrompt, locations: Mapping[int, SiteLocation], policies: Sequence[Policy], ranks: str = ""
) -> PromptProgram:
    """Return the program that reads a prompt and fills one cache for each policy.

    Args:
        split: the decoder. locations: of the entries of its layers. ranks: the spec of processes that share the heads,
            "" for one process.
    Raises:
        UnsupportedAttentionError: a policy reads something of the model that is not found in it.
        ValueError: a policy does not go with the model.
    """
    program = _Program(split.layers, locations, policies, ranks)
    hidden = program.read_prompt()
    results = program.call("results", hidden)
    if split.states:
        program.call("store_states", hidden)
    for place in range(len(policies)):
        for prefix in program.pools:
            program.operate("pack", program.suffixed("pack", place), program.caches[place, prefix])
    if any(policy.compact for policy in policies):
        program.compact()
    program.graph.output(results)
    return PromptProgram(nn.Module(), program.graph)


def rows_read(policy: Policy) -> int | None:
    """Return by how many of the last queries a policy scores; None: by all of them."""
    return None if policy.query_rows is None else max(policy.query_rows, policy.window, 1)


_RUN = ("hidden", "attention")
"""What a layer gives always."""


class _Program:
    """A program that is being written."""

    def __init__(
        self, layers: Sequence[Layer], locations: Mapping[int, SiteLocation], policies: Sequence[Policy], ranks: str
    ) -> None:
        self.graph, self.layers, self.locations, self.policies = Graph(), layers, locations, policies
        self.ranks = {"ranks": ranks} if ranks else {}
        rows = [rows_read(policy) for policy in policies]
        self.rows = None if None in rows else max(number or 0 for number in rows)
        self.scoring_tokens = [place for place, policy in enumerate(policies) if "token_scores" in policy.inputs]
        self.readers = Counter(layer.site.layer for layer in layers)  # ops that attend to one layer's entries
        self.prompt, self.start, self.first = map(self.graph.placeholder, ("prompt", "start", "first"))
        prefixes = dict.fromkeys(location.prefix for location in locations.values())
        self.pools = dict.fromkeys(location.prefix for location in locations.values() if not location.ring)
        self.caches = {
            (place, prefix): self.graph.placeholder(
                self.suffixed(f"cache_{prefix}" if len(prefixes) > 1 else "cache", place)
            )
            for place in range(len(policies))
            for prefix in prefixes
        }

    def suffixed(self, name: str, place: int) -> str:
        """Return the name of a node of one of several policies."""
        return name if len(self.policies) == 1 else f"{name}_for_{place}"

    def call(self, method: str, *operands: Any, name: str = "", **options: Any) -> Node:
        """Add a call of a method of the prompt."""
        return self.graph.create_node("call_method", method, (self.prompt, *operands), options, name or method)

    def operate(self, operator_name: str, name: str, *operands: Any, **options: Any) -> Node:
        """Add a call of an operator."""
        target = getattr(torch.ops.kvpass, operator_name).default
        return self.graph.create_node("call_function", target, operands, options, name)

    def pick(self, node: Node, place: int, name: str) -> Node:
        """Add what reads one of several results."""
        return self.graph.create_node("call_function", operator.getitem, (node, place), name=name)

    def read_prompt(self) -> Node:
        """Add the layers, and what is kept of each; return the hidden values behind the last one."""
        hidden, replays = self.call("begin"), None
        if any("replays" in policy.inputs for policy in self.policies):
            replays = self.call("begin_replays")
        waiting = list[dict[str, Node]]()  # earlier layers that attend to the same entries
        for place, layer in enumerate(self.layers):
            location = self.locations[layer.site.layer]
            last_reader = location.ring or len(waiting) + 1 == self.readers[layer.site.layer]
            options: dict[str, Any] = {"queries": 0 if location.ring else self.rows}
            if not location.ring and any("column_sum" in policy.inputs for policy in self.policies):
                options["column_sums"] = True
            if not location.ring and last_reader and self.scoring_tokens:
                options["token_scores"] = tuple(self.scoring_tokens)
            run = self.call("run_layer", place, hidden, name=f"run_layer_{place}", **options)
            hidden, attention = (self.pick(run, i, f"{name}_{place}") for i, name in enumerate(_RUN))
            read = {"attention": attention}
            if replays is not None:
                operands = place, replays, hidden, attention
                replay = self.call("replay_layer", *operands, name=f"replay_layer_{place}")
                replays = self.pick(replay, 0, f"replays_{place}")
                read["replayed"] = self.pick(replay, 1, f"most_{place}")
            if "column_sums" in options:
                read["summed"] = self.pick(run, 2, f"summed_{place}")
            if location.ring:
                for fill in range(len(self.policies)):
                    name, cache = self.suffixed(f"keep_newest_{place}", fill), self.caches[fill, location.prefix]
                    self.operate("keep_newest", name, cache, read["attention"], location.layer)
                continue
            if not last_reader:
                waiting.append(read | {"attention": self.call("only_queries", read["attention"])})
                continue
            if waiting:
                read, waiting = self._joined(place, [*waiting, read]), []
            if "token_scores" in options:
                read["entered"] = self.pick(run, 3, f"entered_{place}")
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
        rows, text = rows_read(policy), policy.text

        def named(name: str) -> str:
            return self.suffixed(f"{name}_{place}", fill)

        if rows != self.rows:
            attention = self.call("last_queries", attention, rows, name=named("queries"))
        options: dict[str, Any] = {"scale": layer.site.scale}
        if layer.site.softcap is not None:
            options["softcap"] = layer.site.softcap
        options |= self._policy_inputs(place, layer.site, fill, read) | self.ranks
        of_layer, keep = (self.first, location.layer, text), dict[str, Node]()
        operands = (attention, self.start, self.first, cache, location.layer, text)
        scored = self.operate("score_layer", named("score_layer"), *operands, **options)
        if policy.cascades:
            keep["shares"] = self.operate("cascade_step", named("cascade_step"), cache, scored, *of_layer, **self.ranks)
        elif not isinstance(policy.layers(), UniformLayers):
            keep["shares"] = self.operate("fixed_shares", named("fixed_shares"), cache, scored, *of_layer)
        if not isinstance(policy.heads(), UniformHeads):
            keep["ranking"] = self.operate("rank_heads", named("rank_heads"), cache, scored, text)
        self.operate("gather_layer", named("gather_layer"), cache, attention, scored, *of_layer, **keep, **self.ranks)

    def _policy_inputs(self, place: int, site: Site, fill: int, read: Mapping[str, Node]) -> dict[str, Node]:
        """Add what a policy reads of a layer besides attention.

        Raises:
            UnsupportedAttentionError: it is not found in the model.
        """
        policy, found, shared = self.policies[fill], dict[str, Node](), self.readers[site.layer] > 1
        if shared and (policy.replays_prompt or policy.decode_rule() is not None):
            raise ValueError(
                f"policy {policy.spec}: several layers of this model attend to the same keys and values, and "
                "compact=True, replays and eviction while decoding are of one layer; where the policy has the "
                "option, give evict_during_decode=False"
            )
        if "keys" in policy.inputs:
            site.check_keys()
        if "projection" in policy.inputs:
            what = "one output projection behind the keys and values of a layer, and several layers attend to these"
            site.needed(None if shared else site.output_projection, what)
            found["projection"] = self.call("projection", place, name=self.suffixed(f"projection_{place}", fill))
        if "rotation" in policy.inputs:
            rotary_frequencies(site)
            found["frequencies"] = self.call("frequencies", place, name=self.suffixed(f"frequencies_{place}", fill))
        if "column_sum" in policy.inputs:
            found["summed"] = read["summed"]
        if "replays" in policy.inputs:
            found["replayed"] = self.pick(read["replayed"], fill, self.suffixed(f"replayed_{place}", fill))
        if "token_scores" in policy.inputs:
            index = self.scoring_tokens.index(fill)
            found["entered"] = self.pick(read["entered"], index, self.suffixed(f"token_scores_{place}", fill))
        return found

    def compact(self) -> None:
        """Add a second reading of the prompt, which fits what was kept of it."""
        self.prompt = self.call("repetition")
        hidden, replays = self.call("begin"), self.call("begin_replays")
        for place in range(len(self.layers)):
            run = self.call("run_layer", place, hidden, name=f"run_layer_{place}_again", queries=0)
            hidden, attention = (self.pick(run, i, f"{name}_{place}_again") for i, name in enumerate(_RUN))
            operands = place, replays, hidden, attention
            replays = self.call("compact_layer", *operands, name=f"compact_layer_{place}")

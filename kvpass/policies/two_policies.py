"""Two policies: one for the prompt, and another's decode rule for what is generated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from kvpass.policies.base import Policy, name_and_options, with_options
from kvpass.policies.decode_rules import DecodeRule
from kvpass.policies.head_splits import HeadSplit
from kvpass.policies.layer_splits import LayerSplit
from kvpass.policies.observation import Observation
from kvpass.policies.replay import Replay
from kvpass.ranks import ONE_PROCESS, Ranks

PREFIX = "decode_"  # options of the policy for decoding have it before their names, decode_policy its name
_APPEND = "evict_during_decode=False, where the policy has that option"


@dataclass(frozen=True, kw_only=True)
class TwoPolicies(Policy):
    """A policy for the prompt, and the decode rule of another one, which goes on with the cache as it is then.

    Each head keeps the number of entries that it has after the prompt; the rule's ``window`` takes the place of the
    prompt's, so the rest of the prompt's window competes with the other entries. What the rule must know of the prompt
    it reads as it does of its own.

    Args:
        prompt: scores and divides the prompt; it must only append. decode: its decode rule is taken.
    """

    prompt: Policy
    decode: Policy

    def __post_init__(self) -> None:
        prompt, decode = self.prompt, self.decode
        name, inputs = f"{prompt.name}+{decode.name}", prompt.inputs | (decode.inputs - {"question"})
        vars(self).update(name=name, window=prompt.window, parity=prompt.parity, inputs=inputs)
        reason = self._refusal()
        if reason is not None:
            raise ValueError(f"policy {prompt.name!r} with decode_policy={decode.name!r}: {reason}")

    def _refusal(self) -> str | None:
        prompt, decode, rule = self.prompt, self.decode, self.decode.decode_rule()
        if not prompt.needs_budget:
            return f"{prompt.name!r} keeps the whole prompt; take a policy with a budget"
        if prompt.decode_rule() is not None:
            return f"{prompt.name!r} evicts while decoding itself: give {_APPEND}"
        if prompt.compact or decode.compact:
            return "compact=True goes with policies that only append while decoding"
        if rule is None:
            return f"{decode.name!r} only appends; take one that evicts while decoding"
        if decode.parity == "code":
            return "released rules (parity='code') are of one policy: give decode_parity='paper'"
        if rule.window > prompt.window:
            return f"decode_window={rule.window} must be at most the window of {prompt.name!r}, {prompt.window}"
        if rule.reads_all_heads:
            return f"{decode.name!r} keeps one set of entries in all heads of a layer, which the prompt's need not be"
        if "token_scores" in prompt.inputs & decode.inputs:
            return "both score tokens by what enters attention: give evict_during_decode=True to the first"
        return None

    @property
    def parts(self) -> tuple[Policy, ...]:
        return self.prompt, self.decode

    @cached_property
    def spec(self) -> str:
        options = json.loads(self.decode.spec)
        return json.dumps(json.loads(self.prompt.spec) | {PREFIX + name: value for name, value in options.items()})

    @cached_property
    def text(self) -> str:
        (name, options), (decode, others) = map(name_and_options, (self.prompt.text, self.decode.text))
        others["policy"] = decode
        return with_options(name, options | {PREFIX + option: value for option, value in others.items()})

    @property
    def query_rows(self) -> int | None:
        prompt, decode = self.prompt.query_rows, self.decode.query_rows
        return None if prompt is None or decode is None else max(prompt, decode)

    def decode_rule(self) -> DecodeRule | None:
        return self.decode.decode_rule()

    def decode_quota(self, kept: Tensor, entries: Tensor, available: Tensor, ranks: Ranks = ONE_PROCESS) -> Tensor:
        rule = self.decode.decode_rule()
        assert rule is not None
        return self.prompt.decode_quota(kept, entries, available, ranks) + (self.window - rule.window)

    def token_scores(self, x: Tensor, layer: int, num_layers: int, kv_heads: int, ranks: Ranks) -> Tensor:
        reader = self.prompt if "token_scores" in self.prompt.inputs else self.decode
        return reader.token_scores(x, layer, num_layers, kv_heads, ranks)

    # -- the prompt -------------------------------------------------------------------------------------------------

    def score(self, obs: Observation) -> Tensor:
        return self.prompt.checked_score(obs)

    def heads(self) -> HeadSplit:
        return self.prompt.heads()

    def layers(self) -> LayerSplit:
        return self.prompt.layers()

    def replays(self, ids: Tensor) -> Sequence[Replay]:
        return self.prompt.replays(ids)

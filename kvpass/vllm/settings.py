"""What the user asked for: ``additional_config={"kvpass": {"policy": "lava", "budget": 1024, "room": 512}}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpass.config import ENTRY_FORMATS, EntryFormat, one_of
from kvpass.policies import Policy, resolve, resolve_budget
from kvpass.policies.head_splits import UniformHeads
from kvpass.vllm.layout import BlockLayout

KEY = "kvpass"
"""Our entry in vLLM's ``additional_config``."""
WITHOUT = f"leave {KEY!r} out of additional_config"
"""What messages advise where kvpass cannot serve a model."""


@dataclass(frozen=True)
class Settings:
    """Settings of one engine."""

    policy: Policy
    budget: int  # entries per KV head per layer on average, window included
    room: int  # tokens that a request may append to its prompt
    documents: Mapping[str, str] = field(default_factory=dict)  # file of each, by the name that requests give
    only_documents: bool = False  # no policy is given, so each request must name a document
    entry_format: EntryFormat = "model"  # of blocks and documents

    @classmethod
    def read(cls, additional: object) -> Settings | None:
        """Return the settings in vLLM's ``additional_config``; None if it has none for kvpass.

        Raises:
            ValueError: a value is missing, of a wrong kind or out of range, or the policy cannot be used in vLLM.
        """
        given = additional.get(KEY) if isinstance(additional, Mapping) else None
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise ValueError(
                f'kvpass={given!r}: must be a dict such as {{"policy": "lava", "budget": 1024, "room": 512}}'
            )
        options: dict[str, Any] = dict(given)
        documents = _documents(options.pop("documents", []))
        entry_format = one_of("entries", options.pop("entries", "model"), ENTRY_FORMATS)
        only_documents = bool(documents) and options.keys() == {"room"}
        if only_documents:
            options |= {"policy": "knorm", "budget": 1}  # the least of a block that no request fills
        missing = [name for name in ("policy", "budget", "room") if name not in options]
        if missing:
            raise ValueError(
                f"kvpass: {missing[0]!r} is missing in additional_config; policy, budget and room are needed, or room "
                "and documents"
            )
        name, budget, room = (options.pop(name) for name in ("policy", "budget", "room"))
        policy = resolve(name, **options)
        if not policy.needs_budget:
            raise ValueError(f"policy={policy.name!r} keeps everything: {WITHOUT}")
        if policy.decode_rule() is not None:
            append = '"evict_during_decode": false, or ' if hasattr(policy, "evict_during_decode") else ""
            raise ValueError(
                f"policy={policy.name!r} evicts while decoding, so a preempted request could not get its cache back "
                f'from its prompt: give {append}another policy, such as "policy": "lava"'
            )
        if type(budget) is not int:
            raise ValueError(
                f"budget={budget!r}: in vLLM it must be a number of entries, so that the largest block is known"
            )
        resolve_budget(policy, budget)
        if type(room) is not int or room < 1:
            raise ValueError(f"room={room!r}: must be a positive number of tokens")
        return cls(policy, budget, room, documents, only_documents, entry_format)

    @property
    def entries(self) -> int:
        """Evictable entries per KV head per layer."""
        return self.budget - self.policy.window

    @property
    def queries(self) -> int | None:
        """How many of the last tokens of a prompt the policy reads the queries of; None: of all of them."""
        return None if "column_sum" in self.policy.inputs else self.policy.queries_read

    def layout(self, layers: int, kv_heads: int, head_dim: int, processes: int = 1) -> BlockLayout:
        """Return the layout of the largest block of a request.

        Args:
            kv_heads: of this process. processes: that share the heads. Where a policy compares heads, all entries may
                be of one process; else those of a layer are divided alike, but for less than one per head.
        """
        pool = self.policy.capacity(self.entries, layers, kv_heads * processes)
        if processes > 1 and isinstance(self.policy.heads(), UniformHeads):
            pool = pool // processes + layers * kv_heads
        window = self.policy.window
        return BlockLayout(layers, kv_heads, head_dim, pool, max(window, 1) + self.room, self.entry_format, window)


def _documents(given: object) -> dict[str, str]:
    """Return the file of each document by its name; raise ValueError for what is no list of ``name=file``."""
    if not isinstance(given, list) or not all(type(each) is str and each.count("=") for each in given):
        raise ValueError(f'documents={given!r}: must be a list such as ["manual=manual.kv"], of name=file')
    pairs = [each.split("=", 1) for each in given]
    names = [name for name, _ in pairs]
    for name, file in pairs:
        if not name or not file or names.count(name) > 1:
            raise ValueError(f"documents={given!r}: each needs a file and a name of its own")
    return dict(pairs)

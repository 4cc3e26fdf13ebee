"""Documents that were compressed before: their entries are held once, for all requests that name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvpass.cache.cache_file import CacheMetadata, check_tensors, read_saved
from kvpass.cache.fingerprint import ModelFingerprint
from kvpass.cache.shared_heads import divided
from kvpass.config import EntryFormat
from kvpass.errors import CacheFileError
from kvpass.policies import from_spec
from kvpass.ranks import Ranks
from kvpass.vllm.settings import Settings


class SavedDocument(NamedTuple):
    """What a file of ``cache.save`` holds."""

    metadata: CacheMetadata
    tensors: dict[str, Tensor]

    @property
    def ids(self) -> list[int]:
        """Token ids, without padding."""
        return self.tensors["ids"][0, int(self.tensors["start"]) :].tolist()

    def of_rank(self, ranks: Ranks) -> dict[str, Tensor]:
        """Return the buffers of the KV heads of this process, by their names in a cache."""
        tensors = self.tensors
        if ranks.several:
            tensors, _ = divided(tensors, self.metadata.layout, ranks)
        return {name.removeprefix("store0_"): tensor for name, tensor in tensors.items()}

    @staticmethod
    def segments(held: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield keys and values of each layer and KV head, each ``[entries, D]``: of pool and tail; and scales."""
        kv_heads, first = held["tail_k"].shape[2], int(held["tail_start"])
        for segment, (begin, end) in enumerate(pairwise(held["offsets"][0].tolist())):
            tail = (segment // kv_heads, 0, segment % kv_heads, slice(first, None))
            yield {
                f"pool_{x}": torch.cat([held[f"pool_{x}"][0, begin:end], held[f"tail_{x}"][tail]])
                for x in ("k", "v", "k_scale", "v_scale")
                if f"pool_{x}" in held
            }


class Documents(NamedTuple):
    """Entries of all documents of an engine, of the KV heads of this process.

    Attributes:
        pools: keys and values, ``[1, E, D]``, and if they are codes their scales, ``[1, E]``; by their names in
            :data:`kvpass.operands.BUFFERS`. offsets: by name of the document, bounds of its segments, int32
            ``[P]``. means: of codes, those of the keys of each document, fp32 ``[L, K, D]``.
    """

    pools: dict[str, Tensor]
    offsets: dict[str, Tensor]
    means: dict[str, Tensor]

    @classmethod
    def of(cls, saved: Mapping[str, SavedDocument], ranks: Ranks, device: torch.device) -> Documents:
        segments, offsets, means, end = list[dict[str, Tensor]](), dict[str, Tensor](), dict[str, Tensor](), 0
        for name, document in saved.items():
            held = document.of_rank(ranks)
            own = list(document.segments(held))
            counts = torch.tensor([end, *(len(each["pool_k"]) for each in own)], device="cpu")
            offsets[name], end = counts.cumsum(0).int().to(device), int(counts.sum())
            segments += own
            if "key_mean" in held:
                means[name] = held["key_mean"][:, 0].to(device)
        pools = {name: torch.cat([each[name] for each in segments])[None].to(device) for name in segments[0]}
        return cls(pools, offsets, means)


def load(config: Any, settings: Settings, ranks: Ranks) -> Documents | None:
    """Return the documents of an engine for one of its processes; None without any.

    The first process compares them with the model, and also a policy that is made for one model. The weights of vLLM's
    own model are divided and renamed, so transformers loads them for the comparison.

    Raises:
        ValueError: as :func:`read`, or a document or the policy is of another model.
    """
    model = config.model_config
    saved = read(settings, model.max_model_len)
    of_one_model = any(part.made_for() is not None for part in settings.policy.parts)
    if ranks.rank == 0 and (saved or of_one_model):
        weights = AutoModelForCausalLM.from_pretrained(
            model.model, dtype=model.dtype, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        fingerprint = ModelFingerprint(weights)
        fingerprint.check_policy(settings.policy)
        for name, document in saved.items():
            try:
                fingerprint.check(document.metadata.model)
            except ValueError as error:
                raise ValueError(f"document {name!r}: {error}") from error
    return Documents.of(saved, ranks, torch.device(config.device_config.device)) if saved else None


def read(settings: Settings, max_model_len: int) -> dict[str, SavedDocument]:
    """Read the files of an engine's documents; raise ValueError for one that the engine cannot read or serve."""
    found = {}
    for name, path in settings.documents.items():
        try:
            found[name] = _read(Path(path), max_model_len, settings.entry_format)
        except (ValueError, OSError) as error:
            raise ValueError(f"document {name!r}: {error}") from error
    return found


def _read(path: Path, max_model_len: int, entry_format: EntryFormat) -> SavedDocument:
    metadata, tensors = read_saved(path)
    try:
        policy = from_spec(metadata.policy)
        check_tensors(metadata, policy, tensors)
    except ValueError as error:
        raise CacheFileError(path, f"holds no cache: {error}") from error
    texts, found = len(metadata.entries), metadata.entry_format
    faults = {
        f"holds {texts} texts: compress each alone": texts != 1,
        f"has entries={found!r}, but this engine {entry_format!r}: give both the same": found != entry_format,
        f"has policy {policy.name!r}, which evicts while decoding: compress with one that does not": (
            policy.decode_rule() is not None
        ),
        "has forgotten tokens, whose places the engine does not know: read the text without them": bool(
            metadata.forgotten
        ),
        "has no token ids (an older kvpass made it, or from embeddings): compress the text's ids": "ids" not in tensors,
    }
    for fault, holds in faults.items():
        if holds:
            raise CacheFileError(path, fault)
    document = SavedDocument(metadata, tensors)
    tokens = len(document.ids)
    if tokens + 2 > max_model_len:
        needed = f"pass a --max-model-len above {max_model_len}, for the question and the answer too"
        raise CacheFileError(path, f"has {tokens} tokens: {needed}")
    return document

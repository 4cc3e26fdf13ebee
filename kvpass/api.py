"""``kvpass.compile``, ``kvpass.chosen`` and ``kvpass.load_cache``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from kvpass import block_sparse
from kvpass.adapt.changed_class import changed_class
from kvpass.adapt.copied import adapted_copy
from kvpass.adapt.tensor_parallel import ranks_of
from kvpass.adapt.wrappers import bind_to_copy, check_weights
from kvpass.block_sparse import BlockSparse, PrefillName
from kvpass.cache.cache import CompressedCache
from kvpass.cache.cache_file import CacheMetadata, read_saved
from kvpass.cache.fingerprint import ModelFingerprint, weights_digest
from kvpass.compiler.backend import PhaseCompiler
from kvpass.compiler.blocks import check_block
from kvpass.compiler.capture import CaptureCache
from kvpass.compiler.parts import REGIONS, Regions
from kvpass.config import COMPILERS, Block, BudgetLike, Compiler, EntryFormat, one_of
from kvpass.errors import CacheFileError, CacheMismatchError
from kvpass.frontends.attention import attend_in_captures
from kvpass.frontends.check_model import check_model
from kvpass.frontends.runtime import Runtime
from kvpass.frontends.transformers import CompressedModel
from kvpass.policies import Policy, PolicyName, from_spec
from kvpass.policies.conditions import Recompress, read_conditions
from kvpass.ranks import digest, run_on_all_ranks


def compile(
    model: PreTrainedModel,
    *,
    policy: PolicyName | Policy = "lava",
    budget: BudgetLike = None,
    window: int | None = None,
    backend: Compiler = "inductor",
    recompress: Recompress = "never",
    cuda_graphs: bool = True,
    compile_regions: Regions = "auto",
    prefill_block: Block = "auto",
    prefill: PrefillName | BlockSparse = "full",
    entries: EntryFormat = "model",
    **policy_options: Any,
) -> CompressedModel:
    """Return a copy of a decoder that compresses its KV cache after every prompt.

    Parameters and buffers are shared with ``model``, which does not change; modules and config are new objects. The
    copy has the model's own class, so ``generate``, pipelines and plain calls work as before. Graphs are compiled on
    first use: one per phase for one row, and one for any larger number of rows. ``model.set_policy`` and
    ``model.set_budget`` change policy and budget. Where several processes share the weights of the model, all must
    make the same calls with the same arguments; what one refuses, all refuse.

    Args:
        model: a causal language model of transformers, in eval mode, with all weights on one device.
        policy: name of a registered policy, or an instance such as ``kvpass.policies.Lava(window=16)``, whose options
            type checkers know. With a policy of yours, or a name computed at run time, they want an instance.
        budget: entries kept per KV head per layer on average, window included: an int; a float in (0, 1], the fraction
            of each row's prompt; or bytes of kept entries per sequence such as ``"512MiB"``. Required by every policy
            but ``"full"``.
        window: last prompt tokens, always kept; their queries score the others. None: the policy's default (mostly 32).
        backend: ``"inductor"``, or ``"eager"`` to run the same rewritten graph without Inductor.
        recompress: when to compress a filled cache to its budget again, after a call that appends several tokens. The
            queries of that call score the entries, and the newest ``window`` tokens stay. ``"every_turn"``: after
            every such call that leaves a row above its budget; ``"when_full"``: only above twice the budget;
            ``"never"``: only the first prompt is compressed. A fraction always refers to the first prompt. Policies
            that evict while decoding keep their size and need no recompression.
        cuda_graphs: on CUDA, capture decode steps once per cache and replay them. A custom decode rule must then read
            no value on the host.
        compile_regions: True: compile each distinct part of the decoder between two attention layers once and call it
            for every layer, so that compilation does not grow with depth. False: what continues a cache as one graph;
            prompts always run in parts. ``"auto"``: parts, but decode steps of models of up to 8 layers on the CPU
            whole.
        prefill_block: tokens of a block, at least 2. Each layer runs over a prompt in such blocks, so that their
            activations and not those of the whole prompt take memory; what is kept does not depend on it. ``"auto"``:
            on the CPU 1024 tokens over all rows of a batch, on CUDA 8192, at least 128 of each row.
        prefill: how much of a prompt's attention is computed: ``"full"``; or blocks that are selected from it, by
            ``"xattention"`` or ``"minference"``, or with options by ``kvpass.block_sparse.XAttention(threshold=0.95)``
            or ``MInference``. Layers with a sliding window or latents attend to everything, and so do the last queries.
        entries: how entries are held: ``"model"``, in the dtype of the model; or as codes with one fp32 scale for
            the key and one for the value of each entry: ``"int8"`` or ``"fp8"`` (e4m3) in 8 bits, ``"rot4"``,
            ``"rot3"`` or ``"rot2"`` in 4, 3 or 2 bits of rotated vectors (TurboQuant, arXiv:2504.19874). Attention
            multiplies the scales in as it reads. A budget in bytes counts codes and scales. The tokens of an answer are
            held so too. Layers with a sliding window stay in the dtype of the model.
        policy_options: options of the policy, see ``kvpass.POLICIES``. CAKE's ``tau1`` and ``tau2`` are looked up by
            the model's name and budget when both are left out; give them where none are published.
            ``decode_policy``: a second policy, whose rule evicts while decoding after a prompt that this one cuts;
            options that begin with ``decode_`` are its own.
    Raises:
        ValueError: an argument is out of range, or the model cannot be compiled: already compiled, in training mode,
            an encoder-decoder, no causal language model.
        UnsupportedAttentionError: an attention layer of the model is unsupported; mostly raised on first use.
    """
    ranks = ranks_of(model)

    def make() -> CompressedModel:
        if isinstance(model, CompressedModel):
            raise ValueError(f"{type(model).__name__} is already compiled by kvpass; compile the original model")
        check_model(model)
        compiler, regions = one_of("backend", backend, COMPILERS), one_of("compile_regions", compile_regions, REGIONS)
        block, sparse = check_block(prefill_block), block_sparse.resolve(prefill)
        check_weights(model, compiler)
        conditions = read_conditions(
            *(policy, budget, recompress),
            window=window,
            options=policy_options,
            model_name=str(model.config.name_or_path),
            entries=entries,
        )
        uses_our_attention = type(model)._can_set_attn_implementation()
        compiled, adapted = adapted_copy(model, ranks, uses_our_attention=uses_our_attention)
        compiled.__class__ = changed_class(type(model), CompressedModel)
        bind_to_copy(compiled, model)
        if uses_our_attention:
            attend_in_captures(compiled)
        recurrent, attention = adapted.recurrent, adapted.attention
        phases = PhaseCompiler(
            compiler=compiler,
            layers=model.config.get_text_config().num_hidden_layers if attention is None else len(attention),
            regions=regions,
            cuda_graphs=cuda_graphs,
            prefill=sparse,
            ranks=ranks,
        )
        identity = ModelFingerprint(compiled, adapted.divided)
        compiled._kvpass = runtime = Runtime(
            conditions=conditions,
            captures=CaptureCache(phases, identity, None if recurrent is None else recurrent.arguments),
            identity=identity,
            adapted=adapted,
            block=block,
        )
        runtime.check_policy(conditions.policy)
        return compiled

    return run_on_all_ranks(ranks, "kvpass.compile", make, lambda made: made._kvpass.describe())


class _Choice(msgspec.Struct):
    """What a file of ``kvpass choose`` says, besides what was measured."""

    policy: str
    budget: int | float | str | None
    entries: str
    weights: str


def chosen(path: str | Path, model: PreTrainedModel) -> dict[str, Any]:
    """Return policy, budget and entries that ``kvpass choose`` wrote to ``path``, as arguments of :func:`compile`.

    ``kvpass.compile(model, **kvpass.chosen("choice.json", model))``. A policy of your own must be registered. Where
    several processes share the weights of the model, all must call it.

    Raises:
        ValueError: it was chosen for other weights, has an unknown policy, or is no such file. OSError: cannot be read.
    """
    try:
        choice = msgspec.json.decode(Path(path).read_bytes(), type=_Choice)
    except msgspec.DecodeError as error:
        raise ValueError(f"{str(path)!r} is no file of 'kvpass choose': {error}") from None
    divided = {name: weight for name, weight in model.named_parameters() if isinstance(weight, DTensor)}
    if choice.weights != weights_digest(model, divided, rounded=True):
        raise ValueError(f"{str(path)!r} was chosen for a model with other weights: run 'kvpass choose' for this one")
    return {"policy": from_spec(choice.policy), "budget": choice.budget, "entries": choice.entries}


def load_cache(path: str | Path, model: CompressedModel) -> CompressedCache:
    """Load a cache that :meth:`CompressedCache.save` wrote to ``path``, to continue with ``model``.

    Entries are bit for bit those that were saved; spare capacity was not saved. Where several processes share the heads
    of the model, all must call it; each takes its heads from the file.

    Args:
        model: what ``kvpass.compile`` returned, with the policy and budget of the cache.
    Raises:
        CacheMismatchError: the cache is of another model, dtype, policy or budget; the message says which.
        CacheFileError: the file is damaged, truncated, no cache of kvpass, or written by a newer one.
        ValueError: the model was not compiled by kvpass.
        OSError: the file cannot be read.
    """
    if not isinstance(model, CompressedModel):
        raise ValueError(f"model of type {type(model).__name__}: must be what kvpass.compile returned")

    ranks = model._kvpass.captures.compiler.ranks
    found = run_on_all_ranks(
        ranks, "kvpass.load_cache", lambda: read_saved(path), lambda found: {"file": _summary(*found)}
    )
    return restore_cache(path, *found, model)


def _summary(metadata: CacheMetadata, tensors: Mapping[str, Tensor]) -> str:
    """Text by which processes see that they have read the same file: of it all but keys, values and statistics."""
    tables = [digest(x) for _, x in sorted(tensors.items()) if not x.is_floating_point()]
    return f"{metadata.columns} tokens, {metadata.policy}, {metadata.budget}, {', '.join(tables)}"


@torch.inference_mode(False)
def restore_cache(
    path: str | Path, metadata: CacheMetadata, tensors: Mapping[str, Tensor], model: Any
) -> CompressedCache:
    """Like :func:`load_cache`, for a caller that has read the file and compiled the model."""
    runtime, conditions, heads = model._kvpass, model._kvpass.conditions, model._kvpass.adapted.heads
    runtime.identity.check(metadata.model)
    if metadata.policy != conditions.policy.spec:
        raise CacheMismatchError(
            f"the cache has policy {metadata.policy}, the model {conditions.policy.spec}: set it with model.set_policy"
        )
    groups = (*metadata.layout.pools, *metadata.layout.rings)
    numbers = sum(g.geometry.layers * g.geometry.kv_heads * (g.geometry.key_dim + g.geometry.value_dim) for g in groups)
    # at least as many as the model computes for one token: the next call would take memory for those of the file
    most = heads.size * sum(max(x.shape, default=0) for x in (*model.parameters(), *model.buffers()))
    if numbers > most:
        raise CacheMismatchError(f"the cache is of another model: keys and values of {numbers} numbers, here {most}")
    cache = CompressedCache(conditions.policy, metadata.budget, runtime.identity, heads, metadata.entry_format)
    try:
        cache.state = cache.state.restored(metadata, tensors)
    except ValueError as error:
        raise CacheFileError(path, f"holds no cache: {error}") from error
    cache.reusable, cache.own_budget = metadata.reusable, metadata.own_budget
    runtime.check_cache(cache, conditions)
    cache = cache.to(model.device)
    cache.state.reuse = runtime.captures.compiler.memory(cache.device)
    return cache

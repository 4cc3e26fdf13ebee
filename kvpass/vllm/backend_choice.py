"""``Backend``: ours if the engine that is being built is configured for kvpass, else vLLM's own."""

from __future__ import annotations


def __getattr__(name: str) -> type:
    if name != "Backend":
        raise AttributeError(name)
    from vllm.config import get_current_vllm_config

    from kvpass.vllm import versions
    from kvpass.vllm.refusals import checked_settings

    config = get_current_vllm_config()
    settings = checked_settings(config)
    if settings is None and versions.is_cpu():
        return versions.stock_backend()
    if settings is None:
        raise ValueError(
            "the attention backend CUSTOM is kvpass, which is not configured: give additional_config, or leave "
            "--attention-backend out"
        )
    from kvpass.vllm.backend import bound_backend

    return bound_backend(config)

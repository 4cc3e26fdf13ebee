"""``Backend``: ours if the engine that is being built is configured for kvpass, else vLLM's own."""

from __future__ import annotations


def __getattr__(name: str) -> type:
    if name != "Backend":
        raise AttributeError(name)
    from vllm.config import get_current_vllm_config

    from kvpass.vllm import versions
    from kvpass.vllm.refusals import check_config
    from kvpass.vllm.settings import Settings

    config = get_current_vllm_config()
    settings = Settings.read(config.additional_config)
    if settings is None:
        return versions.stock_backend()
    versions.check_version(versions.installed())
    check_config(config, settings)
    from kvpass.vllm.backend import bound_backend

    return bound_backend(config, settings)

"""A ``torch.compile`` backend that compresses the KV cache of decoder-only language models.

``model = kvpass.compile(model, policy="lava", budget=1024)``: the same model prefills a long prompt, keeps only the KV
entries worth keeping, and decodes against a small static cache in compiled code.

Names are imported when they are first used, so that ``import kvpass`` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvpass.version import __version__

if TYPE_CHECKING:
    from kvpass.api import chosen, compile, load_cache
    from kvpass.cache.cache import CompressedCache
    from kvpass.cache.plan import Plan, plan
    from kvpass.calibration.fit import Calibration, calibrate
    from kvpass.chat import Chat, Document
    from kvpass.config import Budget
    from kvpass.errors import CacheFileError, CacheMismatchError, UnsupportedAttentionError
    from kvpass.frontends.attention import attention
    from kvpass.frontends.generation import generate
    from kvpass.frontends.raw import session
    from kvpass.policies import POLICIES, Policy, register_policy
    from kvpass.policies.loss import OutputLoss, attention_output_loss
    from kvpass.report import Report

_HOMES = {
    "kvpass.api": ("chosen", "compile", "load_cache"),
    "kvpass.cache.cache": ("CompressedCache",),
    "kvpass.cache.plan": ("Plan", "plan"),
    "kvpass.calibration.fit": ("Calibration", "calibrate"),
    "kvpass.chat": ("Chat", "Document"),
    "kvpass.config": ("Budget",),
    "kvpass.errors": ("CacheFileError", "CacheMismatchError", "UnsupportedAttentionError"),
    "kvpass.frontends.attention": ("attention",),
    "kvpass.frontends.generation": ("generate",),
    "kvpass.frontends.raw": ("session",),
    "kvpass.policies": ("POLICIES", "Policy", "register_policy"),
    "kvpass.policies.loss": ("OutputLoss", "attention_output_loss"),
    "kvpass.report": ("Report",),
}

__all__ = [
    "POLICIES", "Budget", "CacheFileError", "CacheMismatchError", "Calibration", "Chat", "CompressedCache", "Document",
    "OutputLoss", "Plan", "Policy", "Report", "UnsupportedAttentionError", "__version__", "attention",
    "attention_output_loss", "calibrate", "chosen", "compile", "generate", "load_cache", "plan", "register_policy",
    "session",
]  # fmt: skip

if not TYPE_CHECKING:  # a checker that saw it would accept any name

    def __getattr__(name):
        for module, names in _HOMES.items():
            if name in names:
                value = getattr(import_module(module), name)
                globals()[name] = value
                return value
        raise AttributeError(f"module 'kvpass' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names; every other module and name of the package is private and may change."""
    return __all__

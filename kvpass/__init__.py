"""A ``torch.compile`` backend that compresses the KV cache of decoder-only models.

``model = kvpass.compile(model, policy="lava", budget=1024)``: the same model prefills a long prompt, keeps only the KV
entries worth keeping, and decodes against a small static cache in compiled code.
"""

from kvpass.api import compile, load_cache
from kvpass.cache.cache import CompressedCache
from kvpass.config import Budget
from kvpass.errors import CacheFileError, CacheMismatchError, UnsupportedAttentionError
from kvpass.frontends.attention import attention
from kvpass.frontends.generation import generate
from kvpass.frontends.raw import session
from kvpass.policies import POLICIES, Policy, register_policy
from kvpass.policies.loss import OutputLoss, attention_output_loss
from kvpass.policies.plan import Plan, plan
from kvpass.report import Report
from kvpass.version import __version__

__all__ = [
    "POLICIES",
    "Budget",
    "CacheFileError",
    "CacheMismatchError",
    "CompressedCache",
    "OutputLoss",
    "Plan",
    "Policy",
    "Report",
    "UnsupportedAttentionError",
    "__version__",
    "attention",
    "attention_output_loss",
    "compile",
    "generate",
    "load_cache",
    "plan",
    "register_policy",
    "session",
]

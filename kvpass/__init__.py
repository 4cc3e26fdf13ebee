"""A ``torch.compile`` backend that makes any decoder forget well.

``model = kvpass.compile(model, policy="lava", budget=1024)``: the same model prefills a long prompt, keeps only the KV
entries worth keeping, and decodes against a small static cache in compiled code.
"""

from kvpass.api import compile
from kvpass.cache import CompressedCache
from kvpass.config import Budget
from kvpass.errors import CacheMismatchError, UnsupportedAttentionError
from kvpass.loss import OutputLoss, attention_output_loss
from kvpass.plan import Plan, plan
from kvpass.policies import POLICIES, Policy, register_policy
from kvpass.raw import session
from kvpass.report import Report

__version__ = "0.1.0"

__all__ = [
    "POLICIES",
    "Budget",
    "CacheMismatchError",
    "CompressedCache",
    "OutputLoss",
    "Plan",
    "Policy",
    "Report",
    "UnsupportedAttentionError",
    "attention_output_loss",
    "compile",
    "plan",
    "register_policy",
    "session",
]

"""Cache-eviction policies, one file per paper, and their registry."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import pkgutil
import sys
from collections.abc import Set
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar, get_args

from kvpass.config import Budget, BudgetLike
from kvpass.policies.ada_kv import AdaPyramidKV, AdaSnapKV
from kvpass.policies.base import Input, Policy, name_and_options
from kvpass.policies.baselines import Full, Random
from kvpass.policies.cake import Cake
from kvpass.policies.chunkkv import ChunkKV
from kvpass.policies.compactor import Compactor
from kvpass.policies.criticalkv import CriticalKV
from kvpass.policies.defensivekv import DefensiveKV, LayerDefensiveKV
from kvpass.policies.dropkv import DropKV
from kvpass.policies.duo_attention import DuoAttention
from kvpass.policies.expected_attention import ExpectedAttention
from kvpass.policies.h2o import H2O
from kvpass.policies.keydiff import KeyDiff
from kvpass.policies.knorm import Knorm
from kvpass.policies.kvzap import KVzap
from kvpass.policies.kvzip import KVzip, KVzipPlus
from kvpass.policies.lagkv import LagKV
from kvpass.policies.lava import Lava, LavaNoHead, LavaPyramid, LavaUniform
from kvpass.policies.pyramidkv import PyramidKV
from kvpass.policies.r_kv import RKV
from kvpass.policies.snapkv import SnapKV
from kvpass.policies.streaming_llm import StreamingLLM
from kvpass.policies.tova import Tova
from kvpass.policies.triattention import TriAttention
from kvpass.policies.two_policies import PREFIX, TwoPolicies
from kvpass.policies.vatp import Vatp

__all__ = ["POLICIES", "Policy", "from_spec", "register_policy", "resolve", "resolve_budget"]

POLICIES: dict[str, type[Policy]] = {}
"""The registered policies by name."""

_BESIDE_OPTIONS = ("policy", "budget", "backend", "recompress", "cuda_graphs", "prefill")
"""Arguments of ``kvpass.compile`` that users may mistype among a policy's options."""

P = TypeVar("P", bound=type[Policy])

PolicyName = Literal[
    "ada_pyramidkv", "ada_snapkv", "cake", "chunkkv", "compactor", "criticalkv", "defensivekv", "dropkv",
    "duo_attention", "expected_attention", "full", "h2o", "keydiff", "knorm", "kvzap", "kvzip", "kvzip_plus",
    "lagkv", "lava", "lava_nohead", "lava_pyramid", "lava_uniform", "layer_defensivekv", "pyramidkv", "r_kv",
    "random", "snapkv", "streaming_llm", "tova", "triattention", "vatp",
]  # fmt: skip
"""Policies of kvpass; of your own, give an instance: a type checker does not know its name.

It knows the options of an instance too: ``kvpass.policies.Lava(window=16)``.
"""


def register_policy(policy: P) -> P:
    """Register a policy class under its ``name``; usable as a decorator.

    Raises:
        ValueError: not a frozen dataclass derived from Policy, no name, another class has the name, it defines what
            follows from its splits, or its inputs are unknown.
    """
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ValueError(f"policy={policy!r}: must be a class derived from kvpass.Policy")
    name = getattr(policy, "name", None)
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"name={name!r} of {policy.__qualname__}: must be an identifier such as 'key_variance'")
    if "__dataclass_fields__" not in vars(policy) or not policy.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise ValueError(f"{policy.__qualname__}: must be decorated with @dataclass(frozen=True, kw_only=True)")
    for method in ("rank", "layer_budgets", "layer_weight", "capacity"):
        if getattr(policy, method) is not getattr(Policy, method):
            raise ValueError(
                f"{policy.__qualname__}.{method}(): follows from heads() and layers(); define one of these"
            )
    inputs, choices = policy.inputs, get_args(Input)
    if not isinstance(inputs, Set) or not inputs <= {*choices}:
        raise ValueError(f"{policy.__qualname__}.inputs={inputs!r}: must be a set, each of {', '.join(choices)}")
    other = POLICIES.get(name)
    if other is not None and other.__qualname__ != policy.__qualname__:
        raise ValueError(f"name={name!r} of {policy.__qualname__}: already the policy {other.__qualname__}")
    POLICIES[name] = policy
    from_spec.cache_clear()
    return policy


def resolve(policy: str | Policy, **options: object) -> Policy:
    """Return the policy with this name and options, or a given policy with these options changed.

    With the option ``decode_policy``, a name or a policy, its decode rule takes over after the prompt; options that
    begin with ``decode_`` are its own.

    Raises:
        ValueError: unknown name (the message gives the nearest), unknown option (the message gives the nearest and the
            policy's own), an option out of range, or two policies that do not go together.
    """
    if isinstance(policy, TwoPolicies):
        return resolve(policy.prompt, **{PREFIX + "policy": policy.decode, **options})
    decode = _decode_options(options)
    if decode:
        then: Any = decode.pop("policy")
        return TwoPolicies(prompt=resolve(policy, **options), decode=resolve(then, **decode))
    if not isinstance(policy, str | Policy):
        raise ValueError(f"policy={policy!r}: must be a kvpass.Policy or one of {', '.join(sorted(POLICIES))}")
    kind = policy_class(policy) if isinstance(policy, str) else type(policy)
    _check_options(kind, options)
    given: Any = kind.read(options)
    return kind(**given) if isinstance(policy, str) else dataclasses.replace(policy, **given)


def _decode_options(options: dict[str, object]) -> dict[str, object]:
    """Take the options of the policy for decoding, whose name is ``policy``, out of others; ValueError: it has none."""
    decode = {name.removeprefix(PREFIX): options.pop(name) for name in [*options] if name.startswith(PREFIX)}
    if decode.get("policy") is not None:
        return decode
    if decode.keys() - {"policy"}:
        raise ValueError(f"{PREFIX}{min(decode.keys() - {'policy'})} is an option of decode_policy, which is not given")
    return {}


def policy_class(name: str) -> type[Policy]:
    """Return the class of a policy by its name, or import it: ``my.module:KeyDiff``, also from the working directory.

    Raises:
        ValueError: unknown name (the message gives the nearest), or what is imported is no policy.
    """
    if ":" not in name:
        return _registered(name)
    here = os.getcwd()
    sys.path.append(here)
    try:
        policy = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"policy={name!r}: cannot be imported: {error}") from error
    finally:
        sys.path.remove(here)
    return register_policy(policy)


def installed_policies() -> dict[str, type[Policy]]:
    """Return ``POLICIES``, with those of installed packages (entry-point group ``kvpass.policies``) registered too."""
    for point in entry_points(group="kvpass.policies"):
        register_policy(point.load())
    return POLICIES


def _registered(name: object) -> type[Policy]:
    if isinstance(name, str) and (name in POLICIES or name in installed_policies()):
        return POLICIES[name]
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), POLICIES, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"policy={name!r}: did you mean {near!r}? Must be one of {', '.join(sorted(POLICIES))}, or a class, "
        "such as 'my.module:KeyDiff'"
    )


def check_registered(policy: Policy) -> Policy:
    """Return the policy if its class is registered, else raise ValueError: operators receive its spec or its text."""
    for part in map(type, policy.parts):
        if POLICIES.get(getattr(part, "name", "")) is not part:
            raise ValueError(f"policy={policy!r}: {part.__qualname__} is not registered: see kvpass.register_policy")
    return policy


@functools.lru_cache(maxsize=256)
def from_spec(spec: str) -> Policy:
    """Return the policy of a :attr:`Policy.spec` or :attr:`Policy.text`; ValueError: no registered policy has it.

    It may be of an untrusted file, so nothing is imported.
    """
    name, options = name_and_options(spec)
    decode = _decode_options(options)
    prompt = _with_options(name, options)
    return TwoPolicies(prompt=prompt, decode=_with_options(decode.pop("policy"), decode)) if decode else prompt


def _with_options(name: object, options: dict[str, Any]) -> Policy:
    policy = _registered(name)
    _check_options(policy, options)
    return policy(**options)


def _check_options(policy: type[Policy], options: dict[str, object]) -> None:
    names = [field.name for field in dataclasses.fields(policy)]
    for name, value in options.items():
        if name not in names:
            near = [] if name in _BESIDE_OPTIONS else difflib.get_close_matches(name, [*names, *_BESIDE_OPTIONS], n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"{name}={value!r}: not an option of policy {policy.name!r}; {meant}its options are {', '.join(names)}"
            )


for _policy in (
    Full, Lava, LavaUniform, LavaPyramid, LavaNoHead, SnapKV, PyramidKV, AdaSnapKV, AdaPyramidKV, Cake, ChunkKV,
    Compactor, CriticalKV, DefensiveKV, LayerDefensiveKV, DropKV, DuoAttention, ExpectedAttention, H2O, Tova,
    StreamingLLM, Vatp, KeyDiff, LagKV, Knorm, KVzap, KVzip, KVzipPlus, RKV, TriAttention, Random,
):  # fmt: skip
    register_policy(_policy)


def resolve_budget(policy: Policy, budget: BudgetLike) -> Budget | None:
    """Parse the budget and check it against the policy.

    Raises:
        ValueError: unreadable, below window + 1, missing, or less than everything for a policy that has none.
    """
    parsed = parse_budget(policy, budget)
    if parsed is not None and parsed.kind == "entries" and parsed.value < policy.window + 1:
        raise ValueError(f"budget={budget}: must be at least window + 1 = {policy.window + 1}")
    return parsed


def parse_budget(policy: Policy, budget: BudgetLike) -> Budget | None:
    """Parse the budget as :func:`resolve_budget`, but do not check it against the window."""
    parsed = None if budget is None else Budget.parse(budget)
    if policy.needs_budget and parsed is None:
        raise ValueError(f"budget=None: policy {policy.name!r} needs one, for instance budget=1024")
    if policy.needs_budget or parsed is None:
        return parsed
    if parsed != Budget.parse(1.0):
        raise ValueError(
            f"budget={budget!r}: policy {policy.name!r} keeps everything and takes no budget: give None or 1.0"
        )
    return None

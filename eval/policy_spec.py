"""Policies as one types them: ``snapkv`` or ``cake:tau1=1.6,tau2=0.4``, several with ``{8,32}``; prefills likewise."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from kvpass.block_sparse import BlockSparse, PrefillName
from kvpass.block_sparse import resolve as resolve_prefill
from kvpass.config import ENTRY_FORMATS, EntryFormat, one_of
from kvpass.eval.options import names
from kvpass.policies import POLICIES, Policy, resolve

_COMMA = re.compile(r",(?![^{]*\})")
"""Outside of braces."""


@dataclass(frozen=True)
class _Spec:
    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        self.resolve()

    def resolve(self) -> Any:
        raise NotImplementedError

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.options)
        return f"{self.name}:{options}" if options else self.name


class PolicySpec(_Spec):
    """A policy as typed, such as ``cake:tau1=1.6,tau2=0.4``; ``ValueError`` for an unknown name or option."""

    def resolve(self) -> Policy:
        return resolve(self.name, **dict(self.options))


class PrefillSpec(_Spec):
    """A value of ``prefill`` as typed, such as ``xattention:threshold=0.8``; ``ValueError`` as for policies."""

    def resolve(self) -> BlockSparse | None:
        return resolve_prefill(self.name, **dict(self.options))


FULL = PrefillSpec("full")


def with_format(policy: str, entry_format: EntryFormat, prefill: PrefillSpec = FULL) -> str:
    """Return a policy's name or spec, behind the format of the entries and the prefill, if these are not the usual."""
    usual = {"model", str(FULL)}
    return " ".join([*(name for name in (entry_format, str(prefill)) if name not in usual), policy])


def parse_formats(text: str) -> tuple[EntryFormat, ...]:
    """Read formats of entries, such as ``model,int8``; ``ValueError`` if there is none, or an unknown one."""
    if not names(text):
        raise ValueError(f"entries='': must be one or several of {', '.join(ENTRY_FORMATS)}")
    return tuple(one_of("entries", name, ENTRY_FORMATS) for name in names(text))


def parse_policies(text: str) -> tuple[PolicySpec, ...]:
    """Read policies and options such as ``snapkv,cake:tau1=1.6,tau2=0.4,full``.

    A part with ``=`` and no colon is an option of the policy before it. ``my.module:KeyDiff`` imports a policy.
    ``snapkv:window={8,32},kernel_size={1,7}`` are four policies: all combinations.

    Raises:
        ValueError: no policy, an unknown one, an unknown option, an option before any policy, or a brace that is not
            closed, is empty, or is not a whole value.
    """
    return tuple(PolicySpec(name, options) for name, options in _parsed("policies", "policy", text, POLICIES))


def parse_prefills(text: str) -> tuple[PrefillSpec, ...]:
    """Read values of ``prefill`` as :func:`parse_policies` reads policies."""
    return tuple(
        PrefillSpec(name, options) for name, options in _parsed("prefill", "prefill", text, get_args(PrefillName))
    )


def _parsed(
    argument: str, noun: str, text: str, known: Collection[str]
) -> Iterator[tuple[str, tuple[tuple[str, Any], ...]]]:
    """Yield names and their options; ``known``: names that are not the first part of a path."""
    specs: list[tuple[str, list[list[tuple[str, Any]]]]] = []
    for part in filter(None, map(str.strip, _COMMA.split(text))):
        name, _, option = part.rpartition(":") if "=" in part else (part, "", "")
        if name.partition(":")[0] in known and ":" in name:
            raise ValueError(f"{argument}={text!r}: {name.partition(':')[2]!r} must be an option such as window=8")
        if name:
            specs.append((name, []))
        elif not specs:
            raise ValueError(f"{argument}={text!r}: the option {part!r} has no {noun} before it")
        if option:
            key, _, value = option.partition("=")
            braces = re.fullmatch(r"\s*\{([^{}]*)\}\s*", value)
            values = names(braces[1]) if braces else (value.strip(),)
            if not values or (braces is None and {*"{}"} & {*option}):
                raise ValueError(f"{argument}={text!r}: {part!r}: several values of an option are written {{8,32}}")
            specs[-1][1].append([(key.strip(), typed(one)) for one in values])
    if not specs:
        raise ValueError(f"{argument}={text!r}: name at least one {noun}")
    for name, choices in specs:
        for options in itertools.product(*choices):
            yield name, options


def spec_of_contents(policy: Policy) -> str:
    """Return the spec of a policy, where a file that an option names is known by its contents."""
    spec: dict[str, Any] = json.loads(policy.spec)
    for name, value in spec.items():
        for path in (value, f"{value}/model.safetensors"):
            if isinstance(value, str) and os.path.isfile(path):
                with open(path, "rb") as file:
                    spec[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return json.dumps(spec)


def typed(text: str) -> Any:
    """A number, a truth value or None as Python writes them, else the text."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text

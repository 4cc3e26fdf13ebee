"""Arguments of the lm-evaluation-harness backend: every one is known by name, or refused with the nearest name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection
from typing import Any

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from kvpass.eval.prompt import Scope
from kvpass.policies import POLICIES, Policy, resolve
from kvpass.policies.options import check_int


def check_hold(hold: int | None, scope: Scope) -> int:
    """How many tokens of a prompt are fed after compression; 1 unless given.

    Raises:
        ValueError: negative, no int, or given where the question is what is fed.
    """
    if hold is None:
        return 1
    if scope == "context":
        raise ValueError(f"hold={hold!r}: scope='context' feeds the question after compression; give no hold")
    check_int("hold", hold, 0)
    return hold


def take_policy_options(
    policy: str | Policy, arguments: dict[str, Any], *, own: Collection[str], harness: Collection[str]
) -> dict[str, Any]:
    """Move the policy's options out of the arguments.

    Args:
        policy: a name or a value. arguments: what nobody has taken yet; changed. own: arguments that have been taken
            already. harness: arguments of the harness's Hugging Face model.
    Raises:
        ValueError: unknown policy, or an argument that neither the policy nor the harness's model has.
    """
    kind = type(policy) if isinstance(policy, Policy) else POLICIES.get(policy) or type(resolve(policy))
    options = [field.name for field in dataclasses.fields(kind)]
    for name, value in arguments.items():
        if name not in harness and name not in options:
            near = difflib.get_close_matches(name, sorted({*own, *harness, *options}), n=1, cutoff=0.0)[0]
            raise ValueError(
                f"{name}={value!r}: no argument of the model 'kvpass' and no option of policy {kind.name!r}, which has "
                f"{', '.join(options)}; did you mean {near!r}?"
            )
    return {name: arguments.pop(name) for name in options if name in arguments}


def refuse_unsupported(arguments: dict[str, Any], batch_size: object) -> None:
    """Refuse what the harness's model can do and this one cannot.

    Raises:
        ValueError: seq2seq, a model in several parts, autocast, or a batch size that is no positive int.
    """
    if arguments.get("backend") == "seq2seq":
        raise ValueError("backend='seq2seq': kvpass compresses decoders only")
    for name in ("parallelize", "tp_plan", "mixed_precision_dtype"):
        if arguments.get(name):
            raise ValueError(f"{name}={arguments[name]!r}: not supported by the model 'kvpass'")
    if not str(batch_size).isdecimal() or int(str(batch_size)) < 1:
        raise ValueError(
            f"batch_size={batch_size!r}: must be an int >= 1; 'auto' would measure neither compression nor generation"
        )


def generation_settings(given: dict[str, Any], end: str | None, default: int, max_length: int) -> dict[str, Any]:
    """Generation arguments of a request as the harness's own models read them.

    Args:
        end: text of the token that ends a text. default: new tokens where the request does not say.
    Raises:
        ValueError: no room for a prompt, or more than one answer a request.
    """
    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(given, default))
    kwargs["until"] = handle_stop_sequences(kwargs["until"], end)
    if kwargs["max_gen_toks"] >= max_length or "max_length" in kwargs:
        raise ValueError(
            f"generation arguments {given!r}: max_gen_toks must be below max_length = {max_length}, and "
            "max_length is an argument of the model"
        )
    if (kwargs.get("num_return_sequences") or 1) != 1:
        raise ValueError(f"generation arguments {given!r}: num_return_sequences must be 1, a request has one answer")
    return kwargs

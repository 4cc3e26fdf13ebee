"""``kvpass.compile``: check the input, copy the model's structure, give the copy our ``forward``."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvpass.attention import ATTENTION_NAME
from kvpass.backend import Compiler, PhaseCompiler, check_compiler
from kvpass.config import Budget
from kvpass.model import CompressedModel, Runtime, compressed_class
from kvpass.policies import Policy, resolve, resolve_budget
from kvpass.policies.cake import temperatures


def compile(
    model: PreTrainedModel,
    *,
    policy: str | Policy = "lava",
    budget: Budget | int | float | str | None = None,
    window: int | None = None,
    backend: Compiler = "inductor",
    **policy_options: Any,
) -> Any:
    """A copy of a decoder that compresses its KV cache after every prompt and decodes in compiled code.

    Parameters and buffers are shared with ``model``, which is left as it was; modules and config are new objects. The
    copy is of the model's own class, so ``generate``, pipelines and plain calls work as before; graphs are compiled on
    first use, one per phase and batch size.

    Args:
        model: a causal language model of transformers, in eval mode.
        policy: name of a registered policy, or a policy value.
        budget: entries kept per KV head per layer on average, window included: an int; a float in (0, 1], the fraction
            of each row's prompt; or bytes of kept entries per sequence such as ``"512MiB"``. Required by every policy
            but ``"full"``.
        window: last prompt tokens that observe and are always kept; the policy's own default (mostly 32) when None.
        backend: ``"inductor"``, or ``"eager"`` to run the same rewritten graph without Inductor.
        policy_options: options of the policy, see ``kvpass.POLICIES``. CAKE's ``tau1`` and ``tau2`` are looked up by
            the model's name and budget when both are left out, and must be given where none are published.
    Raises:
        ValueError: an argument is out of range, or the model cannot be compiled: already compiled, in training mode,
            an encoder-decoder, no causal language model.
        UnsupportedAttentionError: on first use, when an attention layer of the model is not understood.
    """
    if isinstance(model, CompressedModel):
        raise ValueError(f"{type(model).__name__} is already compiled by kvpass; compile the original model")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model of type {type(model).__name__}: kvpass.compile takes a transformers model; "
            'for any other decoder use torch.compile(module, backend="kvpass", options={...}) with kvpass.session()'
        )
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; kvpass compresses decoders only")
    if not model.can_generate() or "logits_to_keep" not in inspect.signature(type(model).forward).parameters:
        raise ValueError(f"{type(model).__name__} is no causal language model with a logits_to_keep argument")
    compiler = check_compiler("backend", backend)
    options = policy_options if window is None else {"window": window, **policy_options}
    if policy == "cake" and not {"tau1", "tau2"} & options.keys():
        options["tau1"], options["tau2"] = temperatures(str(model.config.name_or_path), budget)
    resolved = resolve(policy, **options)
    compiled = copy_structure(model)
    compiled.__class__ = compressed_class(type(model))
    for module in compiled.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = ATTENTION_NAME
    compiled._kvpass = Runtime(
        policy=resolved,
        budget=resolve_budget(resolved, budget),
        weights=next(model.parameters()),
        compiler=PhaseCompiler(
            policy=resolved, compiler=compiler, layers=model.config.get_text_config().num_hidden_layers
        ),
    )
    return compiled


def copy_structure(model: nn.Module) -> Any:
    """A deep copy whose parameters and buffers are the very tensors of ``model``."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)

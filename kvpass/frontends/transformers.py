"""The model ``kvpass.compile`` returns: the user's own class with our ``forward``."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvpass.cache.cache import CompressedCache
from kvpass.cache.copying import copied_only
from kvpass.cache.fingerprint import Identity
from kvpass.cache.prompt_record import PromptRecord
from kvpass.compiler.capture import CaptureCache
from kvpass.compiler.transactions import append, continued, prefill
from kvpass.config import Budget
from kvpass.errors import CacheMismatchError
from kvpass.frontends.arguments import check_forward, check_generate, check_ids, unsupported_argument
from kvpass.frontends.padding import first_real_column
from kvpass.policies import Policy, resolve_budget
from kvpass.policies.rules import OCCASIONS, Rules, read_rules
from kvpass.report import Report


@dataclass(kw_only=True)
class Runtime:
    """What a compiled model carries beside its modules: its rules and what was captured of it.

    ``identity`` is by what its caches are known. ``one_length``: rotary frequencies follow the longest row, so all must
    be of one length.
    """

    rules: Rules
    captures: CaptureCache
    identity: Identity
    one_length: bool = False
    last_prompt: PromptRecord | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """That of a copied model: what was captured reads the weights of the model it was captured from."""
        captures = CaptureCache(replace(self.captures.compiler, records=[]))
        return replace(self, captures=captures, identity=copy.deepcopy(self.identity, memo), last_prompt=None)


class CompressedModel:
    """Mixed in before the model's own class, so that ``isinstance`` and ``generate`` see the model they know."""

    _kvpass: Runtime

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        *,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Prefill a prompt and compress it, or continue on a compressed cache.

        Args:
            input_ids: int64 ``[B, T]``. With an empty cache (or none) this is the prompt, left-padded if at all.
            attention_mask: ``[B, tokens seen + T]``; zeros may only stand before the prompt's first real token. Of a
                mask on CUDA for one new token only the shape is read, so as not to wait for the device.
            position_ids: true positions ``[B, T]``; by default counted from the first real token. Those of a prompt
                must ascend by one: a row is one sequence.
            past_key_values: a :class:`CompressedCache` of this model, or None or any empty cache for a new prompt.
            logits_to_keep: compute logits of the last so many positions only; 0 = all.
        Returns:
            fp logits ``[B, T or logits_to_keep, vocabulary]`` and the cache (None with ``use_cache=False``); a tuple of
            what there is with ``return_dict=False``.
        Raises:
            ValueError: an argument that kvpass does not support was given, or one does not fit the cache, which is
                then unchanged.
        """
        output = self._forward(
            input_ids, attention_mask, position_ids, past_key_values, logits_to_keep, use_cache is not False, kwargs
        )
        return output.to_tuple() if return_dict is False else output

    @torch._dynamo.disable  # also where torch.compile is put around: the decoder is compiled inside
    def _forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        logits_to_keep: int,
        use_cache: bool,
        kwargs: dict[str, Any],
    ) -> CausalLMOutputWithPast:
        check_forward(kwargs)
        if input_ids is None:
            raise ValueError("input_ids=None: a kvpass model takes token ids")
        check_ids(input_ids, self.device)  # type: ignore[attr-defined]
        if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise ValueError(f"logits_to_keep={logits_to_keep!r}: must be an int >= 0")
        if self.training:  # type: ignore[attr-defined]
            raise ValueError("the model is in training mode; call model.eval() first")
        runtime = self._kvpass
        if input_ids.shape[1] > 1:  # a walk over the modules, too slow for every single token
            runtime.identity.look_again()
        with torch.inference_mode(False), torch.no_grad():
            if isinstance(past_key_values, CompressedCache) and not past_key_values.is_empty:
                cache, logits = _continue(
                    self, past_key_values, input_ids, attention_mask, position_ids, logits_to_keep
                )
            else:
                cache = _new_cache(runtime, past_key_values)
                logits = _prefill(self, cache, input_ids, attention_mask, position_ids, logits_to_keep)
                runtime.last_prompt = cache.record
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache if use_cache else None)

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``generate`` of transformers; with a filled cache, ids no longer than what it has seen are new tokens only.

        So a question can be asked of a compressed context: ``model.generate(question_ids, past_key_values=cache)``.
        Longer ids are the whole sequence, as in transformers, unless an attention mask over cache and ids says
        otherwise. The last token of an answer is in no cache yet: a further turn begins with it.

        Raises:
            ValueError: assisted generation was asked for: rejected drafts could not be taken back. Or a prefill in
                chunks: only the first would be a prompt. Or the configuration says ``use_cache=False`` and the call
                does not.
        """
        check_generate(kwargs, generation_config, self.generation_config)  # type: ignore[attr-defined]
        kwargs["disable_compile"] = True  # a static cache that is asked for would have transformers compile our forward
        cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids", inputs)
        if ids is not None:
            check_ids(ids)
        if isinstance(cache, CompressedCache) and ids is not None and ids.shape[1] <= cache.columns:
            given = kwargs.get("attention_mask")
            if given is None or given.shape[1] == ids.shape[1]:
                new = torch.ones_like(ids) if given is None else given
                kwargs["attention_mask"] = torch.cat([cache.attention_mask.to(new), new], 1)
        return super().generate(inputs, generation_config, *args, **kwargs)  # type: ignore[misc]

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As in transformers, asking for the logits of the last position only.

        An empty cache of another kind gives way to ours first: for a static one transformers would turn the mask into
        one that says nothing of padding. A model that is prepared in a way of its own mostly cannot be compiled, and
        the prompt alone tells why: better than that an argument of its ``forward`` is not supported.
        """
        given = kwargs.get("past_key_values")
        if given is not None and not isinstance(given, CompressedCache):
            kwargs["past_key_values"] = _new_cache(self._kvpass, given)
        prepared = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        if kwargs.get("is_first_iteration") and unsupported_argument(prepared) is not None:
            self.forward(prepared["input_ids"])
        prepared.setdefault("logits_to_keep", 1)
        return prepared

    def compress(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> CompressedCache:
        """Compress a context before the question is known (question-agnostic scope).

        Args:
            input_ids: the context, int64 ``[B, N]``. attention_mask: ``[B, N]`` when rows are left-padded.
        Returns:
            a cache that later calls read but never change: each continues on a copy of its own, so any number of
            questions can be asked of it.
        """
        output = self.forward(input_ids, attention_mask, logits_to_keep=1)
        assert isinstance(output, CausalLMOutputWithPast)
        cache = output.past_key_values
        assert isinstance(cache, CompressedCache)
        cache.reusable = True
        return cache

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copied_only(
            self,
            f"a compiled {type(self).__name__} cannot be pickled, it holds captured graphs and compiled code: save the "
            "original model, and call kvpass.compile again after it is loaded",
        )

    @property
    def policy(self) -> Policy:
        """What decides which entries are kept."""
        return self._kvpass.rules.policy

    @property
    def budget(self) -> Budget | None:
        """How much of each prompt is kept; None for a policy that keeps everything."""
        return self._kvpass.rules.budget

    def set_budget(self, budget: Budget | int | float | str | None) -> None:
        """Another budget for the prompts to come; compiled graphs stay, since none knows the budget.

        Caches made before keep theirs: they are refused, as of another budget, until it is set again. The report of
        the last prompt is gone.

        Raises:
            ValueError: unreadable, below window + 1, missing, or given to a policy that has none; nothing changed.
        """
        rules = self._kvpass.rules
        self._kvpass.rules = replace(rules, budget=resolve_budget(rules.policy, budget))
        self._kvpass.last_prompt = None

    def set_policy(
        self,
        policy: str | Policy,
        budget: Budget | int | float | str | None = None,
        *,
        window: int | None = None,
        **policy_options: Any,
    ) -> None:
        """Another policy and budget for the prompts to come, as ``kvpass.compile`` takes them.

        The decoder is not captured again, only its graphs are compiled for the policy when it first needs them; those
        of earlier policies stay. Caches made before and the report are treated as by :meth:`set_budget`.

        Raises:
            ValueError: an argument is out of range, or the policy cannot recompress as this model does; nothing
                changed.
        """
        self._kvpass.rules = read_rules(
            policy,
            budget,
            self._kvpass.rules.recompress,
            window=window,
            options=policy_options,
            model_name=str(self.config.name_or_path),  # type: ignore[attr-defined]
        )
        self._kvpass.last_prompt = None

    def report(self) -> Report:
        """What the last prompt kept, per layer and head, and what was compiled for its policy.

        Raises:
            ValueError: no prompt has been prefilled yet, or none since policy or budget were set.
        """
        runtime = self._kvpass
        if runtime.last_prompt is None:
            raise ValueError("nothing to report: this model has prefilled no prompt yet with its policy and budget")
        policy = runtime.rules.policy
        return Report(
            policy=policy,
            budget=runtime.rules.budget,
            prompt=runtime.last_prompt,
            compiled=tuple(record for record in runtime.captures.compiler.records if record.policy == policy.spec),
        )


def _new_cache(runtime: Runtime, given: Cache | None) -> CompressedCache:
    rules = runtime.rules
    if given is None:
        return CompressedCache(rules.policy, rules.budget, runtime.identity)
    if isinstance(given, CompressedCache):
        given.check_owner(rules.policy, rules.budget, runtime.identity)
        return given
    if given.get_seq_length() > 0:
        raise CacheMismatchError(
            f"past_key_values is a {type(given).__name__} with {given.get_seq_length()} tokens; "
            "a kvpass model continues only on a CompressedCache of its own"
        )
    return CompressedCache(rules.policy, rules.budget, runtime.identity)


def _prefill(
    model: Any,
    cache: CompressedCache,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    logits_to_keep: int,
) -> Tensor:
    ids = input_ids.clone(memory_format=torch.contiguous_format)
    start = first_real_column(attention_mask, *ids.shape)
    if model._kvpass.one_length and bool((start != start[0]).any()):
        raise ValueError("rope_type='longrope': its frequencies follow the longest row; give rows of one length")
    columns = torch.arange(ids.shape[1], device=ids.device)
    positions = _positions(position_ids, (columns - start.to(ids.device)[:, None]).clamp(min=0))
    if position_ids is not None:
        _check_ascending(positions, start)

    return prefill(cache, start, ids.shape[1], *_graph_call(model, ids, positions, logits_to_keep))


def _continue(
    model: Any,
    cache: CompressedCache,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    logits_to_keep: int,
) -> tuple[CompressedCache, Tensor]:
    runtime: Runtime = model._kvpass
    rules = runtime.rules
    b, t = input_ids.shape
    cache.check_owner(rules.policy, rules.budget, runtime.identity)
    cache = continued(cache, b, input_ids.device)
    if attention_mask is not None:
        if attention_mask.ndim != 2 or tuple(attention_mask.shape) != (b, cache.columns + t):
            raise CacheMismatchError(
                f"attention_mask of shape {list(attention_mask.shape)}: must be [{b}, {cache.columns + t}], "
                "tokens in the cache and new ones"
            )
        if t > 1 or attention_mask.device.type == "cpu":
            check_mask(attention_mask, cache)
    ids = input_ids.clone(memory_format=torch.contiguous_format)
    columns = torch.arange(cache.columns, cache.columns + t, device=ids.device)
    positions = _positions(position_ids, columns - cache.start[:, None])

    graph_call = _graph_call(model, ids, positions, logits_to_keep)
    logits, record = append(cache, t, *graph_call, OCCASIONS[rules.recompress])
    if record is not None:
        runtime.last_prompt = record
    return cache, logits


def check_mask(given: Tensor, cache: CompressedCache) -> None:
    """Whether a mask ``[B, columns + T]`` says of the columns what the cache knows."""
    if bool(given.all()) and not bool(cache.start.any()):
        return
    old, new = given.to(cache.device).bool().split([cache.columns, given.shape[1] - cache.columns], 1)
    if not bool(new.all()):
        raise ValueError("attention_mask has zeros among the new tokens: padding is possible only before a prompt")
    wrong = (old != cache.attention_mask.bool()).any(1).nonzero()
    if wrong.numel():
        raise CacheMismatchError(
            f"attention_mask: row {int(wrong[0])} hides other columns than the prompt's mask did; "
            "what the cache holds cannot be hidden or shown later"
        )


def _positions(given: Tensor | None, computed: Tensor) -> Tensor:
    if given is None:
        return computed.contiguous()
    if given.ndim != 2 or given.shape[1] != computed.shape[1] or given.shape[0] not in (1, computed.shape[0]):
        raise ValueError(f"position_ids of shape {list(given.shape)}: must be {list(computed.shape)}")
    return given.expand(computed.shape[0], -1).clone(memory_format=torch.contiguous_format)


def _check_ascending(positions: Tensor, start: Tensor) -> None:
    """Whether positions ``[B, N]`` ascend by one from the first real column of each row on."""
    columns = torch.arange(1, positions.shape[1], device=positions.device)
    wrong = (positions.diff(dim=1) != 1) & (columns > start.to(positions.device)[:, None])
    if bool(wrong.any()):
        row, column = (int(place) for place in wrong.nonzero()[0])
        raise ValueError(
            f"position_ids: row {row} goes from {int(positions[row, column])} to {int(positions[row, column + 1])}; "
            "positions of a prompt must ascend by one, packed sequences are not supported: give each its own row"
        )


def _graph_call(
    model: Any, ids: Tensor, positions: Tensor, logits_to_keep: int
) -> tuple[Callable[[], None], Callable[[], Tensor]]:
    """What makes the graph of a call, and what runs it."""
    captures: CaptureCache = model._kvpass.captures
    hooks = model._kvpass.identity.hooks
    forward = types.MethodType(original_class(model).forward, model)
    return (
        lambda: captures.prepare(forward, ids, positions, logits_to_keep, hooks),
        lambda: captures(ids, positions, logits_to_keep),
    )


def compressed_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The model's class with our ``forward`` before its own, under the same name."""
    return type(cls.__name__, (CompressedModel, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def original_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class the user's model had."""
    return type(model).__mro__[2]

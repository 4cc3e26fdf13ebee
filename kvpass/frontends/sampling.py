"""The loop that chooses tokens: a device gets its next step before the host waits for the token before.

transformers' own loop asks the device after each token whether all rows have ended, and queues nothing meanwhile. Here
one step too many runs where an answer ends before its greatest length. No token, score or random number comes of it:
the entry that it appended is taken back, and what it raises is of no matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput

from kvpass.cache.cache import CompressedCache
from kvpass.transformers_compat import CACHE, NEXT_LENGTH, SAYS_NEXT_LENGTH

QUEUING = {"cuda"}
"""Types of devices that have a queue, so that the host can be ahead of them."""


def append_tokens(
    ids: Tensor,
    logits: Tensor,
    forward: Callable[[Tensor], Tensor],
    choose: Callable[[Tensor, Tensor], Tensor],
    has_ended: Callable[[Tensor], Tensor],
    take_back: Callable[[], None] | None,
    *,
    max_length: int | None,
    pad: int | Tensor | None,
    streamer: Any = None,
) -> Tensor:
    """Return ids ``[B, T]`` with what comes after them, until all rows have ended.

    Args:
        logits: of the last of them, ``[B, vocabulary]``. forward: appends the last ids of a text, and returns their
            logits. choose: returns the next tokens ``[B]`` of a text by them. has_ended: says which rows end with it.
        take_back: called after a step that was one too many; None: there must be none.
        max_length: of a text at which all rows end, if there is one. pad: token of rows that have ended; None: they go
            on until all have.
    """
    goes_on = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    is_ahead = take_back is not None and ids.device.type in QUEUING
    while True:
        new = choose(ids, logits)
        new = new if pad is None else torch.where(goes_on, new, pad)
        ids = torch.cat([ids, new[:, None]], 1)
        goes_on = goes_on & ~has_ended(ids)
        any_goes_on, said = (x.to("cpu", non_blocking=True) for x in (goes_on.any(), new))  # to pinned memory
        copied = torch.cuda.current_stream(ids.device).record_event() if ids.is_cuda else None
        error, has_run, stops = None, False, True
        if is_ahead and ids.shape[1] != max_length:
            try:
                logits, has_run = forward(ids), True
            except Exception as raised:  # such as that the text has no more room
                error = raised
        try:
            if copied is not None:
                copied.synchronize()
            if streamer is not None:
                streamer.put(said)
            stops = not any_goes_on
        finally:
            if stops and has_run and take_back is not None:
                take_back()
        if stops:
            return ids
        if error is not None:
            raise error
        if not has_run:
            logits = forward(ids)


def can_sample(model: Any, ids: Tensor, given: dict[str, Any]) -> bool:
    """Whether :func:`sample` does what ``_sample`` of a compiled model's class would; ``given``: its arguments."""
    return (
        ids.device.type in QUEUING
        and bool(given.get("use_cache"))  # else each step is a prompt
        and not given.get("synced_gpus")
        and not getattr(given.get(CACHE), "assists", False)
        and model._kvpass.adapted.longrope_limit is None  # a step may read the whole text again
        and model._original_class._sample is GenerationMixin._sample
    )


def sample(
    model: Any,
    ids: Tensor,
    *,
    logits_processor: Callable[[Tensor, Tensor], Tensor],
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    synced_gpus: bool = False,
    **given: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Return what transformers' ``_sample`` returns, whose arguments these are."""
    returns, pad = generation_config.return_dict_in_generate, generation_config._pad_token_tensor
    recorded: dict[str, Any] = {
        name: () if returns and getattr(generation_config, f"output_{name}") else None for name in ("scores", "logits")
    }
    next_length = {NEXT_LENGTH: 1} if SAYS_NEXT_LENGTH else {}

    def forward(text: Tensor) -> Tensor:
        nonlocal given
        if text is ids:
            outputs = model._prefill(ids, generation_config, given)
        else:
            prepared = model.prepare_inputs_for_generation(text, **next_length, **given)
            outputs = model(**prepared, return_dict=True)
        given = model._update_model_kwargs_for_generation(outputs, given)
        logits: Tensor = outputs.logits[:, -1].to(ids.device, torch.float32, copy=True)
        return logits

    def choose(text: Tensor, logits: Tensor) -> Tensor:
        scores = logits_processor(text, logits)
        for name, of_token in (("scores", scores), ("logits", logits)):
            if recorded[name] is not None:
                recorded[name] += (of_token,)
        if generation_config.do_sample:
            return torch.multinomial(scores.softmax(-1), 1).squeeze(1)
        return scores.argmax(-1)

    def take_back() -> None:
        if is_kept:
            cache.crop(-1)

    before, logits = given.get(CACHE), forward(ids)
    cache: CompressedCache = given[CACHE]
    is_kept = returns or (cache is before and not cache.for_one_call)
    can_end = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    with model._optimize_model_for_decode():
        text: Any = append_tokens(
            ids,
            logits,
            forward,
            choose,
            lambda text: stopping_criteria(text, recorded["scores"]),
            take_back if cache.state.only_appends or not is_kept else None,
            max_length=stopping_criteria.max_length,
            pad=pad.to(ids.device) if can_end else None,
            streamer=streamer,
        )
    if streamer is not None:
        streamer.end()
    return GenerateDecoderOnlyOutput(sequences=text, **recorded | {CACHE: cache}) if returns else text

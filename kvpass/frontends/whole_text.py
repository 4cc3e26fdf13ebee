"""The whole text for ``generate``, where it is given only the ids that come after a filled cache.

transformers then computes from all ids: logits processors read what the cache holds too. What counts or returns ids
is converted, so that it is of the new ones only.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from kvpass.cache.cache import CompressedCache
from kvpass.errors import CacheMismatchError

_DROPPED = (
    "the prompt begins with the last token of the answer before. If it is the next turn of a conversation: the cache "
    "is reusable and does not hold that answer, every call continues from the compressed context alone. Use "
    "model.compress(ids, reusable=False), or the cache that generate(..., return_dict_in_generate=True) returns"
)

_AGAIN = (
    "the ids begin with all {} tokens of the prompt that past_key_values holds already, and are appended to it, a "
    "second time. Pass only the ids after all that the cache has seen; or, to begin again, no past_key_values"
)
_HEAD = (
    "the ids begin as the prompt that past_key_values holds does ({} tokens), and are appended to it: a chat template "
    "or a tokenizer puts these at the begin of a text. Pass only what comes after the text of the cache, without "
    "special tokens; kvpass.Document puts questions where a template has them"
)
_OTHER_TEXT = (
    "ids of {} tokens, more than the {} that the cache has seen, are taken for the whole text, but do not begin with "
    "that of the cache: column {} of row {} is {}, in the cache {}. If all of them come after what the cache has "
    "seen, pass an attention_mask of shape {}, over both; if this is another text, pass no past_key_values"
)
_UNSEEN = (
    "{}: only the ids of this call are read, not those before, which the cache does not know (it was loaded from a "
    "file without them, or its prompt was inputs_embeds). Pass the whole text, or fill the cache again"
)

_NEUTRAL = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "logits_processor": None,
    "prefix_allowed_tokens_fn": None,
}
"""Arguments of ``generate`` whose processors read all ids, with the values of no effect."""


def by_name(generate: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``generate`` by name; ``args``: those after the ids and the configuration."""
    parameters = inspect.signature(generate).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD][2:]
    if len(names) < len(args) or kwargs.keys() & names[: len(args)]:
        raise TypeError("generate: give each argument once, and what comes after generation_config by its name")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def has_new_ids(cache: CompressedCache, ids: Tensor, mask: Tensor | None) -> bool:
    """Whether ids ``[B, T]`` are those after a filled cache: no more than it has seen, or with a mask over both."""
    held, tokens = cache.columns, ids.shape[1]
    return tokens <= held or (held > 0 and mask is not None and mask.shape[-1] == held + tokens)


def check_whole_text(cache: CompressedCache, ids: Tensor) -> None:
    """Check that ids ``[B, T]``, more than a filled cache has seen, begin with its text, if that is known."""
    if cache.ids is None:
        return
    (rows, tokens), held = ids.shape, cache.columns
    before, real = (_of_rows(x.to(ids), rows) for x in (cache.ids, cache.attention_mask))
    wrong = ((ids[:, :held] != before) & (real > 0)).nonzero().tolist()
    if wrong:
        row, column = wrong[0]
        place = column, row, int(ids[row, column]), int(before[row, column])
        raise CacheMismatchError(_OTHER_TEXT.format(tokens, held, *place, [rows, held + tokens]))


def with_text_of_cache(
    cache: CompressedCache, ids: Tensor, given: Mapping[str, Any], says: Callable[[str], Any]
) -> tuple[dict[str, Any], int]:
    """Return the arguments of ``generate`` for the text of a filled cache and the new ids ``[B, T]`` behind it.

    Args:
        given: arguments by name. says: returns what they, or else the configurations, say under a name.
    Returns:
        the arguments, and how many ids in them are of the cache: 0 where it does not know its ids.
    """
    prompt = None if cache.ids is None else cache.ids[:, : cache.state.prompt_columns]
    changed, mask = dict(given), given.get("attention_mask")
    if cache.answer_end == ids[:, 0].tolist():
        warnings.warn(_DROPPED, stacklevel=5)  # who called generate
    if prompt is not None and 1 < (n := prompt.shape[1]) <= ids.shape[1] and torch.equal(ids[:, :n], prompt.to(ids)):
        warnings.warn(_AGAIN.format(n), stacklevel=5)
    elif prompt is not None and (n := _repeated_head(prompt[0, int(cache.state.start[0]) :], ids[0], says)):
        warnings.warn(_HEAD.format(n), stacklevel=5)
    if mask is None or mask.shape[1] == ids.shape[1]:
        new = torch.ones_like(ids) if mask is None else mask
        mask = changed["attention_mask"] = with_mask_of_cache(cache, new)
    # for a mask of another shape nothing more is done, the call of the model refuses it
    if cache.ids is not None and tuple(mask.shape) == (len(ids), cache.columns + ids.shape[1]):
        return _with_whole_text(_of_rows(cache.ids, len(ids)), ids, changed, says), cache.columns
    unseen = next((name for name, off in _NEUTRAL.items() if says(name) not in (None, off, [])), None)
    if unseen is not None:
        warnings.warn(_UNSEEN.format(unseen), stacklevel=5)
    return changed, 0


def _repeated_head(prompt: Tensor, ids: Tensor, says: Callable[[str], Any]) -> int:
    """Return how many first tokens of a prompt ids begin with, if these are the head of a text alone; else 0.

    They are if they are three, or the token of the configuration that begins texts, and occur once in the prompt.
    """
    n = min(3, len(prompt), len(ids))
    same = int((prompt[:n].to(ids) == ids[:n]).long().cumprod(0).sum())
    if same < 3 and not (same and int(ids[0]) == says("bos_token_id")):
        return 0
    return same if int((prompt.unfold(0, same, 1) == prompt[:same]).all(1).sum()) == 1 else 0


def with_mask_of_cache(cache: CompressedCache, new: Tensor) -> Tensor:
    """Return the mask of a filled cache and of ids ``[B, T]`` behind it, whose mask is ``new``; int64."""
    return torch.cat([_of_rows(cache.attention_mask, len(new)), new.to(cache.attention_mask)], 1)


def _of_rows(held: Tensor, rows: int) -> Tensor:
    """Return what a cache holds of ``rows`` rows of ids: it has each once, several times for beams, or one for all."""
    if len(held) == 1:
        return held.expand(rows, -1)
    if len(held) % rows:
        raise CacheMismatchError(f"the ids have {rows} rows, the cache {len(held)}")
    return held[:: len(held) // rows]


def _with_whole_text(
    before: Tensor, ids: Tensor, given: Mapping[str, Any], says: Callable[[str], Any]
) -> dict[str, Any]:
    """Return the arguments of ``generate`` for the whole text: the ids ``before`` of the cache, and the new ones."""
    held = before.shape[1]
    changed = {**given, ("input_ids" if "input_ids" in given else "inputs"): torch.cat([before.to(ids), ids], 1)}
    for name, new in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        length = says(name)
        if length is not None and says(new) is None:
            changed[name] = held + length
    criteria, streamer = given.get("stopping_criteria"), given.get("streamer")
    if criteria is not None:
        changed["stopping_criteria"] = StoppingCriteriaList(_of_new_ids(one, held) for one in criteria)
    if streamer is not None:
        changed["streamer"] = _StreamOfNewIds(streamer, held)
    return changed


def new_ids_only(output: Any, held: int) -> Any:
    """Return what ``generate`` returned, without the first ``held`` ids of its sequences."""
    if isinstance(output, Tensor):
        return output[:, held:]
    output.sequences = output.sequences[:, held:]
    return output


def _of_new_ids(criterion: Callable[..., Any], held: int) -> Callable[..., Any]:
    """Return a criterion that decides by the new ids; the class of transformers' own for the length stays."""
    if type(criterion) is MaxLengthCriteria:
        return MaxLengthCriteria(criterion.max_length + held, criterion.max_position_embeddings)
    return lambda ids, scores, **kwargs: criterion(ids[:, held:], scores, **kwargs)


class _StreamOfNewIds(BaseStreamer):
    """Gives a streamer the new ids, in place of the whole text that ``generate`` puts first."""

    def __init__(self, streamer: BaseStreamer, held: int) -> None:
        self.streamer, self.held = streamer, held

    def put(self, value: Tensor) -> None:
        if self.held:
            value, self.held = value[:, self.held :], 0
        self.streamer.put(value)

    def end(self) -> None:
        self.streamer.end()

"""Methods of a model that ``generate`` of transformers calls, where a compressed cache needs another result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import GenerationMixin

from kvpass.adapt.positions import check_rows_stay
from kvpass.cache.cache import CompressedCache
from kvpass.frontends.arguments import unsupported_argument
from kvpass.frontends.forward import CompressedForward
from kvpass.frontends.sampling import can_sample, sample
from kvpass.transformers_compat import CACHE, NEXT_LENGTH, SAYS_NEXT_LENGTH


class GenerateHooks(CompressedForward):
    """What transformers' ``generate`` calls of a compiled model: base class before the model's own class."""

    def _expand_inputs_for_generation(self, expand_size: int = 1, *args: Any, **kwargs: Any) -> Any:
        """Repeat the rows for beams or several answers, as transformers does; those of a filled cache too.

        Forward repeats a cache of one row itself.
        """
        cache, rows = kwargs.get(CACHE), len(kwargs["input_ids"])
        if expand_size > 1 and isinstance(cache, CompressedCache) and cache.batch_size == rows > 1:
            cache = kwargs[CACHE] = cache.clone()
            cache.batch_repeat_interleave(expand_size)
        return super()._expand_inputs_for_generation(expand_size, *args, **kwargs)  # type: ignore[misc]

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Return who drafts tokens, as transformers does, but the first draft, made before the prompt, is dropped.

        It would be part of the prompt, and of what scores its entries.
        """
        generator: Any = super()._get_candidate_generator(*args, **kwargs)  # type: ignore[misc]
        draft = generator.get_candidates

        def dropped(input_ids: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, None]:
            draft(input_ids, *rest, **more)
            generator.get_candidates = draft
            return input_ids, None

        generator.get_candidates = dropped
        return generator

    def _sample(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Choose tokens one by one, as transformers does; on CUDA the host does not wait between two steps."""
        if not args and can_sample(self, input_ids, kwargs):
            return sample(self, input_ids, **kwargs)
        return super()._sample(input_ids, *args, **kwargs)  # type: ignore[misc,arg-type]

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return positions of text: of each token one.

        Classes that read images count several, and add what the last image shifted, also one of the uncompiled model.
        """
        positions: Tensor = GenerationMixin._prepare_position_ids_for_generation(self, *args, **kwargs)
        return positions

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Prepare as transformers does, but ask for the logits of the last position only.

        The empty cache that ``generate`` makes by default is replaced by ours: for a static one, which some checkpoints
        configure, transformers would drop the padding from the mask. A model that prepares its own arguments mostly
        cannot be compiled. Then the prompt alone is run, since its error names the reason, and "argument not supported"
        would not.
        """
        if inputs_embeds is not None:  # a named argument: generate looks whether there is one
            kwargs["inputs_embeds"] = inputs_embeds
        cache = kwargs.get(CACHE)
        if not isinstance(cache, CompressedCache | None):
            cache = kwargs[CACHE] = self._kvpass.new_cache()
        limit = self._kvpass.adapted.longrope_limit
        if limit is not None and cache is not None and not cache.is_empty:
            # transformers may drop the cache there
            check_rows_stay(limit, cache.state.start, cache.state.columns, 1)
        first, tokens = kwargs.get("is_first_iteration") and SAYS_NEXT_LENGTH, input_ids.shape[1]
        at = kwargs.get("position_ids")
        only_new = at is not None and at.shape[-1] > tokens  # positions of the whole text beside ids of its end
        if first and cache is not None and 0 < cache.columns < tokens and not only_new:
            kwargs[NEXT_LENGTH] = tokens - cache.columns  # with drafts, transformers gives all ids
        prepared = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)  # type: ignore[misc,arg-type]
        if limit is not None and cache is not None and not cache.is_empty and prepared.get(CACHE) is None:
            conditions = replace(self._kvpass.conditions_now, budget=cache.budget, own_budget=cache.own_budget)
            again = prepared[CACHE] = self._kvpass.new_cache(conditions)  # longrope: the whole text is read again
            again.expected = cache.expected
        prepared.pop("tokenizer", None)  # of stop strings, which generate reads itself
        if kwargs.get("is_first_iteration") and unsupported_argument(prepared) is not None:
            self.forward(prepared["input_ids"], inputs_embeds=prepared.get("inputs_embeds"))
        prepared.setdefault("logits_to_keep", 1)
        if cache is not None and (cache.state.padded is not None or cache.state.ahead is not None):
            prepared.pop("position_ids", None)  # transformers counts on from a padded column, and tokens of images
        return prepared

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Go on as transformers does; a cache whose text longrope has read again takes over what was read."""
        given: Any = model_kwargs.get(CACHE)
        read: Any = outputs.get(CACHE)
        has_moved = isinstance(given, CompressedCache) and not given.reusable and given is not read
        if self._kvpass.adapted.longrope_limit is not None and has_moved and given.batch_size == read.batch_size:
            given.state, given.record, given.longest = read.state, read.record, read.longest
            outputs[CACHE] = given
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)

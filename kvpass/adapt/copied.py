"""The copy of a model that is captured: its structure is new, its weights are the user's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvpass.adapt.equal_layers import repeat_layers
from kvpass.adapt.images import admit_images
from kvpass.adapt.latent_attention import attend_latents
from kvpass.adapt.positions import rotate_by_row, tune_by_position
from kvpass.adapt.recurrent import RecurrentLayers, recurrent_layers, replace_token_mixers
from kvpass.adapt.tensor_parallel import check_heads, divides_heads, hold_own_weights
from kvpass.adapt.wrappers import check_wrappers, remove_wrappers
from kvpass.ranks import ONE_PROCESS, Ranks


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """What was changed in a copy of a model, so that it can be captured."""

    heads: Ranks  # processes that share its attention heads
    recurrent: RecurrentLayers | None
    longrope_limit: int | None  # tokens beyond which rotary frequencies are others
    expanded: str | None  # why its latents are cached as expanded heads; None if they are not, or it has none
    divided: Mapping[str, Any] = field(repr=False)  # weights by name of which each process can gather the whole

    @property
    def attention(self) -> tuple[int, ...] | None:
        """Numbers of the layers with attention, where others are recurrent."""
        return None if self.recurrent is None else self.recurrent.attention


def adapted_copy(model: PreTrainedModel, ranks: Ranks, *, uses_our_attention: bool) -> tuple[Any, Adapted]:
    """Copy a model, and change what Dynamo or a cache could not follow. The model itself does not change.

    ``uses_our_attention``: its layers will call kvpass's attention function; else passes find attention in the graph.
    """
    check_wrappers(model)
    is_divided = ranks != ONE_PROCESS  # also by a mesh of one process, whose weights are such tensors too
    recurrent = recurrent_layers(model, divided=is_divided)
    heads = ranks if ranks.several and divides_heads(model) else ONE_PROCESS
    if heads.several:
        check_heads(model, heads)
    copied = copy_structure(model)
    divided = hold_own_weights(copied, model, ranks) if is_divided else {}
    remove_wrappers(copied, model)
    repeat_layers(copied)
    admit_images(copied)
    longrope_limit = rotate_by_row(copied)
    if recurrent is not None:
        replace_token_mixers(copied)
    expanded = None
    if uses_our_attention:
        expanded = attend_latents(copied, divided=heads.several)
        tune_by_position(copied)
    return copied, Adapted(
        heads=heads, recurrent=recurrent, longrope_limit=longrope_limit, expanded=expanded, divided=divided
    )


def copy_structure(model: nn.Module) -> Any:
    """Return a deep copy that shares parameters and buffers with ``model``."""
    # names of PEFT's adapters that are merged into the weights: whoever merges one changes what both compute
    merged = (module.merged_adapters for module in model.modules() if hasattr(module, "merged_adapters"))
    memo: dict[int, Any] = {id(shared): shared for shared in (*model.parameters(), *model.buffers(), *merged)}
    return copy.deepcopy(model, memo)

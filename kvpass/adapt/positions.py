"""What depends on positions and is another one for each row of a batch: rotary frequencies, temperature of queries.

Rotary embeddings whose frequencies follow the length of the text: transformers takes for all rows the frequencies of
the longest one (longrope), or of the longest text since a short one (dynamic). Here the last position of a row in a
call decides, so that a padded row is rotated as alone.

Temperature tuning of Llama 4: layers without RoPE scale queries by their positions, which transformers counts in
columns of the batch, from the length of a cache. Here they are the ``position_ids``, so that a padded row is scaled as
alone, and a token after a prompt by where it is.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvpass.adapt.changed_class import changed_class, in_captures, once
from kvpass.tracing import capturing

_TUNING = "attn_temperature_tuning"
_POSITIONS = "token_positions"


@dataclass
class _Frequencies:
    """What the forward of a rotary embedding reads of its module: frequencies ``[D / 2]`` or ``[B, 1, D / 2]``."""

    inv_freq: Tensor
    attention_scaling: float


def rotate_by_row(model: nn.Module) -> int | None:
    """Let the rotary embeddings of a compiled copy take the frequencies of each row.

    Returns the tokens beyond which longrope takes other frequencies; None without longrope.
    """
    limit, by_row = None, once(_by_row)  # for each model anew: forwards may have been patched since the last
    module: Any
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        types = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
        if not {"dynamic", "longrope"} & {*types}:
            continue
        kind = type(module)
        if isinstance(rope_type, dict) or not _takes_rows(module):
            raise ValueError(
                f"rope_type={rope_type!r}: {kind.__name__} does not take frequencies of its own for each row, as most "
                "rotary embeddings of transformers >= 5.23 do"
            )
        if rope_type == "longrope":
            limit = module.config.rope_parameters["original_max_position_embeddings"]
            module.limit = limit
            module.long_frequencies = _of_length(module, limit + 1).to(module.original_inv_freq.device)
        module.__class__ = by_row(kind)
    return limit


def check_rows_stay(limit: int, start: Tensor, columns: int, tokens: int) -> None:
    """Raise if rows of several lengths are in a cache, and new tokens bring one beyond the limit of longrope.

    Alone, the model of such a row reads its text again (``generate`` of Phi-3), or goes on with keys of two kinds.
    ``start``: first real column of each row, int64 ``[B]``.
    """
    if bool((start == start[0]).all()):
        return
    lengths = columns - start
    passing = ((lengths <= limit) & (lengths + tokens > limit)).nonzero().flatten().tolist()
    if passing:
        raise ValueError(
            f"rope_type='longrope': row {passing[0]} passes {limit} tokens, from which on its frequencies are others, "
            "in a batch of rows of several lengths; give rows of one length, or one row"
        )


def _of_length(module: Any, length: Any) -> Tensor:
    """Return the frequencies ``[D / 2]`` of texts of that length; ``[B, 1, D / 2]`` for int64 ``[B, 1, 1]``."""
    device = module.original_inv_freq.device
    frequencies, _ = ROPE_INIT_FUNCTIONS[module.rope_type](module.config, device, seq_len=length)
    return frequencies


def _takes_rows(module: Any) -> bool:
    """Return whether the forward gives with frequencies of a row what it gives with those of all rows."""
    frequencies, forward = module.original_inv_freq, inspect.unwrap(type(module).forward)
    example, positions = frequencies.new_zeros(1), torch.tensor([[3, 7]], device=frequencies.device)
    try:
        of_all, of_row = (
            forward(_Frequencies(x, module.attention_scaling), example, positions)
            for x in (frequencies, frequencies[None, None])
        )
    except (AttributeError, RuntimeError):  # it reads something else, or takes one dimension only
        return False
    return all(map(torch.equal, of_all, of_row))


def _by_row(module_class: Any) -> Any:
    rotate = inspect.unwrap(module_class.forward)  # without what chooses the frequencies

    def forward(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        length = position_ids.amax(-1, keepdim=True)[..., None] + 1
        if self.rope_type == "longrope":
            chosen = torch.where(length > self.limit, self.long_frequencies, self.original_inv_freq)
        else:
            chosen = _of_length(self, length)
        return rotate(_Frequencies(chosen, self.attention_scaling), x, position_ids)

    return changed_class(module_class, forward=in_captures(torch.no_grad()(forward), module_class.forward))


def tunes_by_column(module: Any) -> bool:
    """Return whether the layer itself scales queries, by their columns."""
    return bool(getattr(module, _TUNING, False)) and not getattr(module, "use_rope", True)


def tune_by_position(model: nn.Module) -> None:
    """Let the layers of a compiled copy leave the scale of queries to :func:`tuned_query`."""
    for layer in model.modules():
        tuned = [child for child in layer.children() if tunes_by_column(child)]
        if tuned:
            layer.__class__ = _passing_positions(type(layer))
        for child in tuned:
            vars(child)["tunes_by_position"] = vars(child).pop(_TUNING)
            child.__class__ = _tuning_elsewhere(type(child))


@once
def _tuning_elsewhere(kind: Any) -> Any:
    """Return a class of layers that scale their queries except in captures."""
    return changed_class(kind, **{_TUNING: property(lambda layer: layer.tunes_by_position and not capturing())})


@once
def _passing_positions(kind: Any) -> Any:
    """Return a class of layers which pass ``position_ids`` on to the arguments of attention."""

    def forward(self: Any, hidden_states: Tensor, *given: Any, position_ids: Tensor, **named: Any) -> Any:
        passed = {_POSITIONS: position_ids} if capturing() else {}
        return kind.forward(self, hidden_states, *given, position_ids=position_ids, **passed, **named)

    return changed_class(kind, forward=forward)


def tuned_query(module: Any, query: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Return ``query`` ``[B, H, T, D]``, scaled if the layer tunes its temperature (2501.19399).

    The positions, int64 ``[B or 1, T]``, are taken out of the arguments of attention.
    """
    positions = arguments.pop(_POSITIONS, None)
    if not getattr(module, "tunes_by_position", False):
        return query
    steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
    scale = torch.log1p(steps) * module.attn_scale + 1.0
    return (query * scale[:, None, :, None]).to(query.dtype)

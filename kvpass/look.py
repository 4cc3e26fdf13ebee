"""A page that shows the text of a cache and how many heads keep each of its tokens."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from kvpass.cache.prompt_record import layer_ids
from kvpass.cache.state import KVState

_TEMPLATE = Path(__file__).with_name("look.html")


def page(state: KVState, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return one HTML file that loads nothing: the text, each token shaded by the share of KV heads that keep it.

    Args:
        state: of one row, whose token ids are known, with all heads. tokenizer: that made the ids.
    Raises:
        ValueError: it is another cache, or has no layer that shares the budget.
    """
    if len(state.start) != 1 or state.ids is None or state.ranks.several:
        raise ValueError(
            "only one row of token ids can be shown; where several processes share the heads, its saved file"
        )
    if not state.full_layers:
        raise ValueError("nothing to show: all layers have sliding windows or are recurrent")
    pools, rule = state.layout.pools, state.policy.decode_rule()
    by_layer = {layer: group.geometry.kv_heads for group in pools for layer in group.layers}
    heads = torch.tensor([by_layer[layer] for layer in layer_ids(pools)], device="cpu")[:, None]
    ids = state.ids[0, state.attention_mask[0] == 1].tolist()
    positions = state.positions[0].flatten(1).cpu()  # -1: no entry
    kept = torch.zeros(len(heads), 1 + state.columns, device="cpu")
    kept = kept.scatter_add_(1, positions + 1, torch.ones(positions.shape, device="cpu"))[:, 1:]
    kept = kept[:, state.text_positions[: len(ids)]]
    pieces, starts = _pieces(ids, tokenizer)
    shares = torch.cat([kept.sum(0, keepdim=True) / heads.sum(), kept / heads])
    sizes = torch.tensor([*starts, len(ids)], device="cpu").diff()
    of_piece = torch.segment_reduce(shares, "mean", lengths=sizes.expand(len(shares), -1), axis=1)
    percent = (100 * of_piece).round().clamp(min=of_piece > 0)  # what one head keeps is not shown as 0 %
    total, full = int(kept.sum()), len(ids) * int(heads.sum())
    nbytes, full_bytes = state.nbytes, len(ids) * state.layout.token_bytes("model")
    tail = state.full_layers[0]
    outside = sum(len(ring.layers) for ring in state.layout.rings) + len({s.layer for s in state.layout.states})
    data = {
        "figures": {
            "tokens": f"{len(ids):,}",
            "policy": f"{state.policy.text}, budget {state.budget}",
            "entries kept": f"{total:,} of {full:,} ({total / full:.1%})",
            f"bytes, entries={state.entry_format!r}": f"{nbytes:,} of {full_bytes:,} ({nbytes / full_bytes:.1%})",
        },
        "outside": outside,
        "first": getattr(state.policy.parts[0], "sinks", 0),
        "newest": rule.window if rule else tail.used - int(tail.buffers.tail_start[0]),
        "tokens": len(ids),
        "layers": len(heads),
        "kept": [round(100 * x, 1) for x in shares.mean(1).tolist()],
        "pieces": pieces,
        "starts": starts,
        "shares": b64encode(percent.byte().numpy().tobytes()).decode(),
    }
    text = json.dumps(data, ensure_ascii=False).replace("<", r"\u003c")  # no text ends the script
    return _TEMPLATE.read_text(encoding="utf-8").replace("{{DATA}}", text)


def _pieces(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[int]]:
    """Return the texts of tokens, and the token at which each begins; bytes of one character are one text."""

    def text(begin: int, end: int) -> str:
        return str(tokenizer.decode(ids[begin:end], clean_up_tokenization_spaces=False))

    pieces, starts, before = [], [0], 0
    for end in range(1, len(ids) + 1):
        whole = text(before, end)  # with the token before: some tokenizers drop a space at the begin
        if end == len(ids) or not whole.endswith("\N{REPLACEMENT CHARACTER}"):
            pieces.append(whole[len(text(before, starts[-1])) :])
            before = starts[-1]
            starts.append(end)
    return pieces, starts[:-1]

"""What compressed models are compared with: the uncompressed model, whose tokens may look only at chosen entries."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from compiled_models import in_pieces
from kvpass.adapt.copied import copy_structure
from kvpass.cache.cache import CompressedCache
from kvpass.policies import POLICIES
from numeric_checks import assert_close
from tiny_models import left_pad, random_ids


class MaskedOracle:
    """The uncompressed model in eager mode, whose later tokens may look only at chosen prompt entries.

    Keeps everything and masks, so it shares no code with the compressed path: new tokens attend, per layer and KV
    head, to the kept positions of the prompt and causally to each other; prompt tokens attend to the whole prompt.
    Sliding windows, soft-capping and sinks are the model's own.

    Args:
        reads_images: attention outside of its language model stays as it is. sees_later: which tokens see which in any
            case, themselves too, bool ``[S, S]``.
    """

    def __init__(self, model: PreTrainedModel, *, reads_images: bool = False, sees_later: Tensor | None = None) -> None:
        self.model, self.sees_later = copy_structure(model), sees_later
        for module in (self.model.get_decoder() if reads_images else self.model).modules():
            if getattr(module, "config", None) is not None:
                module.config._attn_implementation = _ORACLE_NAME

    @torch.no_grad()
    def logits(self, ids: Tensor, mask: Tensor, keep: Tensor, **images: Tensor) -> Tensor:
        """Logits of every token, ``[B, S, vocabulary]``.

        Args:
            ids: prompt and new tokens, ``[B, S]``, left-padded. mask: ``[B, S]``.
            keep: bool ``[B, L, K, N]`` over the prompt's columns. images: of a prompt that has some.
        """
        s = ids.shape[1]
        n = keep.shape[3]
        seen = torch.cat([keep, torch.ones(*keep.shape[:3], s - n, dtype=torch.bool)], 3)
        new_rows = torch.arange(s)[:, None] >= n
        return self.logits_seen(ids, mask, seen[:, :, :, None, :] | ~new_rows, **images)

    @torch.no_grad()
    def logits_seen(self, ids: Tensor, mask: Tensor, seen: Tensor, **images: Tensor) -> Tensor:
        """The same where every token may have another view: ``seen`` bool ``[B, L, K, S, S]``, rows look at columns.

        What lies in the future or in padding stays hidden whatever ``seen`` says; a token always sees itself.
        """
        s = ids.shape[1]
        causal = torch.ones(s, s, dtype=torch.bool).tril() & mask[:, None, None, :].bool()
        allowed = causal[:, None] & seen
        allowed |= torch.eye(s, dtype=torch.bool) if self.sees_later is None else self.sees_later
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        _ORACLE_MASKS[:] = list(allowed.unbind(1))
        # recurrent layers must not read padding; attention reads ``allowed`` alone
        given = {} if bool(mask.all()) else {"attention_mask": mask}
        given |= images or {"position_ids": positions}  # a model that reads images counts positions itself
        return self.model(input_ids=ids, use_cache=False, **given).logits


_ORACLE_NAME = "kvpass_masked_oracle"
_ORACLE_MASKS: list[Tensor] = []
"""What may be seen in the attention calls to come, one each: some models have two in a layer."""


def _masked_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    scaling, window, softcap, sinks = (given.get(name) for name in ("scaling", "sliding_window", "softcap", "s_aux"))
    group = query.shape[1] // key.shape[1]
    allowed = _ORACLE_MASKS.pop(0).repeat_interleave(group, 1)
    if window is not None:
        rows = torch.arange(query.shape[2])
        allowed = allowed & (rows[:, None] - rows < window)
    config: Any = module.config
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[module.layer_idx] == "chunked_attention":
        chunk = torch.arange(query.shape[2]) // config.attention_chunk_size  # of a row without padding
        allowed = allowed & (chunk[:, None] == chunk)
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(*logits.shape[:3], 1)], -1)
    return (logits.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2), None


AttentionInterface.register(_ORACLE_NAME, _masked_attention)


class Transcript:
    """All tokens that went through a cache, and what each of them could see: the oracle's side of a test.

    Args:
        oracle: of the model. ids, mask: the prompt, int64 ``[B, N]``. Of the cache only :func:`kept_columns` is read.
    """

    def __init__(self, oracle: MaskedOracle, ids: Tensor, mask: Tensor, layers: int, kv_heads: int) -> None:
        self.oracle = oracle
        self.ids, self.mask = ids, mask
        self.seen = torch.ones(ids.shape[0], layers, kv_heads, ids.shape[1], ids.shape[1], dtype=torch.bool)

    def append(self, new: Tensor, kept: Tensor) -> None:
        """Tokens ``[B, T]`` that see ``kept`` ``[B, L, K, columns so far]``, each other causally, and themselves."""
        t = new.shape[1]
        rows = torch.cat([kept, torch.ones(*kept.shape[:3], t, dtype=torch.bool)], 3)[:, :, :, None]
        self.seen = torch.cat([torch.nn.functional.pad(self.seen, (0, t)), rows.expand(-1, -1, -1, t, -1)], 3)
        self.ids = torch.cat([self.ids, new], 1)
        self.mask = torch.cat([self.mask, torch.ones_like(new)], 1)

    def logits(self) -> Tensor:
        """What the uncompressed model says to every token, ``[B, S, vocabulary]``."""
        return self.oracle.logits_seen(self.ids, self.mask, self.seen)

    def pick_rows(self, index: Tensor) -> None:
        """Row i becomes what row ``index[i]`` was."""
        self.ids, self.mask, self.seen = self.ids[index], self.mask[index], self.seen[index]

    def clone(self) -> Transcript:
        """An independent copy."""
        return copy.copy(self)


def kept_columns(cache: CompressedCache, columns: int) -> Tensor:
    """Which prompt columns a cache keeps, bool ``[B, L, K, columns]``; every real one in layers with a sliding window.

    L counts all layers of the model, which have the same number of KV heads.
    """
    real = torch.arange(columns, device=cache.state.start.device) >= cache.state.start[:, None]
    heads = (*cache.state.layout.pools, *cache.state.layout.rings)[0].geometry.kv_heads
    keep = real[:, None, None].repeat(1, len(cache), heads, 1)
    if cache.state.full_layers:
        positions = cache.positions
        live = positions + cache.state.start[:, None, None, None]
        live = torch.where((positions >= 0) & (live < columns), live, columns)
        chosen = torch.zeros(*positions.shape[:3], columns + 1, dtype=torch.bool, device=live.device)
        keep[:, list(cache.layer_ids)] = chosen.scatter(3, live, True)[..., :columns]
    return keep


def assert_decodes_like_the_masked_model(
    model: PreTrainedModel,
    fast: Any,
    lengths: Sequence[int],
    pieces: list[int],
    between: Callable[[CompressedCache], CompressedCache] = lambda cache: cache,
) -> None:
    """Whether new tokens on compressed prompts have the logits of the model whose tokens see only what was kept.

    Args:
        lengths: of the prompts, a row each. pieces: tokens of each further call. between: the cache that is given to
            the next call.
    """
    ids, mask = left_pad([random_ids(1, n, seed=n)[0] for n in lengths])
    new = random_ids(len(lengths), sum(pieces), seed=5)
    cache = fast(ids, attention_mask=mask).past_key_values
    keep, columns, logits = kept_columns(cache, ids.shape[1]), ids.shape[1] + sum(pieces), []
    if cache.state.full_layers:
        held = int(cache.lengths.sum())
        assert int(keep[:, list(cache.layer_ids)].sum()) == held
    for piece in new.split(pieces, 1):
        out = fast(piece.contiguous(), past_key_values=between(cache))
        cache = out.past_key_values
        logits.append(out.logits)
    given = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    expected, everything = (
        MaskedOracle(model).logits(*given, seen)[:, ids.shape[1] :] for seen in (keep, torch.ones_like(keep))
    )
    assert_close("decode logits", torch.cat(logits, 1), expected, atol=1e-4)
    assert cache.get_seq_length() == columns
    assert (everything - expected).abs().max() > 1e-2, "the budget should change the logits"


PROMPT = 61
"""Tokens of the longest prompt below."""
OPTIONS: dict[str, dict[str, Any]] = {"cake": {"tau1": 1.0, "tau2": 1.0}, "vatp": {"indicator": "h2o"}}


def under(fast: Any, policy: str, budget: int, ids: Tensor, sizes: list[int], mask: Tensor | None = None) -> Any:
    """Logits of a text that is given in pieces of so many tokens under a policy, and its cache."""
    given = budget if POLICIES[policy].needs_budget else None
    fast.set_policy(policy, given, window=8, **OPTIONS.get(policy, {}))
    return in_pieces(fast, ids, sizes, mask)


def assert_padded_rows_equal_alone(fast: Any, policy: str, copies: int) -> None:
    """Against each prompt without padding, in a batch of ``copies``: with 3 no other batch size need be captured.

    The tokens of a prompt differ: equal ones have keys of nearly equal norms, and rounding depends on the batch. The
    model's own token for padding has zeros as its embedding, which would hide what it leaves.
    """
    vocabulary = fast.config.get_text_config().vocab_size
    prompts = [
        torch.randperm(vocabulary, generator=torch.Generator().manual_seed(n))[:n] for n in (PROMPT, 37, 5)
    ]  # the last is shorter than the window
    new, singles = random_ids(3, 4, seed=1), [1] * 4
    ids, mask = left_pad(prompts, pad=5)
    whole_mask = torch.cat([mask, torch.ones_like(new)], 1)
    logits, cache = under(fast, policy, 16, torch.cat([ids, new], 1), [PROMPT, *singles], whole_mask)
    for row, prompt in enumerate(prompts):
        n = prompt.numel()
        text = torch.cat([prompt, new[row]]).repeat(copies, 1)
        expected, alone = under(fast, policy, 16, text, [n, *singles])
        label = f"{policy}, row {row}"
        assert_close(label, logits[row, PROMPT - n :], expected[0], atol=1e-4)
        kept = kept_columns(cache, PROMPT + 4)[row]
        assert torch.equal(kept[..., PROMPT - n :], kept_columns(alone, n + 4)[0]), f"{label} keeps other entries"
        assert not kept[..., : PROMPT - n].any(), f"{label} keeps padding"

"""Kept entries in fewer bits: what attention sees of them, bytes, files, later turns, refusals."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import kvpass
from kvpass.cache.serialization import read_cache_file
from kvpass.errors import CacheFileError, CacheMismatchError
from numeric_checks import assert_close
from tiny_models import left_pad, random_ids, tiny_model

FORMATS = ["int8", "fp8"]
QUICK = [pytest.param("int8", marks=pytest.mark.exhaustive), "fp8"]
"""Both share what these tests are of."""
WINDOW, BUDGET = 8, 20


@functools.cache
def decoder(family: str) -> Any:
    return tiny_model(family, layers=None if family == "gemma3" else 2)


@functools.cache
def compiled(entries: str = "int8", family: str = "llama", backend: str = "eager", **options: Any) -> Any:
    given = {"policy": "lava", "window": WINDOW, "budget": BUDGET, **options}
    return kvpass.compile(decoder(family), backend=backend, entries=entries, **given)


def prompt() -> tuple[torch.Tensor, torch.Tensor]:
    return left_pad([random_ids(1, n, seed=n)[0] for n in (50, 31)])


def rounded(entries: torch.Tensor, entry_format: str) -> torch.Tensor:
    """Entries after a round trip, by the formula."""
    scale = entries.abs().amax(-1, keepdim=True) / (127 if entry_format == "int8" else 448)
    scaled = entries / scale.where(scale > 0, 1.0)
    return (scaled.round() if entry_format == "int8" else scaled.to(torch.float8_e4m3fn).float()) * scale


def continuation(fast: Any, cache: Any, calls: tuple[int, ...] = (1, 1, 4, 9, 1)) -> torch.Tensor:
    logits = []
    for tokens in calls:
        out = fast(random_ids(2, tokens, seed=tokens), past_key_values=cache)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1)


def check_logits(entries: str, family: str, backend: str) -> None:
    """Logits equal those against a cache in full precision whose pool holds the rounded entries."""
    ids, mask = prompt()
    packed, plain = compiled(entries, family, backend), compiled("model", family, backend)
    cache, other = (fast(ids, attention_mask=mask).past_key_values for fast in (packed, plain))
    assert torch.equal(cache.positions, other.positions), "what is kept depends on the entries' format"
    for store in other.full_layers:
        before = store.pool_k
        store.pool_k, store.pool_v = rounded(store.pool_k, entries), rounded(store.pool_v, entries)
        assert not torch.equal(store.pool_k, before)
    assert_close(family, continuation(packed, cache), continuation(plain, other), atol=2e-5)


@pytest.mark.parametrize(
    ("family", "entries"),
    [("llama", "int8"), ("gemma3", "fp8"), pytest.param("llama", "fp8", marks=pytest.mark.exhaustive)],
)
def test_attention_reads_rounded_entries(family: str, entries: str) -> None:
    check_logits(entries, family, "eager")


@pytest.mark.exhaustive
@pytest.mark.parametrize("entries", FORMATS)
def test_attention_reads_rounded_entries_compiled(entries: str) -> None:
    check_logits(entries, "llama", "inductor")


def test_a_prompt_is_answered_before_entries_are_rounded() -> None:
    ids, mask = prompt()
    out = [compiled(entries)(ids, attention_mask=mask).logits for entries in ("int8", "model")]
    assert torch.equal(*out)


@pytest.mark.parametrize("entries", [*QUICK, "model"])
def test_bytes(entries: str) -> None:
    fast = compiled(entries)
    ids = random_ids(1, 400, seed=1)
    fast.set_budget("48KiB")
    try:
        cache = fast(ids).past_key_values
        report = fast.report()
    finally:
        fast.set_budget(BUDGET)
    (store,), g = cache.full_layers, cache.geometry
    full = (g.key_dim + g.value_dim) * 4
    packed = full if entries == "model" else g.key_dim + g.value_dim + 2 * 4
    heads = g.layers * g.kv_heads
    per_head = WINDOW + (48 * 1024 - WINDOW * heads * full) // (heads * packed)
    assert int(cache.lengths.sum()) == per_head * heads
    held = heads * (WINDOW * full + (per_head - WINDOW) * packed)
    assert held <= 48 * 1024 and int(report.bytes_kept.sum()) == held == store.entry_bytes
    pool, tail = heads * (per_head - WINDOW) * (packed + 4), heads * store.tail_k.shape[3] * full
    assert cache.nbytes == pytest.approx(pool + tail, rel=0.02)
    assert report.to_dict()["entry_format"] == entries
    assert (f"entries='{entries}'" in str(report)) == (entries != "model")


@pytest.mark.parametrize("entries", QUICK)
def test_a_file_holds_the_codes(entries: str, tmp_path: Any) -> None:
    fast, (ids, mask) = compiled(entries), prompt()
    cache = fast(ids, attention_mask=mask).past_key_values
    path = tmp_path / "cache.kv"
    cache.save(path)
    metadata, tensors = read_cache_file(path)
    assert metadata["entry_format"] == entries
    assert tensors["store0_pool_k"].dtype.itemsize == 1 and tensors["store0_pool_k_scale"].dtype == torch.float32
    loaded = kvpass.load_cache(path, fast)
    assert torch.equal(continuation(fast, loaded), continuation(fast, cache))
    with pytest.raises(CacheMismatchError, match=f"entries='{entries}', the model 'model'"):
        kvpass.load_cache(path, compiled("model"))
    with pytest.raises(CacheMismatchError, match=f"entries='{entries}', the model 'model'"):
        compiled("model")(ids[:, :1], past_key_values=cache)


def test_a_file_whose_codes_are_of_another_dtype_is_refused(tmp_path: Any) -> None:
    fast, (ids, mask) = compiled("int8"), prompt()
    path = tmp_path / "cache.kv"
    cache = fast(ids, attention_mask=mask).past_key_values
    cache.entry_format = "fp8"
    cache.save(path)
    with pytest.raises(CacheFileError, match=r"pool_k is torch\.int8"):
        kvpass.load_cache(path, compiled("fp8"))


@pytest.mark.parametrize("entries", QUICK)
def test_recompression_moves_codes_as_they_are(entries: str) -> None:
    fast = compiled(entries, recompress="every_turn")
    cache = fast(random_ids(1, 60, seed=1)).past_key_values
    (store,), held = cache.full_layers, {}
    for position, *row in zip(
        store.pool_positions[0].tolist(),
        store.pool_k[0].float(),
        store.pool_k_scale[0],
        store.pool_v[0].float(),
        store.pool_v_scale[0],
        strict=True,
    ):
        held.setdefault(position, []).append(torch.cat([x.flatten() for x in row]))
    tail = store.tail_k[:, 0, :, : store.used].float()
    cache = fast(random_ids(1, 10, seed=2), past_key_values=cache).past_key_values
    (after,), g = cache.full_layers, cache.geometry
    assert int(cache.lengths.sum()) == BUDGET * g.layers * g.kv_heads
    assert after.pool_k.dtype == store.pool_k.dtype
    moved = 0
    for slot, position in enumerate(after.pool_positions[0].tolist()):
        row = [after.pool_k, after.pool_k_scale, after.pool_v, after.pool_v_scale]
        now = torch.cat([x[0, slot].float().flatten() for x in row])
        if position < 60 - WINDOW:
            assert any(torch.equal(now, old) for old in held[position]), "an entry of the pool was rounded again"
        elif position < 60:
            moved += 1
            key = after.pool_k[0, slot].float() * after.pool_k_scale[0, slot]
            exact = rounded(tail[:, :, position - (60 - WINDOW)], entries)
            assert bool((key - exact).abs().amax(-1).min() <= 1e-6), "an entry of the tail was rounded otherwise"
    assert moved > 0


def test_rows_are_selected_and_drafts_taken_back() -> None:
    fast, (ids, mask) = compiled("int8"), prompt()
    cache = fast(ids, attention_mask=mask).past_key_values
    picked = cache.clone()
    picked.reorder_cache(torch.tensor([1, 0]))
    new = random_ids(2, 1, seed=3)
    assert_close(
        "rows",
        fast(new.flip(0), past_key_values=picked).logits.flip(0),
        fast(new, past_key_values=cache.clone()).logits,
        atol=1e-5,
    )
    one = random_ids(1, 40, seed=4)
    plain = fast.generate(one, max_new_tokens=6, do_sample=False)
    assert torch.equal(fast.generate(one, max_new_tokens=6, do_sample=False, prompt_lookup_num_tokens=3), plain)


def test_refusals() -> None:
    model = decoder("llama")
    with pytest.raises(ValueError, match="entries='int3': must be one of model, int8, fp8"):
        kvpass.compile(model, budget=64, entries="int3")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="entries='int8' with policy 'h2o': it evicts while decoding"):
        kvpass.compile(model, policy="h2o", budget=64, entries="int8")
    fast = compiled("int8")
    before = fast.policy
    with pytest.raises(ValueError, match="evicts while decoding"):
        fast.set_policy("tova", 64)
    assert fast.policy == before

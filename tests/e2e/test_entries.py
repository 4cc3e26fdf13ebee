"""Kept entries in fewer bits: what attention sees of them, bytes, files, later turns, refusals."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

import kvpass
from kvpass.cache.serialization import read_cache_file
from kvpass.cache.shared_heads import divided, joined
from kvpass.errors import CacheFileError, CacheMismatchError
from kvpass.operands import LEVELS, AppendBuffers
from kvpass.ops.entry_formats import dequantise, pool_rows
from kvpass.ops.rotation import rotated, rotated_back
from kvpass.ranks import Ranks
from numeric_checks import assert_close
from pairwise import quick
from tiny_models import left_pad, random_ids, tiny_model

FORMATS = ["int8", "fp8", "rot4", "rot3", "rot2"]
ROTATED = {"rot4": 4, "rot3": 3, "rot2": 2}
WINDOW, BUDGET = 8, 20


@functools.cache
def decoder(family: str) -> Any:
    return tiny_model(family, layers=None if family == "gemma3" else 2, head_dim=32)


@functools.cache
def compiled(entries: str = "int8", family: str = "llama", backend: str = "eager", **options: Any) -> Any:
    given = {"policy": "lava", "window": WINDOW, "budget": BUDGET, **options}
    return kvpass.compile(decoder(family), backend=backend, entries=entries, **given)


def prompt() -> tuple[torch.Tensor, torch.Tensor]:
    return left_pad([random_ids(1, n, seed=n)[0] for n in (100, 31)])


def rounded(entries: torch.Tensor, entry_format: str) -> torch.Tensor:
    """Entries ``[n, D]`` of one KV head after a round trip, by the formula."""
    if entry_format in ROTATED:
        level = torch.tensor(LEVELS[ROTATED[entry_format]])
        y = rotated(entries)
        size = y.square().mean(-1, keepdim=True).sqrt()
        near = level[(y[..., None] / size[..., None] - level).abs().argmin(-1)]
        return rotated_back(near * (y * near).sum(-1, keepdim=True) / near.square().sum(-1, keepdim=True))
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


MORE = [("llama", "fp8"), ("llama", "rot2"), ("llama", "rot3"), ("gemma3", "rot4"), ("qwen3", "rot4")]


def check_logits(entries: str, family: str, backend: str) -> None:
    """Logits equal those against a cache in full precision whose pool holds the rounded entries."""
    ids, mask = prompt()
    packed, plain = (compiled(kind, family, backend) for kind in (entries, "model"))
    cache, other = (fast(ids, attention_mask=mask).past_key_values for fast in (packed, plain))
    assert torch.equal(cache.positions, other.positions), "what is kept depends on the entries' format"
    for store in other.full_layers:
        for row, bounds in enumerate(store.offsets.tolist()):
            for begin, end in itertools.pairwise(bounds):
                for pool in (store.pool_k, store.pool_v):
                    before = pool[row, begin:end].clone()
                    pool[row, begin:end] = rounded(before, entries)
                    assert end == begin or not torch.equal(pool[row, begin:end], before)
    assert_close(family, continuation(packed, cache), continuation(plain, other), atol=2e-5)


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("llama", "int8"),
        pytest.param("gemma3", "fp8", marks=pytest.mark.exhaustive),
        ("llama", "rot4"),
        *(pytest.param(family, entries, marks=pytest.mark.exhaustive) for family, entries in MORE),
    ],
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


@pytest.mark.parametrize("entries", quick([*FORMATS, "model"], ["int8", "rot3"]))
def test_bytes(entries: str) -> None:
    fast = compiled(entries)
    ids = random_ids(1, 440, seed=1)
    fast.set_budget("48KiB")
    try:
        cache = fast(ids).past_key_values
        report = fast.report()
    finally:
        fast.set_budget(BUDGET)
    (store,), g = cache.full_layers, cache.geometry
    full = (g.key_dim + g.value_dim) * 4
    packed = full if entries == "model" else (g.key_dim + g.value_dim) * ROTATED.get(entries, 8) // 8 + 2 * 4
    heads = g.layers * g.kv_heads
    per_head = WINDOW + (48 * 1024 - heads * WINDOW * full) // (heads * packed)
    assert int(cache.lengths.sum()) == per_head * heads
    held = heads * (WINDOW * full + (per_head - WINDOW) * packed)
    assert held <= 48 * 1024 and int(report.bytes_kept.sum()) == held == store.entry_bytes
    pool, tail = heads * (per_head - WINDOW) * (packed + 4), heads * store.tail_k.shape[3] * full
    assert cache.nbytes == pytest.approx(pool + tail + 4 * ids.numel(), rel=0.02)
    assert report.to_dict()["entry_format"] == entries
    assert (f"entries='{entries}'" in str(report)) == (entries != "model")


@pytest.mark.parametrize("entries", quick(["int8", "fp8", "rot3", "rot2"], ["rot3"]))
def test_a_file_holds_the_codes(entries: str, tmp_path: Any) -> None:
    fast, (ids, mask) = compiled(entries), prompt()
    cache = fast(ids, attention_mask=mask).past_key_values
    path = tmp_path / "cache.kv"
    cache.save(path)
    metadata, tensors = read_cache_file(path)
    assert metadata["entry_format"] == entries
    codes = tensors["store0_pool_k"]
    assert codes.dtype.itemsize == 1 and codes.shape[2] == 32 * ROTATED.get(entries, 8) // 8
    scales = {name for name in tensors if name.endswith("scale")}
    assert scales == {f"store0_pool_{side}_scale" for side in "kv"}
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


@pytest.mark.parametrize("entries", quick(["int8", "fp8", "rot4"], ["rot4"]))
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
            key = dequantise(after.pool_k[0, slot], after.pool_k_scale[0, slot], 32)
            exact = tail[:, :, position - (60 - WINDOW)]
            exact = rotated(rounded(rotated_back(exact), entries)) if entries in ROTATED else rounded(exact, entries)
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


@pytest.mark.parametrize("entries", ["rot4", pytest.param("fp8", marks=pytest.mark.exhaustive)])
def test_processes_divide_codes_by_heads_and_join_them(entries: str) -> None:
    """Each has the entries of its heads; joined they are the whole, bit for bit."""
    ids, mask = prompt()
    cache = compiled(entries, budget=60)(ids, attention_mask=mask).past_key_values
    tensors = {"start": cache.start}
    tensors |= {f"store0_{name}": x for name, x in cache.full_layers[0].compact_tensors().items()}
    parts, layouts = zip(*(divided(tensors, cache.layout, Ranks("", rank, 2)) for rank in range(2)), strict=True)

    def entries_of(part: Any, row: int, segment: int) -> tuple[torch.Tensor, torch.Tensor]:
        held = AppendBuffers(*(part.get(f"store0_{name}") for name in AppendBuffers._fields))
        return pool_rows(held, row, slice(*held.offsets[row, segment : segment + 2].tolist()))

    g = cache.layout.pools[0].geometry
    for row, layer, head in itertools.product(range(2), range(g.layers), range(g.kv_heads)):
        own = g.kv_heads // 2
        found = entries_of(parts[head // own], row, layer * own + head % own)
        for one, other in zip(found, entries_of(tensors, row, layer * g.kv_heads + head), strict=True):
            assert torch.equal(one, other), (row, layer, head)
    whole = joined(parts, layouts[0])
    assert whole.keys() == tensors.keys()
    for name, x in tensors.items():
        assert torch.equal(whole[name].view(torch.uint8), x.contiguous().view(torch.uint8)), name


def test_refusals() -> None:
    model = decoder("llama")
    with pytest.raises(ValueError, match="entries='int3': must be one of model, int8, fp8, rot4, rot3, rot2"):
        kvpass.compile(model, budget=64, entries="int3")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="entries='int8' with policy 'h2o': it evicts while decoding"):
        kvpass.compile(model, policy="h2o", budget=64, entries="int8")
    odd = tiny_model("llama", layers=1, head_dim=12)
    odd = kvpass.compile(odd, budget=20, window=8, entries="rot2", backend="eager")
    with pytest.raises(ValueError, match="entries='rot2': head dimensions must be multiples of 8"):
        odd(random_ids(1, 30, seed=1))
    fast = compiled("int8")
    before = fast.policy
    with pytest.raises(ValueError, match="evicts while decoding"):
        fast.set_policy("tova", 64)
    assert fast.policy == before

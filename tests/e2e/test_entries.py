"""Entries in fewer bits: what attention sees of them, bytes, files, eviction while decoding, later turns, refusals."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import kvpass
from compiled_models import compiled_anew, greedy, padded, reloaded, two_layers
from kvpass.cache.cache_file import read_cache_file
from kvpass.errors import CacheFileError, CacheMismatchError
from kvpass.ops import reference
from numeric_checks import assert_close, rounded
from pairwise import quick, quick_rows
from tiny_models import continuation, random_ids, tiny_model

FORMATS = ["int8", "fp8", "rot4", "rot3", "rot2"]
ROTATED = {"rot4": 4, "rot3": 3, "rot2": 2}
WINDOW, BUDGET = 8, 20


def compiled(entries: str = "int8", family: str = "llama", **options: Any) -> Any:
    """A model that is shared with other tests: :func:`two_layers`."""
    return two_layers(family, entries=entries, **options)[1]


IDS, MASK = padded(100, 31)
OFTEN = [("llama", "int8"), ("llama", "rot4"), ("deepseek_v3", "rot4"), ("gemma2", "rot4"), ("gpt_oss", "int8")]
MORE = [("llama", "fp8"), ("llama", "rot2"), ("llama", "rot3"), ("gemma3", "rot4"), ("qwen3", "rot4")]
MORE += [("gemma3", "fp8"), ("deepseek_v3", "int8")]
NOT_PLAIN = {"gemma2", "gpt_oss"}
"""Families whose logits have a soft cap or sinks."""


def means_of(store: Any, family: str = "llama") -> torch.Tensor:
    """Mean key of each head of a store in full precision, ``[L, B, K, D]``; zeros where none is subtracted."""
    layers, rows, kv_heads, _, dim = store.buffers.tail_k.shape
    found = store.buffers.tail_k.new_zeros(layers, rows, kv_heads, dim)
    if store.evicts or store.geometry.values_in_keys or family in NOT_PLAIN:
        return found
    for layer, row, head in itertools.product(range(layers), range(rows), range(kv_heads)):
        begin, end = store.buffers.offsets[row, layer * kv_heads + head :][:2].tolist()
        own = store.buffers.tail_k[layer, row, head, int(store.buffers.tail_start[row]) : store.used]
        found[layer, row, head] = torch.cat([store.buffers.pool_k[row, begin:end], own]).double().mean(0)
    return found


@contextmanager
def new_entries_rounded(entries: str, means: torch.Tensor | None = None) -> Iterator[None]:
    """The eager operators in full precision, to which new keys and values are given as codes stand for them."""

    def given_rounded(attend: Any) -> Any:
        def attends(call: Any, held: Any, layer: int) -> Any:
            mean = 0.0 if means is None else means[layer][:, :, None]
            k = rounded(call.k - mean, entries) + mean
            v = rounded(call.v, entries) if held.tail.v.shape[-1] else k[..., : call.v.shape[3]]
            return attend(call._replace(k=k, v=v), held, layer)

        return attends

    with pytest.MonkeyPatch.context() as patch:
        for name in ("attend_cache", "attend_slots"):
            patch.setattr(reference, name, given_rounded(getattr(reference, name)))
        yield


def round_prompt(store: Any, entries: str, means: torch.Tensor) -> None:
    """Replace what a store in full precision holds by what codes of it stand for."""
    used, heads = slice(store.used), means.transpose(0, 1).flatten(1, 2)
    for row, bounds in enumerate(store.buffers.offsets.tolist()):
        for segment, (begin, end) in enumerate(itertools.pairwise(bounds)):
            mean = heads[row, segment]
            store.buffers.pool_k[row, begin:end] = rounded(store.buffers.pool_k[row, begin:end] - mean, entries) + mean
            if store.buffers.pool_v.shape[-1]:
                store.buffers.pool_v[row, begin:end] = rounded(store.buffers.pool_v[row, begin:end].clone(), entries)
    mean = means[:, :, :, None]
    store.buffers.tail_k[..., used, :] = rounded(store.buffers.tail_k[..., used, :] - mean, entries) + mean
    if store.buffers.tail_v.shape[-1]:
        store.buffers.tail_v[..., used, :] = rounded(store.buffers.tail_v[..., used, :].clone(), entries)


@pytest.mark.parametrize(
    ("family", "entries", "backend"),
    [
        *((family, entries, "eager") for family, entries in OFTEN),
        *(pytest.param(family, entries, "eager", marks=pytest.mark.exhaustive) for family, entries in MORE),
        *(pytest.param("llama", entries, "inductor", marks=pytest.mark.exhaustive) for entries in FORMATS),
    ],
)
def test_attention_reads_rounded_entries(family: str, entries: str, backend: str) -> None:
    """Logits equal those against a cache in full precision that holds the rounded entries."""
    packed, plain = compiled(entries, family, backend=backend), compiled("model", family)
    outs = [fast(IDS, MASK) for fast in (packed, plain)]
    cache, other = (out.past_key_values for out in outs)
    assert backend == "inductor" or torch.equal(*(out.logits for out in outs)), "of entries before they are rounded"
    assert torch.equal(cache.positions, other.positions), "what is kept depends on the entries' format"
    before = plain(IDS[:, :1], past_key_values=other.clone()).logits
    (means,) = (means_of(store, family) for store in other.state.full_layers)
    for store in other.state.full_layers:
        round_prompt(store, entries, means)
    assert not torch.allclose(plain(IDS[:, :1], past_key_values=other.clone()).logits, before, atol=2e-5)
    found = continuation(packed, cache)
    with new_entries_rounded(entries, means):
        assert_close(family, found, continuation(plain, other), atol=2e-5)


EVICTING = {"tova": {}, "r_kv": {"buffer": 16}, "h2o": {}, "cake": {"tau1": 1.6, "tau2": 0.4}, "streaming_llm": {}}
"""Their options; a r_kv of the usual buffer would not evict in so short a test."""


@pytest.mark.parametrize(
    ("policy", "entries", "backend"),
    quick_rows(
        [("r_kv", "rot3", "inductor"), *((policy, "rot4", "eager") for policy in EVICTING)], [("tova", "rot4", "eager")]
    ),
)
def test_eviction_while_decoding_reads_rounded_entries(policy: str, entries: str, backend: str) -> None:
    """New codes take the slots of evicted ones; kept positions and logits are those of rounded entries."""
    options = {"policy": policy, "window": None if policy in ("tova", "streaming_llm") else WINDOW, **EVICTING[policy]}
    packed, plain = compiled(entries, backend=backend, **options), compiled("model", **options)
    cache, other = (fast(IDS, MASK).past_key_values for fast in (packed, plain))
    for store in other.state.full_layers:
        round_prompt(store, entries, means_of(store))
    held, new = int(cache.lengths.sum()), random_ids(2, 40, seed=5)
    for step in range(40):
        found = packed(new[:, step : step + 1], past_key_values=cache).logits
        with new_entries_rounded(entries):
            expected = plain(new[:, step : step + 1], past_key_values=other).logits
        assert_close(f"step {step}", found, expected, atol=5e-5)
    assert torch.equal(cache.positions, other.positions)
    assert cache.state.full_layers[0].buffers.tail_k.dtype.itemsize == 1
    assert policy == "r_kv" or int(cache.lengths.sum()) <= held + 4


@pytest.mark.parametrize("entries", quick([*FORMATS, "model"], ["int8", "rot3"]))
def test_bytes(entries: str) -> None:
    fast = compiled(entries)
    ids = random_ids(1, 440, seed=1)
    fast.set_budget("32KiB")
    cache, report = fast(ids).past_key_values, fast.report()
    (store,) = cache.state.full_layers
    g = store.geometry
    size = g.key_dim + g.value_dim
    entry = 4 * size if entries == "model" else size * ROTATED.get(entries, 8) // 8 + 2 * 4
    heads = g.layers * g.kv_heads
    per_head = 32 * 1024 // (heads * entry)
    assert int(cache.lengths.sum()) == per_head * heads
    held = heads * per_head * entry
    assert held <= 32 * 1024 and int(report.bytes_kept.sum()) == held == store.entry_bytes
    pool, tail = heads * (per_head - WINDOW) * (entry + 4), heads * store.buffers.tail_k.shape[3] * entry
    assert cache.nbytes == pytest.approx(pool + tail + 4 * ids.numel(), rel=0.02)
    assert report.to_dict()["entry_format"] == entries
    assert (f"entries='{entries}'" in str(report)) == (entries != "model")


@pytest.mark.parametrize("entries", quick(["int8", "fp8", "rot3", "rot2"], ["rot3"]))
def test_a_file_holds_the_codes(entries: str, tmp_path: Any) -> None:
    fast, path = compiled(entries), tmp_path / "cache.kv"
    cache = fast(IDS, MASK).past_key_values
    cache.save(path)
    metadata, tensors = read_cache_file(path)
    assert metadata["entry_format"] == entries
    codes, dim = tensors["store0_pool_k"], cache.state.full_layers[0].geometry.key_dim
    assert codes.dtype.itemsize == 1 and codes.shape[2] == dim * ROTATED.get(entries, 8) // 8
    scales = {name for name in tensors if name.endswith("scale")}
    assert scales == {f"store0_{side}_{name}_scale" for side in ("pool", "tail") for name in "kv"}
    loaded = kvpass.load_cache(path, fast)
    assert torch.equal(continuation(fast, loaded), continuation(fast, cache))
    plain = compiled("model")
    for use in (lambda: kvpass.load_cache(path, plain), lambda: plain(IDS[:, :1], past_key_values=cache)):
        with pytest.raises(CacheMismatchError, match=f"entries='{entries}', the model 'model'"):
            use()


@pytest.mark.parametrize("entries", quick(["int8", "fp8", "rot4"], ["rot4"]))
def test_recompression_moves_codes_as_they_are(entries: str) -> None:
    fast = compiled(entries, recompress="every_turn")
    cache = fast(random_ids(1, 60, seed=1)).past_key_values
    (store,), held = cache.state.full_layers, {}
    sides = "k", "k_scale", "v", "v_scale"

    def codes_of(store: Any) -> Iterator[tuple[int, torch.Tensor]]:
        """Position, and codes and scales, of each entry of the pool."""
        for slot, position in enumerate(store.buffers.pool_positions[0].tolist()):
            parts = [getattr(store.buffers, f"pool_{name}")[0, slot].flatten() for name in sides]
            yield position, torch.cat(parts)

    for position, codes in codes_of(store):
        held.setdefault(position, []).append(codes)
    for slot in range(store.used):
        tails = [getattr(store.buffers, f"tail_{name}")[:, 0, :, slot].flatten(0, 1) for name in sides]
        held[60 - WINDOW + slot] = [torch.cat([x.flatten() for x in row]) for row in zip(*tails, strict=True)]
    cache = fast(random_ids(1, 10, seed=2), past_key_values=cache).past_key_values
    (after,) = cache.state.full_layers
    assert int(cache.lengths.sum()) == BUDGET * after.geometry.layers * after.geometry.kv_heads
    old = [(position, codes) for position, codes in codes_of(after) if position < 60]
    assert any(position >= 60 - WINDOW for position, _ in old)
    for position, codes in old:
        assert any(torch.equal(codes, before) for before in held[position]), "an entry was rounded again"


def test_rows_are_selected_drafts_taken_back_and_a_file_of_codes_of_another_dtype_refused(tmp_path: Any) -> None:
    fast = compiled("int8")
    cache = fast(IDS, MASK).past_key_values
    picked = cache.clone()
    picked.reorder_cache(torch.tensor([1, 0]))
    new = random_ids(2, 1, seed=3)
    found = fast(new.flip(0), past_key_values=picked).logits.flip(0)
    assert_close("rows", found, fast(new, past_key_values=cache).logits, atol=1e-5)
    one = random_ids(1, 40, seed=4)
    assert torch.equal(greedy(fast, one, prompt_lookup_num_tokens=3), greedy(fast, one))
    cache.entry_format = "fp8"
    with pytest.raises(CacheFileError, match=r"pool_k is torch\.int8"):
        reloaded(cache, compiled("fp8"), tmp_path)


def test_head_dims_that_8_does_not_divide_and_codes_of_wide_rows_on_cuda_are_refused() -> None:
    """No kernel there reads these; asked before anything moves, so this needs no device."""
    odd = compiled_anew(tiny_model("llama", layers=1, head_dim=12), entries="rot2")
    with pytest.raises(ValueError, match="entries='rot2': head dimensions must be multiples of 8"):
        odd(random_ids(1, 30, seed=1))
    wide = compiled_anew(tiny_model("llama", layers=1, head_dim=264), entries="rot3")
    cache = wide(random_ids(1, 30)).past_key_values
    with pytest.raises(ValueError, match=r"entries='rot3': keys have 264 numbers, .* give entries='model'"):
        cache.to("cuda")

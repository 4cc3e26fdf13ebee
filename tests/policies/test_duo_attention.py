"""Head maps: which heads keep the whole prompt, against an order of all entries; files as published; refusals."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import kvpass
from kvpass.cache.plan import plan
from kvpass.policies import from_spec, resolve
from masked_oracle import kept_columns
from tiny_models import HEAD_MAP, compiled_once, left_pad, random_ids


def kept_of(head_map: list[list[float]], length: int, budget: int, window: int, sinks: int) -> torch.Tensor:
    """Entries in the order in which they are taken until the budget is spent, bool ``[L, K, N]``."""
    layers, kv_heads = len(head_map), len(head_map[0])
    every = itertools.product(range(layers), range(kv_heads))
    heads = sorted(every, key=lambda at: (-head_map[at[0]][at[1]], at))
    newest = [(*at, n) for at in heads for n in range(max(length - window, 0), length)]
    first = [(*at, n) for n in range(min(sinks, length - window)) for at in heads]
    rest = [(*at, n) for at in heads for n in reversed(range(sinks, length - window))]
    keep = torch.zeros(layers, kv_heads, length, dtype=torch.bool)
    for at in [*newest, *first, *rest][: min(budget, length) * layers * kv_heads]:
        keep[at] = True
    return keep


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 30)),
    budget=st.integers(1, 34),
    window=st.integers(0, 6),
    sinks=st.integers(0, 5),
    data=st.data(),
)
def test_heads_become_full_in_the_order_of_the_map_until_the_budget_is_spent(sizes, budget, window, sinks, data):
    layers, kv_heads, length = sizes
    if budget < min(window + 1, length):
        budget = window + 1
    row = st.lists(st.sampled_from([0.0, 0.2, 0.5, 1.0]), min_size=kv_heads, max_size=kv_heads)
    head_map = data.draw(st.lists(row, min_size=layers, max_size=layers))
    q, k, v = torch.randn(3, layers, 1, kv_heads, length, 4)
    found = plan("duo_attention", q, k, v, budget=budget, window=window, head_map=head_map, sinks=sinks)
    assert torch.equal(found.keep[:, 0], kept_of(head_map, length, budget, window, sinks))


def published(folder: Path, rows: list[str], **config: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "full_attention_heads.tsv").write_text("".join(f"{row}\n" for row in rows))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


ROWS = ["\t".join(f"{number:e}" for number in row) for row in HEAD_MAP]


def test_a_published_map_decides_what_rows_of_any_padding_keep_and_a_saved_cache_needs_no_file(tmp_path):
    folder = published(tmp_path / "map", ROWS, sink_size=3, recent_size=5)
    _, fast = compiled_once("llama", layers=3, policy="duo_attention", budget=17, backend="eager", head_map=folder)
    prompts = [random_ids(1, tokens, seed=tokens)[0] for tokens in (41, 23)]
    cache = fast.compress(*left_pad(prompts))
    for row, prompt in enumerate(prompts):
        found = kept_columns(cache, 41)[row, ..., -len(prompt) :]
        assert torch.equal(found, kept_of([*HEAD_MAP], len(prompt), 17, 5, 3))
    cache.save(tmp_path / "document.kv")
    published(tmp_path / "map", ["1"])
    loaded = kvpass.load_cache(tmp_path / "document.kv", fast)
    assert loaded.policy == cache.policy == resolve("duo_attention", head_map=HEAD_MAP, sinks=3, window=5)
    step = random_ids(2, 1)
    assert torch.equal(*(fast(step, past_key_values=one).logits for one in (cache, loaded)))


def fitted(path: Path, **held: torch.Tensor) -> str:
    save_file(held, path, metadata={"kvpass_model": "digest"})
    return str(path)


@pytest.mark.parametrize("rule", [None, "maxima", "distances"])
def test_a_file_of_calibrate_has_a_map_by_each_rule(rule, tmp_path):
    maps = {"head_maxima": torch.rand(3, 2), "head_distances": torch.rand(3, 2)}
    path = fitted(tmp_path / "file", **maps, other=torch.tensor([torch.nan]))
    given = {} if rule is None else {"rule": rule}
    policy = resolve("duo_attention", head_map=path, sinks=3, window=5, **given)
    rows = maps[f"head_{rule or 'maxima'}"].tolist()
    assert policy.head_map == tuple(map(tuple, rows)) and policy.made_for() == policy.of_model == "digest"
    q, k, v = torch.randn(3, 3, 1, 2, 30, 4)
    assert torch.equal(plan(policy, q, k, v, budget=17).keep[:, 0], kept_of(rows, 30, 17, 5, 3))
    assert from_spec(policy.spec) == policy == resolve(policy, head_map=path, **given)
    assert resolve(policy, sinks=4).of_model == "digest"
    folder = published(tmp_path / "map", ROWS, sink_size=3, recent_size=5)
    for other in (rows, folder):
        assert resolve(policy, head_map=other).made_for() is None, "a map of another kind is not of that model"


def test_a_file_without_the_map_and_a_rule_without_a_file_are_refused(tmp_path):
    path, distances = fitted(tmp_path / "file", head_maxima=torch.rand(3, 2)), {"rule": "distances"}
    published_map = published(tmp_path / "map", ROWS, sink_size=3, recent_size=5)
    (tmp_path / "text").write_text("no tensors")
    for policy, options, message in (
        ("duo_attention", {"head_map": path, **distances}, "no head_distances: a newer 'kvpass calibrate' writes"),
        ("duo_attention", {"head_map": path, "rule": "distance"}, "must be one of 'maxima', 'distances'"),
        ("duo_attention", {"head_map": HEAD_MAP, **distances}, "is of a file of 'kvpass calibrate'"),
        ("duo_attention", {"head_map": published_map, **distances}, "is of a file of 'kvpass calibrate'"),
        (resolve("duo_attention", head_map=path), distances, "rule='distances': is of a file"),
        (
            "duo_attention",
            {"head_map": fitted(tmp_path / "nan", head_maxima=torch.full((1, 1), torch.nan))},
            "head_map=",
        ),
        ("duo_attention", {"head_map": fitted(tmp_path / "vector", head_maxima=torch.ones(3))}, "head_map="),
        ("duo_attention", {"head_map": str(tmp_path / "text")}, "cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve(policy, **options)


def test_numbers_of_a_file_are_clipped_options_come_before_its_sizes_and_it_may_begin_with_a_byte_order_mark(tmp_path):
    folder = published(tmp_path / "map", ["-0.5\t0.25", "3\t1"], sink_size=3, recent_size=5)
    policy = resolve("duo_attention", head_map=folder, sinks=7)
    assert (policy.head_map, policy.sinks, policy.window) == (((0.0, 0.25), (1.0, 1.0)), 7, 5)
    for file in Path(folder).iterdir():
        file.write_text(file.read_text(), encoding="utf-8-sig")
    assert resolve("duo_attention", head_map=folder, sinks=7) == policy


@pytest.mark.parametrize(
    ("rows", "config", "said"),
    [
        (None, {}, "FileNotFoundError"),
        (["0.5\tx"], {"sink_size": 1, "recent_size": 2}, "could not convert string to float"),
        (["0.5\t1", "0.5"], {"sink_size": 1, "recent_size": 2}, "a row of numbers for each layer"),
        (["0.5\tnan"], {"sink_size": 1, "recent_size": 2}, "nan must be a finite number"),
        (["0.5"], {"sink_size": 1}, "KeyError: 'recent_size'"),
        (["0.5"], {"sink_size": "a", "recent_size": 2}, "sinks='a': must be an int"),
    ],
)
def test_a_map_that_is_not_as_published_is_refused(rows, config, said, tmp_path):
    folder = str(tmp_path / "none") if rows is None else published(tmp_path / "map", rows, **config)
    with pytest.raises(ValueError, match=said):
        resolve("duo_attention", head_map=folder)


def test_a_map_of_another_shape_is_refused_before_a_prompt_is_read():
    given = {"budget": 17, "window": 5, "head_map": HEAD_MAP[:2]}
    _, fast = compiled_once("llama", layers=3, policy="duo_attention", backend="eager", **given)
    said = "head_map is of 2 layers of 2 KV heads, but the model has 3 layers of 2 KV heads under the budget"
    with pytest.raises(ValueError, match=said):
        fast(random_ids(1, 40))
    with pytest.raises(ValueError, match=said):
        plan("duo_attention", *torch.randn(3, 3, 1, 2, 40, 4), **given)
    fast.set_policy("duo_attention", 17, window=5, head_map=HEAD_MAP)
    assert int(fast(random_ids(1, 40)).past_key_values.lengths.sum()) == 17 * 6
    spec = json.loads(resolve("duo_attention", head_map=HEAD_MAP).spec)  # of a file, which may come from anywhere
    with pytest.raises(ValueError, match="head_map='/': must be"):
        from_spec(json.dumps(spec | {"head_map": "/"}))

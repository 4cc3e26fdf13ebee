"""Files that somebody made up, with a right checksum: refused before they are used, and by ``kvpass ask``."""

import copy
import json

import pytest
import torch

import kvpass
from command_line import invoke
from kvpass.cache.cache_file import read_cache_file, write_cache_file
from kvpass.cli import documents
from pairwise import quick
from tiny_models import left_pad, random_ids, tiny_model


class Base:
    """A model, a good file of it, and what is in the file."""

    def __init__(self, folder, family, policy, budget, **changes):
        model = tiny_model(family, num_hidden_layers=2, **changes)
        self.fast = kvpass.compile(model, policy=policy, budget=budget, window=8, backend="eager")
        ids, mask = left_pad([random_ids(1, n, seed=n)[0] for n in (50, 31)])
        cache = self.fast(ids, attention_mask=mask).past_key_values
        cache = self.fast(random_ids(2, 3), past_key_values=cache).past_key_values
        self.path = folder / "cache.kv"
        cache.save(self.path, notes={"model": "builtin", "dtype": "auto"})
        self.metadata, self.tensors = read_cache_file(self.path)

    def load(self, metadata=None, tensors=None):
        """What a file of these parts gives, the good file's own where None."""
        write_cache_file(self.path, self.tensors if tensors is None else tensors, metadata or self.metadata)
        return kvpass.load_cache(self.path, self.fast)

    def refuses(self, what, metadata=None, tensors=None):
        with pytest.raises((kvpass.CacheFileError, kvpass.CacheMismatchError)):
            self.load(metadata, tensors)
            pytest.fail(f"a file was loaded: {what}")


@pytest.fixture(scope="session")
def appending(tmp_path_factory):
    """Pool, tail, a ring, and a padded row."""
    types = ["sliding_attention", "full_attention"]
    return Base(tmp_path_factory.mktemp("appending"), "gemma3", "lava", 20, layer_types=types)


@pytest.fixture(scope="session")
def evicting(tmp_path_factory):
    """Pool, tail, and the table by which decoding evicts."""
    return Base(tmp_path_factory.mktemp("evicting"), "llama", "h2o", 0.5)


HUGE = 10**30
REMOVED = object()
NEW = random_ids(2, 3)
"""As many tokens as :class:`Base` appends: nothing is captured for them again."""


@pytest.fixture(params=["appending", "evicting"])
def base(request):
    return request.getfixturevalue(request.param)


def places(value, path=()):
    """Path to every value inside a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*path, key)
        yield from places(inner, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def changed(value, path, new):
    """A copy with another value at the path, or none."""
    made = copy.deepcopy(value)
    holder = at(made, path[:-1])
    if new is REMOVED:
        del holder[path[-1]]
    else:
        holder[path[-1]] = new
    return made


def is_allowed(path, new):
    """Whether a file may say this: free text, settings that only one of two models knows, a default."""
    for free in (("notes",), ("model", "config")):
        if path[: len(free)] == free:
            return len(path) > len(free) or new == {}
    return (
        (path == ("kvpass_version",) and new == "text")
        or (path == ("reusable",) and new is True)
        or (path == ("format",) and new is REMOVED)  # it is written anyway
        or (path in (("entry_format",), ("own_budget",), ("layout", "states")) and new is REMOVED)  # as in older files
        or (path == ("own_budget",) and new is True)
        or (path[:2] == ("layout", "pools") and path[-1] == "sliding_window" and new is REMOVED)
        or (path[:1] == ("layout",) and path[-1] in ("values_in_keys", "chunked") and new is REMOVED)
        or (path[:2] == ("layout", "rings") and path[-1] == "chunked" and new is True)  # no graph would take the cache
    )


@pytest.mark.parametrize("step", quick([1, 3], [3]))
def test_every_place_of_the_metadata_with_every_wrong_value_is_refused(base, step):
    """In every run each place with a third of the values."""
    forged = 0
    for number, path in enumerate(places(base.metadata)):
        old = at(base.metadata, path)
        for new in (None, [], {}, "text", -1, HUGE, 1.5, True, [old], REMOVED)[number % step :: step]:
            if is_allowed(path, new) or (type(new) is type(old) and new == old):
                continue
            base.refuses((path, new), changed(base.metadata, path, new))
            forged += 1
    assert forged > 200 / step
    assert base.load().columns == 53, "the same file unchanged is loaded"


NUMBERS = {
    "no columns": {"columns": 0},
    "forgotten tokens that it never had": {"forgotten": [53]},
    "nothing left of its text": {"forgotten": [*range(53)]},
    "columns that no memory has a mask for": {"columns": 2**26 + 1},
    "a budget of no row": {"entries": []},
    "a budget of too many rows": {"entries": [20, 20, 20]},
    "a row of more budget than tokens": {"entries": [20, 54]},
    "a budget in bytes of other entries": {"budget": {"kind": "bytes", "value": 10**6}},
    "a fraction above 1": {"budget": {"kind": "fraction", "value": 1.01}},
    "another policy": {"policy": '{"policy": "full"}'},
}


def test_numbers_that_contradict_each_other_and_layers_out_of_order_are_refused(base):
    for case, numbers in NUMBERS.items():
        base.refuses(case, {**base.metadata, **numbers})
    (pool,) = base.metadata["layout"]["pools"]
    rings = base.metadata["layout"]["rings"]
    first, *rest = pool["layers"]
    wrong = [first, first], [*rest, 7], [first, 7], [-1, first], [*rest], [first, *rest, 3], [*rest, first][:2]
    of_pool = [[{**pool, "layers": layers}] for layers in wrong if layers != pool["layers"]]
    for pools in (*of_pool, [], [pool, pool], [{**pool, "sliding_window": 9}]):
        base.refuses(pools, {**base.metadata, "layout": {"pools": pools, "rings": rings}})


def test_a_small_file_for_which_a_call_would_take_much_memory_is_refused(appending):
    """A mask over all columns of two rows, or room in the tails, which have no slots, of many heads."""
    no_ids = {name: tensor for name, tensor in appending.tensors.items() if name != "ids"}
    with pytest.raises(kvpass.CacheFileError, match="columns=33554433 of 2 rows: must be from 1 to"):
        appending.load({**appending.metadata, "columns": 2**25 + 1}, no_ids)
    heads, rows, layers = 75_000, 2, 1
    metadata = copy.deepcopy(appending.metadata)
    metadata["layout"]["pools"][0]["geometry"] |= {"kv_heads": heads, "key_dim": 128, "value_dim": 128}
    forged = {
        "store0_offsets": torch.zeros(rows, layers * heads + 1, dtype=torch.int32),
        "store0_pool_positions": torch.full((rows, 2), -1, dtype=torch.int32),
        "store0_tail_start": torch.zeros(rows, dtype=torch.int64),
        **{f"store0_pool_{side}": torch.zeros(rows, 2, 128) for side in "kv"},
        **{f"store0_tail_{side}": torch.zeros(layers, rows, heads, 0, 128) for side in "kv"},
    }
    with pytest.raises(kvpass.CacheMismatchError, match=r"keys and values of \d+ numbers, here \d+"):
        appending.load(metadata, appending.tensors | forged)


def of(name, change):
    """Tensors with one of them changed."""

    def forge(tensors):
        made = dict(tensors)
        made[name] = change(made[name].clone())
        return made

    return forge


def put(*at, value):
    def change(tensor):
        tensor[at] = value
        return tensor

    return change


def fill_line(table):
    """Every position that a line does not hold goes into its tail of 72 slots."""
    line = table[0, 0, 0]
    others = [position for position in range(53) if position not in line.tolist()]
    line[-len(others) :] = torch.tensor(others)
    return table


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def in_halves(dtype):
    return lambda tensors: {
        key: tensor.to(dtype) if key.endswith(("_k", "_v")) else tensor for key, tensor in tensors.items()
    }


ANY = {
    "start below 0": of("start", put(0, value=-1)),
    "start behind the last column": of("start", put(0, value=53)),
    "start of no row": of("start", lambda x: x[:0]),
    "start is missing": without("start"),
    "ids of another length": of("ids", lambda x: x[:, 1:].contiguous()),
    "ids that are negative": of("ids", lambda x: -1 - x),
    "a tensor too many": lambda tensors: {**tensors, "ring7_ring_k": torch.ones(1)},
    "keys are missing": without("store0_pool_k"),
    "keys of another dtype": of("store0_pool_k", lambda x: x.half()),
    "keys of one dim": of("store0_pool_k", lambda x: x.reshape(-1)),
    "fewer keys than values": of("store0_pool_k", lambda x: x[:, :-1]),
    "keys of a narrower head": of("store0_tail_k", lambda x: x[..., 1:]),
    "everything in another dtype": in_halves(torch.float16),
    "offsets that begin late": of("store0_offsets", put(0, 0, value=1)),
    "offsets that fall": of("store0_offsets", lambda x: x.flip(1)),
    "offsets beyond the pool": of("store0_offsets", put(0, -1, value=10**6)),
    "offsets of one head more": of("store0_offsets", lambda x: torch.cat([x, x[:, -1:]], 1)),
    "a position below 0": of("store0_pool_positions", put(0, 0, value=-1)),
    "a position that was not seen": of("store0_pool_positions", put(0, 0, value=53)),
    "positions that fall": of("store0_pool_positions", lambda x: x.flip(1)),
    "a position twice": of("store0_pool_positions", lambda x: torch.where(x > 0, 1, x)),
    "a tail that begins before itself": of("store0_tail_start", put(0, value=-1)),
    "a tail that begins behind its end": of("store0_tail_start", put(0, value=1000)),
}
ONLY_APPENDING = {
    "a tail of more tokens than a row has": of("start", put(1, value=50)),
    "the same in a row without a pool": lambda tensors: {
        **tensors,
        "start": torch.tensor([0, 50]),
        "store0_offsets": tensors["store0_offsets"] * torch.tensor([[1], [0]], dtype=torch.int32),
        "store0_pool_positions": torch.stack([tensors["store0_pool_positions"][0], torch.full((24,), -1).int()]),
    },
    "a tail that is longer than its use": of("store0_tail_k", lambda x: torch.cat([x, x], 3)),
    "a shorter ring": of("ring0_ring_k", lambda x: x[..., 1:, :]),
    "a ring of one row": of("ring0_ring_v", lambda x: x[:, :1]),
    "a ring is missing": without("ring0_ring_v"),
}
ONLY_EVICTING = {
    "a position in a spare slot": of("store0_pool_positions", lambda x: torch.where(x < 0, 1, x)),
    "no table": without("store0_slot_positions"),
    "a shorter table": of("store0_slot_positions", lambda x: x[..., 1:]),
    "a table and decode_state without a pool": lambda tensors: {
        **tensors,
        "store0_slot_positions": tensors["store0_slot_positions"][..., -72:],
        "store0_decode_state": tensors["store0_decode_state"][..., -72:],
    },
    "a slot of a token to come": of("store0_slot_positions", put(0, 0, 0, 0, value=53)),
    "a slot below every position": of("store0_slot_positions", put(0, 0, 0, 0, value=-3)),
    "a slot of the pool is absent": of("store0_slot_positions", put(0, 0, 0, 0, value=-2)),
    "a slot of the tail is absent": of("store0_slot_positions", put(0, 0, 0, -1, value=-2)),
    "a slot behind a segment can be taken": of("store0_slot_positions", lambda x: x.clamp(min=-1)),
    "a position in two slots": of("store0_slot_positions", put(0, 0, 0, slice(0, 2), value=5)),
    "a quota below 0": of("store0_quota", put(0, 0, 0, value=-1)),
    "a later next position": of("store0_next_position", lambda x: x + 1),
}


def test_tensors_that_do_not_fit_are_refused(base):
    own = ONLY_APPENDING if "ring0_ring_k" in base.tensors else ONLY_EVICTING
    for what, forge in (ANY | own).items():
        base.refuses(what, tensors=forge(base.tensors))


MORE_ROOM = {
    "more entries in a tail than came": of("store0_slot_positions", fill_line),
    "a quota that is not there": of("store0_quota", put(0, 0, 0, value=10**6)),
}


@pytest.mark.parametrize("case", MORE_ROOM)
def test_a_line_without_an_empty_slot_gets_more(evicting, case):
    cache = evicting.load(tensors=MORE_ROOM[case](evicting.tensors))
    for _ in range(2):
        assert evicting.fast(NEW, past_key_values=cache).logits.isfinite().all()


def test_a_file_of_format_1_loads(base):
    """It says how many slots of the tails are in use, which the tensors show too."""
    fact = {"used": base.tensors["store0_tail_k"].shape[3], "tail_bound": 99}
    cache = base.load({**base.metadata, "format": 1, "stores": [fact]})
    assert torch.equal(base.fast(NEW, past_key_values=cache).logits, base.fast(NEW, past_key_values=base.load()).logits)


def test_entries_of_another_layout_or_dtype_are_refused_by_the_model(appending, tmp_path):
    """Which layers have a window, and in which dtype a model computes, is known from its graph."""
    pools, rings = appending.metadata["layout"]["pools"], appending.metadata["layout"]["rings"]
    elsewhere = {"pools": [{**pools[0], "layers": [0]}], "rings": [{**rings[0], "layers": [1]}]}
    cache = appending.load({**appending.metadata, "layout": elsewhere})
    with pytest.raises(kvpass.CacheMismatchError, match="layout"):
        appending.fast(NEW, past_key_values=cache)
    fast = kvpass.compile(tiny_model("llama", dtype=torch.float16, num_hidden_layers=1), budget=40, backend="eager")
    fast(random_ids(1, 40)).past_key_values.save(tmp_path / "cache.kv")
    metadata, tensors = read_cache_file(tmp_path / "cache.kv")
    write_cache_file(tmp_path / "cache.kv", in_halves(torch.bfloat16)(tensors), metadata)
    with pytest.raises(kvpass.CacheMismatchError, match=r"torch\.bfloat16 was handed to a model of torch\.float16"):
        fast(NEW[:1], past_key_values=kvpass.load_cache(tmp_path / "cache.kv", fast))


# -- kvpass ask: it loads no model that the file chooses, and believes nothing else of it -----------------------------


@pytest.fixture
def ask(appending, tmp_path, monkeypatch):
    """Ask a file with these parts; the models that were loaded come back with the output."""
    loaded = []

    def load_model(name, **options):
        loaded.append(name)
        raise ValueError("loaded")

    monkeypatch.setattr(documents, "load_model", load_model)
    monkeypatch.delenv("KVPASS_MODEL", raising=False)

    def run(*words, **metadata):
        path = tmp_path / "doc.kv"
        write_cache_file(path, appending.tensors, {**appending.metadata, **metadata})
        result = invoke("ask", path, "why", *words)
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
        assert result.output.count("\n") == 1 and result.output.startswith("error: "), result.output
        assert all(char.isprintable() for char in result.output[:-1])
        return loaded, result.output

    return run


def test_a_file_does_not_choose_what_is_downloaded(ask):
    for name in (
        "someone/else",
        "gpt2",
        "https://example.org/x",
        "../nowhere",
        "",
        "a" * 5000,
        "x\0y",
        "\x1b[31mred\n",
    ):
        loaded, output = ask(notes={"model": name, "dtype": "auto"})
        assert loaded == [] and "kvpass ask FILE QUESTION --model NAME" in output, name


def test_a_model_that_fetches_nothing_or_that_the_user_names_is_loaded(ask, tmp_path, monkeypatch):
    notes = {"model": "someone/else", "dtype": "auto"}
    assert ask(notes={**notes, "model": "builtin"})[0][-1:] == ["builtin"]
    assert ask(notes={**notes, "model": str(tmp_path)})[0][-1:] == [str(tmp_path)]
    assert ask("--model", "someone/else", notes=notes)[0][-1:] == ["someone/else"]
    monkeypatch.setenv("KVPASS_MODEL", "mine/own")
    assert ask(notes=notes)[0][-1:] == ["mine/own"]
    assert ask("--model", "builtin", notes=notes)[0][-1:] == ["builtin"]


def test_a_message_quotes_no_control_character_of_a_file(ask):
    _, output = ask(format=4, kvpass_version="\x1b[31m\nred\u202e")
    assert r"written by kvpass \x1b[31m\nred\u202e" in output


POLICIES = {
    "unknown": {"policy": "evil"},
    "a list": [],
    "an unknown option": {"policy": "lava", "evil": 1},
    "a huge window": {"policy": "lava", "window": HUGE},
    "a huge kernel": {"policy": "lava", "kernel_size": 10**9 + 1},
    "NaN": {"policy": "cake", "tau1": float("nan"), "tau2": 1.0},
    "one that has no budget": {"policy": "full"},
}


SPECS = ["", "{", "[" * 10**5, '{"policy": "lava", "window": 1e999}', "lava", "\x1b]0;title\x07"]
NOTES = [{}, {"model": "builtin"}, {"model": 1, "dtype": "auto"}, {"model": "builtin", "dtype": ["auto"]}]


def test_a_forged_policy_or_note_is_refused_before_anything_is_loaded(ask):
    for spec in (*map(json.dumps, POLICIES.values()), *SPECS):
        loaded, output = ask(policy=spec)
        assert loaded == [] and "policy" in output, spec
    for notes in NOTES:
        loaded, output = ask(notes=notes)
        assert loaded == [] and "names no model" in output, notes


def test_a_forged_dtype_is_refused(appending, tmp_path):
    path = tmp_path / "doc.kv"
    write_cache_file(path, appending.tensors, {**appending.metadata, "notes": {"model": "builtin", "dtype": "float8"}})
    result = invoke("ask", path, "why", "--backend", "eager")
    assert result.exit_code == 2 and "dtype='float8': must be one of" in result.output

"""Cache files that somebody made up, with a right checksum: refused by one kind of exception, before they are used."""

from __future__ import annotations

import copy
import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvpass
from kvpass.cache.serialization import read_cache_file, write_cache_file
from tiny_models import random_ids, tiny_model

BLANK = b"0" * 64
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
        or (path == ("entry_format",) and new is REMOVED)  # files written before there was another say none
        or (path[:2] == ("layout", "pools") and path[-1] == "sliding_window" and new is REMOVED)
        or (path[:1] == ("layout",) and path[-1] in ("values_in_keys", "chunked") and new is REMOVED)
        or (path[:2] == ("layout", "rings") and path[-1] == "chunked" and new is True)  # no graph would take the cache
    )


def test_every_place_of_the_metadata_with_every_wrong_value_is_refused(base):
    forged = 0
    for path in places(base.metadata):
        old = at(base.metadata, path)
        for new in (None, [], {}, "text", -1, HUGE, 1.5, True, [old], REMOVED):
            if is_allowed(path, new) or (type(new) is type(old) and new == old):
                continue
            base.refuses((path, new), changed(base.metadata, path, new))
            forged += 1
    assert forged > 200
    assert base.load().columns == 53, "the same file unchanged is loaded"


NUMBERS = {
    "no columns": {"columns": 0},
    "columns that no memory has a mask for": {"columns": 2**26 + 1},
    "a budget of no row": {"entries": []},
    "a budget of too few rows": {"entries": [20]},
    "a budget of too many rows": {"entries": [20, 20, 20]},
    "a row of no budget": {"entries": [20, 0]},
    "a row of more budget than tokens": {"entries": [20, 54]},
    "a budget in bytes of other entries": {"budget": {"kind": "bytes", "value": 10**6}},
    "a fraction above 1": {"budget": {"kind": "fraction", "value": 1.01}},
    "a negative fraction": {"budget": {"kind": "fraction", "value": -0.5}},
    "another policy": {"policy": '{"policy": "full"}'},
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_that_contradict_each_other_are_refused(base, case):
    base.refuses(case, {**base.metadata, **NUMBERS[case]})


def test_layers_that_overlap_are_missing_or_out_of_order_are_refused(base):
    (pool,) = base.metadata["layout"]["pools"]
    rings = base.metadata["layout"]["rings"]
    first, *rest = pool["layers"]
    for layers in ([first, first], [*rest, 7], [first, 7], [-1, first], [*rest], [first, *rest, 3], [*rest, first][:2]):
        if layers == pool["layers"]:
            continue
        base.refuses(layers, {**base.metadata, "layout": {"pools": [{**pool, "layers": layers}], "rings": rings}})
    for what, pools in (
        ("no pool", []),
        ("two pools", [pool, pool]),
        ("a ring as pool", [{**pool, "sliding_window": 9}]),
    ):
        base.refuses(what, {**base.metadata, "layout": {"pools": pools, "rings": rings}})
    fact = base.metadata["stores"][0]
    for facts in ([], [fact, fact], [{**fact, "used": 54}], [{**fact, "used": 2}], [{**fact, "tail_bound": 2**60}]):
        base.refuses(facts, {**base.metadata, "stores": facts})


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
    line = table[0, 0, 0, 0]
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
    "start of the smallest number": of("start", put(0, value=-(2**63))),
    "start of another dtype": of("start", lambda x: x.int()),
    "start of floats": of("start", lambda x: x.double()),
    "start of another shape": of("start", lambda x: x[None]),
    "start of no row": of("start", lambda x: x[:0]),
    "start is missing": without("start"),
    "ids of another length": of("ids", lambda x: x[:, 1:].contiguous()),
    "ids that are negative": of("ids", lambda x: -1 - x),
    "a tensor too many": lambda tensors: {**tensors, "ring7_ring_k": torch.ones(1)},
    "a store too many": lambda tensors: {**tensors, "store1_pool_k": tensors["store0_pool_k"].clone()},
    "keys are missing": without("store0_pool_k"),
    "keys of another dtype": of("store0_pool_k", lambda x: x.half()),
    "keys of ints": of("store0_pool_k", lambda x: x.int()),
    "keys of one dim": of("store0_pool_k", lambda x: x.reshape(-1)),
    "a scalar for keys": of("store0_pool_k", lambda x: x.sum()),
    "fewer keys than values": of("store0_pool_k", lambda x: x[:, :-1]),
    "keys of a narrower head": of("store0_tail_k", lambda x: x[..., 1:]),
    "everything in another dtype": in_halves(torch.float16),
    "everything in double": in_halves(torch.float64),
    "offsets that begin late": of("store0_offsets", put(0, 0, value=1)),
    "offsets below 0": of("store0_offsets", put(0, 0, value=-5)),
    "offsets that fall": of("store0_offsets", lambda x: x.flip(1)),
    "offsets beyond the pool": of("store0_offsets", put(0, -1, value=10**6)),
    "the largest offset": of("store0_offsets", put(0, -1, value=2**31 - 1)),
    "offsets of one head more": of("store0_offsets", lambda x: torch.cat([x, x[:, -1:]], 1)),
    "offsets of int64": of("store0_offsets", lambda x: x.long()),
    "a position below 0": of("store0_pool_positions", put(0, 0, value=-1)),
    "a position that was not seen": of("store0_pool_positions", put(0, 0, value=53)),
    "positions that fall": of("store0_pool_positions", lambda x: x.flip(1)),
    "a position twice": of("store0_pool_positions", lambda x: torch.where(x > 0, 1, x)),
    "a tail that begins before itself": of("store0_tail_start", put(0, value=-1)),
    "a tail that begins behind its end": of("store0_tail_start", put(0, value=12)),
}
ONLY_APPENDING = {
    "a tail of more tokens than a row has": lambda tensors: {
        **tensors,
        "start": torch.tensor([0, 50]),
    },
    "the same in a row without a pool": lambda tensors: {
        **tensors,
        "start": torch.tensor([0, 50]),
        "store0_offsets": tensors["store0_offsets"] * torch.tensor([[1], [0]], dtype=torch.int32),
        "store0_pool_positions": torch.stack([tensors["store0_pool_positions"][0], torch.full((24,), -1).int()]),
    },
    "a tail that is longer than its use": of("store0_tail_k", lambda x: torch.cat([x, x], 3)),
    "a shorter ring": of("ring0_ring_k", lambda x: x[..., 1:, :]),
    "a ring of another dtype": of("ring0_ring_v", lambda x: x.half()),
    "a ring of one row": of("ring0_ring_v", lambda x: x[:, :1]),
    "a ring is missing": without("ring0_ring_v"),
}
ONLY_EVICTING = {
    "a position in a spare slot": of("store0_pool_positions", lambda x: torch.where(x < 0, 1, x)),
    "no table": without("store0_table"),
    "a table of int64": of("store0_table", lambda x: x.long()),
    "a shorter table": of("store0_table", lambda x: x[..., 1:]),
    "a table and decode_state without a pool": lambda tensors: {
        **tensors,
        "store0_table": tensors["store0_table"][..., -72:],
        "store0_decode_state": tensors["store0_decode_state"][..., -72:],
    },
    "a slot of a token to come": of("store0_table", put(0, 0, 0, 0, 0, value=53)),
    "a slot of the largest position": of("store0_table", put(0, 0, 0, 0, 0, value=2**31 - 1)),
    "a slot below every position": of("store0_table", put(0, 0, 0, 0, 0, value=-3)),
    "a slot of the pool is absent": of("store0_table", put(0, 0, 0, 0, 0, value=-2)),
    "a slot of the tail is absent": of("store0_table", put(0, 0, 0, 0, -1, value=-2)),
    "a slot behind a segment can be taken": of("store0_table", lambda x: x.clamp(min=-1)),
    "a position in two slots": of("store0_table", put(0, 0, 0, 0, slice(0, 2), value=5)),
    "more entries in a tail than came": of("store0_table", fill_line),
    "a quota below 0": of("store0_quota", put(0, 0, 0, value=-1)),
    "a quota that is not there": of("store0_quota", put(0, 0, 0, value=10**6)),
    "the largest quota": of("store0_quota", put(0, 0, 0, value=2**63 - 1)),
    "a quota of floats": of("store0_quota", lambda x: x.double()),
    "a later next position": of("store0_next_position", lambda x: x + 1),
    "an earlier next position": of("store0_next_position", put(0, value=-1)),
    "decode_state of half precision": of("store0_decode_state", lambda x: x.half()),
}


@pytest.mark.parametrize("case", [*ANY, *ONLY_APPENDING])
def test_tensors_that_do_not_fit_are_refused(appending, case):
    appending.refuses(case, tensors={**ANY, **ONLY_APPENDING}[case](appending.tensors))


@pytest.mark.parametrize("case", [*ANY, *ONLY_EVICTING])
def test_tensors_of_a_policy_that_evicts_are_refused_when_they_do_not_fit(evicting, case):
    evicting.refuses(case, tensors={**ANY, **ONLY_EVICTING}[case](evicting.tensors))


def test_room_that_decoding_needs_is_refused_to_be_less(evicting):
    fact = evicting.metadata["stores"][0]
    for change in ({"tail_bound": fact["tail_bound"] - 1}, {"tail_bound": 0}, {"used": 1}):
        evicting.refuses(change, {**evicting.metadata, "stores": [{**fact, **change}]})


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


# -- the file around them ---------------------------------------------------------------------------------------------


def seal(header, data=b""):
    """A file of these bytes with the checksum that it should have; the header has ``BLANK`` in its place."""
    whole = len(header).to_bytes(8, "little") + header + data
    return whole.replace(BLANK, hashlib.sha256(whole).hexdigest().encode(), 1)


def of_text(metadata, tensors=""):
    """A header whose metadata is this text, before the description of tensors."""
    own = json.dumps({"kvpass": metadata, "sha256": BLANK.decode()}, separators=(",", ":"))
    return f'{{"__metadata__":{own}{tensors}}}'.encode()


def of_tensors(*described):
    return of_text('{"format": 1}', "".join(f',"t{i}":{text}' for i, text in enumerate(described)))


def one(dtype="F32", shape="[1]", offsets="[0,4]"):
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


HEADERS = {
    "no object": b'["sha256":"' + BLANK + b'"]',
    "a list": json.dumps([{"sha256": BLANK.decode()}], separators=(",", ":")).encode(),
    "no text for metadata": b'{"__metadata__":{"kvpass":1,"sha256":"' + BLANK + b'"}}',
    "metadata twice": b'{"__metadata__":{"a":"b"},"__metadata__":{"kvpass":"{}","sha256":"' + BLANK + b'"}}',
    "no metadata": b'{"__metadata__":{"sha256":"' + BLANK + b'"}}',
    "no JSON": of_text("format"),
    "a list as metadata": of_text("[1]"),
    "a number as metadata": of_text("1"),
    "empty metadata": of_text("{}"),
    "a format that is a bool": of_text('{"format": true}'),
    "a format that is a text": of_text('{"format": "1"}'),
    "a format that is no int": of_text('{"format": 1.0}'),
    "a format of null": of_text('{"format": null}'),
    "format 0": of_text('{"format": 0}'),
    "a negative format": of_text('{"format": -1}'),
    "a later format": of_text('{"format": 2}'),
    "an endless format": of_text('{"format": 1e999}'),
    "a format of 5000 digits": of_text('{"format": ' + "1" * 5000 + "}"),
    "a name twice": of_text('{"format": 2, "format": 1}'),
    "a name twice, deeper": of_text('{"format": 1, "notes": {"a": [{"b": 1, "b": 2}]}}'),
    "NaN": of_text('{"format": 1, "columns": NaN}'),
    "infinity": of_text('{"format": 1, "columns": -Infinity}'),
    "a number beyond every float": of_text('{"format": 1, "columns": 1e999}'),
    "half a pair of surrogates": of_text('{"format": 1, "notes": {"a": "\\ud800"}}'),
    "half a pair in a name": of_text('{"format": 1, "\\udfff": 1}'),
    "lists in lists": of_text('{"format": 1, "notes": ' + "[" * 10**5 + "]" * 10**5 + "}"),
    "objects in objects": of_text('{"format": 1, "notes": ' + '{"a":' * 10**5 + "1" + "}" * 10**6),
    "lists in lists in the header": of_text("{}", ',"x":' + "[" * 10**5 + "]" * 10**5),
    "something behind it": of_text('{"format": 1} 2'),
    "bytes that are no text": of_text("{}").replace(b"{}", b"\xff\xfe"),
    "surrogates as bytes": of_text("{}").replace(b"{}", b'{\\"\xed\xa0\x80\\":1}'),
    "UTF-16": of_text("{}").decode().encode("utf-16"),
    "a mark of UTF-8 before it": b"\xef\xbb\xbf" + of_text("{}"),
}
DATA = bytes(4)
ENTRIES = {
    "an unknown dtype": of_tensors(one("Q4")),
    "a dtype that no cache has": of_tensors(one(), one("C64", "[0]", "[4,4]")),
    "the checksum elsewhere": b'{"a":{"sha256":"' + BLANK + b'","data_offsets":[0,4]}}',
    "a dtype in lower case": of_tensors(one("f32")),
    "a list as dtype": of_tensors(one().replace('"F32"', "[]")),
    "a tensor twice": of_tensors(one()).replace(b'"t0"', b'"t1":{},"t1"'),
    "the same bytes twice": of_tensors(one(), one()),
    "bytes that overlap": of_tensors(
        one("F16", "[1]", "[0,2]"), one("F16", "[1]", "[1,3]"), one("F16", "[1]", "[2,4]")
    ),
    "bytes of nobody": of_tensors(one("F16", "[1]", "[2,4]")),
    "a gap": of_tensors(one("F16", "[0]", "[0,0]"), one("F16", "[1]", "[2,4]")),
    "the end before the beginning": of_tensors(one(offsets="[8,4]", shape="[-1]")),
    "an offset below 0": of_tensors(one(offsets="[-4,4]", shape="[2]")),
    "an offset that is no int": of_tensors(one(offsets="[0,4.0]")),
    "an offset that is a bool": of_tensors(one(offsets="[false,4]")),
    "an offset that is a text": of_tensors(one(offsets='["0",4]')),
    "three offsets": of_tensors(one(offsets="[0,4,4]")),
    "no offsets": of_tensors('{"dtype":"F32","shape":[1]}'),
    "no shape": of_tensors('{"dtype":"F32","data_offsets":[0,4]}'),
    "an offset beyond the file": of_tensors(one(offsets="[0,400]", shape="[100]")),
    "a huge offset": of_tensors(one(offsets=f"[0,{HUGE}]", shape=f"[{HUGE // 4}]")),
    "more elements than bytes": of_tensors(one(shape="[2]")),
    "fewer elements than bytes": of_tensors(one(shape="[0]")),
    "a shape below 0": of_tensors(one(shape="[-1,-1]")),
    "a shape of floats": of_tensors(one(shape="[1.0]")),
    "a shape of bools": of_tensors(one(shape="[true]")),
    "a shape of null": of_tensors(one(shape="null")),
    "a shape that overflows": of_tensors(one(), one(shape=f"[{2**62},{2**62},0]", offsets="[4,4]")),
    "a shape of huge numbers": of_tensors(one(), one(shape=f"[{HUGE},0]", offsets="[4,4]")),
    "a text as entry": of_tensors('"F32"'),
    "null as entry": of_tensors("null"),
}


@pytest.mark.parametrize("case", [*HEADERS, *ENTRIES])
def test_headers_and_metadata_of_every_odd_kind_are_refused(tmp_path, case):
    path = tmp_path / "cache.kv"
    path.write_bytes(seal(HEADERS[case]) if case in HEADERS else seal(ENTRIES[case], DATA))
    with pytest.raises(kvpass.CacheFileError):
        read_cache_file(path)


@pytest.mark.parametrize("header", [of_text('{"format": 1}'), of_tensors(one(shape=str([1] * 10**4)))])
def test_a_file_that_is_in_order_and_no_cache_is_refused(appending, tmp_path, header):
    path = tmp_path / "cache.kv"
    path.write_bytes(seal(header, DATA if b"F32" in header else b""))
    with pytest.raises(kvpass.CacheFileError, match="holds no cache"):
        kvpass.load_cache(path, appending.fast)


def test_the_same_header_with_good_entries_is_read(tmp_path):
    path = tmp_path / "cache.kv"
    path.write_bytes(
        seal(of_tensors(one("F16", "[]", "[2,4]"), one("F16", "[0,7]", "[2,2]"), one("F16", "[1]", "[0,2]")), DATA)
    )
    metadata, tensors = read_cache_file(path)
    assert metadata == {"format": 1}
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {"t0": [], "t1": [0, 7], "t2": [1]}


def test_the_library_safetensors_reads_what_is_written_and_what_it_writes_is_read(base, tmp_path):
    """Files of versions that wrote with the library stay readable."""
    path = tmp_path / "cache.kv"
    write_cache_file(path, base.tensors, base.metadata)
    found = load_file(path)
    assert found.keys() == base.tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in base.tensors.items())
    save_file(base.tensors, path, {"kvpass": json.dumps(base.metadata, sort_keys=True), "sha256": BLANK.decode()})
    older = path.read_bytes()
    path.write_bytes(
        seal(older[8 : 8 + int.from_bytes(older[:8], "little")], older[8 + int.from_bytes(older[:8], "little") :])
    )
    loaded, own = kvpass.load_cache(path, base.fast), base.load()
    assert torch.equal(loaded.positions, own.positions)
    assert torch.equal(*(base.fast(NEW, past_key_values=cache).logits for cache in (loaded, own)))

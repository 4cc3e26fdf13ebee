"""Settings of the plug-in, and what a block of them holds."""

import pytest

from kvpass.vllm.settings import Settings

GIVEN = {"policy": "lava", "budget": 128, "room": 64}


def layout_of(kv_heads=2, processes=1, **given):
    """The blocks of a model of four layers, with these settings beside the usual ones."""
    return Settings.read({"kvpass": GIVEN | given}).layout(4, kv_heads, head_dim=8, processes=processes)


def test_without_an_entry_there_are_no_settings_and_a_document_has_a_name_and_a_file():
    assert [Settings.read(additional) for additional in ({}, {"other": 1}, None)] == [None] * 3
    settings = Settings.read({"kvpass": GIVEN | {"documents": ["a=x=1.kv", "b=x=1.kv"]}})
    assert settings.documents == {"a": "x=1.kv", "b": "x=1.kv"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "lavaa"}, "did you mean 'lava'"),
        ({"policy": "full"}, "leave 'kvpass' out"),
        ({"policy": "h2o"}, 'evicts while decoding.*: give "evict_during_decode": false, or another policy'),
        ({"policy": "r_kv"}, "evicts while decoding.*: give another policy"),
        ({"policy": "cake", "tau1": 1.6, "tau2": 0.4}, "evicts while decoding"),
        ({"budget": 0.1}, "must be a number of entries"),
        ({"budget": "1MiB"}, "must be a number of entries"),
        ({"budget": True}, "must be a number of entries"),
        ({"budget": 32}, "at least window [+] 1 = 33"),
        ({"room": 0}, "room=0"),
        ({"room": "64"}, "room='64'"),
        ({"rooom": 1}, "rooom=1: not an option"),
        ({"entries": "int4"}, "entries='int4': must be one of model, int8"),
        ({"documents": {"a": "a.kv"}}, "must be a list such as"),
        ({"documents": ["a.kv"]}, "of name=file"),
        ({"documents": ["a=a.kv", "b=b.kv", "a=c.kv"]}, "a name of its own"),
        ({"documents": ["=a.kv"]}, "a name of its own"),
        ({"documents": ["a="]}, "each needs a file"),
    ],
)
def test_wrong_settings_are_refused_with_what_to_do(change, message):
    with pytest.raises(ValueError, match=message):
        Settings.read({"kvpass": GIVEN | change})


def test_a_block_of_a_server_of_documents_alone_holds_the_room():
    settings = Settings.read({"kvpass": {"room": 64, "documents": ["a=a.kv"]}})
    layout = settings.layout(layers=4, kv_heads=2, head_dim=8)
    assert settings.only_documents and (layout.pool, layout.tail) == (8, 1 + 64)
    assert not Settings.read({"kvpass": GIVEN | {"documents": ["a=a.kv"]}}).only_documents


def test_settings_are_a_dict_in_which_each_is_needed():
    without = {f"'{name}' is missing": {key: GIVEN[key] for key in GIVEN if key != name} for name in GIVEN}
    for said, settings in {**without, "must be a dict": "lava"}.items():
        with pytest.raises(ValueError, match=said):
            Settings.read({"kvpass": settings})


@pytest.mark.parametrize(
    ("policy", "pool", "tail"),
    [
        ("snapkv", 96 * 8, 32 + 64),  # the budget and the room
        ("knorm", 128 * 8, 1 + 64),  # a slot for a prompt of one token where there is no window
        ("lava", 96 * 8 + 4, 32 + 64),  # a cascade has one entry more for each layer
    ],
)
def test_a_block_holds(policy, pool, tail):
    layout = layout_of(policy=policy)
    assert (layout.pool, layout.tail) == (pool, tail)
    assert policy != "snapkv" or layout.units(layout.largest) * 8 == 128 + 64


@pytest.mark.parametrize(
    ("entries", "width", "shortest"), [("model", 16, 2), ("int8", 24, 1), ("rot4", 16, 1), ("rot3", 14, 1)]
)
def test_an_entry_of_codes_takes_their_bytes_and_two_scales(entries, width, shortest):
    layout = layout_of(entries=entries)
    assert (layout.width, layout.shortest) == (width, shortest)


def test_each_process_has_room_for_all_entries_where_heads_compete_else_its_part():
    for policy in ("lava", "snapkv", "pyramidkv"):
        alone, divided = (layout_of(4 // size, size, policy=policy).pool for size in (1, 2))
        assert divided == alone if policy == "lava" else alone / 2 <= divided <= alone / 2 + 4 * 2


@pytest.mark.parametrize(
    ("policy", "queries"),
    [
        ({"policy": "lava", "window": 16}, 16),
        ({"policy": "knorm", "window": 0}, 1),
        ({"policy": "vatp", "indicator": "scissorhands", "evict_during_decode": False}, 400),
        ({"policy": "vatp", "indicator": "h2o", "evict_during_decode": False}, None),
    ],
)
def test_the_last_chunk_must_hold_the_queries_that_a_policy_reads(policy, queries):
    assert Settings.read({"kvpass": policy | {"budget": 64, "room": 8}}).queries == queries

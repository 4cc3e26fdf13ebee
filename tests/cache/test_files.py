"""Files of caches without a model: damage, forged headers, killed savers, full disks, links, permissions, names."""

import errno
import hashlib
import itertools
import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import kvpass
from kvpass import replace_file
from kvpass.cache import cache_file
from kvpass.cache.cache_file import read_cache_file, write_cache_file
from tiny_models import random_ids, tiny_model

METADATA = {"model": {"name": 'a "sha256":"x" b'}, "numbers": [1, 2.5, None]}


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "cache.kv"
    write_cache_file(path, some_tensors(), METADATA)
    return path


def some_tensors():
    return {
        "half": torch.randn(3, 4).half(),
        "bfloat": torch.randn(2, 0, 5).bfloat16(),
        "view": torch.arange(40, dtype=torch.int32).view(5, 8)[:, ::2],
        "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
        "scalar": torch.tensor(7),
    }


def bits(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def test_everything_comes_back_bit_for_bit_in_storages_of_its_own(written):
    torch.manual_seed(0)
    expected = some_tensors()
    torch.manual_seed(0)
    write_cache_file(written, some_tensors(), METADATA)
    metadata, found = read_cache_file(written)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert tensor.shape == expected[name].shape and torch.equal(bits(tensor), bits(expected[name]))
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert metadata == {**METADATA, "format": cache_file.FORMAT}


def test_every_byte_of_the_file_counts(written):
    content = written.read_bytes()
    flipped = (content[:i] + bytes([byte ^ 0x20]) + content[i + 1 :] for i, byte in enumerate(content))
    for damaged in itertools.chain(flipped, (content[:length] for length in range(len(content))), [content + b"\0"]):
        written.write_bytes(damaged)
        with pytest.raises(kvpass.CacheFileError, match=r"cache\.kv (is|has|holds)"):
            read_cache_file(written)
    written.write_bytes(content)
    read_cache_file(written)


# -- files that are no caches, and headers that somebody made up, with a right checksum --------------------------------


BLANK = b"0" * 64
HUGE, DEEP = 10**30, 10**5
DATA = bytes(4)


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


OTHER_FILES = [
    (b"", "no cache file"),
    (b"\x08\0\0\0\0\0\0\0[1, 2,3]", "states no checksum"),
    (b"\x02\0\0\0\0\0\0\0{}", "states no checksum"),
    (b"\x02\0\0\0\0\0\0\0\xff\xff", "states no checksum"),
    (b"\xff\xff\xff\xff\xff\xff\xff\xff{}", "no cache file"),
    (b"PK\x03\x04 a pickled thing of torch.save", "no cache file"),
    (save({"weight": torch.ones(3)}), "states no checksum"),
    (save({"weight": torch.ones(3)}, {"sha256": "0" * 64}), "damaged"),
    (seal(of_text('{"format": 4, "kvpass_version": "9.9"}')), r"by kvpass 9\.9; this kvpass reads formats up to 3"),
]
TEXTS = [
    *"format [1] 1 {}".split(),
    *(f'{{"format": {value}}}' for value in ["true", '"1"', "1.0", "null", "0", "-1", "4", "1e999", "1" * 5000]),
    '{"format": 2, "format": 1}',
    '{"format": 1, "notes": {"a": [{"b": 1, "b": 2}]}}',
    *(f'{{"format": 1, "columns": {value}}}' for value in ("NaN", "-Infinity", "1e999")),
    '{"format": 1, "notes": {"a": "\\ud800"}}',
    '{"format": 1, "\\udfff": 1}',
    '{"format": 1, "notes": ' + "[" * DEEP + "]" * DEEP + "}",
    '{"format": 1, "notes": ' + '{"a":' * DEEP + "1" + "}" * 10 * DEEP,
    '{"format": 1} 2',
]
"""Of the metadata: each is no JSON object, states no format that is read, or has names, numbers or texts of no JSON."""
HEADERS = [
    *map(of_text, TEXTS),
    b'["sha256":"' + BLANK + b'"]',
    json.dumps([{"sha256": BLANK.decode()}], separators=(",", ":")).encode(),
    b'{"__metadata__":{"kvpass":1,"sha256":"' + BLANK + b'"}}',
    b'{"__metadata__":{"a":"b"},"__metadata__":{"kvpass":"{}","sha256":"' + BLANK + b'"}}',
    b'{"__metadata__":{"sha256":"' + BLANK + b'"}}',
    of_text("{}", ',"x":' + "[" * DEEP + "]" * DEEP),
    of_text("{}").replace(b"{}", b"\xff\xfe"),
    of_text("{}").replace(b"{}", b'{\\"\xed\xa0\x80\\":1}'),
    of_text("{}").decode().encode("utf-16"),
    b"\xef\xbb\xbf" + of_text("{}"),
]
ENTRIES = [
    *(one(dtype=name) for name in ("Q4", "f32")),
    *(one(offsets=value) for value in ("[0,4.0]", "[false,4]", '["0",4]', "[0,4,4]")),
    *(one(shape=value) for value in ("[2]", "[0]", "[-1,-1]", "[1.0]", "[true]", "null")),
    one(offsets="[8,4]", shape="[-1]"),
    one(offsets="[-4,4]", shape="[2]"),
    one(offsets="[0,400]", shape="[100]"),
    one(offsets=f"[0,{HUGE}]", shape=f"[{HUGE // 4}]"),
    one("F16", "[1]", "[2,4]"),
    one().replace('"F32"', "[]"),
    '{"dtype":"F32","shape":[1]}',
    '{"dtype":"F32","data_offsets":[0,4]}',
    '"F32"',
    "null",
]
"""Descriptions of the one tensor of a file of four bytes."""
SEVERAL = [
    [one(), one()],
    [one(), one(shape=f"[{2**62},{2**62},0]", offsets="[4,4]")],
    [one(), one(shape=f"[{HUGE},0]", offsets="[4,4]")],
    [one("F16", "[1]", "[0,2]"), one("F16", "[1]", "[1,3]"), one("F16", "[1]", "[2,4]")],
    [one("F16", "[0]", "[0,0]"), one("F16", "[1]", "[2,4]")],
]
REFUSED = [
    *OTHER_FILES,
    *((seal(header), None) for header in HEADERS),
    *((seal(of_tensors(*entries), DATA), None) for entries in [*([entry] for entry in ENTRIES), *SEVERAL]),
    (seal(of_tensors(one()).replace(b'"t0"', b'"t1":{},"t1"'), DATA), None),
    (seal(b'{"a":{"sha256":"' + BLANK + b'","data_offsets":[0,4]}}', DATA), None),
]


@pytest.mark.parametrize(("content", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_other_and_forged_files_are_refused(tmp_path, content, reason):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(kvpass.CacheFileError, match=reason):
        read_cache_file(path)


def test_a_file_that_is_in_order_and_no_cache_is_refused(fast, tmp_path):
    path, none = tmp_path / "cache.kv", of_text('{"format": 1}')
    for header in (none, of_tensors(one(shape=str([1] * 10**4))), of_tensors(one(), one("C64", "[0]", "[4,4]"))):
        path.write_bytes(seal(header, DATA if b"F32" in header else b""))
        with pytest.raises(kvpass.CacheFileError, match="holds no cache"):
            kvpass.load_cache(path, fast)


def test_the_library_safetensors_reads_what_is_written_and_what_it_writes_is_read(written):
    """Files of versions that wrote with the library stay readable."""
    metadata, tensors = read_cache_file(written)
    found = load_file(written)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(bits(found[name]), bits(tensor)) for name, tensor in tensors.items())
    save_file(tensors, written, {"kvpass": json.dumps(metadata, sort_keys=True), "sha256": BLANK.decode()})
    older = written.read_bytes()
    end = 8 + int.from_bytes(older[:8], "little")
    written.write_bytes(seal(older[8:end], older[end:]))
    assert read_cache_file(written)[0] == metadata
    assert all(torch.equal(bits(x), bits(tensors[name])) for name, x in read_cache_file(written)[1].items())


def test_the_same_header_with_good_entries_is_read(tmp_path):
    path = tmp_path / "cache.kv"
    path.write_bytes(
        seal(of_tensors(one("F16", "[]", "[2,4]"), one("F16", "[0,7]", "[2,2]"), one("F16", "[1]", "[0,2]")), DATA)
    )
    metadata, tensors = read_cache_file(path)
    assert metadata == {"format": 1}
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {"t0": [], "t1": [0, 7], "t2": [1]}


# Only these modules of kvpass, not what kvpass/__init__.py imports: a child starts in a second or less.
CHILD = """
import os, sys, types
package = types.ModuleType("kvpass")
package.__path__ = [sys.argv[1]]
sys.modules["kvpass"] = package
"""
KILLS = """
import itertools, random, signal, time
import torch
from kvpass.cache.cache_file import read_cache_file, write_cache_file

folder, kills = sys.argv[2], int(sys.argv[3])
path = os.path.join(folder, "cache.kv")

def save(version):
    write_cache_file(path, {"x": torch.full((100_000,), version)}, {"version": version})

def saves_until_killed(at=None):
    child = os.fork()
    if child == 0:
        if at is not None:
            setattr(os, at, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        for version in itertools.count(1):
            save(version)
    elif at is None:
        time.sleep(random.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    metadata, tensors = read_cache_file(path)
    assert bool((tensors["x"] == metadata["version"]).all()), "half of one save and half of another"

save(0)
for name in ("fchmod", "fsync", "replace"):
    saves_until_killed(name)
for _ in range(kills):
    saves_until_killed()
"""
SLOW_WRITER = """
from kvpass.replace_file import replacing

with replacing(sys.argv[2]) as file:
    file.write(b"first ")
    print("ready", flush=True)
    sys.stdin.readline()
    file.write(b"last")
"""


def child(script, *args, **options):
    words = [sys.executable, "-c", CHILD + script, str(Path(kvpass.__file__).parent), *map(str, args)]
    return subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, **options)


def some(value=1.0, size=1000):
    return {"x": torch.full((size,), value)}


def saved_value(path):
    return float(read_cache_file(path)[1]["x"][0])


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture(scope="module")
def fast():
    return kvpass.compile(tiny_model("llama", num_hidden_layers=1), policy="full", backend="eager")


@pytest.fixture(scope="module")
def cache(fast):
    return fast(random_ids(1, 400)).past_key_values


# -- killed processes and others that save --------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [5, pytest.param(25, marks=pytest.mark.exhaustive)])
def test_a_save_that_is_killed_leaves_the_old_file_or_the_new(tmp_path, kills):
    process = child(KILLS, tmp_path, kills, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


@pytest.mark.parametrize("name", ["quick", "slow"], ids=["another file", "the same file"])
def test_the_draft_of_a_living_process_is_left_alone_and_the_last_to_finish_wins(tmp_path, name):
    process = child(SLOW_WRITER, tmp_path / "slow", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    (draft,) = os.listdir(tmp_path)
    write_cache_file(tmp_path / name, some(), {})
    assert sorted(os.listdir(tmp_path)) == sorted([draft, name]) and saved_value(tmp_path / name) == 1.0
    process.communicate("\n", timeout=60)
    assert process.returncode == 0 and (tmp_path / "slow").read_bytes() == b"first last"
    assert set(os.listdir(tmp_path)) == {name, "slow"}


# -- full disks -------------------------------------------------------------------------------------------------------


def test_a_file_that_may_not_grow_is_an_os_error_and_the_old_file_stays(tmp_path, cache):
    path, limits = tmp_path / "cache.kv", resource.getrlimit(resource.RLIMIT_FSIZE)
    write_cache_file(path, some(), {})
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            cache.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == f"[Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}: {str(path)!r}"
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


# -- permissions, links, names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "umask"),
    [
        *((None, umask) for umask in (0o022, 0o077, 0o777, 0o000)),
        *itertools.product([0o644, 0o640, 0o600, 0o666, 0o444, 0o755], [0o022, 0o077]),
    ],
)
def test_a_new_file_is_readable_by_its_owner_only_and_one_that_is_replaced_keeps_its_mode(tmp_path, mode, umask):
    path = tmp_path / "cache.kv"
    if mode is not None:
        path.touch()
        path.chmod(mode)
    before = os.umask(umask)
    try:
        write_cache_file(path, some(), {})
    finally:
        os.umask(before)
    assert mode_of(path) == (0o600 if mode is None else mode) and saved_value(path) == 1.0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_file_that_root_replaces_keeps_its_owner(tmp_path):
    path = tmp_path / "cache.kv"
    path.touch()
    os.chown(path, 1234, 4321)
    path.chmod(0o640)
    write_cache_file(path, some(), {})
    found = path.stat()
    assert (found.st_uid, found.st_gid, mode_of(path)) == (1234, 4321, 0o640)


def test_links_stay_links_their_target_is_written_or_made_and_a_draft_is_readable_by_its_owner_only(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "target").touch()
    (folder / "target").chmod(0o640)
    (tmp_path / "second").symlink_to(folder / "target")
    (tmp_path / "first").symlink_to("second")
    write_cache_file(tmp_path / "first", some(3.0), {})
    assert (tmp_path / "first").is_symlink() and (tmp_path / "second").is_symlink()
    assert saved_value(folder / "target") == 3.0 and mode_of(folder / "target") == 0o640
    assert os.listdir(folder) == ["target"] and sorted(os.listdir(tmp_path)) == ["elsewhere", "first", "second"]
    (tmp_path / "link").symlink_to("elsewhere/new.kv")
    write_cache_file(tmp_path / "link", some(), {})
    assert (tmp_path / "link").is_symlink() and saved_value(folder / "new.kv") == 1.0
    (tmp_path / "lost").symlink_to("nowhere/new.kv")
    with pytest.raises(FileNotFoundError, match="lost"):
        write_cache_file(tmp_path / "lost", some(), {})
    with replace_file.replacing(folder / "target"):
        (draft,) = folder.glob(".kvpass-*.draft")
        assert mode_of(draft) & 0o077 == 0


def test_what_is_no_file_is_an_os_error_and_stays(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    os.mkfifo(tmp_path / "pipe")
    names = {"loop": errno.ELOOP, "folder": errno.EISDIR, "link": errno.EISDIR, "pipe": errno.EINVAL}
    others = {"no/cache.kv": errno.ENOENT, "pipe/cache.kv": errno.ENOTDIR, "ü" * 128: errno.ENAMETOOLONG}
    for name, number in {**names, **others}.items():
        with pytest.raises(OSError) as caught:
            write_cache_file(tmp_path / name, some(), {})
        assert caught.value.errno == number and str(caught.value).endswith(f": {str(tmp_path / name)!r}")
    assert sorted(os.listdir(tmp_path)) == sorted(names) and os.listdir(tmp_path / "folder") == []
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127 + "x", "漢" * 85, "-", ".kv", " ", "a\nb", "*[a-z]?"])
def test_every_name_that_the_file_system_takes_is_taken(tmp_path, name):
    assert len(os.fsencode(name)) <= 255
    for value in (1.0, 2.0):
        write_cache_file(tmp_path / name, some(value), {})
        assert saved_value(tmp_path / name) == value
    assert os.listdir(tmp_path) == [name]


def test_notes_that_json_has_no_words_for_are_refused_before_anything_is_written(tmp_path, cache):
    for notes in ({"x": float("nan")}, {"x": float("inf")}, {"x": "\ud800"}):
        with pytest.raises(ValueError):
            cache.save(tmp_path / "cache.kv", notes=notes)
    assert os.listdir(tmp_path) == []
    cache.save(tmp_path / "cache.kv", notes={"name": 'ü "sha256":"x" \u2028'})
    assert read_cache_file(tmp_path / "cache.kv")[0]["notes"] == {"name": 'ü "sha256":"x" \u2028'}

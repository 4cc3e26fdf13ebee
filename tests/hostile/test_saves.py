"""Saving where things go wrong: processes that are killed, full disks, links, permissions, names, other savers."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvpass
from kvpass.cache import replace_file
from kvpass.cache.serialization import read_cache_file, write_cache_file
from tiny_models import random_ids, tiny_model

# Only these modules of kvpass, not what kvpass/__init__.py imports: a child starts in a second or less.
CHILD = """
import os, sys, types
package = types.ModuleType("kvpass")
package.__path__ = [sys.argv[1]]
sys.modules["kvpass"] = package
"""

KILLS = (
    CHILD
    + """
import itertools, random, signal, time
import torch
from kvpass.cache.serialization import read_cache_file, write_cache_file

folder, kills = sys.argv[2], int(sys.argv[3])
path = os.path.join(folder, "cache.kv")
rng = random.Random(kills)

def save(version):
    write_cache_file(path, {"x": torch.full((1_000_000,), version)}, {"version": version})

def drafts():
    return sorted(set(os.listdir(folder)) - {"cache.kv"})

def killed(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return child

def check():
    metadata, tensors = read_cache_file(path)
    assert bool((tensors["x"] == metadata["version"]).all()), "half of one save and half of another"

def endless():
    for version in itertools.count(1):
        save(version)

save(0)
began = time.perf_counter()
save(0)
took = time.perf_counter() - began
for _ in range(kills):
    child = killed(endless)
    time.sleep(rng.uniform(0, 3 * took))
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    check()
    assert len(drafts()) <= 1, "the save after a kill removes what it left"

def dies_at(name):
    def work():
        setattr(os, name, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        save(-1)
    return work

for name in ("fchmod", "fsync", "replace"):
    before = drafts()
    os.waitpid(killed(dies_at(name)), 0)
    check()
    assert len(drafts()) == 1 and drafts() != before, name
save(7)
assert drafts() == []
check()
"""
)

SLOW_WRITER = (
    CHILD
    + """
from kvpass.cache.replace_file import replacing

with replacing(sys.argv[2]) as file:
    file.write(b"first ")
    print("ready", flush=True)
    sys.stdin.readline()
    file.write(b"last")
"""
)


def child(script, *args, **options):
    words = [sys.executable, "-c", script, str(Path(kvpass.__file__).parent), *map(str, args)]
    return subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, **options)


def some(value=1.0, size=1000):
    return {"x": torch.full((size,), value)}


def saved_value(path):
    return float(read_cache_file(path)[1]["x"][0])


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture(scope="module")
def cache():
    fast = kvpass.compile(tiny_model("llama", num_hidden_layers=1), policy="full", backend="eager")
    return fast(random_ids(1, 400)).past_key_values


# -- killed processes and others that save --------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [5, pytest.param(25, marks=pytest.mark.exhaustive)])
def test_a_save_that_is_killed_leaves_the_old_file_or_the_new_and_a_draft_that_the_next_removes(tmp_path, kills):
    process = child(KILLS, tmp_path, kills, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert os.listdir(tmp_path) == ["cache.kv"]


def test_the_draft_of_a_living_process_is_left_alone(tmp_path):
    process = child(SLOW_WRITER, tmp_path / "slow", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    (draft,) = os.listdir(tmp_path)
    write_cache_file(tmp_path / "quick", some(), {})
    assert sorted(os.listdir(tmp_path)) == sorted([draft, "quick"])
    process.communicate("\n", timeout=60)
    assert process.returncode == 0 and (tmp_path / "slow").read_bytes() == b"first last"
    assert sorted(os.listdir(tmp_path)) == ["quick", "slow"]


def test_two_processes_that_save_the_same_file_leave_one_of_the_two(tmp_path):
    process = child(SLOW_WRITER, tmp_path / "file", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    write_cache_file(tmp_path / "file", some(), {})
    assert saved_value(tmp_path / "file") == 1.0
    process.communicate("\n", timeout=60)
    assert (tmp_path / "file").read_bytes() == b"first last" and os.listdir(tmp_path) == ["file"]


def test_a_draft_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    lock, removed = fcntl.flock, []

    def removing(descriptor, how):
        if not removed:
            (draft,) = tmp_path.glob(".kvpass-*.draft")
            draft.unlink()
            removed.append(draft)
        lock(descriptor, how)

    monkeypatch.setattr(replace_file.fcntl, "flock", removing)
    write_cache_file(tmp_path / "cache.kv", some(), {})
    assert removed and saved_value(tmp_path / "cache.kv") == 1.0 and os.listdir(tmp_path) == ["cache.kv"]


def test_a_folder_without_locks_can_be_saved_to_and_nothing_is_removed_there(tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(replace_file.fcntl, "flock", unsupported)
    (tmp_path / ".kvpass-0123.draft").touch()
    write_cache_file(tmp_path / "cache.kv", some(), {})
    assert sorted(os.listdir(tmp_path)) == [".kvpass-0123.draft", "cache.kv"]


def test_odd_things_with_the_name_of_a_draft_stop_no_save(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / ".kvpass-link.draft").symlink_to("target")
    (tmp_path / ".kvpass-folder.draft").mkdir()
    os.mkfifo(tmp_path / ".kvpass-pipe.draft")
    (tmp_path / "kvpass.draft").touch()
    write_cache_file(tmp_path / "cache.kv", some(), {})
    assert {"cache.kv", "target", ".kvpass-folder.draft", "kvpass.draft"} == set(os.listdir(tmp_path))
    assert (tmp_path / "target").read_text() == "mine"


# -- full disks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this machine does not let tests mount a small tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def small_files():
    """Files of this process may have no more than 50,000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def check_refused_for_room(path, cache, number):
    """Saving a cache of more bytes than there is room for raises OSError and leaves the old file alone."""
    write_cache_file(path, some(), {})
    before = path.read_bytes()
    with pytest.raises(OSError) as caught:
        cache.save(path)
    assert str(caught.value) == f"[Errno {number}] {os.strerror(number)}: {str(path)!r}"
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_a_full_disk_is_an_os_error_and_the_old_file_stays(small_disk, cache):
    filler = small_disk / "filler"
    filler.write_bytes(bytes(200_000))
    path = small_disk / "saves" / "cache.kv"
    path.parent.mkdir()
    check_refused_for_room(path, cache, errno.ENOSPC)
    filler.unlink()
    cache.save(path)
    assert os.listdir(path.parent) == ["cache.kv"]


def test_a_file_that_may_not_grow_is_an_os_error_and_the_old_file_stays(tmp_path, cache, small_files):
    check_refused_for_room(tmp_path / "cache.kv", cache, errno.EFBIG)


def test_a_stale_draft_that_fills_the_disk_is_removed_first(small_disk, cache):
    (small_disk / ".kvpass-0123.draft").write_bytes(bytes(200_000))
    cache.save(small_disk / "cache.kv")
    assert os.listdir(small_disk) == ["cache.kv"]


# -- permissions, links, names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o777, 0o000])
def test_a_new_file_is_readable_by_its_owner_only(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_cache_file(tmp_path / "cache.kv", some(), {})
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "cache.kv") == 0o600


@pytest.mark.parametrize("umask", [0o022, 0o077])
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o600, 0o666, 0o444, 0o755])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path, mode, umask):
    path = tmp_path / "cache.kv"
    path.touch()
    path.chmod(mode)
    before = os.umask(umask)
    try:
        write_cache_file(path, some(), {})
    finally:
        os.umask(before)
    assert mode_of(path) == mode and saved_value(path) == 1.0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_file_that_root_replaces_keeps_its_owner(tmp_path):
    path = tmp_path / "cache.kv"
    path.touch()
    os.chown(path, 1234, 4321)
    path.chmod(0o640)
    write_cache_file(path, some(), {})
    found = path.stat()
    assert (found.st_uid, found.st_gid, mode_of(path)) == (1234, 4321, 0o640)


def test_a_draft_is_readable_by_its_owner_only_while_it_is_written(tmp_path):
    path = tmp_path / "cache.kv"
    path.touch(0o644)
    with replace_file.replacing(path):
        (draft,) = tmp_path.glob(".kvpass-*.draft")
        assert mode_of(draft) & 0o077 == 0


def test_links_stay_links_and_their_target_is_written(tmp_path):
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


def test_a_link_to_nothing_makes_its_target(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/new.kv")
    write_cache_file(tmp_path / "link", some(), {})
    assert (tmp_path / "link").is_symlink() and saved_value(tmp_path / "folder" / "new.kv") == 1.0
    (tmp_path / "lost").symlink_to("nowhere/new.kv")
    with pytest.raises(FileNotFoundError, match="lost"):
        write_cache_file(tmp_path / "lost", some(), {})


def test_what_is_no_file_is_an_os_error_and_stays(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    os.mkfifo(tmp_path / "pipe")
    names = {"loop": errno.ELOOP, "folder": errno.EISDIR, "link": errno.EISDIR, "pipe": errno.EINVAL}
    for name, number in {**names, "no/cache.kv": errno.ENOENT, "pipe/cache.kv": errno.ENOTDIR}.items():
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


def test_a_name_that_is_too_long_is_an_os_error(tmp_path):
    with pytest.raises(OSError) as caught:
        write_cache_file(tmp_path / ("ü" * 128), some(), {})
    assert caught.value.errno == errno.ENAMETOOLONG and os.listdir(tmp_path) == []


def test_notes_that_json_has_no_words_for_are_refused_before_anything_is_written(tmp_path, cache):
    for notes in ({"x": float("nan")}, {"x": float("inf")}, {"x": "\ud800"}):
        with pytest.raises(ValueError):
            cache.save(tmp_path / "cache.kv", notes=notes)
    assert os.listdir(tmp_path) == []
    cache.save(tmp_path / "cache.kv", notes={"name": 'ü "sha256":"x" \u2028'})
    assert read_cache_file(tmp_path / "cache.kv")[0]["notes"] == {"name": 'ü "sha256":"x" \u2028'}

"""What was compiled for the CPU is loaded without a C++ compiler."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch._inductor import codecache, cpp_builder
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.utils import fresh_cache

from kvpass import torch_compat
from kvpass.kernels.cpu import build
from kvpass.torch_compat import CppCodeCache, inductor_config, known_cpp_compiler

SOURCE = 'extern "C" int kvpass_test() { return 42; }'
NO_COMPILER = r"a C\+\+ compiler is needed .* No working C\+\+ compiler found"


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Have built SOURCE as an earlier process would, one that had a compiler."""
    monkeypatch.setenv("KVPASS_CACHE", str(tmp_path))
    pick_vec_isa()  # the answer, which takes a process that imports torch, is in the usual cache
    with fresh_cache():
        assert build(SOURCE).kvpass_test() == 42
        for known in (cpp_builder.cpp_compiler_search, cpp_builder.get_compiler_version_info):
            known.cache_clear()
        CppCodeCache.cache.clear()
        monkeypatch.setenv("PATH", str(tmp_path))
        yield


def test_what_was_built_is_loaded_without_a_compiler(built):
    assert build(SOURCE).kvpass_test() == 42


def test_what_was_not_built_is_an_error_without_a_compiler(built):
    with pytest.raises(RuntimeError, match=NO_COMPILER):
        build(SOURCE.replace("42", "43"))


def test_where_nothing_is_kept_a_compiler_is_needed(built, monkeypatch):
    monkeypatch.setenv("KVPASS_CACHE", "0")
    with pytest.raises(RuntimeError, match=NO_COMPILER):
        build(SOURCE)


def test_another_compiler_by_name_has_built_nothing(built):
    with inductor_config.patch({"cpp.cxx": ("clang++",)}), pytest.raises(RuntimeError, match=NO_COMPILER):
        build(SOURCE)


def test_the_compiler_is_asked_again_when_it_is_back(built, monkeypatch):
    assert build(SOURCE).kvpass_test() == 42
    monkeypatch.undo()
    assert build(SOURCE.replace("42", "43")).kvpass_test() == 43


def test_inductor_loads_what_is_compiled_already_and_has_no_headers_read_for_it(tmp_path, monkeypatch):
    read, read_headers = [], codecache._precompile_header
    monkeypatch.setenv("KVPASS_CACHE", str(tmp_path))
    monkeypatch.setattr(codecache, "_precompile_header", lambda *a, **n: read.append(a) or read_headers(*a, **n))
    with fresh_cache():
        built = []
        for _ in range(2):
            torch._dynamo.reset()
            CppPythonBindingsCodeCache.cache_clear()
            with known_cpp_compiler():
                assert torch.compile(lambda x: x.sin() + 42)(torch.zeros(8)).tolist() == [42.0] * 8
            built.append(sorted(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so")))
            assert len(read) == 1
        assert built[0] == built[1] != []


def test_inductors_name_for_a_machine_without_a_gpu_is_found_without_reading_triton(monkeypatch):
    def reads():
        raise AssertionError

    expected = codecache.CacheBase.get_system()
    codecache.CacheBase.get_system.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(codecache, "triton_key", reads, raising=False)
    torch_compat._find_system()
    if not torch.cuda.device_count():
        assert codecache.CacheBase.get_system() == expected

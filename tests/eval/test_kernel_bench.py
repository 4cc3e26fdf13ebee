"""The kernel bench without a GPU: its inputs, its operators on the eager reference, its kernel in the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from kvpass.eval.bench import kernels as kernel_bench
from kvpass.eval.bench.kernels import Shape, prompt_figures, prompt_run, ragged_lengths, uniform_lengths

CPU = Shape(layers=2, heads=4, kv_heads=2, dim=32, dtype=torch.float32, place="cpu")
LATENT = Shape(layers=2, heads=4, kv_heads=1, dim=48, latent=32, dtype=torch.float32, place="cpu")

INTERPRETED = """
import torch
from kvpass.eval.bench import kernels as bench

calls = []
def once(function):
    calls.append(function())
    return 1e-3

bench.time_graph = once
bench.WORST_ERROR = 1e-5
assert torch.ops.kvpass.pack, "the command itself imports what defines the operators"
shape = bench.Shape(layers=2, heads=4, kv_heads=2, dim=32, dtype=torch.float32, place="cpu")
lengths = bench.ragged_lengths(shape, 2, 40)
found = bench.time_decode(shape, lengths, 1e9, check=True)
assert found["error"] < 1e-5 and len(calls[0]) == 2
assert found["bytes"] == (2 * 2 * 2 * 40 + 2 * 2 * 2 * 33) * 2 * 32 * 4
assert abs(found["share_of_copy"] - found["bytes"] / 1e-3 / 1e9) < 1e-9
for kind, bits in (("int8", 8 + 1), ("rot4", 4 + 1), ("rot3", 3 + 1), ("rot2", 2 + 1)):  # with a scale
    found = bench.time_decode(shape, lengths, 1e9, True, bench.KINDS[kind][1], bench.KINDS[kind][2])
    assert found["bytes"] == 2 * 2 * 2 * (40 * 2 * 4 * bits + 33 * 2 * 32 * 4), (kind, found)
latent = bench.Shape(layers=2, heads=4, kv_heads=1, dim=48, latent=32, dtype=torch.float32, place="cpu")
found = bench.time_decode(latent, bench.ragged_lengths(latent, 2, 40), 1e9, check=True)
assert found["error"] < 1e-5 and found["bytes"] == (2 * 2 * 40 + 2 * 2 * 33) * 48 * 4, found
bench.reference.attend_cache = lambda *arguments: torch.ones(2, 4, 1, 32)
try:
    bench.time_decode(shape, lengths, 1e9, check=True)
except RuntimeError as error:
    assert "decode kernel, layer 0: relative error" in str(error)
else:
    raise SystemExit("a wrong kernel was timed")
print("done")
"""


def test_ragged_lengths_are_unequal_and_of_equal_bytes():
    shape = Shape(place="cpu")
    ragged, uniform = ragged_lengths(shape, 3, 992), uniform_lengths(shape, 3, 992)
    assert ragged.shape == uniform.shape == (3, 32, 8)
    assert torch.equal(ragged.sum((1, 2)), uniform.sum((1, 2)))
    assert ragged.min() >= 0
    assert ragged.float().std() > 500


@pytest.mark.exhaustive
def test_the_kernel_is_compared_before_it_is_timed():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert run.stdout.strip() == "done", run.stderr


def test_a_prompt_is_compressed_by_the_operators_of_the_package(monkeypatch):
    monkeypatch.setattr(kernel_bench, "BUDGET", 48)
    for shape in (CPU, LATENT):
        compress, attend = prompt_run(shape, 160, "lava")
        compress()
        assert attend().shape == (1, 4, 160, 32)
    records = prompt_figures(CPU, (160,))
    assert [record["policy"] for record in records] == ["lava", "cake"]
    for record in records:
        assert record["added_ms"] > 0
        assert record["added_over_attention"] == pytest.approx(record["added_ms"] / record["attention_ms"])
        assert "aten::scaled_dot_product_attention" not in record["parts_ms"]


def paged_attention(q, keys, values, sequences, scale):
    """Of each sequence of ``[N, G, D]``: its pages and how many entries they hold."""
    outs = []
    for queries, (pages, count) in zip(q, sequences, strict=True):
        k, v = (pool[pages].flatten(0, 2)[:count] for pool in (keys, values))
        outs.append((queries @ k.T * scale).softmax(-1) @ v)
    return torch.stack(outs)


def varlen_attn(
    q, keys, values, bounds_q, bounds_k, max_q, max_k, *, seqused_k, block_table, enable_gqa=False, scale=None
):  # fmt: skip
    assert bounds_q.tolist() == list(range(len(q) + 1)) and bounds_k is None and enable_gqa
    assert (max_q, max_k) == (1, int(seqused_k.max())) and block_table.dtype == seqused_k.dtype == torch.int32
    pages = [row[: -(-count // keys.shape[1])] for row, count in zip(block_table, seqused_k.tolist(), strict=True)]
    return paged_attention(q, keys, values, list(zip(pages, seqused_k.tolist(), strict=True)), scale)


class PagedDecode:
    """FlashInfer's wrapper, as far as the bench uses it."""

    def __init__(self, workspace, layout, use_tensor_cores):
        assert layout == "NHD" and not workspace.any()

    def plan(self, bounds, pages, last, heads, kv_heads, dim, size, *, q_data_type, kv_data_type, sm_scale):
        assert bounds.dtype == pages.dtype == last.dtype == torch.int32 and kv_heads == 1
        whole = (bounds.diff() - 1) * size
        self.sequences = [
            (pages[first:end], int(count))
            for first, end, count in zip(bounds[:-1], bounds[1:], whole + last, strict=True)
        ]
        assert last.min() >= 1 and last.max() <= size
        self.scale = sm_scale

    def run(self, q, cache):
        return paged_attention(q, *cache, self.sequences, self.scale)


@pytest.fixture
def small(monkeypatch):
    """Budgets and pages of the CPU, a clock that stands, no other libraries."""
    monkeypatch.setattr(kernel_bench, "BUDGET", 96)
    monkeypatch.setattr(kernel_bench, "VARLEN_PAGE", 24)
    monkeypatch.setattr(kernel_bench, "WORKSPACE_BYTES", 8)
    monkeypatch.setattr(kernel_bench, "WORST_ERROR", 1e-5)
    monkeypatch.setattr(kernel_bench, "time_graph", lambda function: 1e-3 + 0 * len(function()))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=PagedDecode))
    return monkeypatch


def test_baselines_read_the_entries_of_the_ragged_cache_in_pages(small):
    figures = kernel_bench.decode_figures(CPU, 1e9, ("flashinfer", "varlen"), (3,))
    for kind in ("flashinfer", "varlen"):
        assert figures[0][kind]["error"] < 1e-5, figures
        assert figures[0][kind]["bytes"] == (3 * 2 * 2 * 64 + 3 * 2 * 2 * 33) * 2 * 32 * 4


def test_a_baseline_that_is_not_there_is_named_and_the_others_are_measured(small):
    small.setitem(sys.modules, "flashinfer", None)
    small.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, k, v: None)
    figures = kernel_bench.decode_figures(CPU, 1e9, ("flashinfer", "varlen"), (1,))
    assert figures[0]["flashinfer"]["failure"].startswith("ModuleNotFoundError: import of flashinfer halted")
    assert figures[0]["varlen"] == {
        "failure": f"ImportError: varlen_attn of torch {torch.__version__} takes no block_table"
    }


@pytest.fixture
def command(small, tmp_path):
    """The command on the CPU, with the eager reference for kernels and a few sizes."""
    kinds = dict(kernel_bench.KINDS)
    for kind in kernel_bench.OURS:
        kinds[kind] = (kinds[kind][0], lambda case: case.reference, kinds[kind][2])
    small.setattr(kernel_bench, "KINDS", kinds)
    small.setattr(torch.cuda, "is_available", lambda: True)
    small.setattr(kernel_bench, "Shape", lambda **options: CPU)
    small.setattr(kernel_bench, "LATENT", LATENT)
    small.setattr(kernel_bench, "LATENT_PROMPTS", (160,))
    small.setattr(kernel_bench, "copy_bandwidth", lambda device: 1e9)
    small.setattr(kernel_bench.decode_figures, "__defaults__", (kernel_bench.OURS, (1, 2), lambda figures: None))
    small.setattr(kernel_bench.prompt_figures, "__defaults__", ((160,), lambda figures: None))
    path = tmp_path / "out.json"

    def run(*words):
        status = kernel_bench.main(["--json", str(path), *words])
        return status, json.loads(path.read_text())

    return run


def test_every_figure_is_saved_when_it_is_there_and_a_failure_loses_no_other(command, small, capsys):
    saved, save = [], kernel_bench.save_json
    small.setattr(
        kernel_bench, "save_json", lambda path, result: (saved.append(json.dumps(result)), save(path, result))
    )
    status, result = command()
    assert status == 0 and result["complete"]
    assert len(saved) == 2 * 6 + 2 + 2 + 2 + 1 and all(not json.loads(text)["complete"] for text in saved[:-1])
    assert list(json.loads(saved[0])["decode"][0]) == ["batch", "uniform"]
    assert [record["ragged_over_uniform"] for record in result["decode"][:2]] == [1.0, 1.0]
    assert [list(record) for record in result["decode"][2:]] == [["batch", "rows", "ragged"]] * 2
    assert [record.get("rows") for record in result["prefill"]] == [None, None, "latent", "latent"]

    kinds = kernel_bench.KINDS

    def broken(case):
        raise RuntimeError("no such kernel\nmore")

    small.setattr(kernel_bench, "KINDS", {**kinds, "ragged": (kinds["ragged"][0], broken, "model")})
    status, result = command()
    assert status == 1 and not result["complete"]
    assert result["decode"][1]["ragged"] == {"failure": "RuntimeError: no such kernel"}
    assert result["decode"][1]["uniform"]["us_per_layer"] > 0 and len(result["prefill"]) == 4
    assert "kernel_bench: ragged, batch 2: RuntimeError: no such kernel" in capsys.readouterr().err
    (_, decode), _ = kernel_bench.tables(result)
    assert decode[0][3:5] == ["failed", "-"] and decode[0][-1] == "-"


def test_a_baseline_may_fail_and_the_result_is_complete(command, small):
    small.setitem(sys.modules, "flashinfer", None)
    status, result = command("--baselines")
    assert status == 0 and result["complete"] and "prefill" not in result
    assert "failure" in result["decode"][0]["flashinfer"] and result["decode"][0]["varlen"]["us_per_layer"] > 0


def test_without_a_gpu_the_command_says_so(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert kernel_bench.main(["--json", str(tmp_path / "out.json")]) == 1
    assert "no CUDA device" in capsys.readouterr().err

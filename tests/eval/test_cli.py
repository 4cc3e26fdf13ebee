"""The ``kvpass`` command: help, version, clear errors, and a whole bench on a micro model."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool

import pytest
from rich.console import Console

import kvpass
from command_line import invoke
from kvpass.eval.bench import measure as bench_measure
from kvpass.eval.bench import processes as bench_processes
from kvpass.eval.bench.run import Bench
from kvpass.eval.experiments import demo
from kvpass.eval.run import Evaluation
from kvpass.eval.tasks.needle import Task, hide

pytestmark = pytest.mark.usefixtures("compile_once")


def test_commands_whose_model_no_processes_share_are_refused_under_torchrun(micro, monkeypatch):
    """Each process would measure on its own, and all write the same files."""
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    result = invoke("bench", "--model", micro, "--contexts", 128, "--budget", 40)
    assert result.exit_code == 2 and "kvpass bench runs in one process" in result.stderr


@pytest.mark.parametrize("command", [(), ("demo",), ("bench",), ("policies",)])
def test_help_is_given_for_every_command(command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


BAD_PATHS = [
    (("ask", "nofile", "q"), "file 'nofile' does not exist"),
    (("ask", ".", "q"), "file '.' is a directory"),
    (("compress", "nofile", "-o", "doc.kv"), "file 'nofile' does not exist"),
    (("compress", "-", "-o", "."), "file '.' is a directory"),
    (("demo", "--document", "nofile", "--question", "who?"), "file 'nofile' does not exist"),
    (("eval", "builtin", "--data-dir", "nofolder"), "dir 'nofolder' does not exist"),
    (("eval", "builtin", "--output", "/etc/passwd"), "dir '/etc/passwd' is a file"),
]


def test_a_bad_path_is_refused_before_anything_is_imported():
    """All in one process: it takes most of the time to start."""
    code = """
import json, sys
from kvpass.cli.main import app
for words in json.loads(sys.argv[1]):
    try:
        app(words, standalone_mode=False)
    except Exception as error:
        print(str(error).lower())
print(sorted({"torch", "transformers"} & sys.modules.keys()))
"""
    asked = json.dumps([words for words, _ in BAD_PATHS])
    said = subprocess.run([sys.executable, "-c", code, asked], capture_output=True, text=True, check=True).stdout
    *refusals, imported = said.splitlines()
    for (words, part), refusal in zip(BAD_PATHS, refusals, strict=True):
        assert part in refusal, words
    assert imported == "[]"


GOES_ON = "the same command goes on; the samples finished so far are in 'out'"


@pytest.mark.parametrize(
    ("words", "where", "part"),
    [
        (("eval", "builtin", "--output", "out"), Evaluation, GOES_ON),
        (("curve", "--output", "out"), Evaluation, GOES_ON),
        (("bench", "--model", "tiny"), Bench, "the same command begins anew; nothing is kept without --json"),
        (("bench", "--model", "tiny", "--json", "a.json"), Bench, "the same command begins anew; a.json has what"),
    ],
)
@pytest.mark.parametrize("when", ["__init__", "run"])
def test_ctrl_c_says_how_to_go_on(words, where, part, when, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    if when == "run":
        monkeypatch.setattr(where, "__init__", lambda self, given: setattr(self, "options", given))
    monkeypatch.setattr(where, when, interrupt)
    result = invoke(*words)
    assert result.exit_code == 130, result.output
    assert result.stderr.startswith(f"interrupted: {part}") and result.stderr.count("\n") == 1


@pytest.mark.usefixtures("compile_anew")
def test_bars_are_drawn_on_standard_error(tmp_path, monkeypatch):
    """Spinners of a compilation stand below a bar only if both are on one console."""
    monkeypatch.setenv("KVPASS_CACHE", str(tmp_path / "cache"))  # else the capture may be known
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    for module in ("kvpass.progress", "kvpass.eval.run"):
        monkeypatch.setattr(f"{module}.progress_console", lambda: console)
    monkeypatch.setitem(bench_measure._COPY_BYTES, "cpu", 2**22)
    words = ("--samples", 1, "--length", 160, "--policies", "lava", "--budgets", 0.3, "--backend", "eager")
    result = invoke("eval", "builtin", *words, "--scope", "prompt", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    assert re.search(r"lava 0.3 prompt multi_needle.* 0/1 0:00:\d\d", drawn)
    assert "kvpass: capturing the decoder" in drawn and "0/1" not in result.output


def test_version_is_the_package_version():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.output.strip() == f"kvpass {kvpass.__version__}"
    module = subprocess.run([sys.executable, "-m", "kvpass", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == result.output


def test_policies_lists_every_registered_policy_with_its_options():
    result = invoke("policies")
    assert result.exit_code == 0
    for name in kvpass.POLICIES:
        assert name in result.output
    assert "kernel_size=7" in result.output


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("bench", "--model", "huge"), "model='huge': expected one of llama-3.1-8b, qwen3-8b"),
        (("bench", "--model", "gone.json"), "model='gone.json': no such file"),
        (("bench", "--budget", "nan"), "budget=nan"),
        (("bench", "--budget", "-5"), "budget=-5"),
        (("bench", "--budget", "12 apples"), "budget='12 apples'"),
        (("bench", "--budget", "32"), "budget=32: must be at least window + 1 = 33"),
        (("bench", "--model", "tiny", "--budget", "0.01"), "budget 0.01 is 10 entries"),
        (("bench", "--model", "tiny", "--budget", "100B"), "budget 100B is 0 entries"),
        (("bench", "--policies", "snapkw"), "did you mean 'snapkv'"),
        (("bench", "--context", "32"), "context=32: must be above window=32"),
        (("bench", "--context", "32768"), "context=32768: must be above"),
        (("bench", "--contexts", "1024,32"), "context=32: must be above window=32"),
        (("bench", "--contexts", "1024;2048"), "contexts='1024;2048': must be whole numbers"),
        (("bench", "--batches", "1,0"), "batches=1,0: must be one or more numbers >= 1"),
        (("bench", "--systems", "vllm"), "systems: 'vllm' must be one of hf-eager, hf-static, full, kvpress"),
        (("bench", "--start", "4,0"), "start=4,0: must be one or more numbers of layers >= 1"),
        (("bench", "--start", "4", "--prefill-memory"), "start and prefill_memory: measure one of them at a time"),
        (("bench", "--serve", "--start", "4"), "start and serve: measure one of them at a time"),
        (("bench", "--serve", "--policies", "h2o"), "evicts while decoding"),
        (("bench", "--serve", "--budget", "0.1"), "in vLLM it must be a number of entries"),
        (
            ("bench", "--serve", "--question-tokens", "8", "--policies", "h2o"),
            "a document for vLLM needs one that does",
        ),
        (("bench", "--serve", "--task", "needle"), "task='needle': model 'small-mha' has random weights"),
        (("bench", "--serve", "--task", "needles"), "did you mean 'needle'"),
        (
            ("bench", "--serve", "--task", "needle", "--question-tokens", "8"),
            "task and question_tokens: ask one of them",
        ),
        (("demo", "--facts", "0"), "facts=0: must be between 1 and 512"),
        (("demo", "--facts", "300"), "tokens=2048: 300 facts"),
        (("demo", "--tokens", "64", "--facts", "1"), "tokens=64: must be above 64 for the budgets"),
        (("demo", "--tokens", "17000"), "tokens=17000: with the answer 17016, and the model reads at most 16384"),
        (("demo", "--question", "who?"), "document and question: give both, or none"),
        (("demo", "--document", __file__, "--question", "who?", "--tokens", 512), "a document has the length"),
        (("demo", "--output", "map.txt"), "output='map.txt': must end in .png"),
        (("curve", "--budgets", "0.01"), "budget 0.01 is 5 entries"),
        (("curve", "--length", "60"), "tokens=60"),
        (("curve", "--task", "ruler"), "task='ruler': stands for several tasks"),
        (("eval", "builtin", "--tasks", "haystack"), "tasks='haystack'"),
        (("eval", "builtin", "--policies", "snapkw"), "did you mean 'snapkv'"),
        (("eval", "builtin", "--budgets", "nan"), "budget=nan"),
        (("eval", "builtin", "--scope", "answer"), "scope='answer'"),
    ],
)
def test_a_bad_value_is_one_line_with_the_name_and_exit_code_2_and_nothing_is_written(
    words, part, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = invoke(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert part in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "builtin", "--samples", "0"),
        ("eval", "builtin", "--num-uncompressed-tokens", "-1"),
        ("eval", "builtin", "--dtype", "int8"),
        ("bench", "--device", "tpu"),
        ("bench", "--repeats", "0"),
        ("demo", "--backend", "jit"),
        ("ask", __file__, "who?", "--new-tokens", "0"),
    ],
)
def test_a_number_out_of_range_and_an_unknown_choice_are_refused_by_the_option_s_name(words):
    result = invoke(*words)
    assert result.exit_code == 2
    assert f"Invalid value for '{words[-2]}'" in result.stderr


@pytest.mark.parametrize(
    ("content", "part"),
    [("{", "not JSON"), ("[]", "has none"), ('{"model_type": "no-such-model"}', "no-such-model")],
)
def test_a_config_file_that_is_none_is_refused(tmp_path, content, part):
    path = tmp_path / "bad.json"
    path.write_text(content)
    result = invoke("bench", "--model", path)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert part in result.stderr


def test_bench_of_a_config_file_writes_what_it_measured(micro, tmp_path, monkeypatch):
    monkeypatch.setitem(bench_measure._COPY_BYTES, "cpu", 2**22)
    out = tmp_path / "new" / "folder" / "out.json"
    result = invoke(
        "bench", "--model", micro, "--contexts", "96", "--budget", 24, "--window", 8, "--policies", "lava",
        "--systems", "hf-eager,hf-static,full", "--new-tokens", 4, "--repeats", 2, "--backend", "eager",
        "--json", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert {"device", "cpu", "threads"} <= written["machine"].keys()
    assert written["machine"]["copy_bandwidth"] > 1e6
    assert {"torch", "transformers", "kvpass"} <= written["versions"].keys()
    assert written["model"]["dtype"] == "float32"
    assert (written["model"]["layers"], written["model"]["kv_heads"], written["model"]["key_dim"]) == (1, 2, 8)
    assert (written["new_tokens"], written["repeats"], written["budget"]) == (4, 2, 24)
    assert [(run["context"], run["batch"]) for run in written["runs"]] == [(96, 1)]
    (run,) = written["runs"]
    entry_bytes = 2 * 8 * 4
    assert run["budget"] == {"entries": 24, "bytes": 24 * 2 * entry_bytes}
    systems = {record["name"]: record for record in run["systems"]}
    assert list(systems) == ["hf-eager", "hf-static", "lava", "full"]
    for record in systems.values():
        assert len(record["prefill_s"]["all"]) == 2
        assert [len(steps) for steps in record["decode_ms"]["all"]] == [4, 4]
        for spread in (record["prefill_s"], record["decode_ms"]):
            assert 0 < spread["min"] <= spread["q1"] <= spread["median"] <= spread["q3"] <= spread["max"]
        for ratio in (*record["decode_speedup"].values(), *record["prefill_ratio"].values()):
            assert math.isfinite(ratio)
            assert ratio > 0
        assert record["tokens_per_s"] == pytest.approx(1e3 / record["decode_ms"]["median"])
        step_bytes = written["model"]["step_weight_bytes"] + record["attended_bytes"]
        bound_ms = 1e3 * step_bytes / written["machine"]["copy_bandwidth"]
        assert record["share_of_bound"] == pytest.approx(bound_ms / record["decode_ms"]["median"])
    assert systems["hf-eager"]["compile_s"] is None
    assert systems["full"]["compile_s"] >= 0
    assert systems["hf-eager"]["scoring"] is None
    assert 0 < systems["lava"]["scoring"]["share"] < 1
    assert systems["hf-eager"]["cache_bytes"] == 100 * 2 * entry_bytes
    assert [systems[name]["attended_bytes"] for name in ("hf-eager", "hf-static", "full")] == [
        100 * 2 * entry_bytes
    ] * 3
    assert systems["lava"]["attended_bytes"] == (24 + 4) * 2 * entry_bytes
    assert systems["full"]["cache_bytes"] >= systems["hf-eager"]["cache_bytes"]
    assert systems["lava"]["cache_bytes"] < systems["full"]["cache_bytes"]
    assert systems["hf-static"]["same_tokens_as_hf_eager"]
    assert systems["full"]["same_tokens_as_hf_eager"]
    assert systems["lava"]["decode_speedup"]["hf-eager"] == pytest.approx(
        systems["hf-eager"]["decode_ms"]["median"] / systems["lava"]["decode_ms"]["median"]
    )
    for name in systems:
        assert re.search(rf"^ *{name} ", result.output, re.MULTILINE)
    assert "…" not in result.output


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("demo", "--output", "map.png"), "output"),
        (("bench", "--model", "tiny", "--json", "out.json"), "json"),
        (("eval", "builtin", "--samples", "1", "--output", "answers"), "output"),
        (("curve", "--samples", "1", "--output", "curve"), "output"),
        (("compress", "file", "--output", "doc.kv"), "output"),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else None,
)
def test_a_folder_that_cannot_be_made_is_refused_alike_by_every_command(words, option, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a document")
    names = {"--output", "--json"}
    placed = [blocked / word if before in names else word for before, word in zip(("", *words), words, strict=False)]
    result = invoke(*[blocked if word == "file" else word for word in placed])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: {option}: cannot make the folder '{blocked}"), result.stderr
    assert result.stderr.endswith("; name another\n")


def test_demo_prints_answers_and_writes_the_heat_map(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "BUDGETS", (64,))
    monkeypatch.setattr(demo, "POLICIES", ("lava", "streaming_llm"))
    picture = tmp_path / "new" / "map.png"
    result = invoke("demo", "--tokens", 256, "--facts", 2, "--backend", "eager", "--output", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = {}
    for line in result.output.splitlines():
        cells = re.split(r" {2,}", line.strip())
        rows[cells[0]] = cells[1:]
    assert rows["transformers"][:3] == ["all", "100%", "2/2"]
    assert rows["kvpass full"][:3] == ["all", "100%", "2/2"]
    assert rows["kvpass lava"][:3] == ["64", "25.0%", "2/2"]
    assert int(rows["kvpass lava"][3]) < int(rows["transformers"][3])
    for sample in hide(Task(keys=2, questions=2), 256, seed=0):
        (name,) = re.findall(r"of (\w+ \w+) is", sample.question)
        assert rows[name][:4] == [sample.answers[0]] * 4
    assert "…" not in result.output
    for words in ("seed 0", "float32", "256 tokens", "lava, streaming_llm, with default options"):
        assert words in result.output.replace("\n", " ")


def test_demo_shows_what_each_policy_answers_about_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "POLICIES", ("lava",))
    document, picture = tmp_path / "document.txt", tmp_path / "map.png"
    document.write_text(
        "the code of bara dador is 482 913 . " + 15 * "the old farmer carried the lamp near the river . "
    )
    question = "question the code of bara dador is"
    result = invoke("demo", "--document", document, "--question", question, "--backend", "eager", "--output", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = [line.split() for line in result.output.splitlines()]
    for system in (["transformers", "all"], ["kvpass", "full", "all"], ["kvpass", "lava", "50%"]):
        assert [*system, "482", "913", "."] in lines, result.output
    assert ["kvpass", "full", "all", "100%", "1/1"] in [line[:5] for line in lines]


@pytest.mark.parametrize(
    ("text", "part"),
    [(" \n", "is empty"), (17000 * "the ", "reads at most 16384"), ("the code .", "must be above 128")],
)
def test_a_document_that_the_demo_cannot_use_is_refused(text, part, tmp_path):
    document = tmp_path / "document.txt"
    document.write_text(text)
    result = invoke("demo", "--document", document, "--question", "who?")
    assert result.exit_code == 2
    assert part in result.stderr and "document" in result.stderr


def test_a_demo_of_a_model_that_was_not_fetched_says_how(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPASS_MODELS", str(tmp_path))
    result = invoke("demo", "smollm2-135m")
    assert result.exit_code == 2
    assert "'kvpass fetch smollm2-135m' brings it there" in result.stderr


@pytest.fixture
def one_process(monkeypatch):
    """Figures of fresh processes are taken in this one, the same ones once: an import of torch takes seconds."""
    figures = {}

    def here(function, *args):
        if args not in figures:
            figures[args] = function(*args)
        return figures[args]

    monkeypatch.setattr(bench_processes, "in_new_process", here)


@pytest.mark.usefixtures("compile_anew")
def test_bench_of_a_start_counts_what_is_compiled_by_depth_and_batch(micro, tmp_path, one_process):
    out = tmp_path / "out.json"
    result = invoke(
        "bench", "--model", micro, "--start", "1,2", "--batches", "1,2,3", "--budget", 40, "--policies", "lava",
        "--repeats", 1, "--backend", "eager", "--json", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["complete"] and [start["layers"] for start in written["start"]] == [1, 2]
    for start in written["start"]:
        for made in (*start["cold"], *start["warm"]):
            assert [(record["phase"], record["rows"]) for record in made["compiled"]] == [("prefill", 1), ("decode", 1)]
            assert min(*made["first_s"], *made["again_s"]) > 0
    assert written["batches"]["layers"] == 1
    compiled = [[record["rows"] for record in run["compiled"]] for run in written["batches"]["runs"]]
    assert compiled == [[1, 1], [1, 1, 2, 2], [1, 1, 2, 2]], "three rows use what two compiled"
    parts = [sum(record["parts"] for record in run["compiled"]) for run in written["batches"]["runs"]]
    shown = re.findall(r"^ *(\d+) +[\d.]+ +[\d.]+ +(\d+) *$", result.output, re.MULTILINE)
    assert shown == [(str(rows), str(count)) for rows, count in zip((1, 2, 3), parts, strict=True)]


def test_bench_of_memory_tells_blocks_from_the_whole_prompt(micro_sizes, tmp_path, one_process):
    path, out = tmp_path / "wide.json", tmp_path / "out.json"
    sizes = {"intermediate_size": 2048, "max_position_embeddings": 8192, "num_attention_heads": 2}
    path.write_text(json.dumps({**micro_sizes, "model_type": "llama", **sizes}))
    result = invoke(
        "bench", "--model", path, "--prefill-memory", "--contexts", "6144", "--budget", 40, "--policies", "snapkv",
        "--backend", "eager", "--json", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    blocks, whole = written["prefill_memory"]
    assert written["complete"] and (blocks["tokens"], blocks["block"], whole["block"]) == (6144, 1024, 6144)
    needed = blocks["needed_bytes"]
    assert needed["residual stream"] == 6144 * 32 * 4 and needed["K and V of a layer"] == 6144 * 2 * 2 * 16 * 4
    assert needed["block"] == 1024 * 2 * 2048 * 4 and needed["cache"] >= 40 * 2 * 2 * 16 * 4
    assert whole["peak_bytes"] > 6144 * 2 * 2048 * 4, "gate and up of the whole prompt"
    assert 0 < blocks["peak_bytes"] < whole["peak_bytes"] / 2
    for found in written["prefill_memory"]:
        assert f"{found['peak_bytes'] / 2**20:.0f}" in result.output


@pytest.mark.parametrize(("processes", "message"), [(1, "at least 2 processes"), (3, "3 processes cannot share the 4")])
def test_processes_that_cannot_share_a_model_are_refused_before_one_starts(micro, processes, message):
    result = invoke("bench", "--model", micro, "--tensor-parallel", processes, "--contexts", 128, "--budget", 40)
    assert result.exit_code == 2 and message in result.stderr


@pytest.mark.exhaustive
def test_bench_of_processes_that_share_a_model(micro_sizes, tmp_path):
    out, model = tmp_path / "out.json", tmp_path / "model.json"
    model.write_text(json.dumps({"model_type": "llama", **micro_sizes, "num_hidden_layers": 2}))
    result = invoke(
        "bench", "--model", model, "--tensor-parallel", 2, "--contexts", 128, "--budget", 40, "--policies", "lava",
        "--repeats", 2, "--new-tokens", 3, "--backend", "eager", "--json", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    records = written["tensor_parallel"]
    assert written["complete"]
    assert [(x["policy"], x["processes"]) for x in records] == [("lava", 1), ("lava", 2), ("full", 1), ("full", 2)]
    entry_bytes = 2 * 8 * 4  # keys and values, head dim, fp32
    for one, two in (records[:2], records[2:]):
        assert one["kept_bytes"] == two["kept_bytes"] and two["same_tokens"]
        assert len(one["cache_bytes"]) == 1 and len(two["cache_bytes"]) == 2
        assert one["kept_bytes"] < sum(two["cache_bytes"]) and max(two["cache_bytes"]) < one["cache_bytes"][0]
        assert one["imbalance"] == [1, 1] and all(1 <= x <= 2 for x in two["imbalance"])
    assert (
        records[0]["kept_bytes"] == 40 * 2 * 2 * entry_bytes and records[2]["kept_bytes"] == 128 * 2 * 2 * entry_bytes
    )
    for name, count in (("lava", 1), ("lava", 2), ("full", 1), ("full", 2)):
        assert re.search(rf"^ *{name} +{count} .* same *$", result.output, re.MULTILINE)


def test_a_prompt_whose_process_is_killed_is_named_and_the_others_go_on(micro, tmp_path, monkeypatch):
    def killed(function, settings, tokens, rows, whole):
        if whole:
            raise BrokenProcessPool
        return {
            "tokens": tokens,
            "rows": rows,
            "block": 96,
            "prefill_s": 1.0,
            "peak_bytes": 9,
            "needed_bytes": {"a": 3},
        }

    monkeypatch.setattr(bench_processes, "in_new_process", killed)
    out = tmp_path / "out.json"
    words = ("--prefill-memory", "--contexts", "96,128", "--budget", 40, "--policies", "lava", "--json", out)
    result = invoke("bench", "--model", micro, *words)
    assert result.exit_code == 0, result.output
    failures = [found["failure"] for found in json.loads(out.read_text())["prefill_memory"]]
    assert failures[::2] == [None, None] and all("want of memory" in said for said in failures[1::2])
    assert result.output.count("failed") == 2 and result.output.count("3.00") == 2


def test_a_process_of_its_own_has_the_environment_of_now(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "here")
    assert bench_processes.in_new_process(os.getenv, "TORCHINDUCTOR_CACHE_DIR") == "here"
    assert os.getenv("KVPASS_PROGRESS") != "0", "that was for the process alone"
    with pytest.raises(BrokenProcessPool):
        bench_processes.in_new_process(os.abort)

"""The ``kvpass`` command: help, version, clear errors, and a whole bench on a micro model."""

import gc
import io
import itertools
import json
import math
import re
import shlex
import subprocess
import sys

import pytest
import typer
from rich.console import Console

import kvpass
from command_line import invoke
from eval_models import model_folder
from kvpass.cli import main
from kvpass.eval import demo
from kvpass.eval.bench import measure as bench_measure
from kvpass.eval.bench.run import Bench
from kvpass.eval.run import Evaluation
from kvpass.eval.tasks.needle import Task, hide
from kvpass.report import Report

pytestmark = pytest.mark.usefixtures("compile_once")


def test_commands_whose_model_no_processes_share_are_refused_under_torchrun(micro, monkeypatch):
    """Each process would measure on its own, and all write the same files."""
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    result = invoke("bench", "--model", micro, "--contexts", 128, "--budget", 40)
    assert result.exit_code == 2 and "kvpass bench runs in one process" in result.stderr


ARGUMENTS = {"eval": "builtin", "demo": "builtin", "bench": "", "compress": "-", "ask": f"{__file__} who?"}
ARGUMENTS |= {"table": ".", "plot": ".", "show": "."}
ARGUMENTS |= {"calibrate": "builtin", "fetch": "smollm2-135m", "chat": __file__, "look": __file__, "choose": "builtin"}
VALUES = f"""
--tasks needle --policies full --budgets 64 --scope context --samples 3 --length 160 --data-dir . --output a -o a
--entries int8 --seed 1 --batch 2 --num-uncompressed-tokens 2 --backend eager --dtype float32 --device cpu --tokens 160
--facts 2 --context 128 --contexts 128 --batches 2 --budget 40 --systems full --new-tokens 2 --repeats 2
--json a --policy lava --texts . --ridge 2 --model tiny --max-new-tokens 2 --system a --question who?
--document {__file__} --guide a --agreement 0.9 --memory 4MiB --rows policy --columns task --against full --task t
--prefill xattention --text {__file__}
""".split()


@pytest.mark.parametrize("command", ARGUMENTS)
def test_every_option_that_the_help_names_is_taken(command, monkeypatch):
    def reached():
        raise typer.Exit(7)

    monkeypatch.setattr(main, "_bad_values", reached)  # in it a command does what it was asked for
    others = {"bench": {"--dtype": "fp32"}, "choose": {"--texts": __file__}}
    values = dict(zip(VALUES[::2], VALUES[1::2], strict=True)) | others.get(command, {})
    described = invoke(command, "--help", columns=300)
    assert described.exit_code == 0 and "Usage" in described.output
    options = re.findall(r"(?<![\w-])(--[a-z-]+|-[a-z])\b", described.output)
    words = [word for name in options if name != "--help" for word in (name, values.get(name)) if word is not None]
    result = invoke(command, *ARGUMENTS[command].split(), *words)
    assert result.exit_code == 7, result.output


def test_what_is_imported_is_freed_at_the_end_of_a_command(monkeypatch):
    """Else nanobind, which newer versions of triton use, reports what is left as leaks."""
    at_exit = []
    monkeypatch.setattr(main.atexit, "register", at_exit.append)
    assert invoke("bench", "--budget", "nan").exit_code == 2
    assert gc.get_freeze_count() > 0
    for call in at_exit:
        call()
    freed = gc.get_freeze_count() == 0
    gc.freeze()  # as it was
    assert freed


BAD_PATHS = {
    "ask nofile q": "file 'nofile' does not exist",
    "ask . q": "file '.' is a directory",
    "compress nofile -o doc.kv": "file 'nofile' does not exist",
    "compress - -o .": "file '.' is a directory",
    "eval builtin --data-dir nofolder": "dir 'nofolder' does not exist",
    "eval builtin --output /etc/passwd": "dir '/etc/passwd' is a file",
}


def test_a_bad_path_is_refused_before_anything_is_imported():
    """All in one process: it takes most of the time to start."""
    code = """
import json, sys
from kvpass.cli.main import app
for words in json.loads(sys.argv[1]):
    try:
        app(words.split(), standalone_mode=False)
    except Exception as error:
        print(str(error).lower())
print(sorted({"torch", "transformers"} & sys.modules.keys()))
"""
    asked = json.dumps(list(BAD_PATHS))
    said = subprocess.run([sys.executable, "-c", code, asked], capture_output=True, text=True, check=True).stdout
    *refusals, imported = said.splitlines()
    assert all(part in refusal for part, refusal in zip(BAD_PATHS.values(), refusals, strict=True)), refusals
    assert imported == "[]"


GOES_ON = "the same command goes on; the samples finished so far are in 'out'"
ANEW = "the same command begins anew"


@pytest.mark.parametrize(
    ("words", "where", "part"),
    [
        ("eval builtin --output out", Evaluation, GOES_ON),
        ("bench --model tiny", Bench, f"{ANEW}; nothing is kept without --json"),
        ("bench --model tiny --json a.json", Bench, f"{ANEW}; a.json has what"),
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
    result = invoke(*words.split())
    assert result.exit_code == 130, result.output
    assert result.stderr.startswith(f"interrupted: {part}") and result.stderr.count("\n") == 1


@pytest.mark.usefixtures("captured_anew")
def test_bars_are_drawn_on_standard_error(tmp_path, monkeypatch):
    """Spinners of a compilation stand below a bar only if both are on one console."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    for module in ("kvpass.progress", "kvpass.eval.run"):
        monkeypatch.setattr(f"{module}.progress_console", lambda: console)
    monkeypatch.setitem(bench_measure._COPY_BYTES, "cpu", 2**22)
    words = ("--samples", 1, "--length", 160, "--policies", "lava", "--budgets", 0.3, "--backend", "eager")
    result = invoke("eval", model_folder(), *words, "--scope", "prompt", "--output", tmp_path / "out")
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


SHORT = "eval builtin --policies snapkv:window=8 --length 150"
BAD_VALUES = [
    ("bench --model huge", "model='huge': expected one of llama-3.1-8b, qwen3-8b"),
    ("bench --model gone.json", "model='gone.json': is no configuration of transformers: [Errno 2]"),
    ("bench --budget nan", "budget=nan"),
    ("bench --budget 32", "budget=32: must be at least window + 1 = 33"),
    ("bench --model tiny --budget 0.01", "budget 0.01 is 10 entries"),
    ("bench --context 32", "context=32: must be above window=32"),
    ("bench --context 32768", "context=32768: must be above"),
    ("bench --contexts 1024;2048", "contexts='1024;2048': must be whole numbers"),
    ("bench --batches 1,0", "batches=1,0: must be one or more numbers >= 1"),
    ("bench --systems vllm", "systems: 'vllm' must be one of hf-eager, hf-static, full"),
    ("demo --facts 300", "tokens=2048: 300 facts"),
    ("demo --tokens 17000", "the prompt with its answer has 17002 tokens, and the model takes 16384: shorten it"),
    ("demo --output map.txt", "output='.txt': must be one of .png, .pdf, .svg"),
    ("demo --question who?", "--document and --question go together"),
    ("demo --scope answer", "scope='answer'"),
    ("demo --policies full", "policies='full': name one that compresses"),
    ("eval builtin --length 512 --budgets 0.01", "budget 0.01 is 5 entries"),
    ("eval builtin --length 60", "tokens=60"),
    ("eval builtin --tasks haystack", "tasks='haystack'"),
    ("eval builtin --scope ''", "scope=''"),
    ("eval builtin --budgets ''", "budgets=''"),
    ("eval builtin --policies snapkv:window=8 --budgets 8", "budget=8: must be at least window + 1 = 9"),
    (f"{SHORT} --budgets 0.05 --scope prompt", "policy 'snapkv', scope 'prompt': budget 0.05 is 7 entries"),
    (f"{SHORT} --num-uncompressed-tokens 150", "num_uncompressed_tokens=150: leaves nothing of a prompt of 150 tokens"),
    ("eval /no/such/model", "model='/no/such/model'"),
]


@pytest.mark.parametrize(("words", "part"), BAD_VALUES)
def test_a_bad_value_is_one_line_with_the_name_and_exit_code_2_and_nothing_is_written(
    words, part, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = invoke(*shlex.split(words))
    assert result.exit_code == 2 and part in result.stderr
    assert result.stderr.startswith("error: ") and len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == "" and list(tmp_path.iterdir()) == []


OUT_OF_RANGE = [
    "eval builtin --samples 0", "eval builtin --num-uncompressed-tokens -1", "eval builtin --dtype int3",
    "bench --device tpu", "bench --repeats 0", "demo --facts 0", "demo --facts 513", "demo --backend jit",
    f"ask {__file__} who? --max-new-tokens 0",
]  # fmt: skip


@pytest.mark.parametrize("words", OUT_OF_RANGE)
def test_a_number_out_of_range_and_an_unknown_choice_are_refused_by_the_option_s_name(words):
    result = invoke(*words.split())
    assert result.exit_code == 2
    assert f"Invalid value for '{words.split()[-2]}'" in result.stderr


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "line 1 column 2"),
        ("[]", "not list"),
        ("{}", "'model_type'"),
        ('{"model_type": "no-such-model"}', "no-such-model"),
    ],
)
def test_a_config_file_that_is_none_is_refused(tmp_path, content, part):
    path = tmp_path / "bad.json"
    path.write_text(content)
    result = invoke("bench", "--model", path)
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and part in result.stderr


def test_bench_of_a_config_file_writes_what_it_measured(micro, tmp_path, monkeypatch):
    monkeypatch.setitem(bench_measure._COPY_BYTES, "cpu", 2**22)
    out = tmp_path / "new" / "folder" / "out.json"
    result = invoke(
        "bench", "--model", micro, "--contexts", "96", "--budget", 24, "--policies", "lava:window=8",
        "--systems", "hf-eager,hf-static,full", "--new-tokens", 4, "--repeats", 2, "--backend", "eager",
        "--json", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert {"device", "cpu", "threads"} <= written["machine"].keys()
    assert written["machine"]["copy_bandwidth"] > 1e6
    assert {"torch", "transformers", "kvpass"} <= written["versions"].keys()
    assert [written["model"][name] for name in ("dtype", "layers", "kv_heads", "key_dim")] == ["float32", 1, 2, 8]
    assert (written["new_tokens"], written["repeats"], written["budget"]) == (4, 2, 24)
    (run,) = written["runs"]
    token_bytes = 2 * 2 * 8 * 4
    assert (run["context"], run["batch"], run["budget"]) == (96, 1, {"entries": 24, "bytes": 24 * token_bytes})
    systems = {record["name"]: record for record in run["systems"]}
    assert list(systems) == ["hf-eager", "hf-static", "lava:window=8", "full"]
    for record in systems.values():
        assert len(record["prefill_s"]["all"]) == 2
        assert [len(steps) for steps in record["decode_ms"]["all"]] == [4, 4]
        for spread in (record["prefill_s"], record["decode_ms"]):
            assert 0 < spread["min"] <= spread["q1"] <= spread["median"] <= spread["q3"] <= spread["max"]
        for ratio in (*record["decode_speedup"].values(), *record["prefill_ratio"].values()):
            assert 0 < ratio < math.inf
        assert record["tokens_per_s"] == pytest.approx(1e3 / record["decode_ms"]["median"])
        step_bytes = written["model"]["step_weight_bytes"] + record["attended_bytes"]
        bound_ms = 1e3 * step_bytes / written["machine"]["copy_bandwidth"]
        assert record["share_of_bound"] == pytest.approx(bound_ms / record["decode_ms"]["median"])
    eager, _, lava, full = systems.values()
    assert eager["compile_s"] is None and eager["scoring"] is None
    assert full["compile_s"] >= 0 and 0 < lava["scoring"]["share"] < 1
    assert eager["cache_bytes"] == 100 * token_bytes <= full["cache_bytes"] > lava["cache_bytes"]
    assert [one["attended_bytes"] for one in systems.values()] == [n * token_bytes for n in (100, 100, 24 + 4, 100)]
    medians = [one["decode_ms"]["median"] for one in (eager, lava)]
    assert lava["decode_speedup"]["hf-eager"] == pytest.approx(medians[0] / medians[1])
    for name in systems:
        assert re.search(rf"^ *{name} ", result.output, re.MULTILINE)
    assert "…" not in result.output


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("demo --output FILE/map.png", "output"),
        ("bench --model tiny --json FILE/out.json", "json"),
        ("eval builtin --samples 1 --output FILE/answers", "output"),
        ("compress FILE --output FILE/doc.kv", "output"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_alike_by_every_command(words, option, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a document")
    result = invoke(*words.replace("FILE", str(blocked)).split())
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: {option}: cannot make the folder '{blocked}"), result.stderr
    assert result.stderr.endswith("; name another\n")


def test_demo_prints_answers_in_both_scopes_and_writes_the_heat_map(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "ENTRIES", (64,))
    monkeypatch.setenv("COLUMNS", "100")
    picture, titles = tmp_path / "new" / "map.png", []
    plot = Report.plot

    def plotted(*args, **given):
        titles.append((len(args), given["titles"], [*given["marks"]]))
        return plot(*args, **given)

    monkeypatch.setattr(Report, "plot", plotted)
    words = ("--tokens", 256, "--facts", 2, "--scope", "context,prompt", "--policies", "lava,snapkv:window=8,full")
    result = invoke("demo", *words, "--backend", "eager", "--output", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    known = re.findall(r"scope (\w+): the question is (not )?known", result.output)
    assert known == [("context", "not "), ("prompt", "")]
    assert len(re.findall(r"kvpass full +all +2/2", result.output)) == 2
    assert len(re.findall(r"kvpass snapkv:window=8 +64 +\d/2", result.output)) == 2
    rows = {}  # of the last scope
    for line in result.output.splitlines():
        cells = re.split(r" {2,}", line.strip())
        rows[cells[0]] = cells[1:]
    answers = ["lava answers ''", "snapkv:window=8 answers '313 664 664'"]  # in scope context, whose picture it is
    assert titles == [(3, answers, ["asked for: 313 664", "other facts"])]  # a report, the path, another report
    assert re.search("pin of lali tepas +313 664 +313 664 +313 664 +313 664 664 ", result.output)
    assert rows["transformers"][:2] == ["all", "2/2"]
    assert rows["kvpass lava"][:2] == ["64", "2/2"]
    assert int(rows["kvpass lava"][2]) < int(rows["transformers"][2])
    for sample in hide(Task(keys=2, questions=2), 256, seed=0):
        (asked,) = re.findall(r"the (\w+ of \w+ \w+) is", sample.question)
        assert re.search(asked + 4 * rf" +{sample.answers[0]}" + " ", result.output)
    assert "…" not in result.output
    for words in ("seed 0", "float32", "256 tokens", "lava, snapkv:window=8, with default options"):
        assert words in result.output.replace("\n", " ")


DOCUMENT = "the code of bara dador is 482 913 . the pin of lato gilum is 117 . " + 20 * (
    "the old farmer carried the lamp near the river . a quiet baker watched the fox behind the castle . "
)


def test_demo_asks_about_a_document_before_and_after_the_question_is_known(tmp_path):
    document, picture = tmp_path / "doc.txt", tmp_path / "map.png"
    document.write_text(DOCUMENT)
    asked = ("--document", document, "--question", "question the code of bara dador is", "--max-new-tokens", 3)
    result = invoke("demo", *asked, "--backend", "eager", "--output", picture)
    assert result.exit_code == 0, result.output
    _, *tables = result.output.partition("Measured")[0].split("scope ")
    answers = {}
    for table in tables:
        for line in table.splitlines():
            match re.split(r" {2,}", line.strip()):
                case [system, budget, answer, kib, _, _] if system != "system":
                    answers[table.split(":")[0], system, budget] = answer, int(kib)
    assert len(answers) == 12
    wrong = {key for key, (answer, _) in answers.items() if answer != "482 913 ."}
    assert wrong == {("context", "kvpass lava", "25%")}
    for scope, policy in itertools.product(("context", "prompt"), ("lava", "kvzip")):
        quarter, half = (answers[scope, f"kvpass {policy}", budget][1] for budget in ("25%", "50%"))
        assert quarter < half < answers[scope, "kvpass full", "all"][1]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_demo_says_what_to_install_and_computes_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.chdir(tmp_path)
    result = invoke("demo")
    assert result.exit_code == 2, result.output
    assert result.stderr == "error: pictures need matplotlib: pip install 'kvpass[plots]'\n"
    assert list(tmp_path.iterdir()) == []

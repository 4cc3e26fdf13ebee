"""The function of the ``lm_eval`` command, offline, with a tiny model and local tasks."""

import gzip
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kvpass[eval]'")

import yaml
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from torch.utils import collect_env

import cheap_captures
from eval_models import model_folder
from kvpass import builtin
from kvpass.eval.harness_tasks import documents, score
from kvpass.eval.tasks import Sample, find_tasks, longbench, manual, ruler
from kvpass.eval.tasks.needle import hide
from kvpass.lm_eval import SEPARATOR, TASKS, KVPassLM, main

SUPPORT = str(Path(cheap_captures.__file__).parent)
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(filter(None, (SUPPORT, os.environ.get("PYTHONPATH"))))


def words(model: str, arguments: str, tasks: Path, names: str, output: Path) -> list[str]:
    """Arguments of the command."""
    given = ["--model", model, "--model_args", arguments, "--include_path", str(tasks), "--tasks", names]
    return [*given, "--output_path", str(output), "--log_samples", "--device", "cpu"]


def read(names: str, output: Path) -> tuple[Any, dict[str, list[dict[str, Any]]]]:
    """Results, and samples of each task by ``doc_id``."""
    (results,) = output.glob("**/results_*.json")
    samples: dict[str, list[dict[str, Any]]] = {}
    for name in names.split(","):
        (path,) = output.glob(f"**/samples_{name}_*.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        samples[name] = sorted(rows, key=lambda row: row["doc_id"])
    return json.loads(results.read_text()), samples


SEVERAL = """
import functools, json, sys
import lm_eval, torch
assert "kvpass" not in sys.modules, "the package is imported when the model is asked for"
from torch.utils import collect_env
collect_env.get_pretty_env_info = str  # of the harness's results: a dozen programs, in every run
from lm_eval.api.registry import model_registry
print("registered", "kvpass" in model_registry, "hf" in model_registry, len(model_registry) > 20)
for words in json.loads(sys.argv[1]):
    from cheap_captures import cheap_captures
    cheap_captures()
    from lm_eval import tasks
    from lm_eval.__main__ import cli_evaluate
    tasks.TaskManager = functools.partial(tasks.TaskManager, include_defaults=False)
    sys.argv = ["lm_eval", *words]
    cli_evaluate()
"""
"""The command's own function, for one list of arguments after the other, without the many tasks of the harness."""


def tight() -> str:
    """Arguments that name a tiny model, and a budget."""
    return f"pretrained={model_folder()},dtype=float32,compiler=eager,budget=20,window=8"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a multiple-choice and a generation task on needle prompts."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = []
    for seed, tokens in enumerate((90, 140, 110)):
        (sample,) = hide("single", tokens, seed)
        first, text = sample.answers[0].split()[0], sample.context + sample.question
        rows.append({"text": text, "choices": [first, f"{999 - int(first):03}"], "label": 0})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    shared |= {"test_split": "test", "doc_to_text": "{{text}}"}
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}"}
    text = {"output_type": "generate_until", "doc_to_target": "{{choices[label]}}"}
    text |= {"generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False}}
    for name, metric, own in (("number_choice", "acc", choice), ("number_text", "exact_match", text)):
        config = {"task": name, "metric_list": [{"metric": metric}], **shared, **own}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return folder


def scores(samples: dict[str, list[dict[str, Any]]]) -> list[float]:
    # a process with fewer requests answers its last one again
    return [float(first[0]) for row in samples["number_choice"] for first, *_ in row["resps"]]


def answers(samples: dict[str, list[dict[str, Any]]]) -> list[str]:
    return [row["resps"][0][0] for row in samples["number_text"]]


NUMBERS = "number_choice,number_text"
OWN = "kvpass_longbench_trec,kvpass_longbench_passage_count,kvpass_needle"
CONTEXT = "the old fox was very tall . " * 25


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with two tasks of LongBench."""
    folder = tmp_path_factory.mktemp("data")
    row = {"length": 9, "dataset": "", "language": "en", "_id": "0", "context": CONTEXT}
    classed = {**row, "input": "the fox is", "answers": ["old fox"], "all_classes": ["old fox", "red crow"]}
    counted = {**row, "input": "", "answers": ["3"], "all_classes": None}
    (folder / "longbench").mkdir()
    with gzip.open(folder / "longbench" / "trec.jsonl.gz", "wt") as file:
        file.write(json.dumps(classed) + "\n" + json.dumps(classed) + "\n")
    (folder / "longbench" / "passage_count.jsonl").write_text(json.dumps(counted) + "\n")
    return folder


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A program of this Python that ended well."""
    given = {**os.environ, **ENVIRONMENT}
    result = subprocess.run([sys.executable, *command], cwd=folder, env=given, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tasks: Path, data: Path, compile_once: None) -> Path:
    """A folder, to which the command in this process ran first tasks of numbers, then our own ones."""
    folder = tmp_path_factory.mktemp("runs")
    own = ["--gen_kwargs", "max_gen_toks=3", "--metadata", json.dumps({"prompt_tokens": 64, "prompt_count": 1})]
    cut = f"{tight()},policy=snapkv,scope=context,max_length=128,truncation=middle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPASS_DATA_DIR", str(data))
        patch.setattr(collect_env, "get_pretty_env_info", str)  # a dozen programs
        patch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
        for arguments in (
            [*words("kvpass", f"{tight()},policy=streaming_llm", tasks, NUMBERS, folder / "tight")],
            [*words("kvpass", cut, TASKS, OWN, folder / "own"), *own],
        ):
            patch.setattr(sys, "argv", ["kvpass-lm-eval", *arguments])
            main()
    return folder


def test_the_hook_names_the_model_and_leaves_the_others(tmp_path: Path) -> None:
    """The registry must hold the harness's own models, which it adds only while it is empty."""
    assert run(["-c", SEVERAL, "[]"], tmp_path).stdout.splitlines() == ["registered True True True"]


def test_the_command_gives_the_model_its_arguments_and_writes_what_was_kept(runs: Path) -> None:
    """Scores against those of the stock model, and its answers in the same cache: test_harness, test_harness_key."""
    results, samples = read(NUMBERS, runs / "tight")
    facts = results["config"]["kvpass"]
    assert (facts["policy"], facts["budget"], facts["num_uncompressed_tokens"]) == ("streaming_llm", "20", 1)
    assert facts["kept_fraction"] == pytest.approx(20 * 3 / (89 + 139 + 109)) and facts["cache_bytes_peak"] > 0
    best = [max(range(2), key=lambda i, row=row: float(row["resps"][i][0][0])) for row in samples["number_choice"]]
    assert results["results"]["number_choice"]["acc,none"] == pytest.approx(best.count(0) / 3)


def read_of_two(launcher: list[str], arguments: str, runs: Path, tasks: Path, folder: Path) -> tuple[Any, Any]:
    """Results of two processes and of one; samples must be the same."""
    (folder / "several.py").write_text(SEVERAL)
    asked = f"{tight()},policy=streaming_llm{arguments}"
    given = json.dumps([words("kvpass", asked, tasks, NUMBERS, folder / "two")])
    run(["-m", *launcher, "several.py", given], folder)
    (one_results, one), (two_results, two) = (read(NUMBERS, part) for part in (runs / "tight", folder / "two"))
    assert answers(two) == answers(one) and scores(two) == pytest.approx(scores(one), abs=1e-5)
    assert two_results["results"].keys() == one_results["results"].keys()
    return two_results["config"]["kvpass"], one_results["config"]["kvpass"]


@pytest.mark.exhaustive
def test_processes_share_the_requests(runs: Path, tasks: Path, tmp_path: Path) -> None:
    launcher = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    two, one = read_of_two(launcher, "", runs, tasks, tmp_path)
    assert two["prompts_compressed"] < one["prompts_compressed"], "the first process answered its share"


@pytest.mark.exhaustive
def test_processes_share_the_model(runs: Path, tasks: Path, tmp_path: Path) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    two, one = read_of_two(launcher, ",tp_plan=auto", runs, tasks, tmp_path)
    assert two["prompts_compressed"] == one["prompts_compressed"], "each process answered all, with its heads"
    assert two["cache_bytes_peak"] < one["cache_bytes_peak"]


def test_own_tasks_run_from_local_files(runs: Path) -> None:
    results, samples = read(OWN, runs / "own")
    facts = results["config"]["kvpass"]
    assert (facts["prompts_compressed"], facts["requests_truncated"]) == (3, 2)
    assert (facts["scope"], facts["num_uncompressed_tokens"], facts["truncation"]) == ("context", "question", "middle")
    (asked,) = samples["kvpass_longbench_trec"]
    text, settings = asked["arguments"]["gen_args_0"]["arg_0"], asked["arguments"]["gen_args_0"]["arg_1"]
    before = "Please determine the type of the question below. Here are some examples of questions."
    assert text == f"{before}\n\n{CONTEXT}{SEPARATOR}\nthe fox is"
    assert settings["max_gen_toks"] == 3
    for name in OWN.split(","):
        assert 0 <= results["results"][name]["score,none"] <= 100


def test_the_own_command_is_that_of_the_harness_with_the_model_registered_and_prints_the_folder_of_the_tasks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the hook: see test_autoload."""
    import lm_eval.__main__

    seen = []
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: seen.append(get_model("kvpass")))
    monkeypatch.setattr(sys, "argv", ["kvpass-lm-eval", "--model", "kvpass"])
    main()
    assert seen == [KVPassLM]
    monkeypatch.setattr(sys, "argv", ["kvpass-lm-eval", "path"])
    main()
    assert Path(capsys.readouterr().out.strip(), "kvpass_needle.yaml").is_file()


@pytest.mark.parametrize("count", [0, -1, 2.5])
def test_a_number_of_prompts_that_cannot_be_is_refused(count: Any) -> None:
    with pytest.raises(ValueError, match=rf"prompt_count={count}: must be an int >= 1"):
        documents("needle", prompt_tokens=64, prompt_count=count, tokenizer=str(builtin.path()))


def test_every_task_file_names_a_task_and_the_length_of_its_answer() -> None:
    """Lengths are those of RULER's generators and of the harness's own LongBench tasks."""
    lengths: dict[str, int | None] = {task.name: task.max_new_tokens for task in ruler.tasks()}
    lengths |= {"needle": None, "multi_needle": None, "manual": manual.NEW_TOKENS}
    for name in longbench.NAMES:
        lengths[f"longbench_{name}"] = longbench.harness_task(name)["generation_kwargs"]["max_gen_toks"]
    files = {path.stem.removeprefix("kvpass_"): path for path in TASKS.glob("kvpass_*.yaml")}
    assert files.keys() == lengths.keys()
    for name, path in files.items():
        config = yaml.safe_load(path.read_text())
        assert config["task"] == f"kvpass_{name}" and config["dataset_kwargs"] == {"kvpass_task": name}
        assert lengths[name] in (None, config["generation_kwargs"]["max_gen_toks"])
        (task,) = find_tasks([name])
        sample = Sample(id="", context="", question="", answers=("7",), max_new_tokens=1, classes=("7", "8"))
        document = {"kvpass_task": name, "answer_prefix": "", "id": "", "context": "", "question": ""}
        if "retrieval" not in name:
            found = score({**document, "answers": ["7"], "classes": ["7", "8"]}, [" 7"])
            assert found == {"score": 100 * task.metric(" 7", sample)}

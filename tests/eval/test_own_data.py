"""Files of JSON lines as tasks: what is read, refused and scored, in ``kvpass eval`` and in lm-evaluation-harness."""

import gzip
import json

import pytest

from eval_models import model_folder
from kvpass.eval.options import EvalOptions
from kvpass.eval.prompt import SEPARATOR
from kvpass.eval.run import Evaluation
from kvpass.eval.tasks import Sample, find_tasks
from kvpass.eval.tasks.manual import Manual

pytestmark = pytest.mark.usefixtures("compile_once")

ROW = {"context": "The key is under the mat.", "question": "Where is the key?", "answers": ["under the mat"]}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write rows, or lines, to a file in the working directory; return its name."""
    monkeypatch.chdir(tmp_path)

    def written(name, *rows, encoding="utf-8"):
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        content = "".join(f"{line}\n" for line in lines).encode(encoding)
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return name

    return written


def samples_of(name: str, count: int = 9) -> list[Sample]:
    (task,) = find_tasks([name])
    return task.samples(None, 0, count, 0)  # type: ignore[arg-type]


# --- what is read ----------------------------------------------------------------------------------------------------


def test_a_row_is_a_sample_whose_question_begins_with_a_blank_line(write):
    more = {"metric": "f1", "prefix": "It is", "category": "places", "max_new_tokens": 5, "id": "a"}
    first, second = samples_of(write("keys.jsonl", ROW | more, ROW | {"id": 7}))
    given = {"id": "a", "context": ROW["context"], "question": "\n\nWhere is the key?", "answers": ("under the mat",)}
    assert first == Sample(**given, max_new_tokens=5, answer_prefix="It is", labels={"category": "places"})
    assert second == Sample(**given | {"id": "7"}, max_new_tokens=64)
    assert samples_of("keys.jsonl", 1) == [first]


@pytest.mark.parametrize("name", ["keys.jsonl", "keys.jsonl.gz"])
def test_blank_lines_a_byte_order_mark_and_one_answer_as_a_text_are_read(write, name):
    plain = samples_of(write(name, ROW, ROW | {"answers": "a\u2028b"}))
    (task,) = find_tasks([name])
    assert task.name == "keys"
    marked = samples_of(write(name, "", ROW, " ", json.dumps(ROW | {"answers": "a\u2028b"}), "", encoding="utf-8-sig"))
    assert [sample.answers for sample in plain] == [("under the mat",), ("a\u2028b",)]
    assert [sample.answers for sample in marked] == [sample.answers for sample in plain]
    assert [sample.id for sample in marked] == ["2", "4"], "numbers of their lines"


WRONG = {
    "{": "truncated",
    "[]": "array",
    **{json.dumps({key: ROW[key] for key in ROW if key != left_out}): f"field `{left_out}`" for left_out in ROW},
    **{json.dumps(ROW | {key: " "}): rf"at `\$\.{key}`" for key in ROW},
    json.dumps(ROW | {"answers": []}): r"length >= 1 - at `\$\.answers`",
    json.dumps(ROW | {"answers": ["a", 1]}): r"at `\$\.answers\[1\]`",
    json.dumps(ROW | {"metric": "rogue"}): r"'rogue' - at `\$\.metric`",
    json.dumps(ROW | {"max_new_tokens": 0}): r"at `\$\.max_new_tokens`",
    json.dumps(ROW | {"max_tokens": 9}): "unknown field `max_tokens`",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_line_that_is_no_row_is_refused_by_file_line_and_field(write, line):
    name = write("keys.jsonl", ROW, "", line)
    with pytest.raises(ValueError, match=rf"^keys\.jsonl, line 3: is no row of a task: .*{WRONG[line]}"):
        find_tasks([name])


def test_a_file_that_is_not_there_and_one_id_for_two_rows_are_refused(write):
    with pytest.raises(ValueError, match=r"keys\.jsonl: cannot be read: .*No such file"):
        find_tasks(["keys.jsonl"])
    name = write("keys.jsonl", "", ROW | {"id": 3}, ROW)
    with pytest.raises(ValueError, match=r"keys\.jsonl, line 3: the id '3' is that of an earlier row"):
        find_tasks([name])


def test_files_and_names_are_mixed_and_each_name_is_of_one_task(write, tmp_path):
    (tmp_path / "other").mkdir()
    names = [write("keys.jsonl", ROW), "manual", write("doors.jsonl.gz", ROW), "keys.jsonl"]
    assert [task.name for task in find_tasks(names)] == ["keys", "manual", "doors"]
    for name in ("other/keys.jsonl", "keys.jsonl.gz", "manual.jsonl", "ruler.jsonl"):
        write(name, ROW)
        with pytest.raises(ValueError, match=f"tasks='{name}': another task is called"):
            find_tasks(["keys.jsonl", name])
    with pytest.raises(ValueError, match=r"tasks='keys\.json': did you mean .*, FILE\.jsonl"):
        find_tasks(["keys.json"])


# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "answers", "prediction", "expected"),
    [
        ("contains", "Norby", "It was made in NORBY, I think.", 1.0),
        ("contains", "Norby", "in Norbyton", 0.0),
        ("contains", ["Oslo", "New York"], "in New\nYork.", 1.0),
        ("contains", "12", "120 or 312", 0.0),
        ("contains", "a.c", "abc", 0.0),
        ("contains", "大学", "厦门大学在这里", 1.0),  # no blanks between words
        ("contains", "15", "段落15和16", 1.0),
        ("contains", "15", "段落150", 0.0),
        ("contains", "Ünal", "von ÜNAL, und", 1.0),
        ("exact", "New York.", " new  york\n", 1.0),
        ("exact", "New York", "New York.", 1.0),
        ("exact", "New York", "New York is it", 0.0),
        ("exact", ["Oslo", "New York"], "New York", 1.0),
        ("f1", ["Rome", "The cat sat"], "a cat sat down", 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("rouge", "a b y z", "a x b", 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)),
    ],
)
def test_each_metric_gives_what_its_definition_says(write, metric, answers, prediction, expected):
    if metric in ("f1", "rouge"):
        pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kvpass[eval]'")
    name = write("keys.jsonl", ROW | {"answers": answers, "metric": metric})
    ((task,), (sample,)) = find_tasks([name]), samples_of(name)
    assert task.metric(prediction, sample) == pytest.approx(expected, abs=1e-6)
    assert task.metric("", sample) == 0.0
    if metric == "contains" and isinstance(answers, str):
        assert Manual().metric(prediction, sample) == expected


# --- runs ------------------------------------------------------------------------------------------------------------

SHORT = {"max_new_tokens": 3}
FACTS = [
    SHORT | {"id": "a", "context": 20 * "the old fox was tall . ", "question": "what is old", "answers": "fox"},
    SHORT | {"id": "b", "context": 20 * "a crow was very small . ", "question": "who is small", "answers": "crow"},
]


def test_a_file_is_evaluated_beside_another_task_and_a_row_that_changes_is_answered_anew(write, tmp_path):
    usual = {"model": model_folder(), "policies": "snapkv:window=8", "budgets": "0.5", "backend": "eager"}
    usual |= {
        "scopes": "prompt",
        "tasks": f"{write('facts.jsonl', *FACTS)},multi_needle",
        "length": 150,
        "samples": 4,
        "output": tmp_path,
    }

    def run():
        (results,) = Evaluation(EvalOptions(**usual)).run()
        return results.rows, [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]

    rows, records = run()
    assert [(row["task"], row["samples"]) for row in rows[:2]] == [("facts", 2), ("multi_needle", 4)]
    assert len(records) == 6 and {record["generated_tokens"] for record in records[:2]} <= {1, 2, 3}
    said = {record["question"]["sample"]: record["prediction"] for record in records[:2]}
    scored = [row | {"answers": said[row["id"]], "metric": "exact", "category": "said"} for row in FACTS]
    write("facts.jsonl", *scored)
    rows, again = run()
    assert rows[0]["score"].mean == 1.0 and again[:6] == records, "answers and metrics are of no prompt"
    changed = {"answers": [said["b"]], "score": 1.0, "labels": {"category": "said"}}
    (first,) = (record for record in records if record["question"]["sample"] == "b")
    assert first | changed in again[6:] and len(again) == 8
    write("facts.jsonl", scored[0], scored[1] | {"context": 20 * "a crow was very tall . "})
    assert [record["question"]["sample"] for record in run()[1][8:]] == ["b"]


def test_lm_eval_scores_a_file_by_three_lines_of_yaml_as_kvpass_does(write, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kvpass[eval]'")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from torch.utils import collect_env

    from harness_models import TIGHT, build
    from kvpass.lm_eval import TASKS

    monkeypatch.setattr(collect_env, "get_pretty_env_info", str)  # a dozen programs
    name = write("facts.jsonl", FACTS[0] | {"prefix": "it is"}, FACTS[1] | {"metric": "f1"})
    yaml = [f"include: {TASKS}/_base.yaml", "task: my_facts", f"dataset_kwargs: {{kvpass_task: {name}}}"]
    (tmp_path / "my_facts.yaml").write_text("\n".join(yaml))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    lm = build(scope="context", **TIGHT)
    found = simple_evaluate(
        lm, tasks=["my_facts"], task_manager=manager, gen_kwargs="max_gen_toks=4", bootstrap_iters=0
    )
    samples = sorted(found["samples"]["my_facts"], key=lambda sample: sample["doc_id"])
    prompts = [sample["arguments"][0][0] for sample in samples]
    assert prompts[0] == f"{FACTS[0]['context']}{SEPARATOR}\n\nwhat is old it is"
    (task,) = find_tasks([name])
    scores = [task.metric(row["resps"][0][0], sample) for row, sample in zip(samples, samples_of(name), strict=True)]
    assert found["results"]["my_facts"]["score,none"] == pytest.approx(100 * sum(scores) / 2)
    assert found["config"]["kvpass"]["prompts_compressed"] == 2

"""LongBench: rows become prompts and scores; official rows where KVPASS_DATA_DIR has them."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpass.eval.tasks import encode, longbench, registry

DATA = os.environ.get("KVPASS_DATA_DIR")

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kvpass[eval]'")


@pytest.fixture
def folder(tmp_path):
    """A data folder with made-up rows: one data set plain, one compressed, one with two questions."""
    place = tmp_path / "longbench"
    place.mkdir()
    row = {"input": "who?", "context": "A fox.", "answers": ["fox", "a fox"], "length": 2, "all_classes": None}
    (place / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"input": "what?"}) + "\n")
    with gzip.open(place / "trec.jsonl.gz", "wt") as file:
        file.write(json.dumps(row | {"answers": ["Food"], "all_classes": ["Food", "Date"]}) + "\n")
    return tmp_path


def test_longbench_rows_become_the_prompt_of_the_harness_cut_behind_the_context(words, folder):
    task = registry(folder)["longbench_hotpotqa"]
    first, second = task.samples(words, 512, 9, 0)
    assert first.context == second.context
    assert first.context.startswith("Answer the question based on the given passages. Only give me the answer")
    assert first.context.endswith("The following are given passages.\nA fox.")
    assert first.question.endswith("\n\nQuestion: who?\nAnswer:")
    assert second.question == first.question.replace("who?", "what?")
    assert (first.id, first.answers, first.max_new_tokens) == ("0", ("fox", "a fox"), 32)
    assert len(task.samples(words, 512, 1, 0)) == 1
    assert task.chat
    assert task.metric("A FOX!", first) == 1.0


def test_every_data_set_of_the_harness_has_one_border_between_context_and_question():
    assert len(longbench.NAMES) == 21
    for name in longbench.NAMES:
        config = longbench.harness_task(name)
        assert config["doc_to_text"].count("{{context}}") == 1 and config["task"] == f"longbench_{name}"
        assert set(re.findall(r"{{(\w+)}}", config["doc_to_text"])) <= {"context", "question"}


def test_longbench_classes_reach_the_metric_and_few_shot_prompts_are_not_chats(words, folder):
    task = registry(folder)["longbench_trec"]
    (sample,) = task.samples(words, 512, 9, 0)
    assert not task.chat
    assert task.metric("\nFood\nDate", sample) == 1.0
    assert task.metric("Food or Date", sample) == 0.5


def test_what_is_not_in_the_folder_is_asked_of_the_hub(words, folder, monkeypatch):
    asked = []
    row = {"question": "who?", "context": "A fox.", "answers": ["fox"], "length": 2, "all_classes": None}

    def load_dataset(repository, name, split):
        asked.append((repository, name, split))
        if name == "lcc":
            raise ConnectionError("no net")
        return [row, row, row]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    samples = registry(folder)["longbench_musique"].samples(words, 512, 2, 0)
    assert [sample.question.split("Question: ")[1] for sample in samples] == ["who?\nAnswer:"] * 2
    assert asked == [("Xnhyacinth/LongBench", "musique", "test")]
    with pytest.raises(ValueError, match="data set 'lcc': not in data_dir, and not on the hub: no net"):
        registry(folder)["longbench_lcc"].samples(words, 512, 2, 0)


@pytest.mark.skipif(DATA is None, reason="KVPASS_DATA_DIR does not name a folder with the official rows")
@pytest.mark.parametrize("dataset", longbench.NAMES)
def test_official_rows_become_prompts_that_lose_their_middle(words, dataset):
    assert DATA is not None
    if not list(Path(DATA, "longbench").glob(f"{dataset}.jsonl*")):
        pytest.skip(f"{DATA} has no {dataset}")
    task = registry(Path(DATA))[f"longbench_{dataset}"]
    for sample in task.samples(words, 512, 2, 0):
        whole, cut = encode(words, sample, chat=True), encode(words, sample, chat=True, limit=512)
        assert len(cut) == min(512, len(whole))
        assert cut.ids[:256] == whole.ids[:256]
        assert cut.ids[-256:] == whole.ids[-256:]
        assert sample.answers
        assert 0.0 <= task.metric(sample.answers[0], sample) <= 1.0
        assert task.metric("", sample) == 0.0

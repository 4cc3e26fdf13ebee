"""Tasks for lm-evaluation-harness: those of ``kvpass.eval.tasks`` in its format, in a folder for ``--include_path``.

Context and question are divided by the separator, so that both scopes can be run: only with ``--model kvpass``, for
which ``policy=full`` is the baseline. Other models would read the separator as text. Chat templates are the harness's
matter (``--apply_chat_template``); LongBench wants none for trec, triviaqa, samsum, lsht, lcc and repobench-p.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer

from kvpass.eval.tasks import Sample, find_tasks, registry
from kvpass.eval.tasks.rows import ENDINGS
from kvpass.policies.options import check_int

DATA_DIR = "KVPASS_DATA_DIR"
"""Environment variable: the folder with ``longbench/``."""

_FIELDS = ("id", "context", "question", "answer_prefix", "answers", "classes")
"""Of a sample, which a document has too."""
_ALL = 10**6
_GENERATED = 100
_tasks = functools.cache(registry)  # and files, by their paths


def documents(
    kvpass_task: str,
    data_dir: str | None = None,
    prompt_tokens: int = 2048,
    prompt_count: int | None = None,
    prompt_seed: int = 0,
    **metadata: Any,
) -> dict[str, Dataset]:
    """The test split of a task, by name or file. All arguments but the first come from ``--metadata``.

    The harness's ``--cache_requests`` knows neither ``prompt_*`` nor the files: give it ``refresh`` when they change.

    Args:
        data_dir: folder with ``longbench/``; by default that of the environment variable ``KVPASS_DATA_DIR``.
        prompt_tokens, prompt_seed: of prompts that are generated, for the tokenizer ``tokenizer`` or ``pretrained``.
        prompt_count: rows; by default all there are, or 100 generated ones.
    Raises:
        ValueError: an unknown task, a number out of range, no tokenizer for a task that needs one, or data missing.
    """
    folder = data_dir or os.environ.get(DATA_DIR)
    (task,) = find_tasks([kvpass_task], None if folder is None else Path(folder))
    _tasks()[kvpass_task] = task
    generated = not (kvpass_task.startswith("longbench_") or kvpass_task.endswith(ENDINGS))
    if prompt_count is None:
        prompt_count = _GENERATED if generated else _ALL
    check_int("prompt_count", prompt_count, 1)
    tokenizer = None
    if generated:
        name = metadata.get("tokenizer") or metadata.get("pretrained")
        if not isinstance(name, str):
            raise ValueError(
                f"tokenizer={name!r}: task {kvpass_task!r} fits its prompts to one; give --metadata a path"
            )
        tokenizer = AutoTokenizer.from_pretrained(name)
    samples = task.samples(tokenizer, prompt_tokens, prompt_count, prompt_seed)  # type: ignore[arg-type]
    rows = [{name: getattr(sample, name) for name in _FIELDS} for sample in samples]
    return {"test": Dataset.from_list([{"kvpass_task": kvpass_task, **row} for row in rows])}


def score(document: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The task's own score of an answer, times 100."""
    fields: dict[str, Any] = {name: document[name] for name in _FIELDS}
    fields |= {name: tuple(fields[name]) for name in ("answers", "classes")}
    task = _tasks()[document["kvpass_task"]]
    return {"score": 100.0 * task.metric(results[0], Sample(**fields, max_new_tokens=0))}

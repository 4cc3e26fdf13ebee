"""Tasks by name: needle, manual, RULER, LongBench; or by file."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from kvpass.eval.tasks import jsonl, longbench, manual, needle, ruler
from kvpass.eval.tasks.base import Sample, encode
from kvpass.eval.tasks.rows import ENDINGS

__all__ = ["GROUPS", "Sample", "Task", "encode", "find_tasks", "registry"]

Task = needle.Needle | manual.Manual | ruler.Ruler | longbench.LongBench | jsonl.JsonLines
"""A source of samples: of the registry, or a file.

``chat`` says whether a prompt is put into the tokenizer's chat template. ``samples`` gives at most ``count``, generated
ones with prompts of at most ``tokens`` tokens; too few of them, or data missing, are a ``ValueError``. ``metric`` is
the score of a prediction, in [0, 1].
"""
GROUPS = {"ruler": ruler.Ruler, "longbench": longbench.LongBench}
"""Names that stand for all tasks of a benchmark."""


def registry(data_dir: Path | None = None) -> dict[str, Task]:
    """Every task by name; ``data_dir``: folder with ``longbench/``, if there is any."""
    tasks: list[Task] = [*map(needle.Needle, needle.NAMES), needle.NeedleGrid(), manual.Manual(), *ruler.tasks()]
    tasks += [longbench.LongBench(name, data_dir) for name in longbench.NAMES]
    return {task.name: task for task in tasks}


def find_tasks(names: Sequence[str], data_dir: Path | None = None) -> list[Task]:
    """The tasks of these names, each once; :data:`GROUPS` stand for all of their tasks.

    A name that ends in ``.jsonl`` or ``.jsonl.gz`` is the path of a file (:class:`~kvpass.eval.tasks.jsonl.JsonLines`).

    Raises:
        ValueError: no names, an unknown one (the nearest is named), or a file that cannot be read or is called as
            another task.
    """
    tasks = registry(data_dir)
    groups = {group: [name for name, task in tasks.items() if type(task) is cls] for group, cls in GROUPS.items()}
    known = [*groups, *tasks]
    chosen: dict[str, Task] = {}
    for name in names:
        if name.endswith(ENDINGS):
            task = jsonl.JsonLines.read(Path(name))
            if task.name in known or chosen.get(task.name, task) != task:
                raise ValueError(f"tasks={name!r}: another task is called {task.name!r} too; rename the file")
            chosen[task.name] = task
            continue
        if name not in known:
            (near,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ValueError(f"tasks={name!r}: did you mean {near!r}? Must be one of {', '.join(known)}, FILE.jsonl")
        chosen |= {member: tasks[member] for member in groups.get(name, [name])}
    if not chosen:
        raise ValueError("tasks='': name at least one task")
    return list(chosen.values())

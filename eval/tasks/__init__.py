"""Tasks by name: needle, manual, RULER, LongBench."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from kvpass.eval.tasks import longbench, manual, needle, ruler
from kvpass.eval.tasks.base import Sample, encode

__all__ = ["GROUPS", "Sample", "Task", "encode", "find_tasks", "registry"]

Task = needle.Needle | manual.Manual | ruler.Ruler | longbench.LongBench
"""A source of samples, with a name in the registry.

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

    Raises:
        ValueError: no names, or an unknown one (the nearest is named).
    """
    tasks = registry(data_dir)
    groups = {group: [name for name, task in tasks.items() if type(task) is cls] for group, cls in GROUPS.items()}
    chosen: dict[str, Task] = {}
    for name in names:
        if name not in tasks and name not in groups:
            (near,) = difflib.get_close_matches(name, [*tasks, *groups], n=1, cutoff=0.0)
            raise ValueError(f"tasks={name!r}: did you mean {near!r}? Must be one of {', '.join([*groups, *tasks])}")
        chosen |= {member: tasks[member] for member in groups.get(name, [name])}
    if not chosen:
        raise ValueError("tasks='': name at least one task")
    return list(chosen.values())

"""Before/after artifacts of a graph pass: for tlparse through ``trace_structured``, and as files for everyone else."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from torch._logging import trace_structured
from torch.fx import GraphModule


def count_ops(gm: GraphModule) -> Counter[str]:
    """How often each function, method or module is called."""
    return Counter(str(node.target) for node in gm.graph.nodes if node.op.startswith("call_"))


def diff_ops(before: Counter[str], after: Counter[str]) -> str:
    """Changed counts, one a line: ``kvpass.site.default: 4 -> 0 (-4)``; empty when nothing changed."""
    return "\n".join(
        f"{name}: {before[name]} -> {after[name]} ({after[name] - before[name]:+d})"
        for name in sorted(before | after)
        if before[name] != after[name]
    )


def dump_artifact(name: str, text: Callable[[], str]) -> None:
    """Emit a text to the structured trace, and to ``$KVPASS_DUMP/<name>.txt`` when that variable names a folder.

    Args:
        text: makes it; not called when nobody reads it.
    """
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"kvpass.{name}", "encoding": "string"},
        payload_fn=text,
    )
    folder = os.environ.get("KVPASS_DUMP")
    if folder:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{name}.txt").write_text(text() + "\n")

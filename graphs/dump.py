"""Artifacts of graph passes: for tlparse through ``trace_structured``, and as text files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from torch.fx import GraphModule

from kvpass.torch_compat import trace_structured


def count_ops(gm: GraphModule) -> Counter[str]:
    """Count the calls of each function, method or module."""
    return Counter(str(node.target) for node in gm.graph.nodes if node.op.startswith("call_"))


def diff_ops(before: Counter[str], after: Counter[str]) -> str:
    """Return changed counts, one a line: ``kvpass.site.default: 4 -> 0 (-4)``; "" if none changed."""
    return "\n".join(
        f"{name}: {before[name]} -> {after[name]} ({after[name] - before[name]:+d})"
        for name in sorted(before | after)
        if before[name] != after[name]
    )


def dump_artifact(name: str, text: Callable[[], str]) -> None:
    """Write a text to the structured trace, and to ``$KVPASS_DUMP/<name>.txt`` if that variable is set.

    Args:
        text: makes the text; not called when no one reads it.
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

"""``import kvpass.lm_eval`` registers the model ``"kvpass"`` with lm-evaluation-harness.

The command ``kvpass-lm-eval`` is the ``lm_eval`` command with the model registered, for calls in which the harness
does not find it (``--seed None``, ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``). ``kvpass-lm-eval path`` prints the folder of
kvpass's tasks, for ``--include_path``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import kvpass.eval
from kvpass.eval.prompt import SEPARATOR

try:
    import lm_eval.models  # noqa: F401  # first: the harness adds its own models only to an empty registry
    from lm_eval.api.registry import model_registry

    from kvpass.eval.harness.model import KVPassLM
except ModuleNotFoundError as error:
    raise ImportError(f"{error.name!r} is not installed: pip install 'kvpass[eval]'") from error

__all__ = ["SEPARATOR", "TASKS", "KVPassLM", "main"]

TASKS = Path(str(kvpass.eval.__file__)).parent / "harness_tasks"
"""Folder of kvpass's tasks, for ``--include_path``."""

if "kvpass" not in model_registry:
    model_registry.register("kvpass", target="kvpass.lm_eval:KVPassLM")


def main() -> None:
    """Run the command ``kvpass-lm-eval``."""
    if sys.argv[1:] == ["path"]:
        print(TASKS)
        return
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()

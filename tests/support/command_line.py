"""The command ``kvpass``, run in this process."""

from typing import Any

from typer.testing import CliRunner

from kvpass.cli.main import app


def invoke(*words: object, columns: int | None = None, stdin: bytes = b"") -> Any:
    """What a command prints in a terminal of so many columns, and its exit code."""
    environment = {} if columns is None else {"COLUMNS": str(columns)}
    return CliRunner(env=environment).invoke(app, [str(word) for word in words], input=stdin)

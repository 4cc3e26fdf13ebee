"""Imports inside kvpass point downwards only. The tables below are the rule; DESIGN.md shows the same."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvpass"

# From low to high. A module may import from its own line and from the lines above it, never from a line below.
# A name stands for the module kvpass.<name> or for every module of that package; "kvpass" is kvpass/__init__.py.
LAYERS = """
    errors config copying padding version replace_file
    observation builtin kernels prompt_record cache_file cache_metadata identity
    scheduler decode loading
    policies released
    reference slots evict plan loss recompress
    sliding rules check_saved
    device
    ops
    graphs attention
    store ring cache_face
    turn
    cache
    cuda_graphs arguments
    backend
    captured
    decoders report phases wrappers
    model raw
    generation
    api
    kvpass masked_oracle
    testing
    eval
    documents
    cli lm_eval
"""

# Stricter than its line: these import nothing of kvpass but what is named here and themselves.
ONLY = {
    "builtin": "",
    "kernels": "errors config",
}

# Who may import these. Together with LAZY: the eager reference and the kernels know nothing of each other, `ops`
# chooses between them, and `import kvpass` never needs Triton or a compiler.
USERS = {
    "kernels": "ops device eval",
    "triton": "kernels eval",
}

# Imported inside functions only.
LAZY = ["kernels"]

# All that kernels know outside kvpass, beside the standard library.
KERNEL_LIBRARIES = ["torch", "triton"]

RANK = {name: rank for rank, line in enumerate(LAYERS.split("\n")) for name in line.split()}


@dataclass(frozen=True)
class Import:
    """One import statement: who imports what, where, and whether it runs when the importing module is loaded."""

    importer: str
    imported: str
    line: int
    at_load: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def part_of(module: str) -> str:
    """Name of the module's line in the table: ``kvpass.graphs.passes`` -> ``graphs``."""
    return module.split(".")[1] if "." in module else module


def imports_of(module: str, source: str, known: set[str], *, is_package: bool = False) -> Iterator[Import]:
    """Every import of a module, relative ones resolved; ``from a import b`` is ``a.b`` where known has that."""
    tree = ast.parse(source)
    here = module.split(".") if is_package else module.split(".")[:-1]
    inside_functions = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = here[: len(here) - node.level + 1] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(module, name, node.lineno, id(node) not in inside_functions)


def violation(found: Import) -> str | None:
    """Why this import is not allowed, or None."""
    importer, library = part_of(found.importer), found.imported.split(".")[0]
    imported = part_of(found.imported) if library == "kvpass" else library
    if importer == imported:
        return None
    if imported in USERS and importer not in USERS[imported].split():
        return f"{found}: only [{USERS[imported]}] may"
    if imported in LAZY and found.at_load:
        return f"{found}: only inside a function"
    if library == "kvpass":
        if importer in ONLY and imported not in ONLY[importer].split():
            return f"{found}: {importer} may import only [{ONLY[importer]}]"
        if RANK[imported] > RANK[importer]:
            return f"{found}: an upward arrow"
    elif importer == "kernels" and library not in {*KERNEL_LIBRARIES, *sys.stdlib_module_names}:
        return f"{found}: kernels may import only {KERNEL_LIBRARIES} and the standard library"
    return None


def modules() -> dict[str, Path]:
    """Every module of the package, through the linked folders."""
    found = {}
    for folder, _, files in os.walk(PACKAGE, followlinks=True):
        for file in files:
            if file.endswith(".py"):
                path = Path(folder, file)
                parts = path.relative_to(ROOT).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
SMALL_TREE = {f"kvpass.{name}" for name in ("api", "errors", "graphs", "kernels", "kernels.decode", "ops", "reference")}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_import_points_downwards(module: str) -> None:
    assert part_of(module) in RANK, f"{module} has no place in LAYERS of {__file__}"
    path = MODULES[module]
    found = imports_of(module, path.read_text(), set(MODULES), is_package=path.name == "__init__.py")
    assert [text for text in map(violation, found) if text] == []


def test_the_design_page_shows_the_same_layers() -> None:
    rows = re.findall(r"^\| \d+ \| (.*) \|$", (ROOT / "DESIGN.md").read_text(), re.MULTILINE)
    assert [re.findall(r"`(\w+)`", row) for row in rows] == [line.split() for line in LAYERS.strip().split("\n")]


@pytest.mark.parametrize("folder", ["kernels", "graphs", "eval", "policies", "builtin"])
def test_the_walk_reaches_every_folder(folder: str) -> None:
    assert any(part_of(module) == folder for module in MODULES)


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("kvpass.ops", "import kvpass.api", "an upward arrow"),
        ("kvpass.ops", "from kvpass import api", "an upward arrow"),
        ("kvpass.ops", "from kvpass import compile", "an upward arrow"),
        ("kvpass.ops", "from . import api", "an upward arrow"),
        ("kvpass.ops", "from .graphs import find", "an upward arrow"),
        ("kvpass.ops", "def f():\n    from kvpass.api import compile", "an upward arrow"),
        ("kvpass.graphs.passes", "from .. import api", "an upward arrow"),
        ("kvpass.graphs.passes", "from ..api import compile", "an upward arrow"),
        ("kvpass.ops", "from kvpass.kernels.decode import attend", "only inside a function"),
        ("kvpass.reference", "def f():\n    from kvpass.kernels import decode", "only [ops device eval] may"),
        ("kvpass.kernels.decode", "from kvpass import reference", "may import only [errors config]"),
        ("kvpass.kernels.decode", "import numpy as np", "kernels may import only"),
        ("kvpass.ops", "import triton.language as tl", "only [kernels eval] may"),
        ("kvpass.builtin", "from kvpass.config import Budget", "may import only []"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str, reason: str) -> None:
    (found,) = imports_of(module, source, SMALL_TREE)
    assert reason in str(violation(found))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvpass.ops", "from kvpass import errors"),
        ("kvpass.ops", "def f():\n    from kvpass.kernels.decode import attend"),
        ("kvpass.kernels.decode", "import functools, torch, triton"),
        ("kvpass.kernels.decode", "from kvpass.kernels.tiles import b"),
        ("kvpass.graphs.passes", "from .fx_utils import is_call"),
        ("kvpass.api", "import numpy as np"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str) -> None:
    found = list(imports_of(module, source, SMALL_TREE))
    assert found
    assert [text for text in map(violation, found) if text] == []

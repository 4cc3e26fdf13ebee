"""Every kernel compiles for the GPUs we ship to, within their shared memory and without spilling; no GPU is needed.

The kernels are compiled in another process, because Triton's interpreter, which the other tests use, is chosen once and
for all when a kernel is imported. Run as a script, this file is that process.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpass.kernels.launch import AotCase

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = (80, 90)
SHARED_KIB = {80: 163, 90: 227}
SPILLED_BYTES = 16
"""Of the stack, per thread; a few bytes of it are no spill in a loop."""


def every_case() -> list[AotCase]:
    found = []
    for path in sorted((ROOT / "kernels").glob("*.py")):
        if "def aot_cases(" in path.read_text(encoding="utf-8"):
            found += importlib.import_module(f"kvpass.kernels.{path.stem}").aot_cases()
    return found


def all_ones(case: AotCase) -> AotCase:
    """The case of a call whose sizes are all 1, which the JIT makes constants where a kernel does not forbid it."""
    free = {param.name for param in case.kernel.params if not param.do_not_specialize}
    ones = [name for name, kind in case.signature.items() if kind == "i32" and name in free]
    return dataclasses.replace(
        case,
        name=f"{case.name}, sizes 1",
        signature={name: kind for name, kind in case.signature.items() if name not in ones},
        constexprs={**case.constexprs, **dict.fromkeys(ones, 1)},
    )


def a_few(cases: list[AotCase]) -> Iterator[tuple[AotCase, int]]:
    """bf16 at head dim 128: each config of each kernel once for each architecture, and each kernel with sizes of 1."""
    groups: dict[Any, list[AotCase]] = {}
    for case in cases:
        dims = {case.constexprs[name] for name in ("D", "DV") if name in case.constexprs}
        if dims == {128} and "*bf16:16" in case.signature.values():
            groups.setdefault(case.kernel, []).append(case)
    for kernel in {case.kernel: None for case in cases}:
        group = groups[kernel]
        for config in {case.config: None for case in group}:
            same = [case for case in group if case.config == config]
            if config.least_arch <= 80:
                yield same[0], 80
            yield same[-1], 90
        yield all_ones(group[0]), 90


def compile_cases(exhaustive: bool) -> None:
    """Print a JSON line for each compiled case."""
    from kvpass.kernels.launch import compile_ahead

    cases = every_case()
    every = ((case, arch) for case in cases for arch in ARCHITECTURES if arch >= case.config.least_arch)
    for case, arch in every if exhaustive else a_few(cases):
        needs = dataclasses.asdict(compile_ahead(case, arch))
        print(json.dumps({"name": case.name, "config": str(case.config), "arch": arch, **needs}), flush=True)


def run_compiler(folder: Path, *options: str) -> list[dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(folder), "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, __file__, *options], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    for row in rows:
        print(
            f"sm_{row['arch']} {row['shared_bytes'] / 1024:6.1f} KiB {row['registers']:4} registers "
            f"{row['spilled_bytes']:4} spilled  {row['name']}  [{row['config']}]"
        )
    return rows


def check(rows: list[dict[str, Any]]) -> None:
    too_big = [row for row in rows if row["shared_bytes"] > SHARED_KIB[row["arch"]] * 1024]
    spilling = [row for row in rows if row["spilled_bytes"] > SPILLED_BYTES]
    assert not too_big, f"more shared memory than there is: {too_big}"
    assert not spilling, f"more than {SPILLED_BYTES} bytes spilled: {spilling}"


if __name__ == "__main__":
    # the kernels of this checkout, without what `import kvpass` loads: they need none of it
    package = ModuleType("kvpass")
    package.__path__ = [str(ROOT / "kvpass")]
    sys.modules["kvpass"] = package
    compile_cases("exhaustive" in sys.argv)
else:
    import pytest

    @pytest.mark.slow
    def test_every_kernel_and_config_compiles(tmp_path: Path) -> None:
        rows = run_compiler(tmp_path)
        assert {row["arch"] for row in rows} == set(ARCHITECTURES)
        check(rows)

    @pytest.mark.exhaustive
    @pytest.mark.timeout(3600)
    def test_every_case_compiles(tmp_path: Path) -> None:
        check(run_compiler(tmp_path, "exhaustive"))

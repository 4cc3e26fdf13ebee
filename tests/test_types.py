"""What type checkers know of the public interface: wrong uses are reported, right ones are not."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import kvpass
from kvpass.policies import PolicyName

ROOT = Path(__file__).resolve().parent.parent

GIVEN = """\
# mypy: disallow-any-generics, disallow-subclassing-any, disallow-untyped-calls, disallow-untyped-decorators
# mypy: warn-return-any, strict-equality, extra-checks, no-implicit-reexport
import kvpass
from kvpass import policies
from torch import Tensor
from transformers import PreTrainedModel

def uses(model: PreTrainedModel, ids: Tensor, name: str) -> None:
    fast = kvpass.compile(model, policy="lava", budget=1024)
"""

WRONG = """\
    fast.nonexistent()
    print(fast.bugdet)
    fast.compress(ids, reusable="yes")
    fast.set_budget([64])
    fast.set_policy("lvaa", 64)
    kvpass.compile(model, policy="snapkw", budget=64)
    kvpass.compile(model, policy=policies.Lava(kernelsize=5), budget=64)
    kvpass.compile(model, policy=policies.StreamingLLM(pool="max"), budget=64)
    kvpass.compile(model, policy=policies.SnapKV(pool="mx"), budget=64)
    kvpass.load_cache("document.kv", model)
"""

RIGHT = """\
    cache: kvpass.CompressedCache = fast.compress(ids, reusable=False)
    cache.save("document.kv")
    cache = kvpass.load_cache("document.kv", fast)
    fast.generate(ids, past_key_values=cache, max_new_tokens=3)
    print(fast(ids).logits, fast.config.vocab_size, fast.device, fast.report().prompt_lengths)
    fast.set_budget("512MiB")
    fast.set_policy("snapkv", 0.25, window=16, pool="avg")
    kvpass.compile(model, budget=0.5, window=8, alpha=0.1)
    kvpass.compile(model, policy="cake", budget=128, tau1=1.6, tau2=0.4, recompress="every_turn")
    kvpass.compile(model, policy="full", backend="eager", cuda_graphs=False)
    kvpass.compile(model, **kvpass.chosen("choice.json", model))
    kvpass.compile(model, policy=policies.Lava(kernel_size=31, pool="avg"), budget=64)
    kvpass.compile(model, policy=kvpass.POLICIES[name](window=4), budget=64)
    uses(fast, ids, name)
"""


def lines(code: str, start: int) -> dict[int, str]:
    return dict(enumerate(code.splitlines(), start))


@pytest.mark.exhaustive  # `make typecheck` runs it
def test_wrong_uses_are_reported_and_right_ones_are_not(tmp_path):
    """One run of mypy, with the cache of `make typecheck`; the flags in the code are those that --strict adds to it."""
    files = {"wrong_uses": GIVEN + WRONG, "right_uses": GIVEN + RIGHT}
    for name, code in files.items():
        (tmp_path / f"{name}.py").write_text(code)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *(str(tmp_path / f"{name}.py") for name in files)]
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stderr == ""
    reported = [(place, int(line)) for place, line in re.findall(r"(\w+_uses)\.py:(\d+): error", done.stdout)]
    wanted = lines(WRONG, len(GIVEN.splitlines()) + 1)
    missed = [use.strip() for line, use in wanted.items() if ("wrong_uses", line) not in reported]
    assert missed == [], done.stdout
    assert set(reported) == {("wrong_uses", line) for line in wanted}, done.stdout


def test_type_checkers_know_the_names_of_all_policies_of_kvpass():
    own = {name for name, policy in kvpass.POLICIES.items() if policy.__module__.startswith("kvpass.")}
    assert own == {*get_args(PolicyName)}

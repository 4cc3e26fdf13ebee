"""Whether the CUDA path is right at all, in a minute: ``python -m kvpass.eval.bench.smoke --json FILE``.

Two layers of Llama-3.1-8B in bf16: a prompt, then decode steps, of which the third and later ones replay a CUDA graph.
The logits are compared with transformers in fp32; what transformers in bf16 is off by says what rounding may do.
"""

from __future__ import annotations

import argparse
import copy
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

import kvpass
from kvpass.eval.bench.measure import first_line
from kvpass.eval.bench.settings import BenchModel, build, find_model
from kvpass.eval.environment import machine, save_json, versions
from kvpass.transformers_compat import CACHE

LAYERS, PROMPT, STEPS, BUDGET = 2, 4000, 8, 1024
TIMES_ROUNDING = 2.0
"""A relative error above so many of that of transformers in the same dtype is an error."""


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected one; not a number if either is not."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def replayed(step: Callable[[], Any]) -> bool:
    """Whether the step launches a CUDA graph."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return any("cudaGraphLaunch" in event.name for event in profiler.events() or ())


def run_checks(
    model: PreTrainedModel, result: dict[str, Any], save: Callable[[], None], prompt: int = PROMPT, **options: Any
) -> None:
    """Fill ``result["checks"]``, saved after each: ``what``, its relative ``error``, ``allowed`` and ``ok``.

    Args:
        model: uncompiled. prompt: tokens of it. options: of ``kvpass.compile``.
    """
    device = model.device
    ids = torch.randint(model.config.vocab_size, (1, prompt + STEPS), device=device)
    expected = copy.deepcopy(model).float()(ids, logits_to_keep=STEPS + 1).logits[0]
    allowed = TIMES_ROUNDING * relative(model(ids, logits_to_keep=STEPS + 1).logits[0], expected)
    checks = result["checks"] = []

    def check(what: str, error: float, allowed: float) -> None:
        checks.append({"what": what, "error": error, "allowed": allowed, "ok": error <= allowed})
        save()

    for policy, budgets in (("lava", (10**9, BUDGET)), ("full", (None,))):
        try:
            make: Any = kvpass.compile
            fast = make(model, policy=policy, budget=budgets[0], **options)
            for budget in budgets:
                if budget is not None:
                    fast.set_budget(budget)
                name = f"{policy}, {'all' if budget != BUDGET else BUDGET} entries"
                out = fast(ids[:, :prompt], logits_to_keep=1)
                check(f"{name}: prompt", relative(out.logits[0, 0], expected[0]), allowed)
                step = partial(fast, past_key_values=out[CACHE], logits_to_keep=1)
                found = torch.stack([step(token).logits[0, 0] for token in ids[:, prompt:].split(1, 1)])
                if budget == BUDGET:  # transformers has no such cache to compare with
                    check(f"{name}: numbers in {STEPS} steps that are not finite", float((~found.isfinite()).sum()), 0)
                else:
                    check(f"{name}: {STEPS} steps", relative(found, expected[1:]), allowed)
                if device.type == "cuda":
                    is_graph = replayed(partial(step, ids[:, -1:]))
                    check(f"{name}: steps that replay no CUDA graph", float(not is_graph), 0)
        except Exception as error:  # the other policy does not need this one; it is a failed check
            traceback.print_exc()
            check(f"{policy}: {first_line(error)}", float("nan"), allowed)


def shape_of_8b() -> BenchModel:
    """Two layers of Llama-3.1-8B."""
    found = find_model("llama-3.1-8b")
    found.config.num_hidden_layers = LAYERS
    return found


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Of a table: what, error, allowed, and whether it is right."""
    return [
        [check["what"], f"{check['error']:.1e}", f"{check['allowed']:.1e}", "yes" if check["ok"] else "NO"]
        for check in result["checks"]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 when all is right."""
    parser = argparse.ArgumentParser(prog="smoke", description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="what is found goes here, check by check")
    path = parser.parse_args(arguments).json
    if not torch.cuda.is_available():
        print("smoke: this machine has no CUDA device", file=sys.stderr)
        return 1
    device = torch.device("cuda")
    result: dict[str, Any] = {"machine": machine(device), "versions": versions(), "complete": False}
    with torch.no_grad():
        run_checks(build(shape_of_8b(), 0, device, torch.bfloat16), result, lambda: save_json(path, result))
    wrong = [check["what"] for check in result["checks"] if not check["ok"]]
    result["complete"] = not wrong
    save_json(path, result)
    for row in rows(result):
        print(*row, sep="\t")
    if wrong:
        print(f"smoke: wrong: {'; '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

"""Cost of the checks of a decode step, for docs/checks.md: ``python -m kvpass.eval.bench.check_costs``."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from rich.console import Console
from torch.utils.benchmark import Timer
from transformers import LlamaConfig, LlamaForCausalLM

import kvpass
from kvpass.cache.fingerprint import ModelFingerprint
from kvpass.eval.tables import rich_table
from kvpass.frontends.padding import read_padding
from kvpass.graphs.verify.tables import InputLookup
from kvpass.transformers_compat import CACHE

LAYERS, COLUMNS = 32, 16384


def main() -> None:
    """Print microseconds of each check: 32 layers, a cache of 16384 columns."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=LAYERS, num_attention_heads=1
    )
    model = LlamaForCausalLM(config).eval()
    identity = ModelFingerprint(model)
    policy = kvpass.compile(model, policy="full").policy
    cache = kvpass.CompressedCache(policy, None, identity)
    cache.columns, cache.start = COLUMNS, torch.zeros(1, dtype=torch.int64)
    mask, token = torch.ones(1, COLUMNS + 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    lookup = InputLookup(0, "input_ids", 0, 64, "embed_tokens")
    checks: dict[str, Callable[[], object]] = {
        "the cache belongs to the model: tensors, writes to them, adapters": lambda: cache.check_fingerprint(
            policy, None, identity
        ),
        "hooks on modules are those of the capture": lambda: identity.hooks,
        f"the mask hides nothing, {COLUMNS} columns (CPU)": lambda: read_padding(mask, cache),
        "ids are in the embedding (CPU)": lambda: lookup.check((token,)),
    }
    rows = [
        (name, f"{1e6 * Timer('check()', globals={'check': check}).blocked_autorange().median:.1f}")
        for name, check in checks.items()
    ]
    again, guards = _steps(model, token)
    rows.append(("attributes, tensors and state of torch are those of the step before", f"{again:.1f}"))
    rows.append(("guards of Dynamo (its profiler event), first step after a prompt only", f"{guards:.1f}"))
    console = Console()
    console.print(rich_table(("checked in every decode step", "microseconds"), rows))
    console.print(f"torch {torch.__version__}, {LAYERS} layers, {len(identity.parts.ids)} tensors")


def _steps(model: LlamaForCausalLM, token: torch.Tensor, steps: int = 50) -> tuple[float, float]:
    """Median microseconds to see that a decode step may be repeated, and in which Dynamo finds its compiled code."""
    fast = kvpass.compile(model, policy="full", backend="eager")
    repeated, cache = fast._kvpass.captures.repeated, fast(token.expand(1, 40))[CACHE]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            repeated.clear()
            fast(token, past_key_values=cache)
    (step,) = repeated.values()
    positions = torch.zeros_like(token)
    with torch.no_grad():
        assert step.holds((token, positions))
        again = Timer("step.holds(given)", globals={"step": step, "given": (token, positions)}).blocked_autorange()
    events = profile.events() or []
    lookups = [event.cpu_time_total for event in events if event.name == "TorchDynamo Cache Lookup"]
    return 1e6 * again.median, statistics.median(lookups)


if __name__ == "__main__":
    main()

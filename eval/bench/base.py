"""What every measurement of ``kvpass bench`` has: how its result begins, and how it is saved step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kvpass.eval.bench.settings import BenchSettings
from kvpass.eval.environment import command_line, machine, versions
from kvpass.progress import progress_bar, progress_console

Result = dict[str, Any]


@dataclass
class Benchmark(ABC):
    """A checked measurement."""

    settings: BenchSettings
    failed: list[str] = field(default_factory=list, init=False)
    """What failed, and why, where that is not a figure of the result."""

    def run(self, save: Callable[[Result], None] = lambda result: None) -> Result:
        """Measure, showing progress; ``save`` is handed what is there after every step.

        Returns:
            what ``--json`` writes; ``complete`` says whether it is all.

        Raises:
            RuntimeError: a part failed; what the others did is measured and saved.
        """
        settings, config = self.settings, self.settings.bench_model.config.get_text_config()
        result: Result = {
            "command": command_line(),
            "machine": machine(torch.device(settings.device)),
            "versions": versions(),
            "model": {
                "name": settings.model,
                "type": config.model_type,
                "dtype": str(settings.torch_dtype).removeprefix("torch."),
                "hidden_size": config.hidden_size,
                "intermediate_size": getattr(config, "intermediate_size", None),
                "layers": config.num_hidden_layers,
                "query_heads": config.num_attention_heads,
                "kv_heads": getattr(config, "num_key_value_heads", None),
            },
            **{name: getattr(settings, name) for name in ("device", "window", "backend", "seed")},
            "budget": settings.budget_value,
            "complete": False,
        }
        with torch.no_grad(), progress_bar(progress_console()) as progress:
            task = progress.add_task("", total=self.steps)
            for number, description in enumerate(self.measure(result)):
                if number:
                    save(result)
                progress.update(task, completed=number, description=description)
        save(result := result | {"complete": not self.failed})
        if self.failed:
            raise RuntimeError(f"{len(self.failed)} failed, first {self.failed[0]}")
        return result

    @property
    @abstractmethod
    def steps(self) -> int:
        """How many steps there are."""

    @abstractmethod
    def measure(self, result: Result) -> Iterator[str]:
        """Add to a result what is measured; yields the description of each step before it is done."""


def named(result: Result, *more: object) -> str:
    """Model and dtype of a result, and what else its title begins with."""
    model = result["model"]
    return ", ".join(map(str, (model["name"], model["dtype"], *more)))

"""What torchrun starts: processes that share a model and call it until one fails, or all are stopped.

Usage: failing.py FOLDER HOW; ``memory``: the last process in the middle of a prompt, after what it alone refused;
``goes on``: none.
"""

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import kvpass
from kvpass.ops import reference

IDS = torch.arange(120).view(2, 60)


def say(text: str) -> None:
    os.write(2, f"{text}\n".encode())  # in one piece: both processes write


def now() -> None:
    say(f"fails: {os.getpid()} {time.time()}")


def main(folder: str, how: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2)).eval()
    last = dist.get_rank() == 1
    given: dict[str, Any] = {"budget": 24, "window": 8, "backend": "eager"}
    if how == "memory":
        try:
            kvpass.compile(model, policy="lavva" if last else "lava", **given)
        except ValueError as error:
            say(f"refused: {error}")
    fast = kvpass.compile(model, policy="lava", **given)
    fast(IDS)
    if last and how == "memory":
        judge = reference.score_layer

        def failing(call: Any, lse: Any, start: Any, first: Any, layer: int, *rest: Any) -> Any:
            if layer == 1:
                now()
                raise torch.OutOfMemoryError("out of memory, injected")
            return judge(call, lse, start, first, layer, *rest)

        reference.score_layer = failing
    now()
    while True:
        fast(IDS)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What a decode step should take on a GPU, from a machine without one: ``kvpass bench --predict``.

Launches are counted in the code that Inductor generates for the step (:mod:`kvpass.eval.bench.decode_code`), bytes in
the model and the cache. Everything else is an assumption, which the table names; a measurement can be held against it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import torch
from rich.console import Console
from transformers import PreTrainedModel

from kvpass.config import Budget
from kvpass.eval.bench.decode_code import decode_code
from kvpass.eval.bench.measure import weight_bytes
from kvpass.eval.bench.processes import Result, header_of, in_new_process
from kvpass.eval.bench.run import geometry_of
from kvpass.eval.bench.settings import BenchSettings, build, find_model
from kvpass.eval.policy_spec import PolicySpec
from kvpass.eval.tables import Tables
from kvpass.progress import progress_bar

SHARE = 0.85
"""Of a device's bandwidth that kernels of a decode step reach: assumed."""
LAUNCH_US = 1.5
"""Microseconds between the end of a kernel's reads and the begin of the next one's, in a CUDA graph: assumed."""


class Device(NamedTuple):
    """A GPU: bytes a second of its memory, as its maker says of the SXM version."""

    name: str
    bandwidth: float


DEVICES = (Device("H100", 3.35e12), Device("H200", 4.8e12))


def count_launches(model: str, policy: PolicySpec, entries: int, batch: int) -> dict[str, int]:
    """Return launches of a decode step in all (``launches``) and of one layer in its middle (``per_layer``)."""
    config = find_model(model).config
    code = decode_code(config, policy.resolve(), entries, batch)
    layers: int = config.get_text_config().num_hidden_layers
    return {"launches": code.launches(layers), "per_layer": code.launches_per_layer}


@dataclass(frozen=True)
class Predict:
    """The time of a decode step in bf16 as a CUDA graph, by context and batch, with the first policy and with ``full``.

    Args:
        settings: of them model, contexts, batches, budget, window and the first policy are used.

    Raises:
        ValueError: the policy evicts while decoding, the model is a mixture of experts or has sliding windows, or
            Triton, which writes the code, is not installed.
    """

    settings: BenchSettings

    def __post_init__(self) -> None:
        settings, config = self.settings, self.settings.bench_model.config
        policy = settings.policy.resolve()
        if policy.decode_rule() is not None:
            raise ValueError(f"policy={policy.name!r} evicts while decoding: what a step reads is not predicted")
        text: Any = config.get_text_config()
        if any(kind != "full_attention" for kind in getattr(text, "layer_types", None) or ()):
            raise ValueError(f"model={settings.model!r}: predicted are models with full attention in all layers")
        if weight_bytes(self._model) is None:
            raise ValueError(f"model={settings.model!r}: which experts a step reads is not predicted")
        if find_spec("triton") is None:
            raise ValueError("predict: Triton is not installed; pip install 'kvpass[gpu]'")

    @cached_property
    def _model(self) -> PreTrainedModel:
        """Without weights."""
        return build(self.settings.bench_model, 0, "meta", torch.bfloat16)

    def run(self, console: Console, save: Callable[[Result], None] = lambda result: None) -> Result:
        """Count and compute; ``save`` is handed the result.

        Returns:
            what ``--json`` writes; in ``predict`` a record for every context, batch, device and policy.
        """
        settings, token_bytes = self.settings, geometry_of(self._model).token_bytes
        records = list[Result]()
        result: Result = {**header_of(settings), "share": SHARE, "launch_us": LAUNCH_US, "predict": records}
        result["model"]["dtype"] = "bfloat16"
        with progress_bar(console) as progress, mock.patch.dict(os.environ, TRITON_INTERPRET="0"):
            task = progress.add_task("", total=len(settings.batches))
            for batch in settings.batches:
                progress.update(task, description=f"batch {batch}: generating the code of a step")
                shortest = Budget.parse(settings.budget).check(min(settings.prompts), settings.window, token_bytes)
                launches = in_new_process(count_launches, settings.model, settings.policy, shortest, batch)
                for context in settings.prompts:
                    kept = Budget.parse(settings.budget).check(context, settings.window, token_bytes)
                    for name, entries in ((settings.policy.name, min(kept, context)), ("full", context)):
                        known = {"context": context, "batch": batch, "policy": name, "entries": entries, **launches}
                        records += [self._step(known, device, token_bytes) for device in DEVICES]
                progress.advance(task)
        save(result)
        return result

    def _step(self, known: Result, device: Device, token_bytes: int) -> Result:
        """The record of a step on a device."""
        weights, cache = weight_bytes(self._model), known["batch"] * known["entries"] * token_bytes
        assert weights is not None, "checked above"
        reading = (weights + cache) / (device.bandwidth * SHARE)
        waiting = known["launches"] * LAUNCH_US * 1e-6
        return {
            **known,
            **{"device": device.name, "bandwidth": device.bandwidth, "weight_bytes": weights, "cache_bytes": cache},
            **{"seconds": reading + waiting, "reading_s": reading, "waiting_s": waiting},
        }

    @staticmethod
    def shown(result: Result) -> Tables:
        """A result, with what its columns mean."""
        header = ["prompt", "rows", "policy", "GPU", "GB", "launches", "a layer", "reading", "waiting", "ms"]
        rows = [
            [
                *(str(found[name]) for name in ("context", "batch", "policy", "device")),
                f"{(found['weight_bytes'] + found['cache_bytes']) / 1e9:.2f}",
                *(str(found[name]) for name in ("launches", "per_layer")),
                *(f"{1e3 * found[name]:.2f}" for name in ("reading_s", "waiting_s", "seconds")),
            ]
            for found in result["predict"]
        ]
        title = f"{result['model']['name']}, bf16, budget {result['budget']}: a decode step, predicted"
        return Tables([(title, header, rows)], (PREDICT_LEGEND,), left=4)


PREDICT_LEGEND = (
    f"Predicted, not measured. reading: weights and attended entries once, at {SHARE:.0%} of the bandwidth that the "
    f"maker names for SXM (assumed). waiting: {LAUNCH_US} us between kernels of a CUDA graph (assumed), as often as "
    "the code that Inductor generates for the step launches one. bf16, greedy, without Python's part of generate."
)

"""Decode steps that are recorded once and replayed, as CUDA graphs are, with what vLLM does around those."""

from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from kvpass.kernels import ragged_decode
from kvpass.vllm import backend
from kvpass.vllm.backend import KVPassBuilder, KVPassImpl

ROWS = 4
"""Rows of a graph; steps of fewer are filled up."""


class Recording(TorchDispatchMode):
    """Operators and kernels of a call, with the memory that they read and wrote then."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        out = function(*args, **options or {})
        self.calls.append((function, args, options or {}, out))
        return out

    def launch(self, *args: Any) -> None:
        with _disable_current_modes():
            launch(*args)
        self.calls.append((launch, args, {}, None))

    def replay(self) -> None:
        for function, args, options, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(function(*args, **options)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


launch, forward, build = ragged_decode.launch, KVPassImpl.forward, KVPassBuilder.build


def with_rows(common: Any, starts: torch.Tensor, lengths: torch.Tensor, blocks: torch.Tensor) -> Any:
    """The step of vLLM with other rows."""
    return replace(
        common,
        num_reqs=len(lengths),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        block_table_tensor=blocks,
    )


def filled(common: Any) -> Any:
    """The rows of a decode step, and rows without tokens in block 0."""
    rows = common.num_reqs
    starts, lengths, blocks = common.query_start_loc, common.seq_lens, common.block_table_tensor
    more = ROWS - rows
    return with_rows(
        common,
        torch.cat([starts[: rows + 1], starts[rows].expand(more)]),
        torch.cat([lengths[:rows], lengths.new_zeros(more)]),
        torch.cat([blocks[:rows], blocks.new_zeros(more, blocks.shape[1])]),
    )


def replay_decode_steps() -> None:
    """From now on, steps in which no prompt is read replay what was recorded of the first one, layer by layer."""
    captured: list[Any] = []
    graphs: dict[str, tuple[Recording, list[torch.Tensor]]] = {}

    def build_filled(self: Any, prefix: int, common: Any, fast_build: bool = False) -> Any:
        if not captured:  # vLLM captures with one token in each row, all in block 0
            starts, blocks = torch.arange(ROWS + 1, dtype=torch.int32), torch.zeros(ROWS, 1, dtype=torch.int32)
            captured.append(build(self, 0, with_rows(common, starts, torch.ones_like(starts[:-1]), blocks)))
        new = common.query_start_loc_cpu[: common.num_reqs + 1].diff()
        return build(self, prefix, filled(common) if (new == 1).all() else common, fast_build)

    def forward_replayed(
        self: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, meta: Any, output: Any, **scales: Any
    ) -> Any:
        if meta is None or meta.step.prompts:
            return forward(self, layer, q, k, v, cache, meta, output, **scales)
        if layer.layer_name not in graphs:
            static = [x.new_zeros(ROWS, *x.shape[1:]) for x in (q, k, v, output)]
            recording = Recording()
            ragged_decode.launch = recording.launch
            with recording:
                forward(self, layer, *static[:3], cache, captured[0], static[3])
            ragged_decode.launch = launch
            graphs[layer.layer_name] = recording, static
        recording, static = graphs[layer.layer_name]
        for memory, x in zip(static, (q, k, v), strict=False):
            memory.fill_(torch.nan)[: len(x)] = x
        recording.replay()
        return output.copy_(static[3][: len(output)])

    backend.captures_steps = lambda config: True
    KVPassBuilder.build = build_filled
    KVPassImpl.forward = forward_replayed

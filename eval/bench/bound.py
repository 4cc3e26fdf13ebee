"""What a decode step must read from memory, and so the least time it can take.

Each weight is read once a step whatever the batch, and so is every entry of the cache that new tokens attend to. Their
bytes over the copy bandwidth of the device, measured in the same run, are a lower bound of the time of a step: no
version runs much faster. Where weights and cache fit in the processor's own cache, as those of small models on a CPU
do, a step can beat it.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def weight_bytes(model: PreTrainedModel) -> int | None:
    """Bytes of the weights that every decode step reads.

    The embedding table is not read as a whole, unless it is the output projection too.

    Returns:
        None for a mixture of experts: which of them are read depends on the tokens.
    """
    config: Any = model.config.get_text_config()
    if any(getattr(config, name, None) for name in _EXPERT_COUNTS):
        return None
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    table: Any = model.get_input_embeddings().weight
    head: Any = model.get_output_embeddings()
    if head is None or head.weight is not table:
        total -= table.numel() * table.element_size()
    return total


def least_step_seconds(weights: int, cache: int, bandwidth: float) -> float:
    """The bound.

    Args:
        weights, cache: bytes read in one step. bandwidth: bytes per second, read and written.
    """
    return (weights + cache) / bandwidth

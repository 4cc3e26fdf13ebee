"""Models whose weights transformers has divided among processes: ``from_pretrained(..., distributed_config=...)``.

The compiled copy holds the weights of this process as plain tensors, and its forwards say where processes meet: linear
layers are divided by outputs (each process computes its heads) or by inputs (the processes' results are added), the
embedding and the head of the model by tokens of the vocabulary.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvpass.policies.base import Policy
from kvpass.ranks import ONE_PROCESS, Ranks

_KEY_LAYERS = ("k_proj", "qkv_proj", "query_key_value", "kv_b_proj")
"""Names of the layers that make keys, alone or with others."""
_NEEDED = "kvpass runs models that DistributedConfig(tp_size=...) of transformers divides, and tp_size alone"
_OTHERS = ("pp_size", "ep_size", "fsdp_size", "dp_replicate_size")
"""Ways of ``DistributedConfig`` to share a model that are not tensor parallelism."""


def ranks_of(model: object) -> Ranks:
    """Return the processes that share a model's weights; raise ValueError if they share it in another way."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    others = [f"{name}={size}" for name in _OTHERS if (size := getattr(config, name, None) or 1) > 1]
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    meshes: set[Any] = {tensor.device_mesh for tensor in parameters if hasattr(tensor, "device_mesh")}
    if others or len(meshes) > 1 or any(mesh.ndim > 1 for mesh in meshes):
        raise ValueError(
            f"{type(model).__name__} is divided among processes by {', '.join(others) or 'several meshes'}: {_NEEDED}"
        )
    if not meshes:
        if (size := getattr(config, "tp_size", None) or 1) > 1:
            raise ValueError(
                f"DistributedConfig(tp_size={size}) divided no weight of {type(model).__name__}: {_NEEDED}"
            )
        return ONE_PROCESS
    mesh = meshes.pop()
    return Ranks(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())


def check_heads(model: Any, ranks: Ranks) -> None:
    """Check that the processes can have as many heads each."""
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    for count in (heads, getattr(text, "num_key_value_heads", None) or heads):
        if count % ranks.size:
            raise ValueError(
                f"{ranks.size} processes cannot share the {count} heads of {type(model).__name__}: each needs as many "
                "whole heads"
            )


def divides_heads(model: Any) -> bool:
    """Whether the processes that share a model's weights also share its attention heads; else each has all of them."""
    plan: Mapping[str, str] = model.tp_plan
    return any(style == "colwise" and path.rsplit(".", 1)[-1] in _KEY_LAYERS for path, style in plan.items())


def check_divided(policy: Policy, ranks: Ranks) -> None:
    """Check that a policy is the same on several processes, which share the heads, as on one."""
    if ranks.several and not policy.is_right_divided:
        raise ValueError(
            f"policy {policy.name!r} with heads on {ranks.size} processes: its class does not say that it is right "
            "there. Use obs.all_heads where it compares heads, and set divisible = True"
        )


def hold_own_weights(compiled: nn.Module, model: nn.Module, ranks: Ranks) -> dict[str, Any]:
    """Replace the weights of a copy by those of this process, and its forwards by such that know the others.

    Returns the divided weights by name, of which each process can gather the whole.
    """
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    shards: dict[int, nn.Parameter] = {}
    weights: dict[str, Any] = {}
    for path, module in compiled.named_modules():
        divided: dict[str, Any] = {name: x for name, x in module._parameters.items() if hasattr(x, "device_mesh")}
        if not divided and "forward" not in vars(module):
            continue
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path), plan.get(path, "no style"))
        forward = _forward_of(path, module, style, divided, ranks)
        for name, tensor in divided.items():
            if id(tensor) not in shards:
                shards[id(tensor)] = nn.Parameter(tensor.to_local(), requires_grad=False)
            module._parameters[name] = shards[id(tensor)]
            weights[f"{path}.{name}"] = tensor
        vars(module).pop("forward", None)
        if forward is _rows:
            module.padding_idx = None  # a row of the whole, which this process may lack; no forward needs it
        if forward is not None:
            module.ranks = ranks
            module.forward = types.MethodType(forward, module)
    return weights


def _forward_of(
    path: str, module: nn.Module, style: str, divided: Mapping[str, Any], ranks: Ranks
) -> Callable[..., Tensor] | None:
    """Return the forward of a module that is divided in a style, None for that of its class."""
    if module._forward_pre_hooks or module._forward_hooks:
        raise ValueError(f"{path} is divided among processes by hooks, as by transformers before 5.17: use a newer one")
    axes = {name: getattr(tensor.placements[0], "dim", None) for name, tensor in divided.items()}  # None: not divided
    expected, forward = _STYLES.get(style, (None, None))
    if expected is None or any(axis not in expected.get(name, ()) for name, axis in axes.items()):
        raise ValueError(
            f"{path or type(module).__name__} is divided among processes as {style!r} ({axes}): supported are "
            f"{', '.join(_STYLES)}, as most decoders have them"
        )
    if style.startswith(("colwise", "rowwise")) and type(module) is not nn.Linear:
        raise ValueError(
            f"{path} is a divided {type(module).__name__}: must be a plain torch.nn.Linear; several processes cannot "
            "share a quantised model yet"
        )
    if forward in (_rows, _gathered) and divided["weight"].shape[0] % ranks.size:
        raise ValueError(f"{ranks.size} processes cannot share the rows of {path} alike")
    return forward


def _summed(self: Any, x: Tensor) -> Tensor:
    """Forward of a linear layer of which each process has some columns of the weight."""
    total: Tensor = self.ranks.sum(F.linear(x, self.weight))
    return total if self.bias is None else total + self.bias


def _split(self: Any, x: Tensor) -> Tensor:
    """As :func:`_summed`, of an input that each process has as a whole."""
    width = self.weight.shape[1]
    return _summed(self, x[..., self.ranks.rank * width : (self.ranks.rank + 1) * width])


def _gathered(self: Any, x: Tensor) -> Tensor:
    """Forward of a linear layer of which each process has some rows of the weight; gives the results of all."""
    return self.ranks.gather(F.linear(x, self.weight, self.bias), -1)


def _experts(self: Any, *args: Any) -> Tensor:
    """Forward of experts of which each process has a part."""
    return self.ranks.sum(type(self).forward(self, *args))


def _rows(self: Any, ids: Tensor) -> Tensor:
    """Forward of an embedding of which each process has some rows."""
    count = self.weight.shape[0]
    rows = ids - self.ranks.rank * count
    here = (rows >= 0) & (rows < count)
    embedded = type(self).forward(self, torch.where(here, rows, 0))
    return self.ranks.sum(torch.where(here[..., None], embedded, 0))


_STYLES: dict[str, tuple[dict[str, tuple[int | None, ...]], Callable[..., Tensor] | None]] = {
    "colwise": ({"weight": (0,), "bias": (0,)}, None),
    "rowwise": ({"weight": (1,), "bias": (None,)}, _summed),
    "rowwise_split_input": ({"weight": (1,), "bias": (None,)}, _split),
    "colwise_gather_output": ({"weight": (0,), "bias": (0,)}, _gathered),
    "embedding_rowwise": ({"weight": (0,)}, _rows),
    "moe_tp_experts": ({"gate_up_proj": (1, 2), "down_proj": (2, 1)}, _experts),  # llama4 has them transposed
    "replicated_with_grad_allreduce": ({}, None),
    "mla_kv_a_proj": ({}, None),  # another one in training only
}
"""Of transformers' ways to divide a module: the axes of each parameter, and the forward (None: of its class)."""

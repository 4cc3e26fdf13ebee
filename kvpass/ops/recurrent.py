"""Recurrences over the tokens of a call, from a state to the state after them; those of the layers of transformers.

Each calls the function that the layer of the model would call, by the name of its module, so that an installed kernel
is used: the form in chunks for several tokens, the step for one. States that come in are not written to.

Legend: B batch, T tokens, H heads of values, D key dim, V value dim, G groups, N state size.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

import torch
from torch import Tensor


class DeltaOperands(NamedTuple):
    """query, key ``[B, T, *, D]``, value ``[B, T, H, V]``; g ``[B, T, H]`` or ``[B, T, H, D]``: log of the decay; beta
    ``[B, T, H]``; state fp32 ``[B, H, D, V]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor


class Mamba2Operands(NamedTuple):
    """x ``[B, T, H, V]``, dt ``[B, T, H]``, a ``[H]``, b and c ``[B, T, G, N]``, state ``[B, H, V, N]``, d and dt_bias
    ``[H]``; dt + dt_bias goes through softplus."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    state: Tensor
    d: Tensor
    dt_bias: Tensor


def delta_rule(given: DeltaOperands, module: str, chunked: str, step: str, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return output ``[B, T, H, V]`` and state after it, fp32, of a gated delta rule.

    Args:
        module, chunked, step: names of the module and its two functions. normalize: queries and keys, by their norms.
    """
    run = getattr(importlib.import_module(module), step if given.query.shape[1] == 1 else chunked)
    *tensors, g, beta, state = given
    out, state = run(
        *tensors,
        g=g,
        beta=beta,
        initial_state=state.clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalize,
    )
    return out.to(given.query.dtype).contiguous(), state.float().contiguous()


def mamba2(given: Mamba2Operands, module: str, chunk: int, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return output ``[B, T, H, V]`` and state after it, both fp32, of the selective state space of Mamba 2.

    Args:
        module: name of the module of its functions. chunk: tokens of a chunk. low, high: bounds of the step size.
    """
    functions = importlib.import_module(module)
    x, dt, a, b, c, state, d, dt_bias = given
    if x.shape[1] == 1 and (low, high) == (0.0, float("inf")):  # the step knows no bounds
        head, size = x.shape[3], state.shape[3]
        state = state.clone()
        out = functions.mamba2_selective_state_update(
            state,
            x[:, 0],
            dt[:, 0, :, None].expand(-1, -1, head),
            a[:, None, None].expand(-1, head, size),
            b[:, 0],
            c[:, 0],
            d[:, None].expand(-1, head),
            z=None,
            dt_bias=dt_bias[:, None].expand(-1, head),
            dt_softplus=True,
        )[:, None]
    else:
        out, state = functions.mamba2_chunk_scan(
            x,
            dt,
            a,
            b,
            c,
            chunk_size=chunk,
            D=d,
            z=None,
            return_final_states=True,
            dt_bias=dt_bias,
            dt_softplus=True,
            initial_states=state,
            dt_limit=(low, high),
        )
    return out.float().contiguous(), state.float().contiguous()


def fake_delta_rule(given: DeltaOperands, *_: object) -> tuple[Tensor, Tensor]:
    """Return tensors of the shapes of :func:`delta_rule`."""
    return given.query.new_empty(given.value.shape), given.state.new_empty(given.state.shape, dtype=torch.float32)


def fake_mamba2(given: Mamba2Operands, *_: object) -> tuple[Tensor, Tensor]:
    """Return tensors of the shapes of :func:`mamba2`."""
    out = given.x.new_empty(given.x.shape, dtype=torch.float32)
    return out, given.state.new_empty(given.state.shape, dtype=torch.float32)

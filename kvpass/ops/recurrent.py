"""Recurrences over the tokens of a call, from a state to the state after them; those of the layers of transformers.

Each calls the function that the layer of the model would call, by the name of its module, so that an installed kernel
is used: the form in chunks for several tokens, the step for one. States that come in are not written to.

Legend: B batch, T tokens, H heads of values, D key dim, V value dim, G groups, N state size.
"""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor

_TOKENS = 64
"""Tokens of a part, in which all states ``[B, C, N, tokens]`` are held."""


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    module: str,
    chunked: str,
    step: str,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """Return output ``[B, T, H, V]`` and state after it, fp32, of a gated delta rule.

    Args:
        query, key: ``[B, T, *, D]``. value: ``[B, T, H, V]``. g: ``[B, T, H]`` or ``[B, T, H, D]``, log of the decay.
        beta: ``[B, T, H]``. state: fp32 ``[B, H, D, V]``.
        module, chunked, step: names of the module and its two functions. normalize: queries and keys, by their norms.
    """
    run = getattr(importlib.import_module(module), step if query.shape[1] == 1 else chunked)
    out, state = run(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=state.clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalize,
    )
    return out.to(query.dtype).contiguous(), state.float().contiguous()


def mamba2(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    module: str,
    chunk: int,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """Return output ``[B, T, H, V]`` and state after it, both fp32, of the selective state space of Mamba 2.

    Args:
        x: ``[B, T, H, V]``. dt: ``[B, T, H]``; dt + dt_bias goes through softplus. a, d, dt_bias: ``[H]``.
        b, c: ``[B, T, G, N]``. state: ``[B, H, V, N]``.
        module: name of the module of its functions. chunk: tokens of a chunk. low, high: bounds of the step size.
    """
    functions = importlib.import_module(module)
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


def mamba(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    d: Tensor,
    z: Tensor,
    dt_bias: Tensor,
    module: str,
) -> tuple[Tensor, Tensor]:
    """Return output ``[B, C, T]``, times silu(z), and state after it, both fp32, of the selective scan of Mamba.

    The function of transformers, and the kernel, begin with zeros: what the state adds is added here,
    ``c_t . (exp(a * (dt_1 + ... + dt_t)) * state)`` (Mamba, 2312.00752, section 3). That of a prompt is zeros.

    Args:
        x, dt, z: ``[B, C, T]``, C channels; dt + dt_bias goes through softplus. a: ``[C, N]``. b, c: ``[B, N, T]``.
        state: fp32 ``[B, C, N]``. d, dt_bias: ``[C]``. module: name of the module of its functions.
    """
    functions = importlib.import_module(module)
    if x.shape[2] == 1:
        state = state.clone()
        out = functions.mamba_selective_state_update(
            *(state, x[..., 0], dt[..., 0], a, b[..., 0], c[..., 0], d), z=z[..., 0], dt_bias=dt_bias, dt_softplus=True
        )
        return out[..., None].float().contiguous(), state
    out, made = functions.mamba_selective_scan(
        x, dt, a, b, c, D=d, z=None, delta_bias=dt_bias, delta_softplus=True, return_last_state=True
    )
    out, made = out.float(), made.float()
    if bool(state.any()):
        passed = F.softplus(dt.float() + dt_bias.float()[:, None]).cumsum(2)
        for begin in range(0, x.shape[2], _TOKENS):
            part = slice(begin, begin + _TOKENS)
            left = torch.exp(a.float()[..., None] * passed[:, :, None, part]) * state[..., None]
            out[..., part] += (left * c.float()[:, None, :, part]).sum(2)
        made = made + torch.exp(a.float() * passed[..., -1:]) * state
    return (out * F.silu(z.float())).contiguous(), made.contiguous()

"""Causal attention over a prompt, by the fastest kernel that takes it.

cuDNN and FlashAttention are called through torch; Triton does what neither takes. None of them knows of attention
sinks: a sink is one more term of each softmax's denominator, so it follows from output and log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpass.kernels.checks import check_tensors
from kvpass.kernels.merge_attention import merge_attention
from kvpass.kernels.prefill_attention import check_dims, check_site, in_parts, prefill_attention
from kvpass.operands import Attention, PartialAttention

CUDNN_TOKENS = 16384
"""From so many tokens on cuDNN is called: it makes a plan for each new length, which takes tens to hundreds of
milliseconds, and what it saves grows with the square of the length."""
_HALF = (torch.float16, torch.bfloat16)


class Machine(NamedTuple):
    """What the choice of a kernel depends on beside the call."""

    capability: tuple[int, int] = (0, 0)  # of the device, (0, 0) for a CPU
    cudnn: int = 0  # version of cuDNN that torch may use, 0 for none
    flash: bool = False  # whether torch may use FlashAttention
    flash_impl: str | None = None  # "FA3", "FA4": that of activate_flash_attention_impl; None: FlashAttention-2

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """Read it, torch's own switches (``enable_cudnn_sdp``, ``enable_flash_sdp``, ``sdpa_kernel``) included."""
        if device.type != "cuda":
            return cls()
        switches = torch.backends.cuda
        # torch itself counts cuDNN's attention as not deterministic
        cudnn = switches.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
        return cls(
            torch.cuda.get_device_capability(device),
            torch.backends.cudnn.version() or 0 if cudnn else 0,
            switches.is_flash_attention_available() and switches.flash_sdp_enabled(),
            torch.nn.attention.current_flash_attention_impl(),
        )


def _cudnn_pays(call: Attention, sliding_window: int | None, machine: Machine) -> bool:
    """Whether cuDNN takes the call, from version 9.1 on, and is faster than FlashAttention."""
    dims = call.q.shape[3], call.v.shape[3]
    takes_dims = all(dim % 8 == 0 for dim in dims)
    takes_dims &= max(dims) <= 128 or (dims == (192, 128) and machine.cudnn >= 91100)
    return (
        machine.cudnn >= 90100
        and machine.capability in ((9, 0), (10, 0))
        and call.q.dtype in _HALF
        and call.softcap is None
        and sliding_window is None
        and takes_dims
        and call.k.shape[2] >= CUDNN_TOKENS
    )


def _flash_takes(call: Attention, machine: Machine) -> bool:
    """Whether torch's FlashAttention takes the call; it has no soft-capping."""
    dims = call.q.shape[3], call.v.shape[3]
    takes_dims = dims[0] == dims[1] and dims[0] % 8 == 0 and not in_parts(*dims)
    is_on = machine.flash and machine.capability >= (8, 0)
    return is_on and call.q.dtype in _HALF and call.softcap is None and takes_dims


def _cudnn(call: Attention, sliding_window: int | None) -> tuple[Tensor, Tensor]:
    """cuDNN's causal mask begins at the first key, so keys before the queries are attended apart."""

    def attend(columns: slice, causal: bool) -> PartialAttention:
        k, v = call.k[:, :, columns], call.v[:, :, columns]
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            call.q, k, v, None, True, 0.0, causal, False, scale=call.scale
        )
        return PartialAttention(out, lse.reshape(call.q.shape[:3]))

    before = call.k.shape[2] - call.q.shape[2]
    own = attend(slice(before, None), True)
    return own if before == 0 else merge_attention(attend(slice(before), False), own)


def _flash(call: Attention, sliding_window: int | None) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in call[:3])
    left, right = (None, None) if sliding_window is None else (sliding_window - 1, 0)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(  # its causal mask ends at the last query and key
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False,
        scale=call.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out.transpose(1, 2), lse


_KERNELS: dict[str, Callable[[Attention, int | None], tuple[Tensor, Tensor]]] = {
    "cudnn": _cudnn,
    "flash": _flash,
    "triton": prefill_attention,
}


def choose(call: Attention, sliding_window: int | None, machine: Machine) -> Literal["cudnn", "flash", "triton"]:
    """Choose the kernel for rows without padding, and a sliding window that is shorter than the prompt, if any.

    Values are not read. A FlashAttention that was put in the place of torch's own comes before cuDNN.
    """
    takes_flash = _flash_takes(call, machine)
    if machine.flash_impl and takes_flash:
        return "flash"
    if _cudnn_pays(call, sliding_window, machine):
        return "cudnn"
    return "flash" if takes_flash else "triton"


def attend(call: Attention, sliding_window: int | None = None) -> tuple[Tensor, Tensor]:
    """Causal attention of rows without padding.

    Args:
        call: q ``[B, H, T, D]`` fp32, fp16 or bf16, the last T of N rows, RoPE applied; any strides but a contiguous
            last dim (k and v alike). D up to 576, Dv up to 512. Query head h reads KV head ``h // (H // K)``. sinks of
            any float dtype.
        sliding_window: query i attends key j only if ``i - j < sliding_window``; >= 1.

    Returns:
        Output ``[B, H, T, Dv]`` in the dtype of q, stored as ``[B, T, H, Dv]``; natural log-sum-exp of each query's
        logits (the sink included) fp32 ``[B, H, T]``.
    """
    check_site(call.q, call.k, call.v, queries=1)
    check_dims(call.q.shape[3], call.v.shape[3])
    heads, n = call.q.shape[1], call.k.shape[2]
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window}: must be at least 1")
    near = sliding_window if sliding_window is not None and sliding_window < n else None
    out, lse = _KERNELS[choose(call, near, Machine.of(call.q.device))](call, near)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    if call.sinks is not None:
        check_tensors({"sinks": (call.sinks, (heads,), call.sinks.dtype)}, call.q.device)
        return PartialAttention(out, lse).with_sinks(call.sinks)
    return out, lse

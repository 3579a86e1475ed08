"""RMS norm in Triton, optionally of a sum, with the same bits as torch.

It sums in the order of torch's mean over a row. Each of 32 threads takes four neighbouring numbers
of every 128 and keeps one running sum for each of the four. A thread adds up its four sums. Then
the upper half of the threads adds its sums to the lower half, until one is left. This order was
found by experiment; `rollout.exact.compile` checks that it holds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from rollout.kernels.pdl_triton import gdc_wait, pdl_options

_CHUNK = tl.constexpr(128)


@triton.jit
def _halve(sums, HALF: tl.constexpr):
    """Add the upper half of `2 * HALF` sums to the lower half."""
    low, high = tl.split(tl.trans(tl.reshape(sums, (2, HALF))))
    return low + high


@triton.jit
def _reduce(sums):
    """Add up a chunk's 128 running sums."""
    even, odd = tl.split(tl.reshape(sums, (32, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    thread = _halve(((first + second) + third) + fourth, 16)
    return _halve(_halve(_halve(_halve(thread, 8), 4), 2), 1)


@triton.jit
def _load(STATES, ADDED, at, mask, HAS_ADDED: tl.constexpr):
    states = tl.load(STATES + at, mask=mask, other=0.0)
    if HAS_ADDED:
        states += tl.load(ADDED + at, mask=mask, other=0.0)
    return states


@triton.jit(do_not_specialize=["inner"])
def _rms_norm_kernel(
    STATES, ADDED, WEIGHT, SUM, OUT, outer_stride, inner_stride, inner, eps, share, size,
    CHUNKS: tl.constexpr, SIZE_PAD: tl.constexpr, HAS_ADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    start = row // inner * outer_stride + row % inner * inner_stride
    sums = tl.zeros([_CHUNK], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        at = chunk * _CHUNK + tl.arange(0, _CHUNK)
        states = _load(STATES, ADDED, start + at, at < size, HAS_ADDED).to(tl.float32)
        sums += states * states
    scale = libdevice.rsqrt(_reduce(sums) * share + eps)
    at = tl.arange(0, SIZE_PAD)
    mask = at < size
    states = _load(STATES, ADDED, start + at, mask, HAS_ADDED)
    normed = (states.to(tl.float32) * scale).to(states.dtype)
    weight = tl.load(WEIGHT + at, mask=mask, other=0.0)
    tl.store(OUT + row * size + at, normed * weight, mask=mask)
    if HAS_ADDED:
        tl.store(SUM + row * size + at, states, mask=mask)


def rms_norm(
    states: Tensor, weight: Tensor, eps: float, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `weight * (s / sqrt(mean(s ** 2) + eps))` and `s = states + added`.

    The mean is over the last dimension. The norm has the promoted dtype of `states` and `weight`.

    Args:
        states: `(..., rows, size)`; its leading dimensions must be viewable as one.
        weight: `(size,)`.
        added: Same shape and strides as `states`. `None`: zeros.
    """
    size = weight.shape[0]
    rows = states.reshape(-1, *states.shape[-2:])
    added = None if added is None else added.reshape(rows.shape)
    assert rows.stride(2) == 1
    assert added is None or added.stride() == rows.stride()
    dtype = torch.promote_types(states.dtype, weight.dtype)
    out = torch.empty(states.shape, dtype=dtype, device=states.device)
    summed = states
    if added is not None:
        summed = torch.empty(
            states.shape, dtype=torch.promote_types(states.dtype, added.dtype), device=states.device
        )
    _rms_norm_kernel[(rows.shape[0] * rows.shape[1],)](
        rows, added, weight, summed, out, rows.stride(0), rows.stride(1), rows.shape[1],
        eps, 1.0 / size, size,
        CHUNKS=triton.cdiv(size, _CHUNK.value), SIZE_PAD=triton.next_power_of_2(size),
        HAS_ADDED=added is not None, num_warps=4 if size > 512 else 1,
        # A fused multiply-add would skip torch's rounding of the square.
        enable_fp_fusion=False,
        **pdl_options(),
    )  # fmt: skip
    return out, summed

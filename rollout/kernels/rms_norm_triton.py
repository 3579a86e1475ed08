"""RMS norm, perhaps of a sum, that adds up as torch's mean does, in Triton.

Torch's mean over a row gives each of 32 threads four neighbours out of every 128 numbers. A thread
keeps a sum for each of the four, adds the next to it as it goes along, and adds the four up; then
half of the threads give their sums to the other half, until one has it all. The order was found by
experiment; `compiled_exact` sees for itself whether it holds.
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
    low, high = tl.split(tl.trans(tl.reshape(sums, (2, HALF))))
    return low + high


@triton.jit
def _add_up(sums):
    """The sum of a chunk's 128 running sums."""
    even, odd = tl.split(tl.reshape(sums, (32, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    thread = _halve(((first + second) + third) + fourth, 16)
    return _halve(_halve(_halve(_halve(thread, 8), 4), 2), 1)


@triton.jit
def _load(STATES, ADDED, at, there, HAS_ADDED: tl.constexpr):
    states = tl.load(STATES + at, mask=there, other=0.0)
    if HAS_ADDED:
        states += tl.load(ADDED + at, mask=there, other=0.0)
    return states


@triton.jit(do_not_specialize=["inner"])
def _norm_kernel(
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
    scale = libdevice.rsqrt(_add_up(sums) * share + eps)
    at = tl.arange(0, SIZE_PAD)
    there = at < size
    states = _load(STATES, ADDED, start + at, there, HAS_ADDED)
    normed = (states.to(tl.float32) * scale).to(states.dtype)
    weight = tl.load(WEIGHT + at, mask=there, other=0.0)
    tl.store(OUT + row * size + at, normed * weight, mask=there)
    if HAS_ADDED:
        tl.store(SUM + row * size + at, states, mask=there)


def rms_norm(
    states: Tensor, weight: Tensor, eps: float, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`weight * (s / sqrt(mean(s ** 2) + eps))` over the last dimension, for `s = states + added`.

    Args:
        states: `(..., rows, size)`, or with strides that let its first dimensions be one.
        weight: `(size,)`.
        eps: Keeps the root from 0.
        added: Like `states`, with the same strides.

    Returns:
        The normed sum, in the dtype of states and weight, and the sum.
    """
    size = weight.shape[0]
    rows = states.reshape(-1, *states.shape[-2:])
    added = None if added is None else added.reshape(rows.shape)
    assert rows.stride(2) == 1
    assert added is None or added.stride() == rows.stride()
    dtype = torch.promote_types(states.dtype, weight.dtype)
    out = torch.empty(states.shape, dtype=dtype, device=states.device)
    total = states
    if added is not None:
        total = torch.empty(
            states.shape, dtype=torch.promote_types(states.dtype, added.dtype), device=states.device
        )
    _norm_kernel[(rows.shape[0] * rows.shape[1],)](
        rows, added, weight, total, out, rows.stride(0), rows.stride(1), rows.shape[1],
        eps, 1.0 / size, size,
        CHUNKS=triton.cdiv(size, _CHUNK.value), SIZE_PAD=triton.next_power_of_2(size),
        HAS_ADDED=added is not None, num_warps=4 if size > 512 else 1,
        # A square that is not rounded before it is added would be another number.
        enable_fp_fusion=False,
        **pdl_options(),
    )  # fmt: skip
    return out, total

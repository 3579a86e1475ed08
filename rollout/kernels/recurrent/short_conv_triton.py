"""Decoding by a short convolution in Triton. Shape letters are those of `short_conv`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.pdl_triton import gdc_wait, pdl_options

_BLOCK = 256  # channels in one program


@triton.jit
def _short_conv_kernel(
    X, WEIGHT, BIAS, INPUTS, SLOTS, POSITIONS, OUT, x_stride, slot_stride, channels,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < channels
    slot = tl.load(SLOTS + row)
    if slot == 0:  # a padding row: no slot is its own
        tl.store(OUT + row * channels + at, 0.0, mask=mask)
        return
    # A row's first token begins from zeros, whatever the slot holds.
    begun = mask & (tl.load(POSITIONS + row) > 0)
    places = INPUTS + slot * slot_stride + at * (TAPS - 1)
    x = tl.load(X + row * x_stride + at, mask=mask, other=0.0)
    total = x.to(tl.float32) * tl.load(WEIGHT + at * TAPS + TAPS - 1, mask=mask).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        before = tl.load(places + tap, mask=begun, other=0.0)
        total += before.to(tl.float32) * tl.load(WEIGHT + at * TAPS + tap, mask=mask).to(tl.float32)
        if tap > 0:
            tl.store(places + tap - 1, before, mask=mask)
    tl.store(places + TAPS - 2, x, mask=mask)
    if HAS_BIAS:
        total += tl.load(BIAS + at, mask=mask).to(tl.float32)
    tl.store(OUT + row * channels + at, total.to(OUT.dtype.element_ty), mask=mask)


def decode(
    x_RC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    inputs_SCI: Tensor,
    slots_R: Tensor,
    positions_R: Tensor,
) -> Tensor:
    """As `short_conv.decode`. Rows in slot 0 are padding: their output is 0, and no input moves."""
    num_rows, channels = x_RC.shape
    taps = weight_CK.shape[1]
    x, weight = x_RC.contiguous(), weight_CK.contiguous()
    assert taps > 1
    assert inputs_SCI.stride()[1:] == (taps - 1, 1)
    output = torch.empty((num_rows, channels), dtype=x.dtype, device=x.device)
    _short_conv_kernel[(num_rows, triton.cdiv(channels, _BLOCK))](
        x, weight, bias_C, inputs_SCI, slots_R, positions_R, output,
        x.stride(0), inputs_SCI.stride(0), channels,
        TAPS=taps, HAS_BIAS=bias_C is not None, BLOCK=_BLOCK, **pdl_options(),
    )  # fmt: skip
    return output

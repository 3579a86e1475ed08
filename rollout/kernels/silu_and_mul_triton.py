"""`silu(gate) * up` in Triton, with the same bits as torch."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from rollout.kernels.pdl_triton import gdc_wait, pdl_options

_BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(
    GATE, UP, OUT, gate_stride, up_stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    gate = tl.load(GATE + row * gate_stride + at, mask=mask, other=0.0)
    up = tl.load(UP + row * up_stride + at, mask=mask, other=0.0)
    gate_f32 = gate.to(tl.float32)
    # Round to the dtype before the product, as torch does.
    activated = tl.div_rn(gate_f32, 1.0 + libdevice.exp(-gate_f32)).to(gate.dtype)
    tl.store(OUT + row * size + at, activated * up, mask=mask)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, both `(..., size)`; leading dimensions must be viewable as one."""
    size = gate.shape[-1]
    gates, ups = gate.reshape(-1, size), up.reshape(-1, size)
    assert gates.stride(1) == ups.stride(1) == 1
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grid = (len(gates), triton.cdiv(size, _BLOCK))
    strides = gates.stride(0), ups.stride(0)
    _silu_and_mul_kernel[grid](gates, ups, out, *strides, size, BLOCK=_BLOCK, **pdl_options())
    return out

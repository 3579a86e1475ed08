"""Batch-invariant linear layers in Triton; defined by `torch.nn.functional.linear`.

For a layer with few outputs, cuBLAS splits the inner dimension over the GPU, and the number of
splits depends on the number of rows. Here each program sums the whole inner dimension in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tile sizes change no bit: the matrix unit always sums along the inner dimension.
_SMALL_TILE = {"OUTPUTS": 64, "ROWS": 32, "INNER": 128, "num_warps": 4, "num_stages": 3}
_LARGE_TILE = {"OUTPUTS": 128, "ROWS": 128, "INNER": 64, "num_warps": 8, "num_stages": 3}
_LARGE_TILE_ROWS = 512


@triton.jit(do_not_specialize=["rows"])
def _batch_invariant_linear_kernel(
    STATES, WEIGHT, BIAS, OUT, rows, outputs, inner, state_stride, weight_stride,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, inner, INNER):
        at = start + tl.arange(0, INNER)
        inner_mask = at < inner
        weight = tl.load(
            WEIGHT + output.to(tl.int64)[:, None] * weight_stride + at[None, :],
            mask=(output < outputs)[:, None] & inner_mask[None, :], other=0.0,
        )  # fmt: skip
        states = tl.load(
            STATES + row.to(tl.int64)[:, None] * state_stride + at[None, :],
            mask=(row < rows)[:, None] & inner_mask[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(weight, tl.trans(states), acc, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(BIAS + output, mask=output < outputs, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    out_at = OUT + row.to(tl.int64)[None, :] * outputs + output[:, None]
    mask = (row < rows)[None, :] & (output < outputs)[:, None]
    tl.store(out_at, acc.to(OUT.dtype.element_ty), mask=mask)


def batch_invariant_linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear(states, weight, bias)`; `states` is `(..., inner)`, all of one dtype."""
    flat = states.reshape(-1, states.shape[-1])
    # The kernel takes any row stride but needs each row contiguous.
    flat, weight = (x if x.stride(1) == 1 else x.contiguous() for x in (flat, weight))
    rows, outputs = len(flat), len(weight)
    out = torch.empty((rows, outputs), dtype=states.dtype, device=states.device)
    tile = _LARGE_TILE if rows >= _LARGE_TILE_ROWS else _SMALL_TILE
    grid = (triton.cdiv(outputs, tile["OUTPUTS"]), triton.cdiv(rows, tile["ROWS"]))
    _batch_invariant_linear_kernel[grid](
        flat, weight, bias, out, rows, outputs, flat.shape[1], flat.stride(0), weight.stride(0),
        HAS_BIAS=bias is not None, **tile,
    )  # fmt: skip
    return out.view(*states.shape[:-1], outputs)

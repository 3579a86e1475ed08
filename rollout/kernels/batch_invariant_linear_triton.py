"""Products that add up in order, in Triton; defined by `torch.nn.functional.linear`.

Where a product has few outputs, cuBLAS splits its inner dimension over the GPU and adds up the
parts, into so many that it depends on the number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# A tile's size changes no bit: the matrix unit adds up along the inner dimension.
_FEW = {"OUTPUTS": 64, "ROWS": 32, "INNER": 128, "num_warps": 4, "num_stages": 3}
_MANY = {"OUTPUTS": 128, "ROWS": 128, "INNER": 64, "num_warps": 8, "num_stages": 3}
_MANY_ROWS = 512


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    STATES, WEIGHT, BIAS, OUT, rows, outputs, inner, state_stride, weight_stride,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, inner, INNER):
        at = start + tl.arange(0, INNER)
        there = at < inner
        weight = tl.load(
            WEIGHT + output.to(tl.int64)[:, None] * weight_stride + at[None, :],
            mask=(output < outputs)[:, None] & there[None, :], other=0.0,
        )  # fmt: skip
        states = tl.load(
            STATES + row.to(tl.int64)[:, None] * state_stride + at[None, :],
            mask=(row < rows)[:, None] & there[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(weight, tl.trans(states), total, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(BIAS + output, mask=output < outputs, other=0.0)
        total += bias.to(tl.float32)[:, None]
    place = OUT + row.to(tl.int64)[None, :] * outputs + output[:, None]
    mine = (row < rows)[None, :] & (output < outputs)[:, None]
    tl.store(place, total.to(OUT.dtype.element_ty), mask=mine)


def product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear(states, weight, bias)`.

    Args:
        states: `(..., inner)`.
        weight: `(outputs, inner)`, of the same dtype.
        bias: `(outputs,)`.
    """
    flat = states.reshape(-1, states.shape[-1])
    # Rows may lie apart, their numbers not.
    flat, weight = (x if x.stride(1) == 1 else x.contiguous() for x in (flat, weight))
    rows, outputs = len(flat), len(weight)
    out = torch.empty((rows, outputs), dtype=states.dtype, device=states.device)
    tile = _MANY if rows >= _MANY_ROWS else _FEW
    grid = (triton.cdiv(outputs, tile["OUTPUTS"]), triton.cdiv(rows, tile["ROWS"]))
    _product_kernel[grid](
        flat, weight, bias, out, rows, outputs, flat.shape[1], flat.stride(0), weight.stride(0),
        HAS_BIAS=bias is not None, **tile,
    )  # fmt: skip
    return out.view(*states.shape[:-1], outputs)

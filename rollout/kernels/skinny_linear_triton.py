"""Products of few rows, in Triton; defined by `torch.nn.functional.linear`.

Such a product is the time in which its weights are read, plus the time in which nothing is read.
This kernel is launched while the one before it ends, and so few are its rows that each of its
programs takes all of them and reads its part of the weights once.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.pdl_triton import gdc_wait, pdl_options

MOST_ROWS = 32
"""With more rows cuBLAS is as fast, measured at 64 on an H200."""

_OUTPUTS, _INNER = 64, 128
# Measured on an H200: a deep pipeline where each multiprocessor has one program, a shallow one
# where two of them fit beside each other and one reads while the other begins or ends.
_DEEP, _SHALLOW = 6, 3
_LEAST_STEPS = 4


# One compilation for any number of rows: whether 16 divides it is of no use here.
@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    STATES, WEIGHT, BIAS, OUT, PARTS, ARRIVALS, rows, outputs, inner, part_inner,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
    PARTS_NUM: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    tile, part = tl.program_id(0), tl.program_id(1)
    output, row = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    first = part * part_inner + tl.arange(0, INNER)
    weight_at = WEIGHT + output.to(tl.int64)[:, None] * inner + first[None, :]
    states_at = STATES + row[:, None] * inner + first[None, :]
    there = row < rows
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, part_inner, INNER, num_stages=STAGES):
        weight = tl.load(weight_at + start)
        states = tl.load(states_at + start, mask=there[:, None], other=0.0)
        total = tl.dot(weight, tl.trans(states), total, input_precision="ieee")
    place = row[None, :] * outputs + output[:, None]
    last = True
    if PARTS_NUM > 1:
        tl.store(PARTS + part * rows * outputs + place, total, mask=there[None, :])
        tl.debug_barrier()
        # ORDER: the last program of a tile adds up, in order, what the others have stored
        last = tl.atomic_add(ARRIVALS + tile, 1, sem="acq_rel") == PARTS_NUM - 1
    if last:
        if PARTS_NUM > 1:
            tl.store(ARRIVALS + tile, 0)
            total = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for other in tl.static_range(PARTS_NUM):
                at = PARTS + other * rows * outputs + place
                total += tl.load(at, mask=there[None, :], other=0.0, cache_modifier=".cg")
        if HAS_BIAS:
            total += tl.load(BIAS + output).to(tl.float32)[:, None]
        tl.store(OUT + place, total.to(OUT.dtype.element_ty), mask=there[None, :])


def few_rows_product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear(states, weight, bias)`.

    Args:
        states: `(..., inner)`, of at most `MOST_ROWS` rows.
        weight: `(outputs, inner)`, contiguous, of the same 16-bit dtype, one that `divides`.
        bias: `(outputs,)`.
    """
    flat = states.reshape(-1, states.shape[-1]).contiguous()
    (rows, inner), outputs = flat.shape, len(weight)
    tiles = outputs // _OUTPUTS
    units = _multiprocessors(weight.device)
    num_parts = _parts(tiles, inner, units)
    out = torch.empty((rows, outputs), dtype=states.dtype, device=states.device)
    parts = out
    if num_parts > 1:
        parts = torch.empty((num_parts, rows, outputs), dtype=torch.float32, device=out.device)
    _few_rows_kernel[(tiles, num_parts)](
        flat, weight, bias, out, parts, _arrivals(out.device), rows, outputs, inner,
        inner // num_parts, OUTPUTS=_OUTPUTS, ROWS=16 if rows <= 16 else MOST_ROWS, INNER=_INNER,
        STAGES=_SHALLOW if tiles * num_parts > units else _DEEP, PARTS_NUM=num_parts,
        HAS_BIAS=bias is not None, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out.view(*states.shape[:-1], outputs)


def divides(outputs: int, inner: int) -> bool:
    """Whether a weight of this shape is whole tiles."""
    return outputs % _OUTPUTS == 0 and inner % _INNER == 0


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Counts how many programs of a tile are done, zeros between two products.

    Made by the first product, which compiles its kernel and so is never captured: a graph would
    set the counts to zero in each step, in memory of its pool.
    """
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
    # ALIAS: all products of a device count here; they run one after another on one stream
    return torch.zeros(_multiprocessors(device), dtype=torch.int32, device=device)


def _parts(tiles: int, inner: int, units: int) -> int:
    """Parts of the inner dimension, so that as many programs run as there are multiprocessors."""
    parts = 1
    while (
        tiles * 2 * parts <= units
        and inner % (2 * parts * _INNER) == 0
        and inner >= 2 * parts * _INNER * _LEAST_STEPS
    ):
        parts *= 2
    return parts


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

"""Linear layers of few rows (skinny GEMM) in Triton; defined by `torch.nn.functional.linear`.

Reading the weights takes most of the time. PDL shortens the time in which nothing is read. Each
program computes all rows, so each weight is read once.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.pdl_triton import gdc_wait, pdl_options

MOST_ROWS = 32
"""cuBLAS is as fast with more rows, measured with 64 on an H200."""

_OUTPUTS, _INNER = 64, 128
# Pipeline stages, measured on an H200: deep if a multiprocessor runs one program, shallow if it
# runs two, because one reads while the other starts or ends.
_DEEP, _SHALLOW = 6, 3
_MIN_STEPS = 4  # blocks of the inner dimension in one split


# `do_not_specialize`: Triton would compile anew when 16 divides `rows`.
@triton.jit(do_not_specialize=["rows"])
def _skinny_linear_kernel(
    STATES, WEIGHT, BIAS, OUT, PARTS, ARRIVALS, rows, outputs, inner, split_inner,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
    SPLIT_K: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `OUTPUTS` outputs of all rows over one split of the inner dimension."""
    gdc_wait(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    output, row = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    first = split * split_inner + tl.arange(0, INNER)
    weight_at = WEIGHT + output.to(tl.int64)[:, None] * inner + first[None, :]
    states_at = STATES + row[:, None] * inner + first[None, :]
    row_mask = row < rows
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, split_inner, INNER, num_stages=STAGES):
        weight = tl.load(weight_at + start)
        states = tl.load(states_at + start, mask=row_mask[:, None], other=0.0)
        acc = tl.dot(weight, tl.trans(states), acc, input_precision="ieee")
    out_at = row[None, :] * outputs + output[:, None]
    last = True
    if SPLIT_K > 1:
        tl.store(PARTS + split * rows * outputs + out_at, acc, mask=row_mask[None, :])
        tl.debug_barrier()
        # ORDER: the last program of a tile adds all stored parts, always from the first
        last = tl.atomic_add(ARRIVALS + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if last:
        if SPLIT_K > 1:
            tl.store(ARRIVALS + tile, 0)
            acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for other in tl.static_range(SPLIT_K):
                part_at = PARTS + other * rows * outputs + out_at
                acc += tl.load(part_at, mask=row_mask[None, :], other=0.0, cache_modifier=".cg")
        if HAS_BIAS:
            acc += tl.load(BIAS + output).to(tl.float32)[:, None]
        tl.store(OUT + out_at, acc.to(OUT.dtype.element_ty), mask=row_mask[None, :])


def skinny_linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear(states, weight, bias)`, 16 bit; `MOST_ROWS` bounds the rows, the weight `divides`."""
    flat = states.reshape(-1, states.shape[-1]).contiguous()
    (rows, inner), outputs = flat.shape, len(weight)
    tiles = outputs // _OUTPUTS
    num_units = _multiprocessors(weight.device)
    num_splits = split_k(tiles, inner, num_units)
    out = torch.empty((rows, outputs), dtype=states.dtype, device=states.device)
    parts = out
    if num_splits > 1:
        parts = torch.empty((num_splits, rows, outputs), dtype=torch.float32, device=out.device)
    _skinny_linear_kernel[(tiles, num_splits)](
        flat, weight, bias, out, parts, _arrivals(out.device), rows, outputs, inner,
        inner // num_splits, OUTPUTS=_OUTPUTS, ROWS=16 if rows <= 16 else MOST_ROWS, INNER=_INNER,
        STAGES=_SHALLOW if tiles * num_splits > num_units else _DEEP, SPLIT_K=num_splits,
        HAS_BIAS=bias is not None, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out.view(*states.shape[:-1], outputs)


def divides(outputs: int, inner: int) -> bool:
    """Whether a weight of this shape consists of whole tiles."""
    return outputs % _OUTPUTS == 0 and inner % _INNER == 0


def split_k(tiles: int, inner: int, num_units: int) -> int:
    """Splits of the inner dimension: enough to keep most of `num_units` multiprocessors busy."""
    splits = 1
    while (
        tiles * 2 * splits <= num_units
        and inner % (2 * splits * _INNER) == 0
        and inner >= 2 * splits * _INNER * _MIN_STEPS
    ):
        splits *= 2
    return splits


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Count finished programs of each tile, int32; all zero between products.

    The first product compiles its kernel, so it is never captured. If a capture allocated this
    tensor, the graph would zero it in each step.
    """
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
    # ALIAS: all products of a device share it; one stream runs them one after another
    return torch.zeros(_multiprocessors(device), dtype=torch.int32, device=device)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # of an H200
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

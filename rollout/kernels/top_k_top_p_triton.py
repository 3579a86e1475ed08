"""Top-k, top-p and min-p without a sort, in Triton; defined by `keep.keep`.

Each program halves, for one row, the range in which the bound lies until one number is left: the
highest whose tokens, with all above, are `top_k`, or reach `top_p` together. A row of logits stays
in the cache meanwhile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_HALVINGS = 32  # of the range of 32-bit numbers
_LOWEST = tl.constexpr(-0x7F800001)  # the key of -inf


@triton.jit
def _key(x):
    """Float32 numbers as int32 numbers of the same order; its own inverse, on bits."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _total(ROW, vocab, peak, least, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens have a key of at least `least`, or `exp(logit - peak)` of them together."""
    totals = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        there = tokens < vocab
        scaled = tl.load(ROW + tokens, mask=there, other=-float("inf"))
        counted = there & (_key(scaled).to(tl.int64) >= least)
        if SHARES:
            totals += tl.where(counted, tl.exp(scaled - peak), 0.0)
        else:
            totals += tl.where(counted, 1.0, 0.0)
    return tl.sum(totals, 0)


@triton.jit
def _highest(
    ROW, vocab, peak, low, high, target,
    SHARES: tl.constexpr, HALVINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest key from `low` to `high` whose total is `target`, at least."""
    for _ in range(HALVINGS):
        middle = low + (high - low + 1) // 2
        enough = _total(ROW, vocab, peak, middle, SHARES, BLOCK) >= target
        high = tl.where(enough, high, tl.maximum(middle - 1, low))
        low = tl.where(enough, middle, low)
    return low


@triton.jit
def _bound_kernel(
    SCALED, PEAKS, TOP_K, TOP_P, BOUNDS, stride, vocab,
    HALVINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ROW = SCALED + row * stride
    peak = tl.load(PEAKS + row)
    top_k, top_p = tl.load(TOP_K + row), tl.load(TOP_P + row)
    high = _key(peak).to(tl.int64)
    low = tl.minimum(high, _LOWEST)
    if (top_k > 0) & (top_k < vocab):
        low = _highest(ROW, vocab, peak, low, high, top_k.to(tl.float32), False, HALVINGS, BLOCK)
    if top_p < 1.0:
        target = top_p * _total(ROW, vocab, peak, low, True, BLOCK)
        low = _highest(ROW, vocab, peak, low, high, target, True, HALVINGS, BLOCK)
    bits = low.to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    tl.store(BOUNDS + row, bits.to(tl.float32, bitcast=True))


def keep(scaled_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """`keep.keep` on a GPU; a sum that just reaches `top_p` may round to the other side."""
    num_rows, vocab = scaled_RV.shape
    peaks_R = scaled_RV.amax(dim=1)
    bounds_R = torch.empty_like(peaks_R)
    _bound_kernel[(num_rows,)](
        scaled_RV, peaks_R, top_k_R, top_p_R, bounds_R, scaled_RV.stride(0), vocab,
        HALVINGS=_HALVINGS, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return scaled_RV >= bounds_R.maximum(peaks_R + min_p_R.log())[:, None]

"""Top-k, top-p and min-p without a sort, in Triton; defined by `top_k_top_p.top_k_top_p`.

Each program bisects over all float32 numbers for one row's threshold: the highest number that
`top_k` tokens reach, or that tokens with a total share of `top_p` reach. The row's logits stay in
the cache meanwhile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_HALVINGS = 32  # bisecting 2**32 numbers leaves one
_LOWEST = tl.constexpr(-0x7F800001)  # the key of -inf


@triton.jit
def _key(x):
    """Map float32 to int32 in the same order. On the bits, the map is its own inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _sum_from(ROW, vocab, m, threshold, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Count the tokens whose key is at least `threshold`, or sum their `exp(logit - m)`."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        mask = tokens < vocab
        scaled = tl.load(ROW + tokens, mask=mask, other=-float("inf"))
        reached = mask & (_key(scaled).to(tl.int64) >= threshold)
        if WEIGHTED:
            sums += tl.where(reached, tl.exp(scaled - m), 0.0)
        else:
            sums += tl.where(reached, 1.0, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _bisect(
    ROW, vocab, m, low, high, target,
    WEIGHTED: tl.constexpr, HALVINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the highest key in `[low, high]` whose `_sum_from` is at least `target`."""
    for _ in range(HALVINGS):
        middle = low + (high - low + 1) // 2
        enough = _sum_from(ROW, vocab, m, middle, WEIGHTED, BLOCK) >= target
        high = tl.where(enough, high, tl.maximum(middle - 1, low))
        low = tl.where(enough, middle, low)
    return low


@triton.jit
def _threshold_kernel(
    SCALED, M, TOP_K, TOP_P, THRESHOLDS, stride, vocab,
    HALVINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find one row's threshold; `M` holds the highest logit of each row."""
    row = tl.program_id(0).to(tl.int64)
    ROW = SCALED + row * stride
    m = tl.load(M + row)
    top_k, top_p = tl.load(TOP_K + row), tl.load(TOP_P + row)
    high = _key(m).to(tl.int64)
    low = tl.minimum(high, _LOWEST)
    if (top_k > 0) & (top_k < vocab):
        low = _bisect(ROW, vocab, m, low, high, top_k.to(tl.float32), False, HALVINGS, BLOCK)
    if top_p < 1.0:
        target = top_p * _sum_from(ROW, vocab, m, low, True, BLOCK)
        low = _bisect(ROW, vocab, m, low, high, target, True, HALVINGS, BLOCK)
    bits = low.to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    tl.store(THRESHOLDS + row, bits.to(tl.float32, bitcast=True))


def top_k_top_p(scaled_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """`top_k_top_p.top_k_top_p`; a sum that just reaches `top_p` may round differently."""
    num_rows, vocab = scaled_RV.shape
    max_R = scaled_RV.amax(dim=1)
    thresholds_R = torch.empty_like(max_R)
    _threshold_kernel[(num_rows,)](
        scaled_RV, max_R, top_k_R, top_p_R, thresholds_R, scaled_RV.stride(0), vocab,
        HALVINGS=_HALVINGS, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return scaled_RV >= thresholds_R.maximum(max_R + min_p_R.log())[:, None]

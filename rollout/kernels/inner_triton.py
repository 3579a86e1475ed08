"""The inner function of attention in Triton, shared by every kernel that attends.

Kernels that share it round alike; written twice, the compiler would contract it differently.
"""

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _load(places, tokens, limit, DIM: tl.constexpr, DIM_PAD: tl.constexpr, EDGE: tl.constexpr):
    """Load keys or values, `(BLOCK, DIM_PAD)`, zeros where there are none."""
    dims = tl.arange(0, DIM_PAD)
    if EDGE and DIM != DIM_PAD:
        return tl.load(places, mask=(tokens < limit)[:, None] & (dims < DIM)[None, :], other=0.0)
    elif EDGE:
        return tl.load(places, mask=(tokens < limit)[:, None], other=0.0)
    elif DIM != DIM_PAD:
        return tl.load(places, mask=(dims < DIM)[None, :], other=0.0)
    else:
        return tl.load(places)


@triton.jit
def attend(
    query,
    K,
    V,
    table,
    page_stride,
    token_stride,
    start,
    limit,
    last,
    window,
    scale,
    softcap,
    peak,
    total,
    mixed,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Fold keys `[start, start + BLOCK)` into the running softmax of each query row.

    `last` is the position of each query; keys at or past `limit` are not read. Without `EDGE`
    every query sees every key of the block. `scale` turns scores into logarithms to base 2.
    """
    tokens = start + tl.arange(0, BLOCK)
    dims = tl.arange(0, DIM_PAD)
    if PAGE % BLOCK == 0:
        page = tl.load(table + start // PAGE).to(tl.int64)
        places = page * page_stride + (start % PAGE + tl.arange(0, BLOCK)) * token_stride
    else:
        there = tokens < limit if EDGE else tokens >= 0
        pages = tl.load(table + tokens // PAGE, mask=there, other=0).to(tl.int64)
        places = pages * page_stride + (tokens % PAGE) * token_stride
    offsets = places[:, None] + dims[None, :]
    keys = _load(K + offsets, tokens, limit, DIM, DIM_PAD, EDGE)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if HAS_SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * scale / softcap)) + 1.0))
        scale = LOG2E
    if EDGE:
        visible = tokens[None, :] <= last[:, None]
        if HAS_WINDOW:
            visible = visible & (tokens[None, :] > last[:, None] - window)
        scores = tl.where(visible, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    anchor = new_peak
    if EDGE:
        # A row that has seen no key yet keeps a peak of -inf, and -inf - -inf is no number.
        anchor = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    # Fused by name: a compiler left to itself fuses here and not there, and rounds unalike.
    weights = tl.exp2(tl.fma(scores, scale, -anchor[:, None]))
    fade = tl.exp2(peak - anchor)
    total = tl.fma(total, fade, tl.sum(weights, 1))
    values = _load(V + offsets, tokens, limit, DIM, DIM_PAD, EDGE)
    weights = weights.to(values.dtype)
    mixed = tl.dot(weights, values, mixed * fade[:, None], input_precision="ieee")
    return new_peak, total, mixed


@triton.jit
def add_sink(peak, total, sink):
    """Give a sink its weight: how far the sums so far shrink, and the new total."""
    sink = sink.to(tl.float32) * LOG2E
    new_peak = tl.maximum(peak, sink)
    fade = tl.exp2(peak - new_peak)
    return fade, total * fade + tl.exp2(sink - new_peak)

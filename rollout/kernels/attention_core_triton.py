"""The inner function of attention in Triton, shared by every kernel that attends.

What a query gets depends on its row's keys alone, counted from the row's first token: blocks of one
size are folded one after the other into splits of one size, and the splits in order. Decode,
prefill and the trainer's forward do so by these functions, so they agree to the last bit. For that
- each fused multiply-add is named: a compiler left to itself contracts here and not there;
- weights are summed by the matrix unit, which adds in the same order whatever the tile: the order
  of `tl.sum` follows the number of warps;
- a block that a query does not see changes nothing: its weights are 0, and its peak is no higher.
"""

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
_ONES = tl.constexpr(16)  # columns of ones: the least that a matrix unit's product can have


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
def _places(
    row, start, limit, page_stride, token_stride,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Where keys `[start, start + BLOCK)` of a row lie.

    `row` points to the row's page ids; with `PAGE` 0 keys are packed, and it is the first one.
    """
    tokens = start + tl.arange(0, BLOCK)
    if PAGE == 0:
        return (row + tokens) * token_stride
    elif PAGE % BLOCK == 0:
        page = tl.load(row + start // PAGE).to(tl.int64)
        return page * page_stride + (start % PAGE + tl.arange(0, BLOCK)) * token_stride
    else:
        there = tokens < limit if EDGE else tokens >= 0
        pages = tl.load(row + tokens // PAGE, mask=there, other=0).to(tl.int64)
        return pages * page_stride + (tokens % PAGE) * token_stride


@triton.jit
def _attend_block(
    query, K, V, places, start, limit, last, window, scale, softcap, peak, total, mixed,
    BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Fold keys `[start, start + BLOCK)` into the running softmax of each query.

    Without `EDGE` every query sees every key of the block.
    """
    tokens = start + tl.arange(0, BLOCK)
    offsets = places[:, None] + tl.arange(0, DIM_PAD)[None, :]
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
    # A query that has seen no key yet keeps a peak of -inf, and -inf - -inf is no number.
    anchor = tl.where(new_peak == -float("inf"), 0.0, new_peak) if EDGE else new_peak
    weights = tl.exp2(tl.fma(scores, scale, -anchor[:, None]))
    fade = tl.exp2(peak - anchor)[:, None]
    values = _load(V + offsets, tokens, limit, DIM, DIM_PAD, EDGE)
    weights = weights.to(values.dtype)
    ones = tl.full([BLOCK, _ONES], 1.0, values.dtype)
    total = tl.dot(weights, ones, total * fade, input_precision="ieee")
    mixed = tl.dot(weights, values, mixed * fade, input_precision="ieee")
    return new_peak, total, mixed


@triton.jit
def attend_split(
    query, K, V, row, page_stride, token_stride, first, full, stop, last, window, scale, softcap,
    QUERIES: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend over keys `[first, stop)`, of which every query sees those below `full`.

    `query` is `(QUERIES, DIM_PAD)`, `row` as in `_places`; `first` and `full`, not below it, are
    multiples of `BLOCK`; `last` is the position of each query, `(QUERIES,)`; `scale` turns scores
    into logarithms to base 2.

    Returns the mean of the values by weight, `(QUERIES, DIM_PAD)`, and the logarithm to base 2 of
    the sum of weights, `(QUERIES,)`; zeros and -inf where a query sees no key.
    """
    peak = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES, _ONES], tl.float32)
    mixed = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    for start in range(first, tl.minimum(full, stop), BLOCK):
        places = _places(
            row, start, stop, page_stride, token_stride, PAGE, BLOCK, EDGE=HAS_WINDOW
        )  # fmt: skip
        peak, total, mixed = _attend_block(
            query, K, V, places, start, stop, last, window, scale, softcap, peak, total, mixed,
            BLOCK, DIM, DIM_PAD, HAS_WINDOW, HAS_SOFTCAP, EDGE=HAS_WINDOW,
        )  # fmt: skip
    for start in range(full, stop, BLOCK):
        places = _places(row, start, stop, page_stride, token_stride, PAGE, BLOCK, EDGE=True)
        peak, total, mixed = _attend_block(
            query, K, V, places, start, stop, last, window, scale, softcap, peak, total, mixed,
            BLOCK, DIM, DIM_PAD, HAS_WINDOW, HAS_SOFTCAP, EDGE=True,
        )  # fmt: skip
    weight = tl.max(total, 1)  # every column holds it
    seen = weight > 0.0
    mean = mixed / tl.where(seen, weight, 1.0)[:, None]
    return mean, tl.where(seen, peak + tl.log2(weight), -float("inf"))


@triton.jit
def fold(lse, mean, split_lse, split_mean):
    """Add a split to those before it; both are means with the logarithm of their weights."""
    peak = tl.maximum(lse, split_lse)
    anchor = tl.where(peak == -float("inf"), 0.0, peak)
    before, here = tl.exp2(lse - anchor), tl.exp2(split_lse - anchor)
    total = before + here
    # Where one side has no weight, the other stays as it is, to the last bit.
    share = tl.where(total > 0.0, here / tl.where(total > 0.0, total, 1.0), 0.0)[:, None]
    mean = tl.fma(split_mean - mean, share, mean)
    return tl.where(total > 0.0, anchor + tl.log2(total), -float("inf")), mean


@triton.jit
def add_sink(lse, mean, sink):
    """Give a sink, which has no value, its weight."""
    sink = sink.to(tl.float32) * LOG2E
    peak = tl.maximum(lse, sink)
    weight = tl.exp2(lse - peak)
    total = weight + tl.exp2(sink - peak)
    return peak + tl.log2(total), mean * (weight / total)[:, None]

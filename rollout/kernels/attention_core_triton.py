"""The inner loop of attention in Triton, shared by decode, prefill and the trainer's forward.

A query's result depends on its own sequence alone. Keys form blocks and splits of fixed sizes,
counted from the sequence's first token, and are added in order. All callers agree to the last bit,
because they share these functions, and because:
- Fused multiply-adds are explicit. The compiler would fuse in one kernel and not in another.
- The matrix unit sums the weights. The order of `tl.sum` depends on the number of warps.
- A masked block changes nothing: its weights are 0, and it does not raise the maximum.

Names are flash attention's: `m_i` is the running maximum of the scores, `l_i` the sum of the
weights `exp2(score - m_i)`, `acc` the weighted sum of the values, and `alpha` rescales both sums
when `m_i` rises. `lse` is `m_i + log2(l_i)`.
"""

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
_ONES = tl.constexpr(16)  # columns of ones; the matrix unit takes no fewer


@triton.jit
def _load_kv(pointers, tokens, limit, DIM: tl.constexpr, DIM_PAD: tl.constexpr, EDGE: tl.constexpr):
    """Load keys or values, `(BLOCK, DIM_PAD)`; zeros from token `limit` and dimension `DIM` on."""
    dims = tl.arange(0, DIM_PAD)
    if EDGE and DIM != DIM_PAD:
        return tl.load(pointers, mask=(tokens < limit)[:, None] & (dims < DIM)[None, :], other=0.0)
    elif EDGE:
        return tl.load(pointers, mask=(tokens < limit)[:, None], other=0.0)
    elif DIM != DIM_PAD:
        return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _kv_offsets(
    pages, start, limit, page_stride, token_stride,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Offsets of keys `[start, start + BLOCK)` of a sequence, int64, `(BLOCK,)`.

    `pages` points to the sequence's page ids. If `PAGE` is 0, keys are packed and `pages` is the
    index of the sequence's first key.
    """
    tokens = start + tl.arange(0, BLOCK)
    if PAGE == 0:
        return (pages + tokens) * token_stride
    elif PAGE % BLOCK == 0:
        page = tl.load(pages + start // PAGE).to(tl.int64)
        return page * page_stride + (start % PAGE + tl.arange(0, BLOCK)) * token_stride
    else:
        mask = tokens < limit if EDGE else tokens >= 0
        page = tl.load(pages + tokens // PAGE, mask=mask, other=0).to(tl.int64)
        return page * page_stride + (tokens % PAGE) * token_stride


@triton.jit
def _attend_block(
    query, K, V, kv_offsets, start, limit, positions, window, scale, softcap, m_i, l_i, acc,
    BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Add keys `[start, start + BLOCK)` to the softmax state; only `EDGE` masks any of them."""
    tokens = start + tl.arange(0, BLOCK)
    offsets = kv_offsets[:, None] + tl.arange(0, DIM_PAD)[None, :]
    keys = _load_kv(K + offsets, tokens, limit, DIM, DIM_PAD, EDGE)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if HAS_SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * scale / softcap)) + 1.0))
        scale = LOG2E
    if EDGE:
        visible = tokens[None, :] <= positions[:, None]
        if HAS_WINDOW:
            visible = visible & (tokens[None, :] > positions[:, None] - window)
        scores = tl.where(visible, scores, -float("inf"))
    m_new = tl.maximum(m_i, tl.max(scores, 1) * scale)
    # A query that has seen no key yet has a maximum of -inf, and -inf - -inf is NaN.
    shift = tl.where(m_new == -float("inf"), 0.0, m_new) if EDGE else m_new
    weights = tl.exp2(tl.fma(scores, scale, -shift[:, None]))
    alpha = tl.exp2(m_i - shift)[:, None]
    values = _load_kv(V + offsets, tokens, limit, DIM, DIM_PAD, EDGE)
    weights = weights.to(values.dtype)
    ones = tl.full([BLOCK, _ONES], 1.0, values.dtype)
    l_i = tl.dot(weights, ones, l_i * alpha, input_precision="ieee")
    acc = tl.dot(weights, values, acc * alpha, input_precision="ieee")
    return m_new, l_i, acc


@triton.jit
def attend_split(
    query, K, V, pages, page_stride, token_stride, first, full, stop, positions, window, scale,
    softcap,
    QUERIES: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend over keys `[first, stop)`; keys before `full` are visible to every query.

    `query` is `(QUERIES, DIM_PAD)`, `positions` is `(QUERIES,)`, `pages` is as in `_kv_offsets`.
    `first` and `full` are multiples of `BLOCK`, `first <= full`. `scale` includes `log2(e)`.

    Returns the output over these keys, `(QUERIES, DIM_PAD)`, and its base-2 `lse`, `(QUERIES,)`,
    both float32. A query that sees no key gets zeros and -inf.
    """
    m_i = tl.full([QUERIES], -float("inf"), tl.float32)
    l_i = tl.zeros([QUERIES, _ONES], tl.float32)
    acc = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    for start in range(first, tl.minimum(full, stop), BLOCK):
        kv_offsets = _kv_offsets(
            pages, start, stop, page_stride, token_stride, PAGE, BLOCK, EDGE=HAS_WINDOW
        )  # fmt: skip
        m_i, l_i, acc = _attend_block(
            query, K, V, kv_offsets, start, stop, positions, window, scale, softcap, m_i, l_i, acc,
            BLOCK, DIM, DIM_PAD, HAS_WINDOW, HAS_SOFTCAP, EDGE=HAS_WINDOW,
        )  # fmt: skip
    for start in range(full, stop, BLOCK):
        kv_offsets = _kv_offsets(
            pages, start, stop, page_stride, token_stride, PAGE, BLOCK, EDGE=True
        )  # fmt: skip
        m_i, l_i, acc = _attend_block(
            query, K, V, kv_offsets, start, stop, positions, window, scale, softcap, m_i, l_i, acc,
            BLOCK, DIM, DIM_PAD, HAS_WINDOW, HAS_SOFTCAP, EDGE=True,
        )  # fmt: skip
    weight = tl.max(l_i, 1)  # all columns are equal
    seen = weight > 0.0
    out = acc / tl.where(seen, weight, 1.0)[:, None]
    return out, tl.where(seen, m_i + tl.log2(weight), -float("inf"))


@triton.jit
def merge_states(lse, out, split_lse, split_out):
    """Merge the attention state of a split into that of the splits before it."""
    m_i = tl.maximum(lse, split_lse)
    shift = tl.where(m_i == -float("inf"), 0.0, m_i)
    weight, split_weight = tl.exp2(lse - shift), tl.exp2(split_lse - shift)
    l_i = weight + split_weight
    # If one side has weight 0, the other keeps all its bits.
    share = tl.where(l_i > 0.0, split_weight / tl.where(l_i > 0.0, l_i, 1.0), 0.0)[:, None]
    out = tl.fma(split_out - out, share, out)
    return tl.where(l_i > 0.0, shift + tl.log2(l_i), -float("inf")), out


@triton.jit
def add_sink(lse, out, sink):
    """Add an attention sink: a score that takes weight but has no value."""
    sink = sink.to(tl.float32) * LOG2E
    m_i = tl.maximum(lse, sink)
    weight = tl.exp2(lse - m_i)
    l_i = weight + tl.exp2(sink - m_i)
    return m_i + tl.log2(l_i), out * (weight / l_i)[:, None]

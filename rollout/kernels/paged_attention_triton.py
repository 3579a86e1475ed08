"""Paged attention in Triton: decode in splits, and prefill; defined by `paged_attention`.

Decode and prefill share one inner function. A row's result depends on its own length
alone: decode counts keys from position 0 in splits of a fixed length, and adds the splits up in
order. Prefill does not split, so beyond the first split the two may round differently.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels import SPLIT_TOKENS
from rollout.kernels.inner_triton import LOG2E, add_sink, attend

# Fastest of those tried on an H200; see examples/README.md.
_QUERY_BLOCK = 64
_DECODE = {"num_warps": 2, "num_stages": 3}
_PREFILL = {"num_warps": 4, "num_stages": 2}
_MIN_DOT_ROWS = 16  # the least that a side of a matrix unit's product can have


@triton.jit
def _decode_kernel(
    Q,
    K,
    V,
    TABLE,
    LANES,
    POSITIONS,
    SINKS,
    OUT,
    LSE,
    table_stride,
    page_stride,
    token_stride,
    head_stride,
    window,
    scale,
    softcap,
    num_splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    IN_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(POSITIONS + row)
    first = split * SPLIT
    stop = tl.minimum(first + SPLIT, position + 1)
    if HAS_WINDOW:
        first = tl.maximum(first, (position - window + 1) // BLOCK * BLOCK)
    if first >= stop:
        return
    table = TABLE + tl.load(LANES + row) * table_stride
    heads = kv_head * GROUP + tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    mine = (tl.arange(0, GROUP_PAD) < GROUP)[:, None] & (dims < DIM)[None, :]
    at = (row.to(tl.int64) * HEADS + heads)[:, None]
    query = tl.load(Q + at * DIM + dims[None, :], mask=mine, other=0.0)
    last = tl.zeros([GROUP_PAD], tl.int64) + position
    peak = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    mixed = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    K, V = K + kv_head * head_stride, V + kv_head * head_stride
    full = first + (stop - first) // BLOCK * BLOCK
    for start in range(first, full, BLOCK):
        peak, total, mixed = attend(
            query, K, V, table, page_stride, token_stride, start, stop, last, window, scale,
            softcap, peak, total, mixed, PAGE, BLOCK, DIM, DIM_PAD, HAS_WINDOW, HAS_SOFTCAP,
            EDGE=HAS_WINDOW,
        )  # fmt: skip
    if full < stop:
        peak, total, mixed = attend(
            query, K, V, table, page_stride, token_stride, full, stop, last, window, scale,
            softcap, peak, total, mixed, PAGE, BLOCK, DIM, DIM_PAD, HAS_WINDOW, HAS_SOFTCAP,
            EDGE=True,
        )  # fmt: skip
    if HAS_SINKS and not IN_SPLITS:
        sink = tl.load(SINKS + heads, mask=heads < HEADS, other=0.0)
        fade, total = add_sink(peak, total, sink)
        mixed = mixed * fade[:, None]
    output = mixed / total[:, None]
    if IN_SPLITS:
        part = at * num_splits + split
        tl.store(OUT + part * DIM + dims[None, :], output, mask=mine)
        lse = (peak + tl.log2(total))[:, None]
        tl.store(LSE + part, lse, mask=(tl.arange(0, GROUP_PAD) < GROUP)[:, None])
    else:
        tl.store(OUT + at * DIM + dims[None, :], output.to(OUT.dtype.element_ty), mask=mine)


@triton.jit
def _add_splits_kernel(
    PARTS,
    LSE,
    POSITIONS,
    SINKS,
    OUT,
    window,
    num_splits,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Add up a row's splits in order, so that their number in the graph changes no bit."""
    at = tl.program_id(0).to(tl.int64)
    position = tl.load(POSITIONS + at // HEADS)
    dims = tl.arange(0, DIM_PAD)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(position - window + 1, 0) // SPLIT
    end = position // SPLIT + 1
    peak = -float("inf")
    for split in range(begin, end):
        peak = tl.maximum(peak, tl.load(LSE + at * num_splits + split))
    total = 0.0
    mixed = tl.zeros([DIM_PAD], tl.float32)
    for split in range(begin, end):
        part = at * num_splits + split
        weight = tl.exp2(tl.load(LSE + part) - peak)
        total += weight
        mixed += weight * tl.load(PARTS + part * DIM + dims, mask=dims < DIM, other=0.0)
    if HAS_SINKS:
        fade, total = add_sink(peak, total, tl.load(SINKS + at % HEADS))
        mixed = mixed * fade
    tl.store(OUT + at * DIM + dims, (mixed / total).to(OUT.dtype.element_ty), mask=dims < DIM)


@triton.jit
def _prefill_kernel(
    Q,
    K,
    V,
    TABLE,
    RUNS,
    SINKS,
    OUT,
    table_stride,
    page_stride,
    token_stride,
    head_stride,
    window,
    scale,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    # The longest tiles first, so that short ones fill the gaps at the end.
    head, run = tl.program_id(0), tl.program_id(1)
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    lane = tl.load(RUNS + run * 4)
    packed_start = tl.load(RUNS + run * 4 + 1)
    count = tl.load(RUNS + run * 4 + 2)
    first_position = tl.load(RUNS + run * 4 + 3)
    index = tile * QUERIES + tl.arange(0, QUERIES)
    if tile * QUERIES >= count:
        return
    table = TABLE + lane * table_stride
    dims = tl.arange(0, DIM_PAD)
    mine = (index < count)[:, None] & (dims < DIM)[None, :]
    at = ((packed_start + index) * HEADS + head)[:, None] * DIM + dims[None, :]
    query = tl.load(Q + at, mask=mine, other=0.0)
    last = first_position + index
    stop = first_position + tl.minimum(tile * QUERIES + QUERIES, count)
    first = tl.zeros([], tl.int64)
    if HAS_WINDOW:
        oldest = first_position + tile * QUERIES - window + 1
        first = tl.maximum(oldest, 0) // BLOCK * BLOCK
    peak = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    kv = (head // GROUP) * head_stride
    K, V = K + kv, V + kv
    # Blocks that every query of the tile sees whole, then those that some see in part.
    full = (first_position + tile * QUERIES + 1) // BLOCK * BLOCK
    for start in range(first, full, BLOCK):
        peak, total, mixed = attend(
            query, K, V, table, page_stride, token_stride, start, stop, last, window, scale,
            softcap, peak, total, mixed, PAGE, BLOCK, DIM, DIM_PAD, HAS_WINDOW, HAS_SOFTCAP,
            EDGE=HAS_WINDOW,
        )  # fmt: skip
    for start in range(tl.maximum(first, full), stop, BLOCK):
        peak, total, mixed = attend(
            query, K, V, table, page_stride, token_stride, start, stop, last, window, scale,
            softcap, peak, total, mixed, PAGE, BLOCK, DIM, DIM_PAD, HAS_WINDOW, HAS_SOFTCAP,
            EDGE=True,
        )  # fmt: skip
    if HAS_SINKS:
        fade, total = add_sink(peak, total, tl.load(SINKS + head))
        mixed = mixed * fade[:, None]
    tl.store(OUT + at, (mixed / total[:, None]).to(OUT.dtype.element_ty), mask=mine)


def decode(
    query_RHD: Tensor,
    cache: tuple[Tensor, Tensor],
    block_table_LP: Tensor,
    lanes_R: Tensor,
    positions_R: Tensor,
    *,
    max_context: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend with one query a row over the row's pages; see `paged_attention.attend`.

    Args:
        query_RHD: Queries.
        cache: A layer's keys and values, each `(pages, page_tokens, K, D)`.
        block_table_LP: Page ids of each lane, int64.
        lanes_R: Lane of each row, int64.
        positions_R: Position of each query, int64, below `max_context`.
        max_context: Bounds the launch; baked into a captured graph. It changes no result.
        scale: Multiplies the scores.
        window: Tokens a query sees, itself included. `None`: all.
        softcap: Caps the scores.
        sinks_H: A score of each head that takes weight and has no value.

    Returns:
        `(R, H, D)` in the query's dtype.
    """
    assert lanes_R.is_contiguous()
    assert positions_R.is_contiguous()
    query = query_RHD.contiguous()
    num_rows, num_heads, dim = query.shape
    num_splits = triton.cdiv(max_context, SPLIT_TOKENS)
    output = torch.empty_like(query)
    parts, lse = output, output
    if num_splits > 1:
        shape = (num_rows, num_heads, num_splits)
        parts = torch.empty((*shape, dim), dtype=torch.float32, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    sizes, strides = _sizes(query, cache, window, softcap, sinks_H)
    group = sizes["HEADS"] // cache[0].shape[2]
    _decode_kernel[(num_rows, cache[0].shape[2], num_splits)](
        query, *cache, block_table_LP, lanes_R, positions_R, sinks_H, parts, lse,
        block_table_LP.stride(0), *strides, window or 0, scale * LOG2E.value, softcap or 0.0,
        num_splits,
        GROUP=group, GROUP_PAD=max(_MIN_DOT_ROWS, triton.next_power_of_2(group)),
        SPLIT=SPLIT_TOKENS, IN_SPLITS=num_splits > 1, **_DECODE, **sizes,
    )  # fmt: skip
    if num_splits > 1:
        _add_splits_kernel[(num_rows * num_heads,)](
            parts, lse, positions_R, sinks_H, output, window or 0, num_splits,
            HEADS=num_heads, DIM=dim, DIM_PAD=sizes["DIM_PAD"],
            SPLIT=SPLIT_TOKENS, HAS_WINDOW=window is not None, HAS_SINKS=sinks_H is not None,
        )  # fmt: skip
    return output


def prefill(
    query_THD: Tensor,
    cache: tuple[Tensor, Tensor],
    block_table_LP: Tensor,
    runs_N4: Tensor,
    *,
    max_run_tokens: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend with packed runs of prompt tokens, each over its own row's pages.

    Args:
        query_THD: Queries of all runs.
        cache: A layer's keys and values, those of the queries included.
        block_table_LP: Page ids of each lane, int64.
        runs_N4: Lane, first packed token, number of tokens, first position of each run, int64.
        max_run_tokens: Tokens of the longest run.
        scale: Multiplies the scores.
        window: Tokens a query sees, itself included. `None`: all.
        softcap: Caps the scores.
        sinks_H: A score of each head that takes weight and has no value.

    Returns:
        `(T, H, D)` in the query's dtype.
    """
    assert runs_N4.is_contiguous()
    query = query_THD.contiguous()
    output = torch.empty_like(query)
    sizes, strides = _sizes(query, cache, window, softcap, sinks_H)
    tiles = triton.cdiv(max_run_tokens, _QUERY_BLOCK)
    _prefill_kernel[(query.shape[1], len(runs_N4), tiles)](
        query, *cache, block_table_LP, runs_N4, sinks_H, output,
        block_table_LP.stride(0), *strides, window or 0, scale * LOG2E.value, softcap or 0.0,
        GROUP=sizes["HEADS"] // cache[0].shape[2], QUERIES=_QUERY_BLOCK,
        **_PREFILL, **sizes,
    )  # fmt: skip
    return output


def _sizes(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """What decode and prefill have in common: sizes, and strides of the cache."""
    dim = query.shape[-1]
    dim_pad = max(_MIN_DOT_ROWS, triton.next_power_of_2(dim))
    narrow = query.dtype.itemsize <= 2
    # Keys and values of one block have to fit into shared memory, several stages deep.
    block = (64 if dim_pad <= 128 else 32) if narrow else (32 if dim_pad <= 128 else 16)
    sizes = {
        "HEADS": query.shape[1],
        "DIM": dim,
        "DIM_PAD": dim_pad,
        "PAGE": cache[0].shape[1],
        "BLOCK": block,
        "HAS_WINDOW": window is not None,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_SINKS": sinks_H is not None,
    }
    page_stride, token_stride, head_stride, _ = cache[0].stride()
    return sizes, (page_stride, token_stride, head_stride)

"""Paged attention in Triton, for decode and for runs of tokens; defined by `paged_attention`.

Shape letters: R decode rows, N runs, T packed tokens, L lanes, H query heads, K key/value heads,
D head size, P pages. A layer's `cache` is its keys and values, each `(pages, page_tokens, K, D)`.
`window`, `softcap` and `sinks_H` are those of `paged_attention.attend`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.attention_core_triton import LOG2E, add_sink, attend_split, merge_states
from rollout.kernels.paged_attention import SPLIT_TOKENS
from rollout.kernels.pdl_triton import gdc_wait, pdl_options

# The fastest settings measured on an H200; see examples/README.md.
_QUERY_BLOCK = 64
_DECODE = {"num_warps": 2, "num_stages": 3}
_PREFILL = {"num_warps": 4, "num_stages": 2}
_MIN_DOT_ROWS = 16  # the matrix unit takes no smaller side


# `do_not_specialize`: Triton would compile anew when 16 divides `num_splits`.
@triton.jit(do_not_specialize=["num_splits"])
def _decode_kernel(
    Q, K, V, TABLE, LANES, POSITIONS, SINKS, OUT, LSE,
    table_stride, page_stride, token_stride, head_stride, window, scale, softcap, num_splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, IN_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attend with one row's query heads that share a key/value head, over one split."""
    gdc_wait(PDL)
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(POSITIONS + row)
    first = split * SPLIT
    stop = tl.minimum(first + SPLIT, position + 1)
    if HAS_WINDOW:
        first = tl.maximum(first, (position - window + 1) // BLOCK * BLOCK)
    if first >= stop:
        return
    pages = TABLE + tl.load(LANES + row) * table_stride
    heads = kv_head * GROUP + tl.arange(0, GROUP_PAD)
    head_mask = tl.arange(0, GROUP_PAD) < GROUP
    dims = tl.arange(0, DIM_PAD)
    mask = head_mask[:, None] & (dims < DIM)[None, :]
    at = row.to(tl.int64) * HEADS + heads
    query = tl.load(Q + at[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
    positions = tl.zeros([GROUP_PAD], tl.int64) + position
    K, V = K + kv_head * head_stride, V + kv_head * head_stride
    full = first + (stop - first) // BLOCK * BLOCK
    out, lse = attend_split(
        query, K, V, pages, page_stride, token_stride, first, full, stop, positions, window, scale,
        softcap, GROUP_PAD, PAGE, BLOCK, DIM, DIM_PAD, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    if IN_SPLITS:
        part = at * num_splits + split
        tl.store(OUT + part[:, None] * DIM + dims[None, :], out, mask=mask)
        tl.store(LSE + part, lse, mask=head_mask)
    else:
        if HAS_SINKS:
            lse, out = add_sink(lse, out, tl.load(SINKS + heads, mask=head_mask, other=0.0))
        out = out.to(OUT.dtype.element_ty)
        tl.store(OUT + at[:, None] * DIM + dims[None, :], out, mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits_kernel(
    PARTS, LSE, POSITIONS, SINKS, OUT, window, num_splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge a head's own splits in order; `num_splits` is a bound and changes no bit."""
    gdc_wait(PDL)
    at = tl.program_id(0).to(tl.int64)
    position = tl.load(POSITIONS + at // HEADS)
    dims = tl.arange(0, DIM_PAD)[None, :]
    one = tl.zeros([1], tl.int64)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(position - window + 1, 0) // SPLIT
    lse, out = tl.full([1], -float("inf"), tl.float32), tl.zeros([1, DIM_PAD], tl.float32)
    for split in range(begin, position // SPLIT + 1):
        part = at * num_splits + split
        split_out = tl.load(PARTS + part * DIM + dims, mask=dims < DIM, other=0.0)
        lse, out = merge_states(lse, out, tl.load(LSE + part + one), split_out)
    if HAS_SINKS:
        lse, out = add_sink(lse, out, tl.load(SINKS + at % HEADS + one))
    tl.store(OUT + at * DIM + dims, out.to(OUT.dtype.element_ty), mask=dims < DIM)


@triton.jit(do_not_specialize=["num_tokens"])
def _runs_kernel(
    Q, K, V, TABLE, RUNS, SINKS, OUT, LSE,
    table_stride, page_stride, token_stride, head_stride, window, scale, softcap, num_tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, QUERIES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Attend with one head of `QUERIES` consecutive tokens of one run."""
    # Start the longest tiles first; short ones fill the gaps at the end.
    head, run = tl.program_id(0), tl.program_id(1)
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    lane = tl.load(RUNS + run * 4)
    packed_start = tl.load(RUNS + run * 4 + 1)
    count = tl.load(RUNS + run * 4 + 2)
    first_position = tl.load(RUNS + run * 4 + 3)
    if tile * QUERIES >= count:
        return
    pages = packed_start if PAGE == 0 else TABLE + lane * table_stride
    index = tile * QUERIES + tl.arange(0, QUERIES)
    query_mask = index < count
    dims = tl.arange(0, DIM_PAD)
    mask = query_mask[:, None] & (dims < DIM)[None, :]
    at = ((packed_start + index) * HEADS + head)[:, None] * DIM + dims[None, :]
    query = tl.load(Q + at, mask=mask, other=0.0)
    positions = first_position + index
    tile_position = first_position + tile * QUERIES  # of the tile's first query
    stop = first_position + tl.minimum(tile * QUERIES + QUERIES, count)
    first = tl.zeros([], tl.int64)
    if HAS_WINDOW:
        first = tl.maximum(tile_position - window + 1, 0) // BLOCK * BLOCK
    K, V = K + (head // GROUP) * head_stride, V + (head // GROUP) * head_stride
    lse = tl.full([QUERIES], -float("inf"), tl.float32)
    out = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    for split in range(first // SPLIT, (stop - 1) // SPLIT + 1):
        begin = tl.maximum(first, split * SPLIT)
        end = tl.minimum(stop, split * SPLIT + SPLIT)
        full = tl.maximum(begin, tl.minimum(end, tile_position + 1) // BLOCK * BLOCK)
        split_out, split_lse = attend_split(
            query, K, V, pages, page_stride, token_stride, begin, full, end, positions, window,
            scale, softcap, QUERIES, PAGE, BLOCK, DIM, DIM_PAD, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
        lse, out = merge_states(lse, out, split_lse, split_out)
    if HAS_SINKS:
        lse, out = add_sink(lse, out, tl.load(SINKS + head))
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=mask)
    if HAS_LSE:
        tl.store(LSE + head * num_tokens + packed_start + index, lse / LOG2E, mask=query_mask)


def decode(
    query_RHD: Tensor,
    cache: tuple[Tensor, Tensor],
    page_table_LP: Tensor,
    lanes_R: Tensor,
    positions_R: Tensor,
    *,
    max_context: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend with one query a row over the row's pages; returns the query's dtype.

    Args:
        page_table_LP: Page ids of each lane, int64.
        lanes_R: Lane of each row, int64, contiguous.
        positions_R: Position of each query, int64, contiguous, below `max_context`.
        max_context: Sets the launch size, which a captured graph keeps. Changes no result.
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
    sizes = _sizes(query, cache[0], window, softcap, sinks_H)
    num_kv_heads = cache[0].shape[2]
    group = num_heads // num_kv_heads
    _decode_kernel[(num_rows, num_kv_heads, num_splits)](
        query, *cache, page_table_LP, lanes_R, positions_R, sinks_H, parts, lse,
        page_table_LP.stride(0), *cache[0].stride()[:3], window or 0, scale * LOG2E.value,
        softcap or 0.0, num_splits,
        GROUP=group, GROUP_PAD=max(_MIN_DOT_ROWS, triton.next_power_of_2(group)),
        SPLIT=SPLIT_TOKENS, IN_SPLITS=num_splits > 1, **_DECODE, **sizes, **pdl_options(),
    )  # fmt: skip
    if num_splits > 1:
        _merge_splits_kernel[(num_rows * num_heads,)](
            parts, lse, positions_R, sinks_H, output, window or 0, num_splits,
            HEADS=num_heads, DIM=dim, DIM_PAD=sizes["DIM_PAD"],
            SPLIT=SPLIT_TOKENS, HAS_WINDOW=window is not None, HAS_SINKS=sinks_H is not None,
            **pdl_options(),
        )  # fmt: skip
    return output


def attend_runs(
    query_THD: Tensor,
    keys_and_values: tuple[Tensor, Tensor],
    runs_N4: Tensor,
    *,
    longest: int,
    scale: float,
    page_table_LP: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend with packed runs of consecutive tokens; each run sees its sequence from the start.

    Args:
        keys_and_values: A layer's `cache`. If `page_table_LP` is `None`: keys and values of the
            packed tokens, each `(T, K, D)`.
        runs_N4: Lane, first packed token, number of tokens and first position, int64, contiguous.
        longest: Tokens of the longest run.
        page_table_LP: Page ids of each lane, int64.

    Returns:
        The output in the query's dtype, 0 for tokens outside all runs. With `with_lse`, also the
        natural logarithm of each query's sum of weights, `(H, T)`, float32, inf for those tokens.
    """
    assert runs_N4.is_contiguous()
    query = query_THD.contiguous()
    num_tokens, num_heads, _ = query.shape
    output = torch.zeros_like(query)
    lse = output
    if with_lse:
        shape = (num_heads, num_tokens)
        lse = torch.full(shape, torch.inf, dtype=torch.float32, device=query.device)
    keys, values = keys_and_values
    if page_table_LP is None:
        keys, values = keys[None], values[None]
    sizes = _sizes(query, keys, window, softcap, sinks_H)
    if page_table_LP is None:
        sizes["PAGE"] = 0
    tiles = triton.cdiv(longest, _QUERY_BLOCK)
    _runs_kernel[(num_heads, len(runs_N4), tiles)](
        query, keys, values, page_table_LP, runs_N4, sinks_H, output, lse,
        0 if page_table_LP is None else page_table_LP.stride(0), *keys.stride()[:3],
        window or 0, scale * LOG2E.value, softcap or 0.0, num_tokens,
        GROUP=num_heads // keys.shape[2], QUERIES=_QUERY_BLOCK, SPLIT=SPLIT_TOKENS,
        HAS_LSE=with_lse, **_PREFILL, **sizes,
    )  # fmt: skip
    return output, lse if with_lse else None


def _sizes(
    query: Tensor, keys: Tensor, window: int | None, softcap: float | None, sinks_H: Tensor | None
) -> dict[str, Any]:
    dim = query.shape[-1]
    dim_pad = max(_MIN_DOT_ROWS, triton.next_power_of_2(dim))
    # Several stages of keys and values must fit into shared memory.
    block = 64 if dim_pad <= 128 else 32
    return {
        "HEADS": query.shape[1],
        "DIM": dim,
        "DIM_PAD": dim_pad,
        "PAGE": keys.shape[1],
        "BLOCK": block if query.dtype.itemsize <= 2 else block // 2,
        "HAS_WINDOW": window is not None,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_SINKS": sinks_H is not None,
    }

"""Write keys and values to KV pages, in Triton; defined by `paged_attention.store_kv`."""

import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.pdl_triton import gdc_wait, pdl_options


@triton.jit
def _store_kv_kernel(
    KEYS, VALUES, K, V, TABLE, LANES, POSITIONS,
    table_stride, page_stride, token_stride, key_stride, value_stride,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write one token's keys and values, `WIDTH` numbers each."""
    gdc_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(POSITIONS + token)
    page = tl.load(TABLE + tl.load(LANES + token) * table_stride + position // PAGE).to(tl.int64)
    offset = page * page_stride + (position % PAGE) * token_stride
    at = tl.arange(0, WIDTH_PAD)
    tl.store(
        K + offset + at, tl.load(KEYS + token * key_stride + at, mask=at < WIDTH), mask=at < WIDTH
    )
    values = tl.load(VALUES + token * value_stride + at, mask=at < WIDTH)
    tl.store(V + offset + at, values, mask=at < WIDTH)


def store_kv(
    keys_TKD: Tensor,
    values_TKD: Tensor,
    cache: tuple[Tensor, Tensor],
    page_table_LP: Tensor,
    lanes_T: Tensor,
    positions_T: Tensor,
) -> None:
    """Write packed keys and values, of any token stride, to the pages of their rows.

    Args:
        cache: A layer's keys and values, each `(pages, page_tokens, K, D)`, any page stride.
        page_table_LP: Page ids of each lane, int64.
        lanes_T: Lane of each token, int64, contiguous.
        positions_T: Position of each token in its row, int64, contiguous.
    """
    assert lanes_T.is_contiguous()
    assert positions_T.is_contiguous()
    num_tokens, num_heads, dim = keys_TKD.shape
    width = num_heads * dim
    keys, values = (
        states if states.stride()[1:] == (dim, 1) else states.contiguous()
        for states in (keys_TKD, values_TKD)
    )
    _store_kv_kernel[(num_tokens,)](
        keys, values, *cache, page_table_LP, lanes_T, positions_T,
        page_table_LP.stride(0), cache[0].stride(0), cache[0].stride(1),
        keys.stride(0), values.stride(0),
        PAGE=cache[0].shape[1], WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width),
        **pdl_options(),
    )  # fmt: skip

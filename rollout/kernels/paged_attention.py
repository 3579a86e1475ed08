"""Attention over KV pages, in plain torch.

Shape letters: N sequences, Q queries a sequence, C context tokens, T packed tokens, R rows of one
token, L lanes, H query heads, K key/value heads, D head size, P pages, S tokens a page. A layer's
`cache` is its keys and its values, each `(P, S, K, D)`.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SPLIT_TOKENS = 2048
"""Context tokens that one decode program attends over."""


def store_kv(
    keys_TKD: Tensor,
    values_TKD: Tensor,
    cache: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor],
) -> None:
    """Write packed keys and values to `places`: page and offset of each token, int64 `(T,)`."""
    for new, cached in zip((keys_TKD, values_TKD), cache, strict=True):
        cached[places] = new.to(cached.dtype)


def gather_kv(
    cache: tuple[Tensor, Tensor], page_table_NP: Tensor, context: int
) -> tuple[Tensor, Tensor]:
    """Read the first `context` keys and values of each sequence, each `(N, C, K, D)`.

    `page_table_NP` is int64, in token order. Entries past a sequence's end are arbitrary.
    """
    page_tokens = cache[0].shape[1]
    tokens_C = torch.arange(context, device=page_table_NP.device)
    pages_NC = page_table_NP[:, tokens_C // page_tokens]
    offsets_C = tokens_C % page_tokens
    return cache[0][pages_NC, offsets_C], cache[1][pages_NC, offsets_C]


def attend(
    query_NQHD: Tensor,
    keys_NCKD: Tensor,
    values_NCKD: Tensor,
    positions_NQ: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention with grouped heads, computed in float32 or wider; returns the query's dtype.

    Args:
        keys_NCKD: Key `i` has position `i`. Keys past a query's position have no influence.
        positions_NQ: Position of each query, int64.
        window: Tokens a query sees, itself included. `None`: all.
        softcap: Scores become `softcap * tanh(scores / softcap)` (Gemma 2).
        sinks_H: Each head's attention sink: a score that takes weight but has no value (gpt-oss).
    """
    num_seqs, num_queries, num_heads, head_dim = query_NQHD.shape
    context, num_kv_heads = keys_NCKD.shape[1:3]
    key_positions = torch.arange(context, device=query_NQHD.device)
    visible_NQC = key_positions <= positions_NQ[..., None]
    if window is not None:
        visible_NQC &= key_positions > positions_NQ[..., None] - window
    # Unseen values can be NaN, and 0 * NaN is NaN: zero them before the product.
    seen_NC11 = visible_NQC.any(dim=1)[..., None, None]
    dtype = torch.promote_types(query_NQHD.dtype, torch.float32)
    values = torch.where(seen_NC11, values_NCKD, 0.0).to(dtype).permute(0, 2, 1, 3)
    keys = keys_NCKD.to(dtype).permute(0, 2, 3, 1)
    # Query heads that share a key head become rows of one product.
    query = query_NQHD.to(dtype).unflatten(2, (num_kv_heads, -1))
    query = query.permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = (query @ keys * scale).unflatten(2, (-1, num_queries))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible_NQC[:, None, None], float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.to(dtype).view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    output = scores.softmax(dim=-1)[..., :context].flatten(2, 3) @ values
    output = output.unflatten(2, (-1, num_queries)).permute(0, 3, 1, 2, 4)
    return output.reshape(num_seqs, num_queries, num_heads, head_dim).to(query_NQHD.dtype)


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
    """Decode on a CPU; arguments are those of `paged_attention_triton.decode`.

    `attend` serves what torch's fused kernel lacks: soft caps, sinks, 16 bits summed up in 32.
    """
    page_table_RP = page_table_LP[lanes_R]
    if query_RHD.dtype == torch.float32 and softcap is None and sinks_H is None:
        return _decode_fused(
            query_RHD, cache, page_table_RP, positions_R, max_context, scale, window
        )
    keys, values = gather_kv(cache, page_table_RP, max_context)
    return attend(
        query_RHD[:, None],
        keys,
        values,
        positions_R[:, None],
        scale=scale,
        window=window,
        softcap=softcap,
        sinks_H=sinks_H,
    )[:, 0]


def _decode_fused(
    query_RHD: Tensor,
    cache: tuple[Tensor, Tensor],
    page_table_RP: Tensor,
    positions_R: Tensor,
    max_context: int,
    scale: float,
    window: int | None,
) -> Tensor:
    page_tokens, num_kv_heads, head_dim = cache[0].shape[1:]
    tokens_C = torch.arange(max_context)
    visible_RC = tokens_C <= positions_R[:, None]
    if window is not None:
        visible_RC &= tokens_C > positions_R[:, None] - window
    # Unseen values can be NaN, and 0 * NaN is NaN: read the query's own token in their place.
    tokens_RC = torch.where(visible_RC, tokens_C, positions_R[:, None])
    pages_RC = page_table_RP.gather(1, tokens_RC // page_tokens)
    rows_a_page = cache[0].stride(0) // (num_kv_heads * head_dim)
    index = (pages_RC * rows_a_page + tokens_RC % page_tokens).flatten()
    keys, values = (
        _token_rows(states).index_select(0, index).view(*tokens_RC.shape, num_kv_heads, head_dim)
        for states in cache
    )
    output = scaled_dot_product_attention(
        query_RHD.unflatten(1, (num_kv_heads, -1)),  # query heads of a key head: one product
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=visible_RC[:, None, None],
        scale=scale,
    )
    return output.flatten(1, 2)


def _token_rows(states_PSKD: Tensor) -> Tensor:
    """A view with one row a token; rows between a layer's pages belong to other layers."""
    num_pages, page_tokens, num_kv_heads, head_dim = states_PSKD.shape
    size = num_kv_heads * head_dim
    rows = (num_pages - 1) * (states_PSKD.stride(0) // size) + page_tokens
    return states_PSKD.as_strided((rows, size), (size, 1))

"""Causal attention over packed sequences by torch's flash kernels, and its backward.

Shape letters: N sequences, T packed tokens, H query heads, K key/value heads, D head size.
"""

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16)


def serves(query_THD: Tensor, softcap: float | None, sinks_H: Tensor | None) -> bool:
    """Whether the kernels support these queries, this kind of attention and this GPU."""
    supported = query_THD.dtype in _DTYPES and query_THD.shape[-1] % 8 == 0
    plain = softcap is None and sinks_H is None
    return supported and plain and torch.cuda.get_device_capability(query_THD.device) >= (8, 0)


def attend_packed(
    query_THD: Tensor,
    keys_TKD: Tensor,
    values_TKD: Tensor,
    starts_N: Tensor,
    *,
    longest: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend within each of N packed sequences; inputs are 16 bit.

    Args:
        starts_N: Packed index of each sequence's first token, int64. Sequences leave no gap.
        longest: Tokens of the longest sequence.
        window: Tokens a query sees, itself included. `None`: all.
    """
    num_tokens = starts_N.new_full((1,), len(query_THD))
    bounds = torch.cat([starts_N, num_tokens]).int()
    # Not the public `varlen_attn`: for grouped heads torch 2.13 requires `enable_gqa`, which 2.11
    # lacks, and each call adds a `zeros` kernel and the checks of `torch.library.custom_op`.
    output, *_ = torch.ops.aten._flash_attention_forward(
        query_THD,
        keys_TKD,
        values_TKD,
        bounds,
        bounds,
        longest,
        longest,
        0.0,  # dropout
        True,  # causal
        False,  # debug mask
        scale=scale,
        **_window(window),
    )
    return output


def backward_packed(
    gradient_THD: Tensor,
    query_THD: Tensor,
    keys_TKD: Tensor,
    values_TKD: Tensor,
    output_THD: Tensor,
    lse_HT: Tensor,
    bounds: Tensor,
    *,
    longest: int,
    scale: float,
    window: int | None = None,
) -> list[Tensor]:
    """Gradients of queries, keys and values, from the output and logsumexp of any forward.

    Args as in `attend_packed`, and:
        lse_HT: Natural logarithm of each query's sum of weights, float32; inf excludes a query.
        bounds: Packed index of each sequence's first token, then T, `(N + 1,)`.
        longest: An upper bound suffices.
    """
    bounds, unused = bounds.int(), bounds.new_zeros(2, dtype=torch.uint64)
    return list(
        torch.ops.aten._flash_attention_backward(
            gradient_THD,
            query_THD,
            keys_TKD,
            values_TKD,
            output_THD,
            lse_HT,
            bounds,
            bounds,
            longest,
            longest,
            0.0,  # dropout
            True,  # causal
            unused,
            unused[0],
            scale=scale,
            **_window(window),
        )
    )


def _window(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}

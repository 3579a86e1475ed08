"""Causal attention over sequences of equal length by cuDNN, and its backward.

On Hopper cuDNN takes half the time of torch's flash kernels. It builds a plan for each new length,
which takes 0.1 s, so it pays off only if lengths recur.

Shape letters: N sequences, T packed tokens, H query heads, K key/value heads, D head size.
"""

import torch
from torch import Tensor


def serves(query_THD: Tensor, window: int | None) -> bool:
    """Whether cuDNN supports queries that `flash.serves` accepts, and is faster on this GPU."""
    hopper = torch.cuda.get_device_capability(query_THD.device) >= (9, 0)
    enabled = torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()
    return hopper and window is None and query_THD.shape[-1] <= 128 and enabled


def attend_rows(
    query_THD: Tensor, keys_TKD: Tensor, values_TKD: Tensor, num_rows: int, scale: float
) -> Tensor:
    """Attend within each of `num_rows` packed sequences of equal length; inputs are 16 bit."""
    packed = (query_THD, keys_TKD, values_TKD)
    states = (_heads_first(x.unflatten(0, (num_rows, -1))) for x in packed)
    output, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *states,
        None,  # bias
        False,  # logsumexp
        0.0,  # dropout
        True,  # causal
        scale=scale,
    )
    return _heads_first(output).flatten(0, 1)


def backward_rows(
    gradient_THD: Tensor,
    query_THD: Tensor,
    keys_TKD: Tensor,
    values_TKD: Tensor,
    output_THD: Tensor,
    lse_HT: Tensor,
    first_N: Tensor,
    *,
    scale: float,
) -> list[Tensor]:
    """Gradients of queries, keys and values, from the output and logsumexp of any forward.

    Inputs are 16 bit and hold N sequences of equal length, padding included. The output is 0 for
    padding.

    Args:
        lse_HT: Natural logarithm of each query's sum of weights, float32; inf for padding.
        first_N: Packed index of the first real token of each sequence, int64. Padding lies before
            it and after the last real token.
    """
    num_rows, num_tokens = len(first_N), len(query_THD) // len(first_N)
    # Rotate each sequence so that all padding is at its end, where no real query sees it.
    steps = torch.arange(num_tokens, device=first_N.device)
    bases = torch.arange(num_rows, device=first_N.device)[:, None] * num_tokens
    order = (bases + (first_N[:, None] - bases + steps) % num_tokens).flatten()

    def rotated(states_TXD: Tensor) -> Tensor:
        return _heads_first(states_TXD[order].unflatten(0, (num_rows, num_tokens)))

    lse_NHT1 = lse_HT[:, order].unflatten(1, (num_rows, num_tokens)).transpose(0, 1)[..., None]
    inputs = (gradient_THD, query_THD, keys_TKD, values_TKD, output_THD)
    unused = order.new_zeros(())
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *map(rotated, inputs),
        lse_NHT1.contiguous(),
        unused,  # random state of dropout
        unused,
        None,  # bias
        None,
        None,
        num_tokens,
        num_tokens,
        0.0,  # dropout
        True,  # causal
        scale=scale,
    )
    flat = (_heads_first(gradient).flatten(0, 1) for gradient in gradients)
    return [torch.empty_like(gradient).index_copy_(0, order, gradient) for gradient in flat]


def _heads_first(states: Tensor) -> Tensor:
    return states.transpose(1, 2)

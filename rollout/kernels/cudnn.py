"""Causal attention over rows of one length by cuDNN, and its backward.

On Hopper cuDNN takes half the time of torch's own flash kernels. It makes a plan for each new
length, which takes a tenth of a second, so it serves where lengths recur.
"""

import torch
from torch import Tensor


def serves(query_THD: Tensor, window: int | None) -> bool:
    """Whether cuDNN knows such heads, and is faster than flash on this GPU.

    Args:
        query_THD: Queries that `flash.serves`.
        window: Tokens a query sees. `None`: all.
    """
    hopper = torch.cuda.get_device_capability(query_THD.device) >= (9, 0)
    return hopper and window is None and query_THD.shape[-1] <= 128 and _enabled()


def attend_rows(
    query_THD: Tensor, keys_TKD: Tensor, values_TKD: Tensor, num_rows: int, scale: float
) -> Tensor:
    """Attend within rows that lie one behind the other, all equally long.

    Args:
        query_THD: Queries, 16 bit.
        keys_TKD: Keys of the same tokens.
        values_TKD: Values of the same tokens.
        num_rows: Rows.
        scale: Multiplies the scores.

    Returns:
        `(T, H, D)`.
    """
    packed = (query_THD, keys_TKD, values_TKD)
    states = (_heads_first(x.unflatten(0, (num_rows, -1))) for x in packed)
    output, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *states,
        None,  # bias
        False,  # logarithms
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
    """Gradients of queries, keys and values, from any forward's output and logarithms.

    Args:
        gradient_THD: Gradient of the output.
        query_THD: Queries, 16 bit, of N equally long rows.
        keys_TKD: Keys.
        values_TKD: Values.
        output_THD: What attention gave, 0 for padding.
        lse_HT: Natural logarithm of each query's sum of weights, float32, inf for padding.
        first_N: First real token of each row; what is before it is padding, like what follows the
            last one.
        scale: Multiplies the scores.
    """
    num_rows, num_tokens = len(first_N), len(query_THD) // len(first_N)
    # Every row is turned until its padding stands at the end, where no real query sees it.
    steps = torch.arange(num_tokens, device=first_N.device)
    bases = torch.arange(num_rows, device=first_N.device)[:, None] * num_tokens
    order = (bases + (first_N[:, None] - bases + steps) % num_tokens).flatten()

    def turned(states_TXD: Tensor) -> Tensor:
        return _heads_first(states_TXD[order].unflatten(0, (num_rows, num_tokens)))

    lse_NHT1 = lse_HT[:, order].unflatten(1, (num_rows, num_tokens)).transpose(0, 1)[..., None]
    unused = order.new_zeros(())
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        turned(gradient_THD),
        turned(query_THD),
        turned(keys_TKD),
        turned(values_TKD),
        turned(output_THD),
        lse_NHT1.contiguous(),
        unused,  # seed of dropout
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
    flat = (_heads_first(gradient).flatten(0, 1) for gradient in found)
    return [torch.empty_like(gradient).index_copy_(0, order, gradient) for gradient in flat]


def _enabled() -> bool:
    return torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()


def _heads_first(states: Tensor) -> Tensor:
    return states.transpose(1, 2)

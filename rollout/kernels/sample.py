"""Sampling by the Gumbel-max trick, in plain torch.

Shape letters: R rows, V vocabulary.
"""

import torch
from torch import Tensor

from rollout.kernels.philox import gumbel


def sample(
    logits_RV: Tensor, temperature_R: Tensor, seeds_R: Tensor, positions_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one token a row from `softmax(logits / temperature)`, by the Gumbel-max trick.

    `argmax(logits / temperature + Gumbel noise)` is such a draw. A temperature of 0
    takes the most likely token, and its log-probability at temperature 1.

    Args:
        logits_RV: Any float dtype.
        temperature_R: float32, at least 0.
        seeds_R: Key of each row's noise, int64.
        positions_R: Position of the token to draw in its row, int64.

    Returns:
        Token ids, int64, and their natural-log probabilities at the temperature over the full
        vocabulary, float32.
    """
    greedy_R1 = (temperature_R == 0)[:, None]
    scaled_RV = logits_RV.float() / torch.where(greedy_R1, 1.0, temperature_R[:, None])
    gumbel_RV = gumbel(seeds_R, positions_R, logits_RV.shape[1])
    tokens_R = (scaled_RV + torch.where(greedy_R1, 0.0, gumbel_RV)).argmax(dim=1)
    logprobs_RV = scaled_RV.log_softmax(dim=1)
    return tokens_R, logprobs_RV.gather(1, tokens_R[:, None])[:, 0]

"""Sampling by the Gumbel-max trick, in plain torch. Shape letters: R rows, V vocabulary."""

import torch
from torch import Tensor

from rollout.kernels.philox import gumbel

_LEAST = torch.finfo(torch.float32).min


def scale(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """Logits divided by the temperature, float32; a temperature of 0 counts as 1.

    The code multiplies by the inverse, as TRL's fused head does: a division rounds differently.
    """
    inverse_R = 1.0 / temperature_R.masked_fill(temperature_R == 0, 1.0)
    return logits_RV.float() * inverse_R[:, None]


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    num_scores: int = 1,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row from `softmax(logits / temperature)`: Gumbel noise, then argmax.

    A temperature of 0 takes the most likely token and scores it at temperature 1.

    Args:
        temperature_R: float32, at least 0.
        seeds_R: Key of each row's noise, int64.
        positions_R: Position of the token to draw in its row, int64.
        num_scores: 1, or 2 to add the entropy.

    Returns:
        Token ids, int64, and float32 scores, `(R, num_scores)`: the token's natural-log probability
        at the temperature over the full vocabulary, and the entropy of that distribution.
    """
    scaled_RV = scale(logits_RV, temperature_R)
    greedy_R1 = (temperature_R == 0)[:, None]
    gumbel_RV = gumbel(seeds_R, positions_R, logits_RV.shape[1])
    tokens_R = (scaled_RV + torch.where(greedy_R1, 0.0, gumbel_RV)).argmax(dim=1)
    return tokens_R, scores_of(scaled_RV, tokens_R, num_scores)


def scores_of(scaled_RV: Tensor, tokens_R: Tensor, num_scores: int) -> Tensor:
    """Log-probability of each row's token, then the entropy if `num_scores` is 2, float32."""
    logprobs_RV = scaled_RV.log_softmax(dim=1)
    scores = [logprobs_RV.gather(1, tokens_R[:, None])[:, 0]]
    if num_scores == 2:
        # The clamp avoids NaN: a masked token would give 0 * -inf.
        scores.append(-(logprobs_RV.exp() * logprobs_RV.clamp(min=_LEAST)).sum(dim=1))
    return torch.stack(scores, dim=1)

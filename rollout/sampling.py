"""Logits to token ids and log-probabilities: which kernel does it."""

import torch
from torch import Tensor

from rollout.kernels import keep as keep_reference
from rollout.kernels import sample as reference


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    num_scores: int = 1,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row; see `rollout.kernels.sample`, whose draws every device repeats."""
    if logits_RV.is_cuda:
        from rollout.kernels import sample_triton as kernel  # Triton is not there on every CPU

        return kernel.sample(logits_RV, temperature_R, seeds_R, positions_R, num_scores)
    return reference.sample(logits_RV, temperature_R, seeds_R, positions_R, num_scores)


def keep(scaled_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """The tokens that top-k, top-p and min-p keep, bool, `(R, V)`; see `rollout.kernels.keep`."""
    if scaled_RV.is_cuda:
        from rollout.kernels import keep_triton as kernel  # Triton is not there on every CPU

        return kernel.keep(scaled_RV, top_k_R, top_p_R, min_p_R)
    return keep_reference.keep(scaled_RV, top_k_R, top_p_R, min_p_R)


def sample_among(
    logits_RV: Tensor,
    among_RV: Tensor,
    temperature_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    num_scores: int = 1,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row from some logits, and score it by others.

    Args:
        logits_RV: What the scores are of: those of the model.
        among_RV: What is drawn from, by the same noise; `-inf` for tokens that are not kept.
        temperature_R: As in `sample`, as are the others.
        seeds_R: Key of each row's noise.
        positions_R: Position of the token to draw in its row.
        num_scores: As in `sample`.

    Returns:
        As `sample`, and the same to the last bit where both logits are.
    """
    tokens_R, scores_RS = sample(logits_RV, temperature_R, seeds_R, positions_R, num_scores)
    drawn_R, _ = sample(among_RV, temperature_R, seeds_R, positions_R)
    both_R2 = logits_RV.gather(1, torch.stack([tokens_R, drawn_R], dim=1))
    scaled_R2 = reference.scale(both_R2, temperature_R)
    # Log-probabilities of one distribution differ as the logits do: not at all, for one token.
    scores_RS[:, 0] += scaled_R2[:, 1] - scaled_R2[:, 0]
    return drawn_R, scores_RS


def kept_mass(logits_RV: Tensor, among_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """Probability, at temperature, of the tokens that a row draws among, float32, `(R,)`."""
    kept_RV = among_RV > -torch.inf
    shares_RV = reference.scale(logits_RV, temperature_R).softmax(dim=1)
    mass_R = shares_RV.masked_fill(~kept_RV, 0.0).sum(dim=1).clamp(max=1.0)
    return mass_R.masked_fill(kept_RV.all(dim=1), 1.0)

"""Logits to token ids and log-probabilities: which kernel does it."""

from torch import Tensor

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

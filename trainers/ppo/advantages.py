"""Per-token rewards, advantages and value targets, as pure functions of tensors.

Shapes: B rows, T completion tokens. `mask` is (B, T), 1 at trainable tokens, which are the tokens
that the policy wrote. Tool output and padding are skipped: they get no reward and no discount, and
their values are never read.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

_LARGEST_LOG_RATIO = 20.0


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) over trainable tokens.

    `delta_t = r_t + gamma * V_next - V_t` and `A_t = delta_t + gamma * lam * A_next`. "Next" is the
    row's next trainable token.

    Args:
        rewards: (B, T).
        values: (B, T), `V_t` of the state before token t.
        lam: A number, or one per row, (B,).
        bootstrap: (B,), the value after each row's last trainable token. `None` means 0.

    Returns:
        Advantages `A` and returns `A + V`, each (B, T) in the dtype of `values`, 0 where masked.
    """
    kept = mask.bool()
    values = torch.where(kept, values, 0.0)
    rewards = torch.where(kept, rewards.to(values.dtype), 0.0)
    end = values.new_zeros(len(values)) if bootstrap is None else bootstrap.to(values.dtype)
    if gamma == 1 and isinstance(lam, float | int) and lam == 1:
        returns = (_suffix_sums(rewards) + end[:, None]) * kept
    else:
        returns = _discounted_returns(rewards, values, kept, gamma, lam, end) * kept
    return returns - values, returns


def _suffix_sums(x: Tensor) -> Tensor:
    return x.flip(1).cumsum(1).flip(1)


def _discounted_returns(
    rewards: Tensor, values: Tensor, kept: Tensor, gamma: float, lam: float | Tensor, end: Tensor
) -> Tensor:
    """`R_t = r_t + gamma * ((1 - lam) * V_next + lam * R_next)`, computed from the last token on.

    A masked token hands `(1 - lam) * V_next + lam * R_next` on unchanged. `end` is (B,), its value
    after the last token.
    """
    lam = torch.as_tensor(lam, dtype=values.dtype, device=values.device)
    # (T, B): each step of the loop reads and writes contiguous memory.
    rewards, values, kept = rewards.t().contiguous(), values.t().contiguous(), kept.t().contiguous()
    returns, following = torch.empty_like(values), end
    for t in reversed(range(len(returns))):
        torch.add(rewards[t], following, alpha=gamma, out=returns[t])
        following = torch.where(kept[t], torch.lerp(values[t], returns[t], lam), following)
    return returns.t().contiguous()


def token_rewards(
    scores: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Per-token rewards: the score at the last trainable token, minus `kl_coef * kl` at each token.

    Args:
        scores: (B,), one reward per completion.
        kl: (B, T), KL estimates in nats.

    Returns:
        (B, T) in the dtype of `scores`, all 0 in a row without trainable tokens.
    """
    rewards = scores[:, None] * at_last(mask)
    return rewards if kl is None else rewards - kl_coef * kl.masked_fill(mask == 0, 0.0)


def at_last(mask: Tensor) -> Tensor:
    """(B, T), true only at each row's last trainable token."""
    kept = mask.bool()
    return kept & (_suffix_sums(kept.long()) == 1)


def bootstrap_values(values_after: Tensor, mask: Tensor, truncated: Tensor) -> Tensor:
    """(B,) values after the last trainable token of truncated rows; 0 for the other rows.

    Args:
        values_after: (B, T), the value of the state after each token.
        truncated: (B,), true if the row was cut off.
    """
    return (values_after * at_last(mask)).sum(1) * truncated


def penalise_missing_eos(scores: Tensor, truncated: Tensor, penalty: float | None) -> Tensor:
    """Subtract `penalty` from the scores of truncated rows. All tensors are (B,)."""
    return scores if penalty is None else scores - penalty * truncated


def kl_estimate(logps: Tensor, ref_logps: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate the KL divergence from the reference at each token, in nats.

    With `d = logp - ref_logp`: k1 is `d`, k2 is `d**2 / 2`, k3 is `exp(-d) - 1 + d` (Schulman 2020,
    "Approximating KL divergence"). k1 and k3 are unbiased on tokens that the policy sampled. k3 is
    never negative.
    """
    difference = logps - ref_logps
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    # Without the bound, one token can make the whole batch infinite. No gradient flows here.
    bounded = difference.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    return bounded.neg().exp() - 1 + difference


def length_adaptive_lam(mask: Tensor, alpha: float) -> Tensor:
    """(B,) float32: `max(0, 1 - 1 / (alpha * length))` of each row (VAPO, Yue 2025, eq. 8)."""
    return 1 - 1 / (alpha * mask.sum(1).float()).clamp(min=1.0)


def _one_rank(local_sum: Tensor) -> Tensor:
    return local_sum


def whiten(x: Tensor, mask: Tensor, sum_ranks: Callable[[Tensor], Tensor] = _one_rank) -> Tensor:
    """Shift and scale `x`, (B, T), to mean 0 and variance 1 over the trainable tokens of all ranks.

    `sum_ranks` sums a tensor over the ranks. Masked tokens become 0. If all values are equal, all
    become 0.
    """
    mean, variance = masked_moments(x, mask, sum_ranks)
    return (x - mean) * torch.rsqrt(variance + 1e-8) * mask


def masked_moments(
    x: Tensor, mask: Tensor, sum_ranks: Callable[[Tensor], Tensor] = _one_rank
) -> tuple[Tensor, Tensor]:
    """Mean and variance over the trainable tokens of all ranks; 0 and 0 if there are none."""
    kept = mask.bool()
    x = torch.where(kept, x, 0.0)
    count = sum_ranks(kept.sum()).clamp(min=1)
    mean = sum_ranks(x.sum()) / count
    # Two passes: E[x**2] - E[x]**2 would lose a small variance in rounding.
    variance = sum_ranks(((x - mean) * kept).square().sum()) / count
    return mean, variance

"""What each token of a completion was worth: rewards a token, advantages and value targets.

Pure functions of tensors. Shapes: B rows, T positions of the completion. A mask is 1 where a token
is trainable, which is to say the policy's own. Between two such tokens nothing happens: what a tool
wrote, and padding, is neither rewarded nor discounted, and no value of theirs is read.
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
    """Generalised advantage estimates (Schulman et al. 2016, eq. 16) over trainable tokens.

    `delta_t = r_t + gamma * V_next - V_t` and `A_t = delta_t + gamma * lam * A_next`, where "next"
    is the row's next trainable token.

    Args:
        rewards: (B, T), by token.
        values: (B, T), of the state before each token.
        mask: (B, T), 1 where a token is trainable.
        gamma: Discount a token.
        lam: One number, or (B,) of them.
        bootstrap: (B,), the value after each row's last trainable token; 0 where it is `None`.

    Returns:
        Advantages, and returns `A + V`, each (B, T) of the values' dtype and 0 where masked.
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
    """(B, T) of `R_t = r_t + gamma * ((1 - lam) * V_next + lam * R_next)`, in a loop from the end.

    A masked token passes on what it was given, so "next" needs no search. `end` is (B,), what the
    last token is given.
    """
    lam = torch.as_tensor(lam, dtype=values.dtype, device=values.device)
    # (T, B): what one step of the loop reads and writes is contiguous.
    rewards, values, kept = rewards.t().contiguous(), values.t().contiguous(), kept.t().contiguous()
    returns, passed_on = torch.empty_like(values), end
    for t in reversed(range(len(returns))):
        torch.add(rewards[t], passed_on, alpha=gamma, out=returns[t])
        passed_on = torch.where(kept[t], torch.lerp(values[t], returns[t], lam), passed_on)
    return returns.t().contiguous()


def token_rewards(
    scores: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Put each row's score on its last trainable token, and a price on leaving the reference.

    Args:
        scores: (B,), one reward a completion.
        mask: (B, T), 1 where a token is trainable.
        kl: (B, T), an estimate a token, or `None`.
        kl_coef: What a nat of it costs.

    Returns:
        (B, T) of the scores' dtype; a row without trainable tokens has no reward.
    """
    rewards = scores[:, None] * at_last(mask)
    return rewards if kl is None else rewards - kl_coef * kl.masked_fill(mask == 0, 0.0)


def at_last(mask: Tensor) -> Tensor:
    """(B, T), true at each row's last trainable token, and nowhere in a row that has none."""
    kept = mask.bool()
    return kept & (_suffix_sums(kept.long()) == 1)


def bootstrap_values(values_after: Tensor, mask: Tensor, truncated: Tensor) -> Tensor:
    """The value of going on, for rows that were cut off.

    Args:
        values_after: (B, T), of the state after each token.
        mask: (B, T), 1 where a token is trainable.
        truncated: (B,), true where a row did not end by itself.

    Returns:
        (B,), 0 for rows that did.
    """
    return (values_after * at_last(mask)).sum(1) * truncated


def penalise_missing_eos(scores: Tensor, truncated: Tensor, penalty: float | None) -> Tensor:
    """Take a penalty from the scores of rows that did not end by themselves.

    Args:
        scores: (B,).
        truncated: (B,), true for such a row.
        penalty: A positive number makes them worse; `None` for none.

    Returns:
        (B,).
    """
    return scores if penalty is None else scores - penalty * truncated


def kl_estimate(logps: Tensor, ref_logps: Tensor, estimator: KLEstimator) -> Tensor:
    """The divergence from the reference, by token (Schulman 2020, "Approximating KL divergence").

    With `d = logp - ref_logp`: k1 is `d`, k2 is `d**2 / 2`, k3 is `exp(-d) - 1 + d`. Over tokens of
    the policy k1 and k3 have the divergence as their mean, and k3 is never negative.

    Args:
        logps: The policy's, natural logarithms, of any shape.
        ref_logps: The reference's, of the same shape.
        estimator: Which of the three.

    Returns:
        Nats, of that shape.
    """
    difference = logps - ref_logps
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    # One token must not overflow the batch; its gradient is nobody's here.
    bounded = difference.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    return bounded.neg().exp() - 1 + difference


def length_adaptive_lam(mask: Tensor, alpha: float) -> Tensor:
    """`1 - 1 / (alpha * length)`, at least 0 (VAPO, Yue et al. 2025, eq. 8).

    Args:
        mask: (B, T), 1 where a token is trainable.
        alpha: Shorter rows than `1 / alpha` tokens have 0.

    Returns:
        (B,), float32.
    """
    return 1 - 1 / (alpha * mask.sum(1).float()).clamp(min=1.0)


def _same(sums: Tensor) -> Tensor:
    return sums


def whiten(x: Tensor, mask: Tensor, sum_ranks: Callable[[Tensor], Tensor] = _same) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over the trainable tokens of all ranks.

    Args:
        x: (B, T).
        mask: (B, T), 1 where a token is trainable.
        sum_ranks: Sums a tensor over the ranks.

    Returns:
        (B, T), 0 where masked, and everywhere if all values are the same.
    """
    mean, variance = masked_moments(x, mask, sum_ranks)
    return (x - mean) * torch.rsqrt(variance + 1e-8) * mask


def masked_moments(
    x: Tensor, mask: Tensor, sum_ranks: Callable[[Tensor], Tensor] = _same
) -> tuple[Tensor, Tensor]:
    """Mean and variance over the trainable tokens of all ranks; 0 and 0 where there are none."""
    kept = mask.bool()
    x = torch.where(kept, x, 0.0)
    count = sum_ranks(kept.sum()).clamp(min=1)
    mean = sum_ranks(x.sum()) / count
    # A second pass: the difference of two large sums would lose a small variance.
    variance = sum_ranks(((x - mean) * kept).square().sum()) / count
    return mean, variance

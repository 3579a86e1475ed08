"""Advantages against hand-computed numbers and against their definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.ppo.advantages import (
    bootstrap_values,
    gae,
    kl_estimate,
    length_adaptive_lam,
    masked_moments,
    penalise_missing_eos,
    token_rewards,
    whiten,
)

DOUBLE = torch.float64
REWARDS = torch.tensor([[0.0, 0.0, 1.0]], dtype=DOUBLE)
VALUES = torch.tensor([[0.5, 0.6, 0.7]], dtype=DOUBLE)


def close(actual, wanted, **tolerance):
    torch.testing.assert_close(actual, torch.as_tensor(wanted, dtype=actual.dtype), **tolerance)


def by_definition(rewards, values, mask, gamma, lam, bootstrap):
    """`A_t = sum_j (gamma * lam)**j * delta_(t+j)` over each row's trainable tokens."""
    actual = torch.zeros_like(values)
    for row, kept in enumerate(mask):
        places = kept.nonzero().flatten().tolist()
        after = [*values[row, places].tolist(), bootstrap[row].item()]
        deltas = [
            rewards[row, place].item() + gamma * after[k + 1] - after[k]
            for k, place in enumerate(places)
        ]
        for k, place in enumerate(places):
            actual[row, place] = sum(
                (gamma * lam[row].item()) ** j * delta for j, delta in enumerate(deltas[k:])
            )
    return actual


@st.composite
def batches(draw):
    """Random rewards, values, masks (the first row's is empty), one lambda per row, bootstraps."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 80))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=DOUBLE)

    mask = (torch.rand(rows, width, generator=generator) > draw(st.floats(0, 0.9))).long()
    mask[0] = mask[0] * draw(st.integers(0, 1))
    lam = torch.rand(rows, generator=generator, dtype=DOUBLE)
    return normal(rows, width), normal(rows, width), mask, lam, normal(rows)


@pytest.mark.parametrize(
    ("gamma", "lam", "wanted"),
    [
        (1.0, 0.95, [0.46575, 0.385, 0.3]),
        (1.0, 1.0, [0.5, 0.4, 0.3]),
        (1.0, 0.0, [0.1, 0.1, 0.3]),
        (0.9, 0.8, [0.21712, 0.246, 0.3]),
    ],
)
def test_three_tokens_worked_out_by_hand(gamma, lam, wanted):
    actual, returns = gae(REWARDS, VALUES, torch.ones(1, 3), gamma, lam)
    close(actual, [wanted])
    close(returns, VALUES + actual)


@given(batches(), st.floats(0.5, 1.0))
def test_the_loop_is_the_definition(batch, gamma):
    rewards, values, mask, lam, bootstrap = batch
    actual, returns = gae(rewards, values, mask, gamma, lam, bootstrap)
    close(actual, by_definition(rewards, values, mask, gamma, lam, bootstrap))
    close(returns, (actual + values) * mask)


@given(batches())
def test_the_closed_form_is_the_loop(batch):
    rewards, values, mask, lam, bootstrap = batch
    closed = gae(rewards, values, mask, 1.0, 1.0, bootstrap)
    looped = gae(rewards, values, mask, 1.0, torch.ones_like(lam), bootstrap)
    for actual, wanted in zip(closed, looped, strict=True):
        close(actual, wanted)


def test_float32_is_close_to_float64():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4, 3000, generator=generator, dtype=DOUBLE)
    mask = torch.rand(4, 3000, generator=generator) > 0.2
    wanted, _ = gae(rewards, values, mask, 0.999, 0.95)
    actual, _ = gae(rewards.float(), values.float(), mask, 0.999, 0.95)
    close(actual, wanted, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("lam", [1.0, 0.9])
def test_the_past_has_no_part_in_an_advantage(lam):
    rewards, values = torch.randn(2, 1, 9, dtype=DOUBLE)
    before, _ = gae(rewards, values, torch.ones(1, 9), 1.0, lam)
    rewards[0, :4], values[0, :4] = 5.0, -3.0
    after, _ = gae(rewards, values, torch.ones(1, 9), 1.0, lam)
    close(after[0, 4:], before[0, 4:])
    assert not torch.isclose(after[0, :4], before[0, :4]).any()


@pytest.mark.parametrize("lam", [1.0, 0.9])
def test_what_is_masked_changes_nothing_wherever_it_stands(lam):
    rewards, values = torch.randn(2, 2, 6, dtype=DOUBLE)
    wanted, _ = gae(rewards, values, torch.ones(2, 6), 1.0, lam)
    places = [0, 3, 4, 7, 8, 11]
    wide_rewards, wide_values = torch.randn(2, 2, 15, dtype=DOUBLE)
    wide_values[:, 13] = float("nan")  # padding may hold anything
    mask = torch.zeros(2, 15)
    mask[:, places], wide_rewards[:, places], wide_values[:, places] = 1, rewards, values
    actual, returns = gae(wide_rewards, wide_values, mask, 1.0, lam)
    close(actual[:, places], wanted)
    assert not actual[mask == 0].any()
    assert not returns[mask == 0].any()


@given(batches())
def test_rows_do_not_see_each_other(batch):
    rewards, values, mask, lam, bootstrap = batch
    together, _ = gae(rewards, values, mask, 0.97, lam, bootstrap)
    alone = [gae(*(x[i : i + 1] for x in batch[:3]), 0.97, lam[i : i + 1], bootstrap[i : i + 1])[0]
             for i in range(len(rewards))]  # fmt: skip
    close(torch.cat(alone), together)


def test_rewards_are_at_the_last_trainable_token():
    """Neither on padding nor on tool output after it."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    actual = token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    close(actual, [[0, 1.0, 0, 0], [0, 0, 2.0, 0], [0, 0, 0, 0], [0, 0, 0, 4.0]])


def test_divergence_is_paid_for_by_trainable_tokens_alone():
    mask = torch.tensor([[1, 0, 1, 0]])
    kl = torch.tensor([[0.5, 9.0, 0.25, float("nan")]])
    actual = token_rewards(torch.tensor([1.0]), mask, kl, kl_coef=0.2)
    close(actual, [[-0.1, 0.0, 0.95, 0.0]])


@pytest.mark.parametrize(("estimator", "wanted"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.106531)])
def test_estimators_of_the_divergence_worked_out_by_hand(estimator, wanted):
    actual = kl_estimate(torch.tensor(-1.0), torch.tensor(-1.5), estimator)
    close(actual, wanted, atol=1e-6, rtol=0)


def test_k1_and_k3_have_the_divergence_as_their_mean():
    """Enumerates a vocabulary of seven tokens."""
    logps, ref_logps = torch.randn(2, 7, dtype=DOUBLE).log_softmax(-1)
    divergence = torch.nn.functional.kl_div(ref_logps, logps, log_target=True, reduction="sum")
    for estimator in ("k1", "k3"):
        mean = (logps.exp() * kl_estimate(logps, ref_logps, estimator)).sum()
        close(mean, divergence, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k2", False), ("k3", False)])
def test_what_the_reward_pays_for_k1_is_the_divergences_gradient(estimator, unbiased):
    """Enumerates the policy gradient over a vocabulary of seven tokens."""
    generator = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 7, generator=generator, dtype=DOUBLE)
    logps, ref_logps = logits.requires_grad_().log_softmax(-1), reference.log_softmax(-1)
    divergence = (logps.exp() * (logps - ref_logps)).sum()
    (wanted,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    price = kl_estimate(logps, ref_logps, estimator).detach()
    (actual,) = torch.autograd.grad((logps.exp().detach() * price * logps).sum(), logits)
    assert torch.allclose(actual, wanted, atol=1e-12, rtol=0) == unbiased


def test_one_impossible_token_does_not_overflow():
    assert kl_estimate(torch.tensor(-200.0), torch.tensor(0.0), "k3").isfinite()


def test_truncated_rows_go_on_from_the_value_after_their_last_token():
    values_after = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    actual = bootstrap_values(values_after, mask, torch.tensor([True, True, True]))
    close(actual, [2.0, 6.0, 0.0])
    close(bootstrap_values(values_after, mask, torch.tensor([False] * 3)), [0.0] * 3)


def test_a_missing_stop_costs_its_penalty():
    scores, truncated = torch.tensor([1.0, 1.0]), torch.tensor([True, False])
    close(penalise_missing_eos(scores, truncated, 0.3), [0.7, 1.0])
    assert penalise_missing_eos(scores, truncated, None) is scores


@pytest.mark.parametrize(
    ("length", "wanted"), [(10, 0.0), (20, 0.0), (100, 0.8), (1000, 0.98), (16384, 0.998779)]
)
def test_lambda_grows_with_the_length(length, wanted):
    mask = torch.zeros(1, 20000)
    mask[:, :length] = 1
    close(length_adaptive_lam(mask, 0.05), [wanted], atol=1e-6, rtol=0)


def test_whitened_is_mean_0_and_variance_1_where_trainable():
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(8, 20, generator=generator) > 0.4
    actual = whiten(100 + torch.randn(8, 20, generator=generator, dtype=DOUBLE), mask)
    assert actual[mask].mean().abs() < 1e-9
    assert actual[mask].var(correction=0) == pytest.approx(1, abs=1e-6)
    assert not actual[~mask].any()


def test_whitening_counts_the_tokens_of_all_ranks():
    """Two ranks that exchange sums give the result of one rank with all rows."""
    x = torch.randn(4, 6, dtype=DOUBLE)
    mask = torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0], [0] * 6, [1, 0, 1, 0, 1, 0]])
    wanted = whiten(x, mask)
    others = [mask[2:].sum(), (x[2:] * mask[2:]).sum()]
    mean = (x * mask).sum() / mask.sum()
    others.append((((x - mean) * mask)[2:] ** 2).sum())
    told = iter(others)
    close(whiten(x[:2], mask[:2], lambda sums: sums + next(told)), wanted[:2])


def test_nothing_to_whiten_gives_zeros():
    assert not whiten(torch.randn(2, 3), torch.zeros(2, 3)).any()
    assert not whiten(torch.full((2, 3), 7.0), torch.ones(2, 3)).any()
    mean, variance = masked_moments(torch.randn(2, 3), torch.zeros(2, 3))
    assert (mean, variance) == (0, 0)

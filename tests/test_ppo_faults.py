"""Inject faults that a rising reward may not show; a test of this suite must catch each.

The shifted advantage and the reward on padding even learn as well as correct code.
"""

from dataclasses import replace
from functools import partial

import pytest
import test_critic
import test_ppo
import torch
import trl_trainer

from rollout.model import twin
from trainers import PPOTrainer, generator
from trainers.ppo import trainer as ppo
from trainers.ppo.critic import Critic


def test_rollouts_are_scored_as_the_trainer_scores_them(tmp_path):
    """With the weights of each update and the trainer's temperature."""
    trainer = test_ppo.build(tmp_path, temperature=0.8)
    trainer.train()
    gaps = trl_trainer.logged(trainer, "rollout/logp_gap_max")
    assert len(gaps) == 3
    assert max(gaps) < 1e-4


def shift_the_advantage(gae):
    return lambda *args: tuple(each.roll(1, 1) for each in gae(*args))


def reward_the_padding(_):
    """The reward is one token after the last, as in TRL's former PPO trainer."""

    def late(scores, mask, kl, kl_coef):
        lengths = mask.sum(1, keepdim=True).clamp(max=mask.shape[1] - 1)
        return torch.zeros(mask.shape).scatter(1, lengths, scores[:, None])

    return late


def reward_the_first_token(_):
    def early(scores, mask, kl, kl_coef):
        return torch.zeros(mask.shape).index_add(1, torch.tensor([0]), scores[:, None])

    return early


def read_the_action(values):
    """A token's value is that of the state after it."""

    def leaking(*args):
        said = values(*args)
        return torch.cat([said[:, 1:], said[:, -1:]], 1)

    return leaking


def roll_out_stale_weights(bind):
    """The engine runs on a copy of the initial weights."""
    seen = set()

    def bound_once(base, live):
        if base not in seen:
            seen.add(base)
            bind(base, live)
            for parameter in base.parameters():
                parameter.data = parameter.data.clone()

    return bound_once


def roll_out_at_another_temperature(row_sampling):
    return lambda *args: replace(row_sampling(*args), temperature=1.0)


def learn_values_of_padding(learn):
    return lambda critic, batch: learn(critic, batch._replace(mask=torch.ones_like(batch.mask)))


def pay_the_divergence_twice(_):
    return PPOTrainer.__mro__[1]._compute_loss


REWARDED = test_ppo.test_a_zero_critic_hands_every_token_its_rows_reward
BEFORE = test_ppo.test_an_advantage_belongs_to_the_state_before_its_token
SCORED = test_rollouts_are_scored_as_the_trainer_scores_them
PAID = test_ppo.test_divergence_is_paid_in_the_reward_and_not_in_the_loss
NOT_CLOSE, GAP = "Tensor-likes are not close", r"assert \d\.\d+ < 0.0001"


@pytest.mark.parametrize(
    ("fault", "owner", "name", "guard", "message"),
    [
        (shift_the_advantage, ppo, "gae", REWARDED, NOT_CLOSE),
        (reward_the_padding, ppo, "token_rewards", REWARDED, NOT_CLOSE),
        (reward_the_first_token, ppo, "token_rewards", REWARDED, NOT_CLOSE),
        (read_the_action, Critic, "values", BEFORE, NOT_CLOSE),
        (roll_out_stale_weights, twin, "bind", SCORED, GAP),
        (roll_out_at_another_temperature, generator, "row_sampling", SCORED, GAP),
        (
            learn_values_of_padding,
            Critic,
            "learn",
            lambda _: test_critic.test_what_is_masked_teaches_nothing(),
            "assert False",
        ),
        (
            pay_the_divergence_twice,
            PPOTrainer,
            "_compute_loss",
            partial(PAID, kind=PPOTrainer),
            "assert False",
        ),
    ],
)
def test_a_fault_is_caught(tmp_path, monkeypatch, fault, owner, name, guard, message):
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    with pytest.raises(AssertionError, match=message):
        guard(tmp_path)

"""Faults that a rising reward may not show, put in one by one: the test that guards fails.

Two of them, the shifted advantage and the reward on padding, learn as well as none. What guards is
a test of this suite, run here with the fault and where it stands without.
"""

from dataclasses import replace
from functools import partial

import pytest
import test_critic
import test_ppo
import torch
import trl_trainer

from rollout.model.twin import Twin
from trainers import PPOTrainer, generator
from trainers.ppo import advantages
from trainers.ppo import trainer as ppo
from trainers.ppo.critic import Critic

LARGEST_GAP = 1e-4
NOT_CLOSE = "Tensor-likes are not close"


def test_rollouts_are_scored_as_the_trainer_scores_them(tmp_path):
    """By the weights of each update, and at the trainer's own temperature."""
    trainer = test_ppo.build(tmp_path, temperature=0.8)
    trainer.train()
    gaps = trl_trainer.logged(trainer, "rollout/logp_gap_max")
    assert len(gaps) == 3
    assert max(gaps) < LARGEST_GAP


def shift_the_advantage(patch):
    def shifted(*args):
        return tuple(each.roll(1, 1) for each in advantages.gae(*args))

    patch.setattr(ppo, "gae", shifted)


def reward_the_padding(patch):
    """One token behind the last, as TRL's former PPO trainer did, or at the end of a full row."""

    def late(scores, mask, kl, kl_coef):
        lengths = mask.sum(1, keepdim=True).clamp(max=mask.shape[1] - 1)
        return torch.zeros(mask.shape).scatter(1, lengths, scores[:, None])

    patch.setattr(ppo, "token_rewards", late)


def reward_the_first_token(patch):
    def early(scores, mask, kl, kl_coef):
        return torch.zeros(mask.shape).index_add(1, torch.tensor([0]), scores[:, None])

    patch.setattr(ppo, "token_rewards", early)


def read_the_action(patch):
    """The value of a token is that of the state behind it."""
    values = Critic.values

    def leaking(critic, ids, attention, num_tokens):
        found = values(critic, ids, attention, num_tokens)
        return torch.cat([found[:, 1:], found[:, -1:]], 1)

    patch.setattr(Critic, "values", leaking)


def roll_out_stale_weights(patch):
    """The engine runs a copy of the weights that it began with."""
    bind, seen = Twin._bind, set()

    def bound_once(twin):
        if twin not in seen:
            seen.add(twin)
            bind(twin)
            for parameter in twin.base.parameters():
                parameter.data = parameter.data.clone()

    patch.setattr(Twin, "_bind", bound_once)


def roll_out_at_another_temperature(patch):
    asked = generator.row_sampling
    patch.setattr(generator, "row_sampling", lambda *args: replace(asked(*args), temperature=1.0))


def train_what_a_tool_wrote(patch):
    scores_and_mask = PPOTrainer._scores_and_mask

    def forgetful(trainer, scored):
        kept = {name: each for name, each in scored.items() if name != "tool_mask"}
        return scores_and_mask(trainer, kept)

    patch.setattr(PPOTrainer, "_scores_and_mask", forgetful)


def learn_values_of_padding(patch):
    losses = Critic._losses

    def unmasked(critic, piece):
        return losses(critic, piece._replace(mask=torch.ones_like(piece.mask)))

    patch.setattr(Critic, "_losses", unmasked)


def pay_the_divergence_twice(patch):
    patch.setattr(PPOTrainer, "_compute_loss", PPOTrainer.__mro__[1]._compute_loss)


GUARDS = {
    shift_the_advantage: (
        test_ppo.test_a_zero_critic_hands_every_token_its_rows_reward,
        NOT_CLOSE,
    ),
    reward_the_padding: (
        test_ppo.test_a_zero_critic_hands_every_token_its_rows_reward,
        NOT_CLOSE,
    ),
    reward_the_first_token: (
        test_ppo.test_a_zero_critic_hands_every_token_its_rows_reward,
        NOT_CLOSE,
    ),
    read_the_action: (
        test_ppo.test_an_advantage_belongs_to_the_state_before_its_token,
        NOT_CLOSE,
    ),
    roll_out_stale_weights: (
        test_rollouts_are_scored_as_the_trainer_scores_them,
        r"assert \d\.\d+ < 0.0001",
    ),
    roll_out_at_another_temperature: (
        test_rollouts_are_scored_as_the_trainer_scores_them,
        r"assert \d\.\d+ < 0.0001",
    ),
    train_what_a_tool_wrote: (
        test_ppo.test_what_a_tool_wrote_moves_neither_policy_nor_critic,
        "assert not tensor",
    ),
    learn_values_of_padding: (
        lambda _: test_critic.test_what_is_masked_teaches_nothing(),
        "assert False",
    ),
    pay_the_divergence_twice: (
        partial(
            test_ppo.test_divergence_is_paid_in_the_reward_and_not_in_the_loss, kind=PPOTrainer
        ),
        "assert False",
    ),
}


@pytest.mark.parametrize("fault", GUARDS, ids=lambda fault: fault.__name__)
def test_a_fault_is_caught(tmp_path, monkeypatch, fault):
    guard, message = GUARDS[fault]
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        guard(tmp_path)

"""PPO on stock TRL: what the policy's loss, the critic and the log receive."""

from statistics import mean

import pytest
import run_length
import tiny
import torch
import trl_trainer
from datasets import Dataset
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig
from trl.kernels import chunked_logprob

from rollout import ConfigError, UnsupportedTrainer
from rollout.exact.attention import EXACT_ATTENTION
from trainers import (
    PPOTrainer,
    RolloutConfig,
    RolloutGRPOTrainer,
    RolloutPPOConfig,
    RolloutPPOTrainer,
)


class Constant(torch.nn.Module):
    """A critic with one value for every state. Set its learning rate to 0 to keep the value."""

    def __init__(self, value=0.0):
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(value))

    def forward(self, input_ids, attention_mask, num_values):
        return self.value.expand(len(input_ids), num_values)


STOPS = [tiny.EOS, *range(20, 30)]


def often_stopping():
    """A model with about a fifth of its tokens as EOS."""
    model = tiny.build()
    model.generation_config.eos_token_id = STOPS
    return model


def build(tmp_path, kind=RolloutPPOTrainer, config=RolloutPPOConfig, **changes):
    """A trainer on the CPU; `changes` go to its config or its constructor."""
    own = ("value_model", "model", "reward_funcs", "processing_class", "train_dataset")
    own += ("peft_config", "tools", "environment_factory")
    given = {name: changes.pop(name) for name in own if name in changes}
    if issubclass(kind, RolloutPPOTrainer | RolloutGRPOTrainer):
        given["rollout"] = changes.pop("rollout", RolloutConfig(max_rows=64, page_tokens=4))
    arguments = {**trl_trainer.ARGUMENTS, "output_dir": str(tmp_path), **changes}
    defaults = {
        "model": often_stopping(),
        "reward_funcs": trl_trainer.reward,
        "train_dataset": tiny.dataset(),
        "processing_class": tiny.tokenizer(),
    }
    trainer = kind(args=config(**arguments), eval_dataset=tiny.dataset(8), **{**defaults, **given})
    trainer.remove_callback(PrinterCallback)
    return trainer


def rollouts_of(trainer):
    """A list that each rollout of the trainer is appended to, as handed to the loss."""
    score, rollouts = trainer._generate_and_score_completions, []

    def spying(inputs):
        scored = score(inputs)
        rollouts.append(dict(scored))
        return scored

    trainer._generate_and_score_completions = spying
    return rollouts


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_it_trains_on_the_engines_rollouts_and_logs_what_they_were_worth(tmp_path):
    trainer = build(tmp_path, value_epochs=2, value_clip=0.2)
    trainer.model.generate = None  # TRL would call it without the engine
    policy, critic = weights(trainer.model), weights(trainer.critic.model)
    rollouts = rollouts_of(trainer)
    trainer.train()
    for scored in rollouts:
        whitened = scored["advantages"][scored["completion_mask"].bool()]
        assert whitened.mean().abs() < 1e-5
        assert whitened.var(correction=0).item() == pytest.approx(1, abs=1e-3)
    assert not torch.equal(weights(trainer.model), policy)
    assert not torch.equal(weights(trainer.critic.model), critic)
    names = "value/loss value/mean value/explained_variance value/clip_ratio value/grad_norm "
    names += "value/lr returns/mean advantage/mean_raw advantage/std_raw reward entropy "
    names += "rollout/generated_tok_s rollout/logp_gap"
    for name in names.split():
        assert len(trl_trainer.logged(trainer, name)) == 3, name
    assert trl_trainer.logged(trainer, "value/mean")[0] == 0  # the head is zero at first
    assert trl_trainer.logged(trainer, "value/lr") == [5e-2] * 3
    assert not trl_trainer.logged(trainer, "frac_reward_zero_std")


def test_evaluation_judges_and_teaches_nobody(tmp_path):
    trainer = build(tmp_path)
    critic = weights(trainer.critic.model)
    logged = trainer.evaluate()
    assert "eval_value/mean" in logged
    assert "eval_value/loss" not in logged
    assert torch.equal(weights(trainer.critic.model), critic)


def test_trl_generates_by_itself_for_the_plain_trainer(tmp_path):
    trainer = build(tmp_path, PPOTrainer)
    trainer.train()
    assert len(trl_trainer.logged(trainer, "value/loss")) == 3
    assert not trl_trainer.logged(trainer, "rollout/generated_tok_s")


@pytest.mark.parametrize("batch", [15, 1])
def test_any_number_of_rows_may_be_a_batch(tmp_path, batch):
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    sizes = {"per_device_train_batch_size": batch, "eval_strategy": "steps", "eval_steps": 9}
    config = RolloutPPOConfig(**arguments, **sizes, gradient_accumulation_steps=3)
    assert (config.num_generations, config.num_generations_eval) == (1, None)
    assert config.generation_batch_size == 3 * batch
    with pytest.raises(ConfigError, match="one completion only; raise per_device_train_batch_size"):
        RolloutPPOConfig(**arguments, per_device_train_batch_size=1)


def test_exact_mode_serves_ppo_as_well(tmp_path):
    exact = RolloutConfig(max_rows=64, page_tokens=4, on_policy="exact")
    trainer = build(tmp_path, rollout=exact, max_steps=1)
    assert trainer.model.config._attn_implementation == EXACT_ATTENTION
    trainer.train()
    assert trl_trainer.logged(trainer, "rollout/logp_gap_max")[0] < 1e-5


def test_a_zero_critic_hands_every_token_its_rows_reward(tmp_path):
    """Catches the faults `advantage shifted by one` and `reward on padding`."""
    fixed = {"value_model": Constant(), "value_learning_rate": 0.0}
    trainer = build(tmp_path, whiten_advantages=False, **fixed)
    rollouts = rollouts_of(trainer)
    trainer.train()
    for scored in rollouts:
        ids, mask = scored["completion_ids"], scored["completion_mask"]
        rows = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
        rewards = torch.tensor(trl_trainer.reward(rows))
        assert mask.sum() < mask.numel()  # some row is shorter than another
        torch.testing.assert_close(scored["advantages"], rewards[:, None] * mask)


@pytest.mark.parametrize(("same", "times"), [(0.3, 0), (None, 3)])
def test_explained_is_a_share_of_returns_that_differ(tmp_path, same, times):
    def judge(completion_ids, **columns):
        """Small numbers with a variance near 1e-12."""
        rewards = trl_trainer.reward(completion_ids)
        return [1e-6 * each if same is None else same for each in rewards]

    fixed = {"value_model": Constant(), "value_learning_rate": 0.0}
    trainer = build(tmp_path, reward_funcs=judge, **fixed)
    trainer.train()
    explained = trl_trainer.logged(trainer, "value/explained_variance")
    assert explained == [pytest.approx(0, abs=1e-3)] * times


def test_an_advantage_belongs_to_the_state_before_its_token(tmp_path):
    """With lambda 0 it is `r_t + V_{t+1} - V_t`; the values come from a plain forward per row."""
    trainer = build(tmp_path, lam=0.0, whiten_advantages=False, max_steps=1)
    torch.nn.init.normal_(trainer.critic.model.head.weight)
    model, values = trainer.critic.model, []
    rollouts = rollouts_of(trainer)
    learn = trainer.critic.learn

    def told(batch):
        for row, attention in zip(batch.input_ids, batch.attention_mask, strict=True):
            ids = row[attention.bool()][None]
            with torch.no_grad():
                values.append(model(ids, torch.ones_like(ids), ids.shape[1])[0])
        return learn(batch)

    trainer.critic.learn = told
    trainer.train()
    (scored,) = rollouts
    for row, value in enumerate(values):
        count = int(scored["completion_mask"][row].sum())
        before, after = value[-count - 1 : -1], value[-count:].clone()
        after[-1] = trl_trainer.reward([scored["completion_ids"][row, :count].tolist()])[0]
        found_here = scored["advantages"][row, :count]
        torch.testing.assert_close(found_here, after - before, atol=1e-4, rtol=1e-4)


def gradient(trainer, scored):
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model, scored).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def test_a_critic_that_knows_the_groups_mean_is_grpo_without_scaling(tmp_path):
    """With one group, gamma = lambda = 1 and no whitening, the policy's gradient is GRPO's."""
    shared = {"num_generations": 8, "max_steps": 1, "beta": 0.0}
    plain = build(tmp_path, RolloutGRPOTrainer, GRPOConfig, scale_rewards="none", **shared)
    rollouts = rollouts_of(plain)
    plain.train()
    average = trl_trainer.logged(plain, "reward")[0]
    critic = Constant(average)
    ours = build(tmp_path, value_model=critic, whiten_advantages=False, **shared)
    judged = rollouts_of(ours)
    ours.train()
    assert torch.equal(rollouts[0]["completion_ids"], judged[0]["completion_ids"])
    fresh = build(tmp_path, PPOTrainer)
    wanted, got = (gradient(fresh, batch[0]) for batch in (rollouts, judged))
    assert wanted.abs().max() > 1e-4
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-4)


def test_a_row_that_nobody_could_judge_teaches_nobody(tmp_path):
    def judge(completion_ids, **columns):
        return [None, *(2.0**row for row in range(1, len(completion_ids)))]

    trainer = build(tmp_path, reward_funcs=judge, max_steps=1)
    rollouts = rollouts_of(trainer)
    trainer.train()
    assert not rollouts[0]["advantages"][0].any()
    assert rollouts[0]["advantages"][1:].any(1).all()


def test_completions_that_were_cut_off_pay_or_go_on(tmp_path):
    """The critic's value is 0.5 everywhere, and the reward is 0."""
    shared = {
        "value_model": Constant(0.5),
        "value_learning_rate": 0.0,
        "reward_funcs": lambda completion_ids, **_: [0.0] * len(completion_ids),
        "whiten_advantages": False,
        "max_steps": 1,
    }
    ends = {}
    for name, changes in {
        "zero": {},
        "bootstrap": {"truncation_value": "bootstrap"},
        "penalty": {"missing_eos_penalty": 0.3},
    }.items():
        trainer = build(tmp_path, **shared, **changes)
        rollouts = rollouts_of(trainer)
        trainer.train()
        ids, mask = rollouts[0]["completion_ids"], rollouts[0]["completion_mask"]
        cut_off = mask.all(1) & ~torch.isin(ids[:, -1], torch.tensor(STOPS))
        assert 0 < cut_off.sum() < 8
        first = rollouts[0]["advantages"][:, 0]
        ends[name] = (first[cut_off].unique().tolist(), first[~cut_off].unique().tolist())
    assert ends["zero"] == ([-0.5], [-0.5])
    assert ends["bootstrap"] == ([0.0], [-0.5])
    assert ends["penalty"] == ([pytest.approx(-0.8)], [-0.5])


@pytest.mark.parametrize("name", ["stop", "stop_strings"])
def test_a_stop_string_is_an_end_like_any_other(tmp_path, name):
    letters = [tiny.tokenizer().decode(token) for token in STOPS[1:]]
    trainer = build(
        tmp_path,
        model=tiny.build(),
        generation_kwargs={name: letters},
        value_model=Constant(),
        value_learning_rate=0.0,
        reward_funcs=lambda completion_ids, **_: [0.0] * len(completion_ids),
        whiten_advantages=False,
        missing_eos_penalty=0.3,
        max_steps=1,
    )
    rollouts = rollouts_of(trainer)
    trainer.train()
    full = rollouts[0]["completion_mask"].all(1)
    assert 0 < full.sum() < 8
    assert rollouts[0]["advantages"][:, 0].tolist() == pytest.approx((full * -0.3).tolist())


def test_the_policy_stands_still_while_the_critic_warms_up(tmp_path):
    trainer = build(tmp_path, value_warmup_steps=3, weight_decay=0.1)
    policy, critic = weights(trainer.model), weights(trainer.critic.model)
    trainer.train()
    assert torch.equal(weights(trainer.model), policy)
    assert not torch.equal(weights(trainer.critic.model), critic)
    trainer = build(tmp_path, value_warmup_steps=2)
    trainer.train()
    assert not torch.equal(weights(trainer.model), policy)
    # Adam must not count the warm-up steps, or its first updates would be too large.
    assert {each["step"].item() for each in trainer.optimizer.state.values()} == {1}


@pytest.mark.parametrize("kind", [PPOTrainer, RolloutPPOTrainer])
def test_divergence_is_paid_in_the_reward_and_not_in_the_loss(tmp_path, kind):
    model, folder = often_stopping(), str(tmp_path / "model")
    model.save_pretrained(folder)  # TRL loads the reference from here
    model.config._name_or_path = folder
    arguments = {"kl_coef": 0.5, "whiten_advantages": False, "learning_rate": 1e-3}
    trainer = build(tmp_path, kind, model=model, value_model=Constant(), **arguments)
    rollouts = rollouts_of(trainer)
    trainer.train()
    divergences = trl_trainer.logged(trainer, "kl")
    assert divergences[0] == pytest.approx(0, abs=1e-5)
    assert abs(divergences[-1]) > 1e-4
    assert len(divergences) == 3
    assert trainer.beta == 0.5
    scored = rollouts[-1]
    elsewhere = {**scored, "ref_per_token_logps": scored["ref_per_token_logps"] - 1.0}
    assert torch.equal(gradient(trainer, elsewhere), gradient(trainer, scored))
    kept = scored["completion_mask"].bool()
    spread = scored["advantages"][:, 0] - scored["advantages"][:, 1]
    assert spread[kept[:, 1]].abs().max() > 1e-4  # the KL penalty differs per token


def test_a_resumed_run_ends_as_one_that_was_never_stopped(tmp_path):
    arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "value_epochs": 2}
    whole = build(tmp_path / "whole", **arguments)
    whole.train()
    resumed = build(tmp_path / "resumed", **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert torch.equal(weights(resumed.critic.model), weights(whole.critic.model))
    (tmp_path / "whole/checkpoint-2/critic.pt").unlink()
    with pytest.raises(UnsupportedTrainer, match=r"checkpoint-2 has no critic\.pt"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))


def test_the_schedule_counts_rollouts_and_not_steps(tmp_path):
    """2 micro-batches a step; 4 a rollout, used twice: one rollout serves 4 steps."""
    trainer = build(
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
        value_lr_scheduler_type="linear",
    )
    trainer.args.max_steps = 9
    trainer.train()
    wanted = [5e-2, 5e-2 * 2 / 3, 5e-2 / 3]
    assert trl_trainer.logged(trainer, "value/lr") == pytest.approx(wanted)


def test_adapters_learn_beside_a_critic_that_has_none(tmp_path):
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = build(tmp_path, peft_config=lora)
    policy, critic = weights(trainer.model), weights(trainer.critic.model)
    assert not any("lora" in name for name, _ in trainer.critic.model.named_parameters())
    trainer.train()
    assert not torch.equal(weights(trainer.model), policy)
    assert not torch.equal(weights(trainer.critic.model), critic)


class WidestLogits(TorchDispatchMode):
    """Largest number of rows of any tensor that is as wide as the vocabulary."""

    def __init__(self, vocab):
        super().__init__()
        self.vocab, self.most = vocab, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.shape[-1:] == (self.vocab,):
                self.most = max(self.most, each.numel() // self.vocab)
        return result


def test_logits_of_all_tokens_are_never_held(tmp_path, monkeypatch):
    """TRL's head takes a few tokens at a time, and the critic has no logits."""
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", 16)
    trainer = build(tmp_path, per_device_train_batch_size=32, max_steps=1, eval_strategy="no")
    with WidestLogits(trainer.model.config.vocab_size) as logits:
        trainer.train()
    # The engine samples one token per row. The head's weights are as wide as logits.
    few = max(32, trainer.model.config.hidden_size)
    assert 32 <= logits.most <= few < 32 * trainer.max_completion_length


def test_accumulated_gradients_make_the_same_step(tmp_path):
    """One batch of eight rows against four of two, in one rollout."""
    runs = []
    for rows, pieces in ((8, 1), (2, 4)):
        trainer = build(
            tmp_path,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=pieces,
            optim="sgd",  # Adam would amplify rounding
            max_steps=1,
        )
        trainer.train()
        runs.append((weights(trainer.model), weights(trainer.critic.model)))
    for one, four in zip(*runs, strict=True):
        torch.testing.assert_close(four, one, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kl_coef": 0.1, "beta": 0.2}, r"kl_coef=0\.1 has .* beta=0\.2 in the loss; drop one"),
        ({"kl_estimator": "k4"}, "kl_estimator='k4': must be 'k1', 'k2' or 'k3'"),
        ({"truncation_value": "one"}, "truncation_value='one': must be 'zero' or 'bootstrap'"),
        ({"critic": "none"}, "critic='none': must be 'model', 'adapter' or 'head'"),
        ({"value_lr_scheduler_type": "polynomial"}, "value_lr_scheduler_type='polynomial': must"),
        ({"value_epochs": 0}, "value_epochs=0: must be an integer >= 1"),
        ({"value_mini_batches": 1.5}, "value_mini_batches=1.5: must be"),
        ({"value_warmup_steps": -1}, "value_warmup_steps=-1: must be"),
        ({"gamma": "1"}, "gamma='1': must be from 0 to 1"),
        ({"kl_coef": "1"}, "kl_coef='1': must be a number"),
        ({"lam": 95}, "lam=95: must be from 0 to 1"),
        ({"value_clip": 0}, "value_clip=0: must be above 0"),
        ({"value_max_grad_norm": 0.0}, "value_max_grad_norm=0.0: must be above 0"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        RolloutPPOConfig(**trl_trainer.ARGUMENTS, output_dir=str(tmp_path), **arguments)


def test_grpos_arguments_are_not_enough(tmp_path):
    with pytest.raises(UnsupportedTrainer, match="RolloutPPOConfig"):
        build(tmp_path, PPOTrainer, GRPOConfig, num_generations=2)


def share(completion_ids, digit, **_):
    rights = [run_length.VOCAB[each] for each in digit]
    return [ids.count(right) / 4 for ids, right in zip(completion_ids, rights, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_to_copy(tmp_path, seed):
    """`7=` is answered by `7777`. A random model gets at most a tenth right."""
    tokenizer = run_length.build_tokenizer()
    rows = [{"prompt": f"{number % 10}=", "digit": str(number % 10)} for number in range(640)]
    trainer = build(
        tmp_path,
        model=run_length.build_model(tokenizer, seed=seed),
        reward_funcs=share,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        per_device_train_batch_size=64,
        max_completion_length=4,
        max_steps=110,
        learning_rate=1.5e-3,
        value_learning_rate=2e-3,
        value_epochs=2,
        lr_scheduler_type="constant",
        seed=seed,
    )
    trainer.train()
    rewards = trl_trainer.logged(trainer, "reward")
    assert rewards[0] < 0.1
    assert mean(rewards[-10:]) > 0.9
    assert max(trl_trainer.logged(trainer, "value/explained_variance")) > 0.2

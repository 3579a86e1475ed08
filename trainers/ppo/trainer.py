"""PPO with a critic: TRL's GRPO trainer with per-token advantages instead of per-group ones.

It wraps TRL's methods and copies none of them. The critic learns from each rollout before the
policy does. The policy's loss is TRL's.
"""

import math
import os
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from rollout.errors import UnsupportedTrainer
from trainers.adapter.support import refuse_vllm
from trainers.config import RolloutConfig
from trainers.generator import RolloutGenerator
from trainers.ppo.advantages import (
    at_last,
    bootstrap_values,
    gae,
    kl_estimate,
    length_adaptive_lam,
    masked_moments,
    penalise_missing_eos,
    token_rewards,
    whiten,
)
from trainers.ppo.config import RolloutPPOConfig
from trainers.ppo.critic import Critic, ValueBatch
from trainers.ppo.value_model import VALUE_MODELS, ValueModel
from trainers.reporting.metrics import log_metrics

_CRITIC_FILE = "critic.pt"
_NO_SPREAD = 1e-12  # variance / mean**2 below this is float32 rounding
_CITATION = """\
@article{schulman2017proximal,
    title   = {{Proximal Policy Optimization Algorithms}},
    author  = {Schulman, John and Wolski, Filip and Dhariwal, Prafulla and Radford, Alec and
               Klimov, Oleg},
    journal = {arXiv preprint arXiv:1707.06347},
    year    = 2017,
}
"""
_STOP_STRINGS = ("stop", "stop_strings")  # the names in vLLM and in transformers
_PLACES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class PPOTrainer(GRPOTrainer):
    """PPO on any generator that TRL offers.

    Takes the arguments of `trl.GRPOTrainer`; `args` must be a `RolloutPPOConfig`. `value_model`
    replaces the critic that `args.critic` names, and is called like `value_model.ValueModel`.

    Raises:
        UnsupportedTrainer: The critic cannot work with a setting. The message says what to change.
    """

    _tag_names = ["trl", "ppo"]  # noqa: RUF012 - TRL's own declaration
    _name = "PPO"
    _paper = {  # noqa: RUF012
        "title": "Proximal Policy Optimization Algorithms",
        "id": "1707.06347",
        "citation": _CITATION,
    }
    args: RolloutPPOConfig
    model: Any
    _logs: Any

    def __init__(self, *args: Any, value_model: nn.Module | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check(self, value_model)
        model = _value_model(self) if value_model is None else value_model
        self.critic = Critic(model, self.args.critic_settings(), self.accelerator)
        self.add_callback(_WarmUp())

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Keep the rewards of all ranks, one column per reward function."""
        self._rewards: Tensor = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Replace TRL's advantages of a rollout, and let the critic learn from it."""
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        scores, mask = self._scores_and_mask(scored)
        ids, attention = _whole_rows(scored)
        values = self.critic.values(ids, attention, mask.shape[1])
        truncated = self._truncated(scored)
        scores = penalise_missing_eos(scores, truncated, self.args.missing_eos_penalty)
        kl = self._divergence(scored, mask)
        rewards = token_rewards(scores, mask, kl, self.args.kl_coef)
        advantages, returns = self._advantages_and_returns(rewards, values, mask, truncated)
        if self.model.training:
            batch = ValueBatch(ids, attention, mask, values[:, :-1], returns)
            log_metrics(self, self.critic.learn(batch))
        self._log_rows(advantages, mask)
        return {**scored, "advantages": advantages}

    def _advantages_and_returns(
        self, rewards: Tensor, values: Tensor, mask: Tensor, truncated: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The policy's advantages and the critic's targets, (B, T) each; `values` is (B, T + 1)."""
        before, after, args = values[:, :-1], values[:, 1:], self.args
        is_bootstrapped = truncated & (args.truncation_value == "bootstrap")
        bootstrap = bootstrap_values(after, mask, is_bootstrapped)
        lam = args.lam if args.lam_alpha is None else length_adaptive_lam(mask, args.lam_alpha)
        advantages, _ = gae(rewards, before, mask, args.gamma, lam, bootstrap)
        _, returns = gae(rewards, before, mask, args.gamma, args.lam_value, bootstrap)
        self._log_values(before, returns, advantages, mask)
        if args.whiten_advantages:
            advantages = whiten(advantages, mask, self._sum_ranks)
        return advantages, returns

    def _scores_and_mask(self, scored: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """(B,) rewards of this rank's rows, and the (B, T) mask of trainable tokens.

        A row for which every reward function returned None has no trainable token.
        """
        mask: Tensor = scored["completion_mask"] * scored.get("tool_mask", 1)
        first = self.accelerator.process_index * len(mask)
        rewards = self._rewards[first : first + len(mask)]
        scores = (rewards * self.reward_weights.to(rewards.device)).nansum(1)
        return scores, mask * ~rewards.isnan().all(1, keepdim=True)

    def _truncated(self, scored: dict[str, Any]) -> Tensor:
        """(B,), true if the last token is no end token: the rule of TRL's own metrics.

        TRL's rule ignores stop strings. With stop strings, only a row of full length is truncated.
        """
        mask: Tensor = scored["completion_mask"]
        last = (scored["completion_ids"] * at_last(mask)).sum(1)
        ends = [*self.eos_token_ids, self._tokenizer.pad_token_id]
        truncated = ~torch.isin(last, torch.tensor(ends, device=last.device))
        sampling: Any = self.args.generation_kwargs or {}
        max_tokens: Any = self.max_completion_length
        if any(sampling.get(name) for name in _STOP_STRINGS):
            truncated &= mask.sum(1) >= max_tokens
        return truncated

    @torch.no_grad()
    def _divergence(self, scored: dict[str, Any], mask: Tensor) -> Tensor | None:
        """(B, T) estimates of the KL divergence from the reference; `None` if `kl_coef` is 0."""
        if not self.args.kl_coef:
            return None
        logps = scored.get("old_per_token_logps")
        if logps is None:
            logps = self._get_per_token_logps_and_entropies(
                self.model,
                *_whole_rows(scored),
                logits_to_keep=mask.shape[1],
                batch_size=self.args.per_device_train_batch_size,
            )[0]
        kl = kl_estimate(logps, scored["ref_per_token_logps"], self.args.kl_estimator)
        log_metrics(self, {"kl": self._moments(kl, mask)[0]})
        return kl

    def _sum_ranks(self, local: Tensor) -> Tensor:
        summed: Tensor = self.accelerator.reduce(local, "sum")
        return summed

    def _moments(self, x: Tensor, mask: Tensor) -> tuple[float, float]:
        mean, variance = masked_moments(x, mask, self._sum_ranks)
        return mean.item(), variance.item()

    def _log_values(
        self, values: Tensor, returns: Tensor, advantages: Tensor, mask: Tensor
    ) -> None:
        """Log values, returns and advantages before whitening."""
        returned, spread = self._moments(returns, mask)
        advantage, variance = self._moments(advantages, mask)
        _, unexplained = self._moments(returns - values, mask)
        metrics = {
            "value/mean": self._moments(values, mask)[0],
            "returns/mean": returned,
            "advantage/mean_raw": advantage,
            "advantage/std_raw": variance**0.5,
        }
        # Explained variance is undefined if all returns are equal up to rounding.
        if spread > _NO_SPREAD * returned**2:
            metrics["value/explained_variance"] = 1 - unexplained / spread
        log_metrics(self, metrics)

    def _log_rows(self, advantages: Tensor, mask: Tensor) -> None:
        """Replace group advantages in TRL's table of completions by each row's mean advantage."""
        rows = advantages.sum(1) / mask.sum(1).clamp(min=1)
        gathered = self.accelerator.gather(rows).tolist()
        table = self._logs["advantages"]
        for _ in gathered[: len(table)]:
            table.pop()
        table.extend(gathered)
        # This metric compares groups as well. It is always 1 with one completion per prompt.
        self._metrics["train" if self.model.training else "eval"].pop("frac_reward_zero_std", None)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss. With `kl_coef`, the KL divergence is in the reward and not in the loss."""
        beta = self.beta
        if self.args.kl_coef:
            self.beta = 0.0
        try:
            loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[no-untyped-call]
        finally:
            self.beta = beta
        return loss

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make TRL's schedule, and start the critic's, which counts rollouts instead of steps."""
        micro_batches: int = num_training_steps * self.args.gradient_accumulation_steps
        micro_batches_per_rollout = (self.args.steps_per_generation or 1) * self.num_iterations
        self.critic.schedule(math.ceil(micro_batches / micro_batches_per_rollout))
        return super().create_scheduler(num_training_steps, optimizer)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)  # type: ignore[no-untyped-call]
        if self.args.should_save:
            folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            path = os.path.join(self._get_output_dir(trial=trial), folder, _CRITIC_FILE)
            torch.save(self.critic.state_dict(), path)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[no-untyped-call]
        if checkpoint is not None:
            path = os.path.join(checkpoint, _CRITIC_FILE)
            if not os.path.exists(path):
                raise UnsupportedTrainer(
                    f"{checkpoint} has no {_CRITIC_FILE}, so it is not from PPO; load its model "
                    "with `model=...` and train without `resume_from_checkpoint`"
                )
            device = self.accelerator.device
            self.critic.load_state_dict(torch.load(path, map_location=device, weights_only=True))


class RolloutPPOTrainer(PPOTrainer):
    """`PPOTrainer` with a `RolloutGenerator` attached. `rollout` has the knobs of the engine.

    Raises:
        UnsupportedTrainer: A setting of the trainer is refused. The message says what to change.
        UnsupportedModel: The model is refused. The message says what to change.

    Example:
        ```python
        trainer = RolloutPPOTrainer(
            model=..., reward_funcs=..., train_dataset=..., args=RolloutPPOConfig()
        )
        trainer.train()
        ```
    """

    def __init__(self, *args: Any, rollout: RolloutConfig | None = None, **kwargs: Any) -> None:
        refuse_vllm(*args, *kwargs.values())
        super().__init__(*args, **kwargs)
        RolloutGenerator(rollout).attach(self)


class _WarmUp(TrainerCallback):
    """Keeps the policy unchanged for the first `value_warmup_steps` steps."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Set the policy's gradients to None, so that the optimizer skips every parameter.

        Gradients of 0 would still apply weight decay and advance Adam's step count: after 100 such
        steps, Adam's first real update would be twice too large.
        """
        if state.global_step < args.value_warmup_steps:
            rest["optimizer"].zero_grad()


def _whole_rows(scored: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Ids and attention mask of prompts and completions, (B, S) each."""
    ids = torch.cat([scored["prompt_ids"], scored["completion_ids"]], dim=1)
    return ids, torch.cat([scored["prompt_mask"], scored["completion_mask"]], dim=1)


def _value_model(trainer: PPOTrainer) -> nn.Module:
    """The critic that `args.critic` names, with gradient checkpointing if the policy has it."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    model = VALUE_MODELS[trainer.args.critic](policy)
    if isinstance(model, ValueModel) and trainer.args.gradient_checkpointing:
        model.backbone.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _check(trainer: PPOTrainer, value_model: nn.Module | None) -> None:
    if not isinstance(trainer.args, RolloutPPOConfig):
        raise UnsupportedTrainer("PPO needs args=RolloutPPOConfig(...)")
    if value_model is not None and trainer.args.critic != "model":
        raise UnsupportedTrainer(
            f"value_model=... and critic={trainer.args.critic!r} are two critics; drop one"
        )
    if trainer.accelerator.distributed_type not in _PLACES:
        raise UnsupportedTrainer(
            f"the critic does not work with {trainer.accelerator.distributed_type.value} yet; "
            "use DDP"
        )
    if trainer.accelerator.mixed_precision == "fp16":
        raise UnsupportedTrainer("the critic does not scale gradients for fp16; set bf16=True")

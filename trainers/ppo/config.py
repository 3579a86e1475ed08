"""Arguments of PPO: TRL's GRPO arguments, plus arguments of the critic and the advantages."""

import os
from dataclasses import dataclass, field
from typing import Literal, get_args

from trl import GRPOConfig

from rollout.errors import ConfigError, check_choice, check_count, is_real
from trainers.ppo.advantages import KLEstimator
from trainers.ppo.critic import CriticSettings, ValueSchedule
from trainers.ppo.value_model import CriticKind

Truncation = Literal["zero", "bootstrap"]
_SHARES = ("gamma", "lam", "lam_value")
_POSITIVE = ("lam_alpha", "value_clip", "value_max_grad_norm")
_COUNTS = {"value_epochs": 1, "value_mini_batches": 1, "value_warmup_steps": 0}
_CHOICES = {
    "critic": CriticKind,
    "kl_estimator": KLEstimator,
    "truncation_value": Truncation,
    "value_lr_scheduler_type": ValueSchedule,
}


@dataclass
class RolloutPPOConfig(GRPOConfig):
    """`trl.GRPOConfig` plus the arguments of PPO.

    GRPO arguments that compare the completions of a group have no effect.

    Raises:
        ConfigError: A PPO argument is out of range, or two arguments exclude each other.
        ValueError: TRL refuses one of its own arguments.
    """

    num_generations: int | None = field(
        default=1,
        metadata={"help": "Completions per prompt. The critic needs only 1."},
    )
    gamma: float = field(
        default=1.0, metadata={"help": "Discount per token. Below 1, answers get shorter."}
    )
    lam: float = field(
        default=1.0,
        metadata={
            "help": "GAE lambda of the policy's advantages. The final reward reaches the first of "
            "T tokens scaled by lam**T."
        },
    )
    lam_value: float = field(default=1.0, metadata={"help": "GAE lambda of the critic's targets."})
    lam_alpha: float | None = field(
        default=None,
        metadata={
            "help": "Length-adaptive lambda: replaces lam by 1 - 1 / (lam_alpha * length). For "
            "completions of thousands of tokens. None: use lam."
        },
    )
    whiten_advantages: bool = field(
        default=True,
        metadata={
            "help": "Scale each rollout's advantages to mean 0 and variance 1 over all ranks."
        },
    )
    kl_coef: float = field(
        default=0.0,
        metadata={
            "help": "Reward subtracted per nat of KL divergence from the reference model. Cannot "
            "be combined with beta, which puts the divergence in the loss."
        },
    )
    kl_estimator: KLEstimator = field(
        default="k1", metadata={"help": "Estimator of the KL divergence: k1, k2 or k3."}
    )
    missing_eos_penalty: float | None = field(
        default=None,
        metadata={"help": "Subtracted from the reward of a truncated completion."},
    )
    truncation_value: Truncation = field(
        default="zero",
        metadata={
            "help": "Value after the last token of a truncated completion: zero, or bootstrap "
            "(the critic's value)."
        },
    )
    critic: CriticKind = field(
        default="model",
        metadata={
            "help": "model: a copy of the policy. adapter: the policy's frozen weights with the "
            "critic's own adapters. head: a linear head on the policy's detached hidden states. "
            "The head starts at zero."
        },
    )
    value_learning_rate: float | None = field(
        default=None,
        metadata={"help": "The critic's initial learning rate. None: five times learning_rate."},
    )
    value_lr_scheduler_type: ValueSchedule = field(
        default="constant",
        metadata={
            "help": "The critic's learning-rate schedule over the rollouts: constant, linear or "
            "cosine. The latter two end at 0."
        },
    )
    value_epochs: int = field(default=1, metadata={"help": "Critic epochs per rollout."})
    value_mini_batches: int = field(default=1, metadata={"help": "Critic updates per epoch."})
    value_clip: float | None = field(
        default=None,
        metadata={
            "help": "Clip range of the value loss: the most that a value may move from its value "
            "at the rollout, in units of the reward. None: no clipping."
        },
    )
    value_max_grad_norm: float = field(
        default=1.0, metadata={"help": "Maximum gradient norm of the critic."}
    )
    value_warmup_steps: int = field(
        default=0,
        metadata={
            "help": "Number of first steps in which only the critic learns. The policy's "
            "learning-rate schedule advances meanwhile."
        },
    )

    def __post_init__(self) -> None:
        """Check the arguments of PPO, then let TRL check its own."""
        self._check()
        if self.kl_coef:
            self.beta = self.kl_coef  # TRL loads a reference model only if beta is set
        if self.num_generations != 1:
            super().__post_init__()  # type: ignore[no-untyped-call]
            return
        # TRL's config refuses 1, although its trainer accepts it.
        evaluation, self.num_generations_eval = self.num_generations_eval, 1
        self.num_generations = self._divisor()
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.num_generations, self.num_generations_eval = 1, evaluation

    def _divisor(self) -> int:
        """A number above 1 that divides the completions of a rollout."""
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        factors = (self.generation_batch_size, self.per_device_train_batch_size, steps)
        for factor in (*factors, int(os.environ.get("WORLD_SIZE", "1"))):
            if factor is not None and factor > 1:
                return int(factor)
        raise ConfigError(
            "a rollout has one completion only; raise per_device_train_batch_size, "
            "gradient_accumulation_steps or steps_per_generation"
        )

    def _check(self) -> None:
        if not is_real(self.kl_coef):
            raise ConfigError(f"kl_coef={self.kl_coef!r}: must be a number")
        if self.kl_coef and self.beta not in (0, self.kl_coef):
            raise ConfigError(
                f"kl_coef={self.kl_coef} has the KL divergence in the reward, beta={self.beta} in "
                "the loss; drop one"
            )
        for name in _SHARES:
            value = getattr(self, name)
            if not is_real(value) or not 0 <= value <= 1:
                raise ConfigError(f"{name}={value!r}: must be from 0 to 1")
        for name in _POSITIVE:
            value, default = getattr(self, name), getattr(type(self), name)
            if (value, default) != (None, None) and not (is_real(value) and value > 0):
                raise ConfigError(f"{name}={value!r}: must be above 0")
        for name, least in _COUNTS.items():
            check_count(ConfigError, name, getattr(self, name), least)
        for name, kind in _CHOICES.items():
            check_choice(ConfigError, name, getattr(self, name), *get_args(kind))

    def critic_settings(self) -> CriticSettings:
        """The settings that `Critic` takes."""
        rate = self.value_learning_rate
        return CriticSettings(
            learning_rate=5 * self.learning_rate if rate is None else rate,
            lr_scheduler_type=self.value_lr_scheduler_type,
            epochs=self.value_epochs,
            mini_batches=self.value_mini_batches,
            micro_batch_rows=self.per_device_train_batch_size,
            clip=self.value_clip,
            max_grad_norm=self.value_max_grad_norm,
        )

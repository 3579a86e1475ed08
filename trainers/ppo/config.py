"""Arguments of PPO: TRL's of GRPO, and those of the critic and of its advantages."""

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
    """`trl.GRPOConfig` with the arguments of PPO.

    Arguments of GRPO that compare the completions of a group have no effect.

    Raises:
        ConfigError: A value cannot work, or two do not go together.
        ValueError: TRL refuses one of its own.
    """

    num_generations: int | None = field(
        default=1,
        metadata={
            "help": "Completions per prompt; the critic needs no second one. With 1, the number of "
            "rows in a batch must be even."
        },
    )
    gamma: float = field(
        default=1.0, metadata={"help": "Discount per token. Below 1 it makes answers shorter."}
    )
    lam: float = field(
        default=1.0,
        metadata={
            "help": "GAE lambda of the policy's advantages. A final reward reaches the first of T "
            "tokens scaled by lam**T."
        },
    )
    lam_value: float = field(default=1.0, metadata={"help": "GAE lambda of the critic's targets."})
    lam_alpha: float | None = field(
        default=None,
        metadata={
            "help": "Length-adaptive lambda: lam becomes 1 - 1 / (lam_alpha * length). Meant for "
            "completions of thousands of tokens. None: lam is fixed."
        },
    )
    whiten_advantages: bool = field(
        default=True,
        metadata={
            "help": "Scale the advantages of a rollout to mean 0 and variance 1 over all ranks."
        },
    )
    kl_coef: float = field(
        default=0.0,
        metadata={
            "help": "Price in the reward of one nat of KL divergence from the reference. "
            "Excludes beta, which has the divergence in the loss."
        },
    )
    kl_estimator: KLEstimator = field(
        default="k1", metadata={"help": "Estimator of that divergence: k1, k2 or k3."}
    )
    missing_eos_penalty: float | None = field(
        default=None,
        metadata={"help": "Subtracted from the reward of a completion that was cut off."},
    )
    truncation_value: Truncation = field(
        default="zero",
        metadata={
            "help": "Value after the last token of a completion that was cut off: zero, or "
            "bootstrap for the critic's value."
        },
    )
    critic: CriticKind = field(
        default="model",
        metadata={
            "help": "model: a copy of the policy. adapter: the policy's frozen weights, with "
            "adapters of its own. head: a linear head on the policy's detached hidden states. All "
            "start with a head of zeros."
        },
    )
    value_learning_rate: float | None = field(
        default=None,
        metadata={"help": "The critic's initial learning rate. None: five times learning_rate."},
    )
    value_lr_scheduler_type: ValueSchedule = field(
        default="constant",
        metadata={
            "help": "The critic's learning rate over the rollouts: constant, or down to zero by "
            "linear or cosine."
        },
    )
    value_epochs: int = field(
        default=1, metadata={"help": "Passes of the critic over each rollout."}
    )
    value_mini_batches: int = field(
        default=1, metadata={"help": "Updates of the critic in each of those passes."}
    )
    value_clip: float | None = field(
        default=None,
        metadata={
            "help": "Clip range of the value loss: how far a value may move from the one at the "
            "rollout, in units of the reward. None: no clipping."
        },
    )
    value_max_grad_norm: float = field(
        default=1.0, metadata={"help": "Norm to which the critic's gradients are clipped."}
    )
    value_warmup_steps: int = field(
        default=0,
        metadata={
            "help": "First trainer steps in which only the critic learns. The policy's learning "
            "rate schedule advances meanwhile."
        },
    )

    def __post_init__(self) -> None:
        """Check what is ours, and let TRL check what is its own."""
        self._check()
        if self.kl_coef:
            self.beta = self.kl_coef  # without a beta TRL loads no reference model
        one = self.num_generations == 1
        if one:
            self.num_generations = 2  # TRL's own check refuses 1; its trainer does not
        super().__post_init__()  # type: ignore[no-untyped-call]
        if one:
            self.num_generations = 1

    def _check(self) -> None:
        if not is_real(self.kl_coef):
            raise ConfigError(f"kl_coef={self.kl_coef!r}: it must be a number")
        if self.kl_coef and self.beta not in (0, self.kl_coef):
            raise ConfigError(
                f"kl_coef={self.kl_coef} has the divergence in the reward, beta={self.beta} in the "
                "loss; drop one"
            )
        for name in _SHARES:
            value = getattr(self, name)
            if not is_real(value) or not 0 <= value <= 1:
                raise ConfigError(f"{name}={value!r}: it must be from 0 to 1")
        for name in _POSITIVE:
            value, default = getattr(self, name), getattr(type(self), name)
            if (value, default) != (None, None) and not (is_real(value) and value > 0):
                raise ConfigError(f"{name}={value!r}: it must be above 0")
        for name, least in _COUNTS.items():
            check_count(ConfigError, name, getattr(self, name), least)
        for name, kind in _CHOICES.items():
            check_choice(ConfigError, name, getattr(self, name), *get_args(kind))

    def critic_settings(self) -> CriticSettings:
        """How the critic learns."""
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

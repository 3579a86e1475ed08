"""Arguments of PPO: TRL's of GRPO, and those of the critic and of its advantages."""

import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trl import GRPOConfig, TrlParser

from rollout.errors import ConfigError, check_count, is_real
from trainers.arguments import add_help
from trainers.ppo.advantages import KLEstimator
from trainers.ppo.critic import CriticSettings, ValueSchedule
from trainers.ppo.value_model import CriticKind

# Arguments of the PPO trainer that TRL had up to 1.12, and what has taken their place.
RENAMED = {
    "cliprange": "epsilon (and epsilon_high)",
    "cliprange_value": "value_clip",
    "num_ppo_epochs": "num_iterations, and value_epochs for the critic",
    "num_mini_batches": "steps_per_generation, and value_mini_batches for the critic",
    "response_length": "max_completion_length",
    "total_episodes": "max_steps or num_train_epochs",
    "reward_model": "the trainer's reward_funcs",
    "reward_model_path": "the trainer's reward_funcs",
    "sft_model_path": "the trainer's model",
    "vf_coef": "nothing: the critic has a loss and an optimizer of its own; value_learning_rate",
    "whiten_rewards": "whiten_advantages",
    "stop_token": "generation_kwargs and the tokenizer's eos_token",
    "stop_token_id": "generation_kwargs and the tokenizer's eos_token",
    "local_rollout_forward_batch_size": "per_device_train_batch_size",
    "model_adapter_name": "the adapter that is active in the trainer's model",
    "ref_adapter_name": "nothing: the reference is the model as training began",
    "num_sample_generations": "log_completions",
    "exp_name": "run_name",
}
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


def _refuse_former(names: Iterable[str]) -> None:
    for name in names:
        if name in RENAMED:
            raise TypeError(f"RolloutPPOConfig has no {name}; it is now {RENAMED[name]}")


def _checking_names(config: type) -> type:
    """Answer a former argument before a dataclass would say that it knows no such name."""
    construct = config.__init__  # type: ignore[misc]

    @functools.wraps(construct)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_former(kwargs)
        construct(self, *args, **kwargs)

    config.__init__ = checked  # type: ignore[misc]
    return config


class RolloutPPOParser(TrlParser):
    """`trl.TrlParser`, which answers arguments of TRL's former PPO trainer with today's.

    Raises:
        TypeError: On parsing such an argument, from the command line or from YAML.

    Example:
        ```python
        args, rollout = RolloutPPOParser((RolloutPPOConfig, RolloutConfig)).parse_args_and_config()
        ```
    """

    def set_defaults_with_config(self, **kwargs: Any) -> Any:
        """Take what stands in the YAML."""
        _refuse_former(kwargs)
        return super().set_defaults_with_config(**kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Take what stands on the command line, where a name may be written with dashes."""
        words = sys.argv[1:] if args is None else args
        options = (word.partition("=")[0] for word in words if word.startswith("--"))
        _refuse_former(option[2:].replace("-", "_") for option in options)
        return super().parse_known_args(args, namespace)


@_checking_names
@dataclass
class RolloutPPOConfig(GRPOConfig):
    """`trl.GRPOConfig` with the arguments of PPO. What compares the rows of a group has no effect.

    Raises:
        TypeError: An argument of TRL's former PPO trainer; the message says what replaces it.
        ValueError: Values that do not go together.
    """

    num_generations: int | None = field(default=1)
    """Completions a prompt; the critic needs no second one. With 1, batches must be even."""

    gamma: float = 1.0
    """Discount a token. Below 1 it makes answers shorter."""

    lam: float = 1.0
    """Lambda of the policy's advantages. A last reward reaches the first of T tokens as lam**T."""

    lam_value: float = 1.0
    """Lambda of the critic's targets."""

    lam_alpha: float | None = None
    """With a number, lam is 1 - 1 / (lam_alpha * length) instead; meant for thousands of tokens."""

    whiten_advantages: bool = True
    """Bring the advantages of a rollout to mean 0 and variance 1 over all ranks."""

    kl_coef: float = 0.0
    """What a nat of divergence from the reference costs in the reward. Excludes beta."""

    kl_estimator: KLEstimator = "k1"
    """How that divergence is estimated: k1, k2 or k3."""

    missing_eos_penalty: float | None = None
    """Taken from the reward of a completion that was cut off."""

    truncation_value: Truncation = "zero"
    """What comes after a completion that was cut off: zero, or bootstrap for the critic's value."""

    critic: CriticKind = "model"
    """model: a copy of the policy. adapter: the policy's frozen weights, and adapters of its own.
    head: the policy's hidden states, detached. All have a head of zeros at first."""

    value_learning_rate: float | None = None
    """The critic's at first. Five times learning_rate by default."""

    value_lr_scheduler_type: ValueSchedule = "constant"
    """How it goes on from rollout to rollout: constant, or to zero, linear or cosine."""

    value_epochs: int = 1
    """Times that the critic goes over each rollout."""

    value_mini_batches: int = 1
    """The critic's updates in each of them."""

    value_clip: float | None = None
    """How far a value may move from that at the rollout before its loss stops to fall."""

    value_max_grad_norm: float = 1.0
    """The critic's gradients are clipped to it."""

    value_warmup_steps: int = 0
    """The trainer's first steps, in which the critic alone learns. The schedule goes on."""

    def __post_init__(self) -> None:
        """Check what is ours, and have TRL check what is its own."""
        self._check()
        if self.kl_coef:
            self.beta = self.kl_coef  # or TRL would have no reference model
        one = self.num_generations == 1
        if one:
            self.num_generations = 2  # TRL insists here, and nowhere else
        super().__post_init__()  # type: ignore[no-untyped-call]
        if one:
            self.num_generations = 1

    def _check(self) -> None:
        if self.kl_coef and self.beta not in (0, self.kl_coef):
            raise ValueError("kl_coef has the divergence in the reward, beta in the loss; drop one")
        self._check_numbers()
        for name, least in _COUNTS.items():
            check_count(ConfigError, name, getattr(self, name), least)
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}, not one of {get_args(kind)}")

    def _check_numbers(self) -> None:
        if not is_real(self.kl_coef):
            raise ValueError(f"kl_coef is {self.kl_coef!r}, not a number")
        for name in _SHARES:
            value = getattr(self, name)
            if not is_real(value) or not 0 <= value <= 1:
                raise ValueError(f"{name} is {value!r}, not a number from 0 to 1")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is None and getattr(type(self), name) is None:
                continue
            if not is_real(value) or value <= 0:
                raise ValueError(f"{name} is {value!r}, not a number above 0")

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


add_help(RolloutPPOConfig)

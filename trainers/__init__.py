"""Generates a TRL trainer's rollouts on the engine. No other folder imports TRL.

Torch and TRL are imported on first use, so that `--help` and argument errors come fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainers.config import RolloutConfig

if TYPE_CHECKING:
    from trainers.generator import RolloutGenerator
    from trainers.grpo import RolloutGRPOTrainer
    from trainers.ppo.config import RolloutPPOConfig
    from trainers.ppo.trainer import PPOTrainer, RolloutPPOTrainer

__all__ = [
    "PPOTrainer",
    "RolloutConfig",
    "RolloutGRPOTrainer",
    "RolloutGenerator",
    "RolloutPPOConfig",
    "RolloutPPOTrainer",
]

_HOMES = ("generator", "grpo", "ppo.config", "ppo.trainer")


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

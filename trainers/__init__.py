"""The only folder that knows TRL: hands a trainer its rollouts.

It is lazy, so that a command line can be read before torch and TRL are imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollout.config import RolloutConfig
from trainers.arguments import add_help

if TYPE_CHECKING:
    from trainers.generator import RolloutGenerator
    from trainers.grpo import RolloutGRPOTrainer
    from trainers.ppo.config import RolloutPPOConfig, RolloutPPOParser
    from trainers.ppo.trainer import PPOTrainer, RolloutPPOTrainer

__all__ = [
    "PPOTrainer",
    "RolloutGRPOTrainer",
    "RolloutGenerator",
    "RolloutPPOConfig",
    "RolloutPPOParser",
    "RolloutPPOTrainer",
]

_HOMES = {
    "PPOTrainer": "ppo.trainer",
    "RolloutGRPOTrainer": "grpo",
    "RolloutGenerator": "generator",
    "RolloutPPOConfig": "ppo.config",
    "RolloutPPOParser": "ppo.config",
    "RolloutPPOTrainer": "ppo.trainer",
}

add_help(RolloutConfig)


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

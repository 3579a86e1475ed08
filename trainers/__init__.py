"""The only folder that knows TRL: hands a trainer its rollouts."""

from trainers.generator import RolloutGenerator

__all__ = ["RolloutGenerator"]

"""GRPO with its rollouts from the engine, in one line."""

from typing import Any

from trl import GRPOTrainer

from trainers.config import RolloutConfig
from trainers.generator import RolloutGenerator


class RolloutGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer`, with a `RolloutGenerator` attached once it is constructed.

    Args:
        *args: TRL's own.
        rollout: Knobs of the engine.
        **kwargs: TRL's own.

    Raises:
        UnsupportedTrainer: The trainer's settings; the message says what to change.
        UnsupportedModel: The model; likewise.
        ConfigError: `rollout` is something else.

    Example:
        ```python
        trainer = RolloutGRPOTrainer(..., rollout=RolloutConfig(max_rows=128))
        trainer.train()
        ```
    """

    def __init__(self, *args: Any, rollout: RolloutConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        RolloutGenerator(rollout).attach(self)

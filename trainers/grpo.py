"""`RolloutGRPOTrainer`: GRPO with the engine attached, in one line."""

from typing import Any

from trl import GRPOTrainer

from trainers.adapter.support import refuse_vllm
from trainers.config import RolloutConfig
from trainers.generator import RolloutGenerator


class RolloutGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` with `RolloutGenerator(rollout)` attached; raises what `attach` raises.

    Example:
        ```python
        trainer = RolloutGRPOTrainer(..., rollout=RolloutConfig(max_rows=128))
        trainer.train()
        ```
    """

    def __init__(self, *args: Any, rollout: RolloutConfig | None = None, **kwargs: Any) -> None:
        refuse_vllm(*args, *kwargs.values())
        super().__init__(*args, **kwargs)
        RolloutGenerator(rollout).attach(self)

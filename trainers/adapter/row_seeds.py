"""Seeds of rows, other ones at each call, and the same ones in a run that is resumed."""

from typing import Any

import numpy as np


class RowSeeds:
    """Seeds by the trainer's seed, step, mode and rank, and by the call within that step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._seen: tuple[Any, int] = (None, -1)
        self._calls = {"train": 0, "eval": 0}

    def draw(self, num_rows: int) -> list[int]:
        """The next call's, one a row, from 0 to 2**63."""
        trainer = self._trainer
        step, mode = trainer.state.global_step, "train" if trainer.model.training else "eval"
        # A state is a training's own: after an interrupt the next may begin at the same step.
        if self._seen[0] is not trainer.state or self._seen[1] != step:
            self._seen, self._calls = (trainer.state, step), {"train": 0, "eval": 0}
        call = self._calls[mode]
        self._calls[mode] += 1
        rank = trainer.accelerator.process_index
        key = (trainer.args.seed, step, mode == "eval", call, rank)
        seeds = np.random.SeedSequence(key).generate_state(num_rows, np.uint64)
        return [int(seed) for seed in seeds >> np.uint64(1)]

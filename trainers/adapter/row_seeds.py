"""Seeds of rows: they differ between calls, and a resumed run repeats them."""

from typing import Any

import numpy as np


class RowSeeds:
    """Derives seeds from the trainer's seed, step, mode and rank, and the call within the step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._seen: tuple[Any, int] = (None, -1)
        self._calls = {"train": 0, "eval": 0}

    def draw(self, num_rows: int) -> list[int]:
        """Return the next call's seeds: one per row, 0 <= seed < 2**63."""
        trainer = self._trainer
        step, mode = trainer.state.global_step, "train" if trainer.model.training else "eval"
        # Each `train()` has a new state. After an interrupt it may start at the same step.
        if self._seen[0] is not trainer.state or self._seen[1] != step:
            self._seen, self._calls = (trainer.state, step), {"train": 0, "eval": 0}
        call = self._calls[mode]
        self._calls[mode] += 1
        rank = trainer.accelerator.process_index
        key = (trainer.args.seed, step, mode == "eval", call, rank)
        seeds = np.random.SeedSequence(key).generate_state(num_rows, np.uint64)
        return [int(seed) for seed in seeds >> np.uint64(1)]

"""How much of a trainer's steps is spent generating."""

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from trainers.reporting.metrics import log_metrics


@dataclass
class _Steps:
    """Steps that were not logged yet: their seconds, and of their rollouts seconds and tokens."""

    seconds: float = 0.0
    rollout_s: float = 0.0
    num_tokens: int = 0

    def metrics(self, num_processes: int) -> dict[str, float]:
        """Tokens of all processes over a step's seconds, and the rollouts' share of those."""
        tokens_per_s = self.num_tokens / self.seconds
        return {
            "rollout/effective_tok_s": tokens_per_s,
            "rollout/tok_s_per_gpu": tokens_per_s / num_processes,
            "rollout/step_share": self.rollout_s / self.seconds,
        }


class StepClock(TrainerCallback):
    """Measures steps, and logs on each that generated what its rollouts are to the whole.

    A step lasts from its beginning to the end of the optimizer's, so that logging, saving and
    evaluating between two of them do not count; steps that train on completions of an earlier one
    count to the next that generates. In evaluation a step is a batch.

    Args:
        trainer: The TRL trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._num_processes = trainer.accelerator.num_processes
        self._began: float | None = None
        # By mode: an evaluation comes between a step that did not generate and the next that does.
        self._steps = defaultdict[bool, _Steps](_Steps)

    def begin(self) -> None:
        """A rollout begins, and with it the step, unless that has."""
        if self._began is None:
            self._began = time.perf_counter()

    def count(self, num_tokens: int = 0, seconds: float = 0.0) -> None:
        """Count of a rollout tokens of all processes, or seconds of this one."""
        steps = self._steps[self._trainer.model.training]
        steps.num_tokens += num_tokens
        steps.rollout_s += seconds

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Forget a step that an error or an interrupt has ended: its seconds are not known."""
        self._began = None
        self._steps.clear()

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Begin a training step."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """End it."""
        self._end()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """End a batch of an evaluation."""
        self._end()

    def _end(self) -> None:
        if self._began is None:
            return
        mode = self._trainer.model.training
        self._steps[mode].seconds += time.perf_counter() - self._began
        self._began = None
        if self._steps[mode].num_tokens:
            log_metrics(self._trainer, self._steps.pop(mode).metrics(self._num_processes))

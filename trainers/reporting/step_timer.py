"""Measures which share of a trainer's steps is spent generating."""

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from trainers.reporting.metrics import log_metrics


@dataclass
class _Steps:
    """Sums over the steps since the last one that was logged."""

    seconds: float = 0.0
    rollout_s: float = 0.0
    num_tokens: int = 0  # of all ranks

    def metrics(self, num_processes: int) -> dict[str, float]:
        tokens_per_s = self.num_tokens / self.seconds
        return {
            "rollout/effective_tok_s": tokens_per_s,
            "rollout/tok_s_per_gpu": tokens_per_s / num_processes,
            "rollout/step_share": self.rollout_s / self.seconds,
        }


class StepClock(TrainerCallback):
    """Logs tokens/s and the rollouts' share of the time for each step that generated.

    A step ends with the optimizer's step: logging, saving and evaluating between steps do not
    count. A step that reuses completions counts towards the next step that generates. In evaluation
    each batch is a step.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._num_processes = trainer.accelerator.num_processes
        self._start_s: float | None = None
        # By training mode: an evaluation may run between two steps whose times belong together.
        self._steps = defaultdict[bool, _Steps](_Steps)

    def begin(self) -> None:
        """Start a step with its rollout, unless the trainer has already started it."""
        if self._start_s is None:
            self._start_s = time.perf_counter()

    def drop(self) -> None:
        """Drop what was counted in the present mode: an error has ended its step."""
        self._start_s = None
        self._steps.pop(self._trainer.model.training, None)

    def count(self, num_tokens: int = 0, seconds: float = 0.0) -> None:
        """Add a rollout's tokens of all ranks, or its seconds on this rank."""
        steps = self._steps[self._trainer.model.training]
        steps.num_tokens += num_tokens
        steps.rollout_s += seconds

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Drop a step that an error or an interrupt ended: its duration is unknown."""
        self._start_s = None
        self._steps.clear()

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Start a training step."""
        self._start_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """End a training step."""
        self._end()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """End an evaluation batch."""
        self._end()

    def _end(self) -> None:
        if self._start_s is None:
            return
        mode = self._trainer.model.training
        self._steps[mode].seconds += time.perf_counter() - self._start_s
        self._start_s = None
        if self._steps[mode].num_tokens:
            log_metrics(self._trainer, self._steps.pop(mode).metrics(self._num_processes))

"""Progress bar of a rollout: finished rows, live rows, tokens/s and the longest time left."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from rollout.engine import RolloutEngine
from rollout.request import Completion
from rollout.scheduler.batch import Batch
from rollout.telemetry.observer import Observer

_PERIOD_S = 0.2


def shows_progress(trainer: Any) -> bool:
    """Whether to show the bar: on a terminal, in the main process, unless `disable_tqdm` is set."""
    wanted = trainer.accelerator.is_main_process and not trainer.args.disable_tqdm
    return wanted and sys.stderr.isatty()


@contextmanager
def progress(engine: RolloutEngine, num_rows: int, max_new_tokens: int) -> Iterator[None]:
    """Show a bar while the engine generates `num_rows` rows; clear it at the end.

    Args:
        max_new_tokens: The largest limit among the rows.
    """
    bar = tqdm(total=num_rows, desc="rollout", unit="row", leave=False)
    with bar, engine.observing(_Progress(engine, bar, max_new_tokens)):
        yield


class _Progress(Observer):
    def __init__(self, engine: RolloutEngine, bar: Any, max_new_tokens: int) -> None:
        self._engine, self._bar, self._max_new_tokens = engine, bar, max_new_tokens
        self._start_s = self._shown_s = time.perf_counter()
        self._num_steps = self._num_tokens = 0
        self._tail_start: int | None = None  # decode step

    def launched(self, batch: Batch, num_bytes: int) -> None:
        """Count steps and tokens; note the step after which no row waits for a lane."""
        self._num_steps += len(batch.rows) > 0
        self._num_tokens += len(batch.rows)
        if self._tail_start is None and not self._engine.num_waiting:
            self._tail_start = self._num_steps

    def settled(self, batch: Batch, completions: Sequence[Completion], stamps: Any) -> None:
        """Update the bar."""
        self._bar.n += len(completions)
        now_s = time.perf_counter()
        # Not at every step: drawing takes as long as a step of a small model.
        if now_s - self._shown_s > _PERIOD_S or self._bar.n == self._bar.total:
            self._shown_s = now_s
            self._bar.set_postfix_str(self._state(now_s - self._start_s))

    def _state(self, seconds: float) -> str:
        text = f"{self._engine.num_live} live, {self._num_tokens / seconds:,.0f} tok/s"
        if self._tail_start is None or not self._num_steps:
            return text
        # Every row has a lane, so each ends within `max_new_tokens` steps of the tail's start.
        steps = self._max_new_tokens - (self._num_steps - self._tail_start)
        left_s = max(0.0, steps * seconds / self._num_steps)
        return f"{text}, at most {tqdm.format_interval(left_s)} to the end"

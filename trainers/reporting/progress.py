"""A rollout's progress on the terminal: rows done, rows live, tokens a second, and its tail."""

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
    """Whether a person looks on: at the main process's terminal, with the trainer's own bar."""
    wanted = trainer.accelerator.is_main_process and not trainer.args.disable_tqdm
    return wanted and sys.stderr.isatty()


@contextmanager
def progress(engine: RolloutEngine, num_rows: int, max_new_tokens: int) -> Iterator[None]:
    """Show a bar of what is generated inside, and clear it in the end.

    Args:
        engine: An idle engine.
        num_rows: Rows that it will be asked for.
        max_new_tokens: Of the longest of them.
    """
    bar = tqdm(total=num_rows, desc="rollout", unit="row", leave=False)
    with bar, engine.observing(_Progress(engine, bar, max_new_tokens)):
        yield


class _Progress(Observer):
    def __init__(self, engine: RolloutEngine, bar: Any, max_new_tokens: int) -> None:
        self._engine, self._bar, self._max_new_tokens = engine, bar, max_new_tokens
        self._began_s = self._shown_s = time.perf_counter()
        self._num_steps = self._num_tokens = 0
        self._tail_began: int | None = None  # decode step

    def launched(self, batch: Batch, num_bytes: int) -> None:
        """Count, and note when no row waits any more."""
        self._num_steps += len(batch.rows) > 0
        self._num_tokens += len(batch.rows)
        if self._tail_began is None and not self._engine.num_waiting:
            self._tail_began = self._num_steps

    def settled(self, batch: Batch, completions: Sequence[Completion], stamps: Any) -> None:
        """Show where the rollout is."""
        self._bar.n += len(completions)
        now_s = time.perf_counter()
        # In the tail rows end in most steps, and to draw takes as long as a small model's step.
        if now_s - self._shown_s > _PERIOD_S or self._bar.n == self._bar.total:
            self._shown_s = now_s
            self._bar.set_postfix_str(self._state(now_s - self._began_s))

    def _state(self, seconds: float) -> str:
        text = f"{self._engine.num_live} live, {self._num_tokens / seconds:,.0f} tok/s"
        if self._tail_began is None or not self._num_steps:
            return text
        # The last row to get a lane has got it, and has so many steps at most.
        steps = self._max_new_tokens - (self._num_steps - self._tail_began)
        left_s = max(0.0, steps * seconds / self._num_steps)
        return f"{text}, at most {tqdm.format_interval(left_s)} to the end"

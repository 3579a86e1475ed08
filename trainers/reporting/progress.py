"""A rollout's progress on the terminal: rows done, rows live, tokens a second, and its tail."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from rollout.engine import RolloutEngine
from rollout.request import Completion
from rollout.tools.trace import wrapped

_PERIOD_S = 0.2


def shows_progress(trainer: Any) -> bool:
    """Whether a person looks on: at the main process's terminal, with the trainer's own bar."""
    wanted = not trainer.args.disable_tqdm
    return wanted and trainer.accelerator.is_main_process and sys.stderr.isatty()


@contextmanager
def progress(engine: RolloutEngine, num_rows: int, most_tokens: int) -> Iterator[None]:
    """Show a bar of what is generated inside, and clear it in the end.

    Args:
        engine: An idle engine.
        num_rows: Rows that it will be asked for.
        most_tokens: New tokens of the longest of them.
    """
    with tqdm(total=num_rows, desc="rollout", unit="row", leave=False) as bar:
        watch = _Watch(engine, bar, most_tokens)
        with wrapped(engine, "step", watch.step):
            yield


class _Watch:
    def __init__(self, engine: RolloutEngine, bar: Any, most_tokens: int) -> None:
        self._engine, self._bar, self._most_tokens = engine, bar, most_tokens
        self._began = self._shown = time.perf_counter()
        self._tail_began: int | None = None  # decode step

    def step(self, step: Callable[[], list[Completion]]) -> list[Completion]:
        """Run a step, and show where the rollout is."""
        done = step()
        if self._tail_began is None and not self._engine.num_waiting:
            self._tail_began = self._engine.stats.decode_steps
        self._bar.n += len(done)
        now = time.perf_counter()
        # In the tail rows end in most steps, and to draw takes as long as a small model's step.
        if now - self._shown > _PERIOD_S or self._bar.n == self._bar.total:
            self._shown = now
            self._bar.set_postfix_str(self._state(now - self._began))
        return done

    def _state(self, seconds: float) -> str:
        stats = self._engine.stats
        text = f"{self._engine.num_live} live, {stats.decoded_rows / seconds:,.0f} tok/s"
        if self._tail_began is None or not stats.decode_steps:
            return text
        # The last row to get a lane has got it, and has so many steps at most.
        steps = self._most_tokens - (stats.decode_steps - self._tail_began)
        left_s = max(0.0, steps * seconds / stats.decode_steps)
        return f"{text}, at most {tqdm.format_interval(left_s)} to the end"

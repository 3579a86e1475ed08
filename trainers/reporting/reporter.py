"""Reports each rollout: metrics, a line and a bar on the terminal, traces."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from rollout.engine import RolloutEngine
from rollout.request import Completion
from rollout.telemetry.stats import RolloutStats
from trainers.config import RolloutConfig
from trainers.reporting.metrics import log_metrics, rollout_metrics, summary, time_metrics
from trainers.reporting.progress import progress, shows_progress
from trainers.reporting.step_timer import StepClock
from trainers.reporting.terminal import Terminal
from trainers.reporting.traces import Traces
from trainers.reporting.utilisation import Utilisation


class Reporter:
    """Reports the rollouts of one trainer until `close`; adds two callbacks to the trainer.

    Create it before the engine's first rollout: `Utilisation` measures the GPU's bandwidth.
    """

    def __init__(self, trainer: Any, engine: RolloutEngine, config: RolloutConfig) -> None:
        self._trainer, self._engine = trainer, engine
        self._utilisation = Utilisation(engine)
        self._clock, self._traces = StepClock(trainer), Traces(trainer, engine, config)
        self._terminal = Terminal(trainer)
        self._untimed = list[RolloutStats]()  # rollouts that `log_times` has not seen
        for callback in (self._clock, self._traces):
            trainer.add_callback(callback)

    @contextmanager
    def rollout(self, num_rows: int, most_tokens: int) -> Iterator[None]:
        """Trace and show the rollout that runs inside. `most_tokens`: largest limit of a row."""
        self._clock.begin()
        with ExitStack() as inside:
            inside.enter_context(self._traces.recording())
            if shows_progress(self._trainer):
                inside.enter_context(progress(self._engine, num_rows, most_tokens))
            try:
                yield
            except BaseException:
                self._clock.drop()
                raise

    def log_rollout(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
    ) -> None:
        """Log the metrics of the engine's last rollout, except its times.

        `prompts` and `completions` are those of the rows that this rank generated.
        """
        stats = self._engine.stats
        lengths = [len(completion.token_ids) for completion in completions]
        log_metrics(self._trainer, rollout_metrics(stats))
        log_metrics(self._trainer, self._utilisation.metrics(stats, prompts, lengths))
        self._untimed.append(stats)

    def add_tokens(self, num_tokens: int) -> None:
        """Count tokens of all ranks towards the step's tokens/s."""
        self._clock.count(num_tokens=num_tokens)

    def log_times(self) -> None:
        """Log the time shares of the finished rollouts. Call it after the engine's `sleep`."""
        for stats in self._untimed:
            self._clock.count(seconds=stats.whole_s)
            log_metrics(self._trainer, time_metrics(stats))
            if stats.sleep_s:
                log_metrics(self._trainer, {"rollout/sleep_ms": stats.sleep_s * 1e3})
            self._terminal.print(summary(stats))
        self._untimed.clear()

    def close(self) -> None:
        """Write the last trace and remove the callbacks from the trainer."""
        self._traces.save()
        self._terminal.close()
        for callback in (self._clock, self._traces):
            self._trainer.remove_callback(callback)

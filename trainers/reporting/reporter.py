"""What the trainer's logs, its terminal and its folder are told of each rollout."""

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


class Watch:
    """Watches the rollouts of one trainer, until it is closed.

    Args:
        trainer: The TRL trainer.
        engine: Its engine, which has not run yet.
        config: What its generator was given.
    """

    def __init__(self, trainer: Any, engine: RolloutEngine, config: RolloutConfig) -> None:
        self._trainer, self._engine = trainer, engine
        self._utilisation = Utilisation(engine)
        self._clock, self._traces = StepClock(trainer), Traces(trainer, engine, config)
        self._terminal = Terminal(trainer)
        self._unrested = list[RolloutStats]()
        for callback in (self._clock, self._traces):
            trainer.add_callback(callback)

    @contextmanager
    def rollout(self, num_rows: int, most_tokens: int) -> Iterator[None]:
        """A rollout of so many rows, the longest of so many new tokens, runs inside."""
        self._clock.begin()
        with ExitStack() as inside:
            inside.enter_context(self._traces.recording())
            if shows_progress(self._trainer):
                inside.enter_context(progress(self._engine, num_rows, most_tokens))
            yield

    def rolled_out(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
    ) -> None:
        """Log a rollout, whose tokens are yet to be `counted`.

        Args:
            prompts: Of the rows that this process has generated.
            completions: Theirs.
        """
        stats = self._engine.stats
        lengths = [len(completion.token_ids) for completion in completions]
        log_metrics(self._trainer, rollout_metrics(stats))
        log_metrics(self._trainer, self._utilisation.metrics(stats, prompts, lengths))
        self._unrested.append(stats)

    def counted(self, num_tokens: int) -> None:
        """Tokens of all processes have been generated in this step."""
        self._clock.count(num_tokens=num_tokens)

    def rested(self) -> None:
        """Log where the time of the rollouts went, now that their memory is where it stays."""
        for stats in self._unrested:
            self._clock.count(seconds=stats.whole_s)
            log_metrics(self._trainer, time_metrics(stats))
            if stats.sleep_s:
                log_metrics(self._trainer, {"rollout/sleep_ms": stats.sleep_s * 1e3})
            self._terminal.print(summary(stats))
        self._unrested.clear()

    def close(self) -> None:
        """Leave what has been recorded, and the trainer alone."""
        self._traces.save()
        self._terminal.close()
        for callback in (self._clock, self._traces):
            self._trainer.remove_callback(callback)

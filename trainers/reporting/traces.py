"""Writes a Perfetto trace and three pictures for each traced rollout.

Files go to `rollouts/` in the trainer's `output_dir`; pictures also go to its W&B run.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from rollout.engine import RolloutEngine
from rollout.telemetry.timeline import Timeline, chrome_trace, draw, middle_steps, open_pyplot
from rollout.telemetry.trace import Tracer
from trainers.config import RolloutConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Traced:
    step: int  # the trainer's
    timeline: Timeline
    lengths: list[int]


class Traces(TrainerCallback):
    """Records training rollouts in the main process, as `RolloutConfig.trace` says.

    Raises:
        ConfigError: `trace` is not "off" and matplotlib is not installed.
    """

    def __init__(self, trainer: Any, engine: RolloutEngine, config: RolloutConfig) -> None:
        self._trainer, self._engine, self._config = trainer, engine, config
        self._num_seen, self._step = 0, -1
        self._unsaved: _Traced | None = None
        if config.trace != "off":
            open_pyplot()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the rollout that runs inside, if `trace` selects it."""
        if not self._is_due():
            yield
            return
        tracer = Tracer(self._engine.device)
        with self._engine.observing(tracer):
            yield
        step = self._trainer.state.global_step + 1
        self._unsaved = _Traced(step, tracer.timeline, list(self._engine.stats.lengths))
        if self._config.trace_period:
            self.save()

    def _is_due(self) -> bool:
        config, trainer = self._config, self._trainer
        if config.trace == "off" or not trainer.model.training:
            return False
        # All turns of a tool loop run in one step and would overwrite each other's files.
        step, self._step = self._step, trainer.state.global_step
        if self._step == step:
            return False
        self._num_seen += 1
        period = config.trace_period or 1
        return trainer.accelerator.is_main_process and (self._num_seen - 1) % period == 0

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Write the last trace."""
        self.save()

    def save(self) -> None:
        """Write the recorded rollout that is not written yet. An error only logs a warning."""
        traced, self._unsaved = self._unsaved, None
        if traced is None or not traced.lengths:
            return
        try:
            self._write(traced)
        except Exception as error:  # for example a full disk
            logger.warning("trace of step %d not written; training goes on: %s", traced.step, error)

    def _write(self, traced: _Traced) -> None:
        folder = Path(self._trainer.args.output_dir) / "rollouts"
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"step-{traced.step:06}"
        trace = json.dumps(chrome_trace(traced.timeline))
        (folder / f"{stem}.json").write_text(trace, encoding="utf-8")
        names = ("timeline", "progress", "lengths")
        pictures = {name: folder / f"{stem}-{name}.png" for name in names}
        decoding = traced.timeline.decoding()
        shown = decoding if decoding.on("compute") else traced.timeline
        title = f"step {traced.step}, some steps of the engine from its middle"
        draw({title: middle_steps(shown)}, pictures["timeline"])
        draw_progress(traced.timeline, pictures["progress"])
        draw_lengths(traced.lengths, pictures["lengths"])
        self._send(pictures, traced.step)

    def _send(self, pictures: dict[str, Path], step: int) -> None:
        if "wandb" not in self._trainer.args.report_to:
            return
        import wandb  # here: only if the trainer reports to it

        if wandb.run is not None:
            images = {f"train/rollout/{n}": wandb.Image(str(p)) for n, p in pictures.items()}
            # Without commit W&B adds this to the next entry logged, so it names its own step.
            wandb.run.log({**images, "train/global_step": step}, commit=False)


_BINS = 100


def draw_progress(timeline: Timeline, path: Path) -> None:
    """Draw live rows and tokens/s over a whole rollout, as a picture at `path`."""
    batches = timeline.on("compute")
    rows = np.array([batch.num_rows for batch in batches])
    stops = np.array([batch.stop_s for batch in batches]) - batches[0].start_s
    # At least 10 steps per bin: with fewer, neighbouring bins differ by a whole step's tokens.
    num_bins = max(1, min(_BINS, len(batches) // 10))
    tokens, edges = np.histogram(stops, num_bins, (0, stops.max()), weights=rows)
    pyplot = open_pyplot()
    figure, (live, speed) = pyplot.subplots(2, sharex=True, figsize=(12, 5))
    live.step(stops, rows, where="pre")
    live.set_ylabel("rows live")
    speed.stairs(tokens / np.diff(edges), edges)
    speed.set_ylabel("tokens/s")
    speed.set_xlabel("s")
    for axis in (live, speed):
        axis.set_ylim(bottom=0)
    _save(figure, path)


def draw_lengths(lengths: Sequence[int], path: Path) -> None:
    """Draw a histogram of completion lengths in tokens, as a picture at `path`."""
    figure, axis = open_pyplot().subplots(figsize=(8, 4))
    width = 1 + max(lengths) // _BINS  # whole tokens, so that each bin covers as many lengths
    axis.hist(lengths, np.arange(0, max(lengths) + width + 1, width) - 0.5)
    axis.set_xlabel("tokens of a completion")
    axis.set_ylabel("completions")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    open_pyplot().close(figure)

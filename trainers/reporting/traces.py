"""What traced rollouts leave: a timeline, pictures, and a trace for Perfetto.

They go to `rollouts/` in the trainer's `output_dir`, and the pictures to its W&B run, on its step.
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
from rollout.telemetry.timeline import Timeline, chrome_trace, draw, open_pyplot
from rollout.telemetry.trace import Tracer
from trainers.config import RolloutConfig

logger = logging.getLogger(__name__)

_PICTURE_S = 0.05  # of a timeline: in more, its steps would run into each other


@dataclass(frozen=True)
class _Traced:
    """One rollout, in the trainer's step `step`."""

    step: int
    timeline: Timeline
    lengths: list[int]


class Traces(TrainerCallback):
    """Records rollouts of a training as `RolloutConfig.trace` says, on the main process.

    Args:
        trainer: The TRL trainer.
        engine: Its engine.
        config: What its generator was given.

    Raises:
        ConfigError: Rollouts are to be recorded, and matplotlib is not installed.
    """

    def __init__(self, trainer: Any, engine: RolloutEngine, config: RolloutConfig) -> None:
        self._trainer, self._engine, self._config = trainer, engine, config
        self._num_seen, self._step = 0, -1
        self._kept: _Traced | None = None
        if config.trace != "off":
            open_pyplot()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the rollout inside, if it is one of those."""
        if not self._is_due():
            yield
            return
        tracer = Tracer(self._engine.device)
        with self._engine.observing(tracer):
            yield
        step = self._trainer.state.global_step + 1
        self._kept = _Traced(step, tracer.timeline, list(self._engine.stats.lengths))
        if self._config.trace_period:
            self.save()

    def _is_due(self) -> bool:
        config, trainer = self._config, self._trainer
        if config.trace == "off" or not trainer.model.training:
            return False
        # Turns of a tool loop are in one step, and would take each other's files.
        step, self._step = self._step, trainer.state.global_step
        if self._step == step:
            return False
        self._num_seen += 1
        period = config.trace_period or 1
        return trainer.accelerator.is_main_process and (self._num_seen - 1) % period == 0

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Leave the last rollout."""
        self.save()

    def save(self) -> None:
        """Write what has been recorded and not been written yet; the training goes on if not."""
        kept, self._kept = self._kept, None
        if kept is None or not kept.lengths:
            return
        try:
            self._write(kept)
        except Exception as error:  # a full disk, a picture that cannot be drawn
            logger.warning("the trace of step %d could not be written: %s", kept.step, error)

    def _write(self, kept: _Traced) -> None:
        folder = Path(self._trainer.args.output_dir) / "rollouts"
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"step-{kept.step:06}"
        trace = json.dumps(chrome_trace(kept.timeline))
        (folder / f"{stem}.json").write_text(trace, encoding="utf-8")
        names = ("timeline", "progress", "lengths")
        pictures = {name: folder / f"{stem}-{name}.png" for name in names}
        decoding = kept.timeline.decoding()
        shown = decoding if decoding.on("compute") else kept.timeline
        title = f"step {kept.step}, {_PICTURE_S * 1e3:.0f} ms from its middle"
        draw({title: shown.middle(_PICTURE_S)}, pictures["timeline"])
        draw_progress(kept.timeline, pictures["progress"])
        draw_lengths(kept.lengths, pictures["lengths"])
        self._send(pictures, kept.step)

    def _send(self, pictures: dict[str, Path], step: int) -> None:
        """Hand the pictures to the trainer's W&B run, if it has one."""
        if "wandb" not in self._trainer.args.report_to:
            return
        import wandb  # only where the trainer reports to it

        if wandb.run is not None:
            images = {f"train/rollout/{n}": wandb.Image(str(p)) for n, p in pictures.items()}
            # The row is whoever logs next's, as TRL's own timings have many: the step is ours.
            wandb.run.log({**images, "train/global_step": step}, commit=False)


_BINS = 100


def draw_progress(timeline: Timeline, path: Path) -> None:
    """Draw how many rows were live, and tokens a second, over a rollout.

    Args:
        timeline: Of the whole rollout.
        path: Picture to write.
    """
    batches = timeline.on("compute")
    rows = np.array([batch.num_rows for batch in batches])
    stops = np.array([batch.stop_s for batch in batches]) - batches[0].start_s
    # Several steps a bin: in fewer, whole tokens would beat against its edges.
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
    """Draw how many completions have how many tokens.

    Args:
        lengths: Tokens of each completion.
        path: Picture to write.
    """
    figure, axis = open_pyplot().subplots(figsize=(8, 4))
    width = 1 + max(lengths) // _BINS  # whole tokens: no bin has one length more than the next
    axis.hist(lengths, np.arange(0, max(lengths) + width + 1, width) - 0.5)
    axis.set_xlabel("tokens of a completion")
    axis.set_ylabel("completions")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    open_pyplot().close(figure)

"""Prints one line per rollout instead of every rollout metric in TRL's dictionary."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from tqdm import tqdm
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import RichProgressCallback

logger = logging.getLogger(__name__)

# Exact types only: a subclass is the user's own and prints what the user wants.
_PRINTERS = (PrinterCallback, ProgressCallback, RichProgressCallback)
_OURS = ("rollout/", "eval_rollout/", "sampling/raw_", "eval_sampling/raw_")


class Terminal:
    """Removes rollout metrics from the trainer's printed logs and prints lines instead.

    The metrics still go to W&B, TensorBoard and `trainer.state.log_history`. If the trainer has
    none of the stock printing callbacks, lines are logged at INFO instead.
    """

    def __init__(self, trainer: Any) -> None:
        callbacks = trainer.callback_handler.callbacks
        self._printers = [callback for callback in callbacks if type(callback) in _PRINTERS]
        for callback in self._printers:
            callback.on_log = partial(_log_without_ours, callback.on_log)
        self._is_main = trainer.accelerator.is_main_process

    def print(self, line: str) -> None:
        """Print a line above the progress bars, in the main process only."""
        if self._is_main and self._printers:
            tqdm.write(line)
        elif self._is_main:
            logger.info(line)

    def close(self) -> None:
        """Restore the trainer's printing callbacks."""
        for callback in self._printers:
            del callback.on_log
        self._printers = []


def _log_without_ours(
    on_log: Callable[..., None], args: Any, state: Any, control: Any, logs: Any = None, **rest: Any
) -> None:
    shown = {name: value for name, value in (logs or {}).items() if not name.startswith(_OURS)}
    on_log(args, state, control, logs=shown, **rest)

"""How long a device takes for what is queued on it, told without waiting for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Adds up bytes, and the seconds that a device spends on them.

    On a GPU two events on the current stream are around each stretch, and are read when asked for;
    on a CPU, which has done what it was told to, it is the host's clock.

    Args:
        device: Where the work is queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._stretches: list[tuple[int, Any, Any]] = []

    @contextmanager
    def running(self, num_bytes: int) -> Iterator[None]:
        """Count what is queued inside, which is about so many bytes."""
        began = self._mark()
        yield
        self._stretches.append((num_bytes, began, self._mark()))

    def forget(self) -> None:
        """Begin anew."""
        self._stretches = []

    def take(self) -> tuple[int, float]:
        """Bytes and seconds since last asked; the device must have done with all of them."""
        stretches, self._stretches = self._stretches, []
        seconds = sum(self._seconds(began, ended) for _, began, ended in stretches)
        return sum(num_bytes for num_bytes, *_ in stretches), seconds

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, began: Any, ended: Any) -> float:
        if not self._on_gpu:
            return float(ended - began)
        return float(began.elapsed_time(ended)) / 1e3

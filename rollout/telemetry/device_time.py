"""When the device reached which point of a batch, read once the host knows that it has.

On a GPU a stamp is a CUDA event that keeps the time. Recording one costs the host a microsecond;
reading two that have been reached waits for nothing.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rollout.telemetry.time_shares import BatchTimes


class HostStamp:
    """A CUDA event's stand-in on a CPU, where what has been queued is done."""

    def __init__(self) -> None:
        self._at_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Keep the time."""
        self._at_s = time.perf_counter()

    def elapsed_time(self, later: "HostStamp") -> float:
        """Milliseconds until `later`, as CUDA has it."""
        return (later._at_s - self._at_s) * 1e3

    def synchronize(self) -> None:
        """Wait for nothing."""


def make_stamp(device: torch.device) -> Any:
    """A point in a stream, with `record(stream)` and `elapsed_time(later)` in milliseconds."""
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else HostStamp()


class Stamps:
    """The points of one batch.

    Attributes:
        uploading: On the H2D stream, before its copies.
        uploaded: There, behind them.
        started: On the compute stream, behind the batch before, the upload and whatever else the
            batch relies on.
        prefilled: There, behind its prefill; only recorded where it has one.
        ended: There, behind its last kernel.
        downloaded: On the D2H stream, behind the copies of tokens and scores.
        late_s: Seconds after `started` in which the device still had nothing to do.
        arrived_s: When the host had the tokens, on its own clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.uploading, self.uploaded = make_stamp(device), make_stamp(device)
        self.started, self.prefilled = make_stamp(device), make_stamp(device)
        self.ended, self.downloaded = make_stamp(device), make_stamp(device)
        self.late_s = self.arrived_s = 0.0
        self._on_gpu = device.type == "cuda"
        self._idle_since_s: float | None = None

    def launching(self, stream: Any) -> None:
        """A batch is about to be queued on `stream`: look whether the device waits for it."""
        is_idle = self._on_gpu and stream.query()
        self.late_s, self._idle_since_s = 0.0, time.perf_counter() if is_idle else None

    def graph_launched(self) -> None:
        """A batch that is one graph has been launched.

        A device that had nothing to do reached `started` at once, and the graph only now. Kernels
        that are launched one by one run while more of them are launched: nothing is late there.
        """
        if self._idle_since_s is not None:
            self.late_s = time.perf_counter() - self._idle_since_s


class BatchClock:
    """Reads the stamps of one batch after the other, in the order in which they ran."""

    def __init__(self) -> None:
        self._last: Stamps | None = None

    def begin(self) -> None:
        """A rollout begins: what was before its first batch is no gap."""
        self._last = None

    def read(self, stamps: Stamps, *, prefills: bool) -> BatchTimes:
        """Times of a batch whose tokens the host has; `prefills` says that it had a prefill."""
        last, self._last = self._last, stamps
        decoding = stamps.prefilled if prefills else stamps.started
        decode_s = _seconds(decoding, stamps.ended)
        late_s = min(stamps.late_s, decode_s)
        return BatchTimes(
            gap_s=late_s + (max(0.0, _seconds(last.ended, stamps.started)) if last else 0.0),
            prefill_s=_seconds(stamps.started, stamps.prefilled) if prefills else 0.0,
            decode_s=decode_s - late_s,
        )


class Stopwatch:
    """Adds up bytes, and the seconds that a device spends on them, without waiting for it.

    Args:
        device: The work is queued on its current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
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
        seconds = sum(_seconds(began, ended) for _, began, ended in stretches)
        return sum(num_bytes for num_bytes, *_ in stretches), seconds

    def _mark(self) -> Any:
        stamp = make_stamp(self._device)
        stamp.record()
        return stamp


def _seconds(begin: Any, end: Any) -> float:
    return float(begin.elapsed_time(end)) / 1e3

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

    def record(self, stream: Any) -> None:
        """Keep the time."""
        self._at_s = time.perf_counter()

    def elapsed_time(self, later: "HostStamp") -> float:
        """Milliseconds until `later`, as CUDA has it."""
        return (later._at_s - self._at_s) * 1e3


def make_stamp(device: torch.device) -> Any:
    """A point in a stream, with `record(stream)` and `elapsed_time(later)` in milliseconds."""
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else HostStamp()


class Stamps:
    """The points of one batch.

    Args:
        device: Where the model lives.

    Attributes:
        uploading: On the H2D stream, before its copies.
        uploaded: There, behind them.
        started: On the compute stream, once the batch before, its upload and whatever else it
            relies on are done.
        prefilled: There, behind its prefill; only recorded where it has one.
        ended: There, behind its last kernel.
        late_s: Seconds after `started` in which the device still had nothing to do.
    """

    def __init__(self, device: torch.device) -> None:
        self.uploading, self.uploaded = make_stamp(device), make_stamp(device)
        self.started, self.prefilled = make_stamp(device), make_stamp(device)
        self.ended = make_stamp(device)
        self.late_s = 0.0
        self._starved_since_s: float | None = None

    def start(self, stream: Any, *, is_starved: bool) -> None:
        """Record `started`; the device may have done all that was launched before."""
        self.started.record(stream)
        self.late_s = 0.0
        self._starved_since_s = time.perf_counter() if is_starved else None

    def replayed(self) -> None:
        """A batch that is one graph has been launched.

        A device that had nothing to do has reached `started` at once, and the graph only now. It
        runs single kernels while more of them are launched, so that nothing is late there.
        """
        if self._starved_since_s is not None:
            self.late_s = time.perf_counter() - self._starved_since_s


class BatchClock:
    """Reads one batch after the other, in the order in which they ran.

    The stamps of a batch are needed until the next one has been read, by which time its slot has
    been launched anew. So there is one set more than slots, and they go round.

    Args:
        device: Where the model lives.
    """

    def __init__(self, device: torch.device) -> None:
        self._spare = Stamps(device)
        self._last: Stamps | None = None

    def begin(self) -> None:
        """A rollout begins: what was before its first batch is no gap."""
        if self._last is not None:
            self._spare, self._last = self._last, None

    def read(self, stamps: Stamps, *, prefills: bool) -> tuple[BatchTimes, Stamps]:
        """Times of a batch whose tokens the host has.

        Args:
            stamps: The batch's.
            prefills: Whether it had prompt tokens to prefill.

        Returns:
            The times, and the stamps that its slot records from now on.
        """
        decoding = stamps.prefilled if prefills else stamps.started
        prefill_s = _seconds(stamps.started, stamps.prefilled) if prefills else 0.0
        gap_s, upload_s = _gap(self._last, stamps) if self._last else (0.0, 0.0)
        decode_s = _seconds(decoding, stamps.ended)
        late_s = min(stamps.late_s, decode_s)
        times = BatchTimes(gap_s + late_s, upload_s, prefill_s, decode_s - late_s)
        free, self._last = self._last or self._spare, stamps
        return times, free


def _gap(before: Stamps, stamps: Stamps) -> tuple[float, float]:
    """Seconds between two batches, and those of them in which the second was being uploaded."""
    gap_s = max(0.0, _seconds(before.ended, stamps.started))
    began_s = max(0.0, _seconds(before.ended, stamps.uploading))
    arrived_s = min(gap_s, _seconds(before.ended, stamps.uploaded))
    return gap_s, max(0.0, arrived_s - began_s)


def _seconds(begin: Any, end: Any) -> float:
    return float(begin.elapsed_time(end)) / 1e3


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

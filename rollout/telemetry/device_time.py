"""When the device reached each point of a batch, read after the host knows that it did.

On a GPU a stamp is a CUDA event with timing. Recording one costs the host 1 us. Reading two that
the device has reached does not wait.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rollout.telemetry.time_shares import BatchTimes


class HostStamp:
    """A CUDA event's stand-in on a CPU, where work is done as soon as it is queued."""

    def __init__(self) -> None:
        self._at_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._at_s = time.perf_counter()

    def elapsed_time(self, later: "HostStamp") -> float:
        """Milliseconds until `later`, as in `torch.cuda.Event`."""
        return (later._at_s - self._at_s) * 1e3

    def synchronize(self) -> None:
        """Return at once."""


def make_stamp(device: torch.device) -> Any:
    """A point in a stream, with `record(stream)` and `elapsed_time(later)` in milliseconds."""
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else HostStamp()


class Stamps:
    """The points of one batch.

    Attributes:
        uploading: On the H2D stream, before the copies.
        uploaded: On the H2D stream, after the copies.
        started: On the compute stream, after everything that the batch waits for.
        prefilled: On the compute stream, after the prefill; recorded only if there is one.
        ended: On the compute stream, after the last kernel.
        downloaded: On the D2H stream, after the copies of tokens and scores.
        late_s: Seconds from `started` until the device had work.
        arrived_s: When the host had the tokens, in seconds of its own clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.uploading, self.uploaded = make_stamp(device), make_stamp(device)
        self.started, self.prefilled = make_stamp(device), make_stamp(device)
        self.ended, self.downloaded = make_stamp(device), make_stamp(device)
        self.late_s = self.arrived_s = 0.0
        self._on_gpu = device.type == "cuda"
        self._idle_since_s: float | None = None

    def launching(self, stream: Any) -> None:
        """Note whether the device is idle before a batch is queued on `stream`."""
        is_idle = self._on_gpu and stream.query()
        self.late_s, self._idle_since_s = 0.0, time.perf_counter() if is_idle else None

    def graph_launched(self) -> None:
        """Note how long an idle device waited for a batch that is one graph.

        It reached `started` at once, but the graph only now. Without a graph, kernels run while the
        host launches more of them, so nothing is late.
        """
        if self._idle_since_s is not None:
            self.late_s = time.perf_counter() - self._idle_since_s


class BatchClock:
    """Reads the stamps of batches in the order in which they ran."""

    def __init__(self) -> None:
        self._last: Stamps | None = None

    def begin(self) -> None:
        """Start a rollout: the time before its first batch is no gap."""
        self._last = None

    def read(self, stamps: Stamps, *, prefills: bool) -> BatchTimes:
        """Times of a batch whose tokens the host has; `prefills`: it had a prefill."""
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
    """Adds up bytes and the device seconds spent on them, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stretches: list[tuple[int, Any, Any]] = []

    @contextmanager
    def running(self, num_bytes: int) -> Iterator[None]:
        """Time what is queued inside on the current stream; it handles about `num_bytes`."""
        began = self._mark()
        yield
        self._stretches.append((num_bytes, began, self._mark()))

    def forget(self) -> None:
        """Drop what was timed."""
        self._stretches = []

    def take(self) -> tuple[int, float]:
        """Bytes and seconds since the last call; the device must have finished all of it."""
        stretches, self._stretches = self._stretches, []
        seconds = sum(_seconds(began, ended) for _, began, ended in stretches)
        return sum(num_bytes for num_bytes, *_ in stretches), seconds

    def _mark(self) -> Any:
        stamp = make_stamp(self._device)
        stamp.record()
        return stamp


def _seconds(begin: Any, end: Any) -> float:
    return float(begin.elapsed_time(end)) / 1e3

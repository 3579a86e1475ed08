"""Records a timeline of an engine's steps; costs nothing unless it observes."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from rollout.request import Completion
from rollout.scheduler.batch import Batch
from rollout.telemetry.device_time import Stamps, make_stamp
from rollout.telemetry.observer import Observer
from rollout.telemetry.timeline import PREFILL, WAIT, Interval, Timeline


class Tracer(Observer):
    """Fills in `timeline` while `RolloutEngine.observing` it."""

    def __init__(self, device: torch.device) -> None:
        self.timeline = Timeline()
        self._origin = make_stamp(device)
        self._origin.record()
        self._origin.synchronize()  # SYNC: once, to align the device's clock with the host's
        self._origin_s = time.perf_counter()
        self._host_s: float | None = None  # end of the host's last interval

    def planned(self, batch: Batch | None) -> None:
        """Add the host's planning. The start of the first plan is unknown."""
        self._on_host("plan")

    def launched(self, batch: Batch, num_bytes: int) -> None:
        """Add the host's filling of buffers and queueing of work."""
        self._on_host("launch")

    def settled(self, batch: Batch, completions: Sequence[Completion], stamps: Stamps) -> None:
        """Add the host's wait and settling, and the batch on the device."""
        self._on_host(WAIT, stamps.arrived_s)
        self._on_host("settle")
        num_rows, name = len(batch.rows), PREFILL if batch.segments else "decode"
        self._on_device("h2d", "h2d", stamps.uploading, stamps.uploaded)
        self._on_device("compute", name, stamps.started, stamps.ended, num_rows, stamps.late_s)
        self._on_device("d2h", "d2h", stamps.ended, stamps.downloaded)

    def _on_host(self, name: str, stop_s: float | None = None) -> None:
        start_s, self._host_s = self._host_s, stop_s or time.perf_counter()
        if start_s is not None:
            self.timeline.intervals.append(Interval("host", name, start_s, self._host_s))

    def _on_device(
        self, track: str, name: str, begin: Any, end: Any, num_rows: int = 0, late_s: float = 0.0
    ) -> None:
        stop_s = self._seconds(end)
        start_s = min(self._seconds(begin) + late_s, stop_s)
        self.timeline.intervals.append(Interval(track, name, start_s, stop_s, num_rows))

    def _seconds(self, stamp: Any) -> float:
        return self._origin_s + float(self._origin.elapsed_time(stamp)) / 1e3

"""Fills in the stats of the current rollout."""

import time
from collections.abc import Sequence
from typing import Any

from rollout.request import Completion, FinishReason
from rollout.scheduler.batch import Batch
from rollout.scheduler.scheduler import Scheduler
from rollout.telemetry.device_time import BatchClock
from rollout.telemetry.gpu_counters import DeviceMeter
from rollout.telemetry.observer import Observer
from rollout.telemetry.stats import RolloutStats


class Recorder(Observer):
    """Counts what happens in a rollout, and times it.

    Attributes:
        stats: Of the current rollout, or of the last one.
    """

    def __init__(self, scheduler: Scheduler, meter: DeviceMeter, page_bytes: int) -> None:
        self.stats = RolloutStats()
        self._scheduler, self._meter, self._page_bytes = scheduler, meter, page_bytes
        self._clock = BatchClock()
        self._began_s = 0.0

    def begin(self) -> None:
        """Start a rollout with new stats."""
        self.stats, self._began_s = RolloutStats(), time.perf_counter()
        self._clock.begin()

    def start_counters(self) -> None:
        """Read the driver's counters from now on, until `end` or `give_up`."""
        self._meter.begin()

    def launched(self, batch: Batch, num_bytes: int) -> None:
        """Count the batch's work, and pages and waiting rows at its launch."""
        stats, pages = self.stats, self._scheduler.pages
        num_rows = len(batch.rows)
        stats.engine_steps += 1
        stats.decode_steps += num_rows > 0
        stats.decoded_rows += num_rows
        stats.h2d_bytes += num_bytes
        stats.peak_pages = max(stats.peak_pages, pages.num_used)
        stats.peak_shared_pages = max(stats.peak_shared_pages, pages.num_shared)
        least = pages.num_free if stats.least_free_pages is None else stats.least_free_pages
        stats.least_free_pages = min(least, pages.num_free)
        stats.prefilled_tokens += batch.num_prefilled
        stats.attended_tokens += batch.num_attended
        stats.shared_tokens += batch.num_shared
        stats.preemptions += batch.num_preempted
        stats.offloaded_bytes += len(batch.offloads) * self._page_bytes
        stats.shares.launched(batch, self._scheduler.num_waiting)

    def settled(self, batch: Batch, completions: Sequence[Completion], stamps: Any) -> None:
        """Count completions, and read when the device ran the batch."""
        stats = self.stats
        stats.shares.ran(self._clock.read(stamps, prefills=len(batch.segments) > 0))
        lengths = [len(completion.token_ids) for completion in completions]
        stats.lengths += lengths
        stats.generated_tokens += sum(lengths)
        stats.num_stopped += sum(c.finish_reason is FinishReason.STOP for c in completions)
        stats.duration_s = time.perf_counter() - self._began_s

    def mapped(self, num_bytes: int, num_released: int, seconds: float) -> None:
        """KV pages now take `num_bytes`; torch freed `num_released` bytes of cache for them."""
        self.stats.mapped_bytes = max(self.stats.mapped_bytes, num_bytes)
        self.stats.released_bytes += num_released
        self.stats.wake_s += seconds

    def warmed_up(self, num_graphs: int, seconds: float) -> None:
        """Layers are compiled and `num_graphs` graphs captured."""
        self.stats.captured_graphs += num_graphs
        self.stats.warmup_s += seconds

    def paused(self) -> None:
        """The trainer uses the device until the next batch."""
        self.stats.shares.paused()

    def slept(self, seconds: float) -> None:
        """Memory was given back."""
        self.stats.sleep_s += seconds

    def end(self, cast_bytes: int, cast_s: float) -> None:
        """The last row ended. Casting weights for the rollout took `cast_bytes` and `cast_s`."""
        self.stats.device = self._meter.end()
        self.stats.cast_bytes += cast_bytes
        self.stats.cast_s += cast_s

    def give_up(self) -> None:
        """The rollout ends early."""
        self._meter.end()

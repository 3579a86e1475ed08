"""Where the time of a rollout went, as shares that add up to 1."""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from rollout.scheduler.batch import Batch

PARTS = (
    "compute",
    "host_bound",
    "h2d_wait",
    "prefill",
    "padding",
    "tail",
    "sleep",
)


class BatchTimes(NamedTuple):
    """Seconds of one batch on the device.

    Attributes:
        gap_s: From the end of the batch before to its start; 0 for the first of a rollout.
        upload_s: Those of them in which it was being uploaded.
        prefill_s: From its start to the end of its prefill.
        decode_s: From there to its end.
    """

    gap_s: float
    upload_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class _Launch:
    """What was known of a batch when it was launched.

    Attributes:
        num_rows: Rows that decode.
        num_padded: Rows that the device runs for them.
        num_wide: Rows that it would run if no lane were idle because no row is left for it.
        was_paused: Whether the time in front of it was the trainer's.
    """

    num_rows: int
    num_padded: int
    num_wide: int
    was_paused: bool


class Attribution:
    """Splits a rollout's time into `PARTS`.

    A rollout lasts from its first row to its last token, and until its memory was given back,
    where that has followed. On a GPU the times of a batch are the device's, on a CPU the host's;
    the others are the host's.

    A decode step of `n` rows that runs `p` of them with padding, while `w` have run together
    before, takes `d` seconds. If `w > p` and no row waits for a lane, the step belongs to the tail
    and is as wide as `w`, otherwise as `p`.

    compute: `d * n / width`: what the rows at hand take.
    padding: `d * (p - n) / width`: rows without a request, up to the size that was captured.
    tail: `d * (width - p) / width` in the tail: lanes with no row left to run.
    prefill: The time from the start of a batch to the end of its prefill: no row decodes.
    h2d_wait: Time between two batches in which the second one is being uploaded.
    sleep: Making room for pages and mapping them, giving them back, and, where the rollout was
        paused, from the end of the batch before to the start of the one after.
    host_bound: The rest, in which the device has no batch to run: planning, settling and whatever
        else the host does between two of them; before the first one compiling and capturing, the
        cast of weights and what the trainer had queued; the way of the last tokens to the host.

    Attributes:
        busy_s: Seconds in which the device was inside a batch.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._launches = deque[_Launch]()
        self._widest = 0  # rows that have run together
        self._was_paused = False

    def paused(self) -> None:
        """The trainer has the device until the next batch."""
        self._was_paused = True

    def launched(self, batch: Batch, num_padded: int, num_waiting: int) -> None:
        """Note what is known of a batch.

        Args:
            batch: The batch.
            num_padded: Rows that the device runs for those that decode.
            num_waiting: Rows that have no lane.
        """
        num_rows = len(batch.rows)
        self._widest = max(self._widest, num_rows)
        num_wide = num_padded if num_waiting else max(num_padded, self._widest)
        self._launches.append(_Launch(num_rows, num_padded, num_wide, self._was_paused))
        self._was_paused = False

    def ran(self, times: BatchTimes) -> None:
        """Add the times of the oldest batch that was launched and has not been settled."""
        launch, seconds = self._launches.popleft(), self._seconds
        self.busy_s += times.prefill_s + times.decode_s
        if launch.was_paused:
            seconds["sleep"] += times.gap_s
        else:
            seconds["h2d_wait"] += times.upload_s
        seconds["prefill"] += times.prefill_s
        self._decoded(launch, times)

    def _decoded(self, launch: _Launch, times: BatchTimes) -> None:
        """Split a decode step; without rows it copies pages for those that come back."""
        seconds, step_s = self._seconds, times.decode_s
        if not launch.num_rows:
            seconds["prefill"] += step_s
            return
        row_s = step_s / launch.num_wide
        seconds["compute"] += row_s * launch.num_rows
        seconds["padding"] += row_s * (launch.num_padded - launch.num_rows)
        seconds["tail"] += row_s * (launch.num_wide - launch.num_padded)

    def shares(self, whole_s: float, sleep_s: float) -> dict[str, float]:
        """Share of each part; none before anything ran.

        Args:
            whole_s: Seconds of the rollout.
            sleep_s: Those of them in which memory was made ready or given back.
        """
        if not whole_s:
            return {}
        seconds = {**self._seconds, "sleep": self._seconds["sleep"] + sleep_s}
        # Memory may be made ready beside a batch or in a pause, or without a token that follows.
        whole_s = max(whole_s, sum(seconds.values()))
        seconds["host_bound"] = whole_s - sum(seconds.values())
        return {part: spent / whole_s for part, spent in seconds.items()}

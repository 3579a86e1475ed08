"""Where the time of a rollout went, as shares that add up to 1."""

from collections import deque
from dataclasses import dataclass

from rollout.scheduler.batch import Batch

PARTS = ("compute", "prefill", "tail", "sleep", "idle")


@dataclass(frozen=True)
class BatchTimes:
    """Seconds of one batch on the device.

    Attributes:
        gap_s: From the end of the batch before to its start; 0 for the first of a rollout.
        prefill_s: From its start to the end of its prefill.
        decode_s: From there to its end.
    """

    gap_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class _Launch:
    """What was known of a batch at its launch: rows that decode, lanes that count, the gap's part.

    `num_lanes` is `num_rows`, or in the tail the most rows that ran together before.
    """

    num_rows: int
    num_lanes: int
    follows_pause: bool


class TimeShares:
    """Splits a rollout's time into `PARTS`.

    A rollout lasts from its first row to its last token, and on until its memory was given back.
    On a GPU the times of a batch are the device's, on a CPU the host's.

    compute: Decode steps, without the tail's share.
    prefill: From the start of a batch to the end of its prefill: no row decodes. Lower it by larger
        groups (a prompt is prefilled once) or shorter prompts.
    tail: In a decode step of `n` rows after which no row waits, while `w` rows ran together before:
        `(w - n) / w` of the step. Lanes are empty because the longest rows are not done.
    sleep: Making room for KV pages and mapping them, giving them back, and pauses.
        `kv_keep="always"` avoids the first two.
    idle: The rest, in which the device has no batch: planning and settling beside nothing,
        compiling and capturing, casting weights, what the trainer had queued. With `num_slots=2`
        and after the first rollouts it is small.

    Attributes:
        busy_s: Seconds in which the device was inside a batch.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._launches = deque[_Launch]()
        self._most_rows = 0  # that have run together
        self._was_paused = False

    def paused(self) -> None:
        """The trainer has the device until the next batch."""
        self._was_paused = True

    def launched(self, batch: Batch, num_waiting: int) -> None:
        """Note what is known of a batch, while `num_waiting` rows have no lane."""
        num_rows = len(batch.rows)
        self._most_rows = max(self._most_rows, num_rows)
        num_lanes = num_rows if num_waiting else self._most_rows
        self._launches.append(_Launch(num_rows, num_lanes, self._was_paused))
        self._was_paused = False

    def ran(self, times: BatchTimes) -> None:
        """Add the times of the oldest batch that was launched and has not been settled."""
        launch, seconds = self._launches.popleft(), self._seconds
        self.busy_s += times.prefill_s + times.decode_s
        if launch.follows_pause:
            seconds["sleep"] += times.gap_s
        seconds["prefill"] += times.prefill_s
        if not launch.num_rows:  # it copies pages
            seconds["prefill"] += times.decode_s
            return
        compute_s = times.decode_s * launch.num_rows / launch.num_lanes
        seconds["compute"] += compute_s
        seconds["tail"] += times.decode_s - compute_s

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
        seconds["idle"] = whole_s - sum(seconds.values())
        return {part: spent / whole_s for part, spent in seconds.items()}

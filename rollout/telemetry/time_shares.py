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
        decode_s: From the end of its prefill to its end.
    """

    gap_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class _Launch:
    """A batch at its launch; in the tail, `num_lanes` is the most rows that ran together."""

    num_rows: int
    num_lanes: int
    follows_pause: bool


class TimeShares:
    """Splits a rollout's time into `PARTS`.

    The time runs from the first row to the last token, and on until memory is given back. Batch
    times are the device's on a GPU, and the host's on a CPU.

    compute: Decode steps, without the tail's share.
    prefill: From the start of a batch to the end of its prefill. Larger groups (a prompt is
        prefilled once) or shorter prompts lower it.
    tail: `(w - n) / w` of a decode step, if no row waits, `n` rows decode and at most `w` rows ran
        together before. Lanes are empty because only the longest rows are left.
    sleep: Freeing and mapping memory for KV pages, giving it back, and pauses.
        `kv_keep="always"` avoids the first two.
    idle: The rest, in which the device has no batch: the host plans or settles, compiles, captures
        graphs or casts weights, or the trainer's work runs. With `num_slots=2` it is small after
        the first rollouts.

    Attributes:
        busy_s: Seconds in which the device was inside a batch.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._launches = deque[_Launch]()
        self._most_rows = 0  # that ran together
        self._was_paused = False

    def paused(self) -> None:
        """The trainer uses the device until the next batch."""
        self._was_paused = True

    def launched(self, batch: Batch, num_waiting: int) -> None:
        """Note a batch at its launch, while `num_waiting` rows have no lane."""
        num_rows = len(batch.rows)
        self._most_rows = max(self._most_rows, num_rows)
        num_lanes = num_rows if num_waiting else self._most_rows
        self._launches.append(_Launch(num_rows, num_lanes, self._was_paused))
        self._was_paused = False

    def ran(self, times: BatchTimes) -> None:
        """Add the times of the oldest launched batch that is not yet settled."""
        launch, seconds = self._launches.popleft(), self._seconds
        self.busy_s += times.prefill_s + times.decode_s
        if launch.follows_pause:
            seconds["sleep"] += times.gap_s
        seconds["prefill"] += times.prefill_s
        if not launch.num_rows:  # the rest of the batch copies pages
            seconds["prefill"] += times.decode_s
            return
        compute_s = times.decode_s * launch.num_rows / launch.num_lanes
        seconds["compute"] += compute_s
        seconds["tail"] += times.decode_s - compute_s

    def shares(self, whole_s: float, sleep_s: float) -> dict[str, float]:
        """Share of each part, empty before anything ran; `sleep_s` goes to the sleep part."""
        if not whole_s:
            return {}
        seconds = {**self._seconds, "sleep": self._seconds["sleep"] + sleep_s}
        # Mapping may overlap a batch or a pause, or happen with no token after it.
        whole_s = max(whole_s, sum(seconds.values()))
        seconds["idle"] = whole_s - sum(seconds.values())
        return {part: spent / whole_s for part, spent in seconds.items()}

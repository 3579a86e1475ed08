"""Counts and times; everyone writes, nothing reads it to decide."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.telemetry.time_shares import Attribution


@dataclass
class RolloutStats:
    """What one rollout did, from its first step to its last.

    Attributes:
        policy_version: Weights it ran on.
        generated_tokens: Tokens of the rows that finished.
        lengths: Tokens of each of them, in the order in which they did.
        num_stopped: Those of them that ended by an EOS or a stop string.
        engine_steps: Steps that launched a batch.
        decode_steps: Those of them in which a row decoded.
        decoded_rows: Rows summed over those steps.
        peak_pages: Most KV pages held at once.
        peak_shared_pages: Most of them that more than one row held at once.
        least_free_pages: Fewest KV pages that were free.
        preemptions: Rows that lost their lane for want of pages.
        offloaded_bytes: Bytes of their KV moved to the host.
        h2d_bytes: Bytes uploaded.
        prefilled_tokens: Prompt tokens whose KV was computed, and others that it was again.
        attended_tokens: Tokens that those have attended to, summed.
        shared_tokens: Prompt tokens whose KV another row had, or was about to have.
        mapped_bytes: Most bytes that KV pages took.
        released_bytes: Bytes that torch gave back from its cache for them and for cast weights.
        wake_s: Seconds of making room for both and mapping them.
        sleep_s: Seconds of giving both back, where that has followed.
        cast_bytes: Bytes of weights that were cast for it, as they are held then.
        cast_s: Seconds that its device took for that.
        warmup_s: Seconds of compiling and capturing before its first step.
        captured_graphs: Graphs captured in that time.
        duration_s: Seconds since it began.
        device: Shares of that time, by name, in which parts of the GPU were busy; see
            `device_stats`.
        attribution: Where that time went.
    """

    policy_version: int = 0
    generated_tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    num_stopped: int = 0
    engine_steps: int = 0
    decode_steps: int = 0
    decoded_rows: int = 0
    peak_pages: int = 0
    peak_shared_pages: int = 0
    least_free_pages: int | None = None
    preemptions: int = 0
    offloaded_bytes: int = 0
    h2d_bytes: int = 0
    prefilled_tokens: int = 0
    attended_tokens: int = 0
    shared_tokens: int = 0
    mapped_bytes: int = 0
    released_bytes: int = 0
    wake_s: float = 0.0
    sleep_s: float = 0.0
    cast_bytes: int = 0
    cast_s: float = 0.0
    warmup_s: float = 0.0
    captured_graphs: int = 0
    duration_s: float = 0.0
    device: dict[str, float] = field(default_factory=dict)
    attribution: Attribution = field(default_factory=Attribution, repr=False)
    _began: float = field(default_factory=time.perf_counter, repr=False)

    def launched(self, num_rows: int, num_pages: int, num_bytes: int) -> None:
        """Record a batch of `num_rows` decoding rows while rows hold `num_pages` pages.

        `num_bytes` were uploaded for it.
        """
        self.engine_steps += 1
        self.decode_steps += num_rows > 0
        self.decoded_rows += num_rows
        self.peak_pages = max(self.peak_pages, num_pages)
        self.h2d_bytes += num_bytes

    def paged(self, num_shared: int, num_free: int) -> None:
        """Record the pages that several rows hold, and those that none does, as a batch begins."""
        self.peak_shared_pages = max(self.peak_shared_pages, num_shared)
        least = num_free if self.least_free_pages is None else self.least_free_pages
        self.least_free_pages = min(least, num_free)

    def preempted(self, num_rows: int, num_bytes: int) -> None:
        """Record rows that lose their lane, and the bytes of KV that are moved to the host."""
        self.preemptions += num_rows
        self.offloaded_bytes += num_bytes

    def prefilled(self, num_tokens: int, num_attended: int, num_shared: int) -> None:
        """Record the prompt tokens that a batch computes, what they attend to, and those spared."""
        self.prefilled_tokens += num_tokens
        self.attended_tokens += num_attended
        self.shared_tokens += num_shared

    def mapped(self, num_bytes: int, num_released: int, seconds: float) -> None:
        """Record that KV pages take `num_bytes` now, for which torch gave back `num_released`."""
        self.mapped_bytes = max(self.mapped_bytes, num_bytes)
        self.released_bytes += num_released
        self.wake_s += seconds

    def cast(self, num_bytes: int, seconds: float) -> None:
        """Record that `num_bytes` of weights were cast, which took `seconds` of the device."""
        self.cast_bytes += num_bytes
        self.cast_s += seconds

    def warmed_up(self, num_graphs: int, seconds: float) -> None:
        """Record that a rollout was made ready, for which `num_graphs` were captured."""
        self.captured_graphs += num_graphs
        self.warmup_s += seconds

    def ended(self, lengths: Sequence[int], num_stopped: int) -> None:
        """Record rows that finished with so many tokens each, `num_stopped` of them not cut off."""
        self.lengths += lengths
        self.num_stopped += num_stopped

    def settled(self, num_tokens: int) -> None:
        """Record that the rows of one engine step ended with `num_tokens` tokens in all."""
        self.generated_tokens += num_tokens
        self.duration_s = time.perf_counter() - self._began

    @property
    def overrun_tokens(self) -> int:
        """Tokens that no completion has, once every row is done: of overruns and aborted rows."""
        return self.decoded_rows - self.generated_tokens

    @property
    def whole_s(self) -> float:
        """Seconds since it began, until its memory was given back where that has followed."""
        return self.duration_s + self.sleep_s

    @property
    def time_shares(self) -> dict[str, float]:
        """Shares of `whole_s`, by part; see `Attribution`."""
        return self.attribution.shares(self.whole_s, self.wake_s + self.sleep_s)

    @property
    def largest_shares(self) -> str:
        """The largest of them, in words."""
        shares = sorted(self.time_shares.items(), key=lambda item: -item[1])
        return ", ".join(f"{part} {share:.0%}" for part, share in shares[:4] if share >= 0.005)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.generated_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def rows_live(self) -> float:
        """Rows in a decode step, on average."""
        return self.decoded_rows / self.decode_steps if self.decode_steps else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens to prefill that another row's served for."""
        wanted = self.prefilled_tokens + self.shared_tokens
        return self.shared_tokens / wanted if wanted else 0.0

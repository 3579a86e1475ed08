"""Counts and times of one rollout."""

from dataclasses import dataclass, field

from rollout.telemetry.time_shares import TimeShares


@dataclass
class RolloutStats:
    """What one rollout did, from its first step to its last.

    Attributes:
            generated_tokens: Tokens of the rows that finished.
        lengths: Tokens of each finished row, in the order of finishing.
        num_stopped: Finished rows that ended by an EOS or a stop string.
        decode_steps: Steps in which at least one row decoded.
        decoded_rows: Rows that decoded, summed over steps.
        peak_shared_pages: Most KV pages that more than one row used at once.
        preemptions: Rows that lost their lane because KV pages ran out.
        offloaded_bytes: KV of preempted rows that moved to the host.
        prefilled_tokens: Tokens that prefill computed KV for, recomputed ones included.
        attended_tokens: Context lengths of the prefilled tokens, summed.
        shared_tokens: Prompt tokens that used another row's KV.
        mapped_bytes: Most bytes that KV pages took.
        released_bytes: Bytes that torch's cache gave back for KV pages and cast weights.
        wake_s: Seconds to free and map memory for both.
        sleep_s: Seconds to give that memory back after the rollout.
        cast_bytes: Bytes of the weights that were cast for the rollout, in their new dtype.
        cast_s: Device seconds of that cast.
        warmup_s: Seconds of compiling and capturing graphs before the first step.
        captured_graphs: Graphs captured in `warmup_s`.
        duration_s: Seconds from the start to the latest settled batch.
        device: Shares of the time in which parts of the GPU were busy; see `gpu_counters`.
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
    shares: TimeShares = field(default_factory=TimeShares, repr=False)

    @property
    def overrun_tokens(self) -> int:
        """Tokens in no completion, once all rows ended: overruns and aborted rows."""
        return self.decoded_rows - self.generated_tokens

    @property
    def whole_s(self) -> float:
        """Seconds of the rollout, and of giving its memory back."""
        return self.duration_s + self.sleep_s

    @property
    def time_shares(self) -> dict[str, float]:
        """Shares of `whole_s`, by part; see `TimeShares`."""
        return self.shares.shares(self.whole_s, self.wake_s + self.sleep_s)

    @property
    def largest_shares(self) -> str:
        """The four largest time shares, as text."""
        shares = sorted(self.time_shares.items(), key=lambda item: -item[1])
        return ", ".join(f"{part} {share:.0%}" for part, share in shares[:4] if share >= 0.005)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.generated_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def rows_live(self) -> float:
        """Mean number of rows in a decode step."""
        return self.decoded_rows / self.decode_steps if self.decode_steps else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the tokens to prefill that used another row's KV."""
        wanted = self.prefilled_tokens + self.shared_tokens
        return self.shared_tokens / wanted if wanted else 0.0

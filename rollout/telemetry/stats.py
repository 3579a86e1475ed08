"""Counts and times of one rollout."""

from dataclasses import dataclass, field

from rollout.telemetry.time_shares import TimeShares


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
            `gpu_counters`.
        shares: Where that time went.
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
        """Tokens that no completion has, once every row is done: of overruns and aborted rows."""
        return self.decoded_rows - self.generated_tokens

    @property
    def whole_s(self) -> float:
        """Seconds since it began, until its memory was given back where that has followed."""
        return self.duration_s + self.sleep_s

    @property
    def time_shares(self) -> dict[str, float]:
        """Shares of `whole_s`, by part; see `TimeShares`."""
        return self.shares.shares(self.whole_s, self.wake_s + self.sleep_s)

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

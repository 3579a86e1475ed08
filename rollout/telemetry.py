"""Counts and times; everyone writes, nothing reads it to decide."""

import time
from dataclasses import dataclass, field


@dataclass
class RolloutStats:
    """What one rollout did, from its first step to its last.

    Attributes:
        policy_version: Weights it ran on.
        generated_tokens: Tokens of the rows that finished.
        engine_steps: Steps that launched a batch.
        decode_steps: Those of them in which a row decoded.
        decoded_rows: Rows summed over those steps.
        peak_pages: Most KV pages held at once.
        h2d_bytes: Bytes uploaded.
        prefilled_tokens: Prompt tokens whose KV was computed.
        shared_tokens: Prompt tokens whose KV another row had, or was about to have.
        mapped_bytes: Most bytes that KV pages took.
        released_bytes: Bytes that torch gave back from its cache for them and for cast weights.
        wake_s: Seconds of making room for both and mapping them.
        sleep_s: Seconds of giving both back, where that has followed.
        warmup_s: Seconds of compiling and capturing before its first step.
        duration_s: Seconds since it began.
    """

    policy_version: int = 0
    generated_tokens: int = 0
    engine_steps: int = 0
    decode_steps: int = 0
    decoded_rows: int = 0
    peak_pages: int = 0
    h2d_bytes: int = 0
    prefilled_tokens: int = 0
    shared_tokens: int = 0
    mapped_bytes: int = 0
    released_bytes: int = 0
    wake_s: float = 0.0
    sleep_s: float = 0.0
    warmup_s: float = 0.0
    duration_s: float = 0.0
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

    def prefilled(self, num_tokens: int, num_shared: int) -> None:
        """Record the prompt tokens that a batch computes, and those that it need not."""
        self.prefilled_tokens += num_tokens
        self.shared_tokens += num_shared

    def mapped(self, num_bytes: int, num_released: int, seconds: float) -> None:
        """Record that KV pages take `num_bytes` now, for which torch gave back `num_released`."""
        self.mapped_bytes = max(self.mapped_bytes, num_bytes)
        self.released_bytes += num_released
        self.wake_s += seconds

    def settled(self, num_tokens: int) -> None:
        """Record that the rows of one engine step ended with `num_tokens` tokens in all."""
        self.generated_tokens += num_tokens
        self.duration_s = time.perf_counter() - self._began

    @property
    def overrun_tokens(self) -> int:
        """Tokens computed for rows that had already finished, once every row has."""
        return self.decoded_rows - self.generated_tokens

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

"""The nouns that travel: what is asked, what one step runs, what comes back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rollout.sampling_params import Draw, SamplingParams

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

# More tokens than any vocabulary has, which float64 and int64 both hold.
_ALL_TOKENS = 2**31


class FinishReason(StrEnum):
    """Why a row ended, in vLLM's words."""

    STOP = "stop"
    """It sampled one of its `eos_token_ids`, or completed one of its `stop_strings`."""
    LENGTH = "length"
    """It reached `max_new_tokens`."""


@dataclass(frozen=True, eq=False)
class Request:
    """One row to generate.

    Attributes:
        prompt: Token ids, `(prompt_tokens,)`.
        sampling: How to draw, when to stop.
        seed: Key of the row's random numbers, `0 <= seed < 2**63`. The same logits and seed give
            the same draw in any batch; logits round a little with the batch's size.
    """

    prompt: Ints
    sampling: SamplingParams
    seed: int = 0

    @property
    def settings(self) -> tuple[float, ...]:
        """What its draws go by besides the temperature, in the order of `SETTINGS`."""
        how = self.sampling
        first_stop = len(self.prompt) + how.min_new_tokens
        penalties = (how.repetition_penalty, how.presence_penalty, how.frequency_penalty)
        top_k = min(max(how.top_k, 0), _ALL_TOKENS)
        return (top_k, how.top_p, how.min_p, *penalties, first_stop)

    @property
    def max_tokens(self) -> int:
        """Prompt and longest completion, in tokens."""
        return len(self.prompt) + self.sampling.max_new_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Tokens whose KV is written: that of a row's last token never is."""
        return self.max_tokens - 1


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of one row's prompt tokens to prefill in one step.

    Attributes:
        lane: The row's lane.
        start: Position of the first token.
        tokens: Token ids, `(segment_tokens,)`.
    """

    lane: int
    start: int
    tokens: Ints


@dataclass(eq=False)
class Admission:
    """Device state of the rows that enter their lanes with this batch, each array `(rows,)`.

    Attributes:
        lanes: Lane of each row.
        tokens: Last prompt token: the input of the row's first decode step.
        positions: Its position.
        seeds: Key of the row's random numbers.
        temperatures: Divides the row's logits.
        settings: What else its draws go by, in the order of `SETTINGS`.
        marks: `(marks, 3)` of each row: lane, token id, and mark; see `rollout.marks`.
        words: `(entries, 4)` of each row: lane, line, place, token id; see `rollout.words`.
    """

    lanes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    settings: list[tuple[float, ...]] = field(default_factory=list)
    marks: list[Ints] = field(default_factory=list)
    words: list[Ints] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Batch:
    """What one step runs. It is complete in itself: settling it looks nothing up.

    Attributes:
        rows: Ids of the rows that decode, `(rows,)`.
        lanes: The lane of each at launch, `(rows,)`.
        policy_version: Weights under which it runs.
        max_context: Longest context among the decoding rows, in tokens, the new token included.
        admission: Rows that enter their lanes first.
        segments: Prompt tokens to prefill before decoding.
        new_pages: `(pages, 3)`: lane, index in the lane's block table, page id.
        copies: `(copies, 2)`: page to copy, and where to, between prefill and decode.
        offloads: `(pages, 2)`: page to copy to the host, and the host page, before anything else.
        restores: `(pages, 2)`: host page to copy back, and the page; read by the next batch first.
        num_shared: Prompt tokens of admitted rows that need no prefill: another row's serve.
        num_preempted: Rows that lost their lane for want of pages.
        num_parked: Rows that have lost theirs and have none again.
        lost: Lanes of rows that enter again, and how many of their tokens had KV that is lost.
        draw: What the draws of its rows take.
    """

    rows: Ints
    lanes: Ints
    policy_version: int
    max_context: int
    admission: Admission
    segments: Sequence[Segment]
    new_pages: Ints
    copies: Ints
    offloads: Ints
    restores: Ints
    num_shared: int
    num_preempted: int
    num_parked: int
    lost: dict[int, int]
    draw: Draw = Draw.PLAIN

    @property
    def num_prefilled(self) -> int:
        """Prompt tokens to prefill."""
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def num_attended(self) -> int:
        """Tokens that those attend to, summed: each to itself, and to all of its row before it."""
        sizes = [(segment.start, len(segment.tokens)) for segment in self.segments]
        return sum(size * start + size * (size + 1) // 2 for start, size in sizes)


@dataclass(frozen=True, eq=False)
class Completion:
    """What one request became.

    Attributes:
        row: The id that `submit` returned.
        token_ids: Generated tokens, with the final EOS if there was one; at least one token.
        logprobs: Natural-log probability of each token at the row's temperature over the full
            vocabulary.
        finish_reason: Why it ended.
        policy_versions: The weights that generated it: each policy version, in order, with the
            number of tokens that are its.
        entropies: Entropy, in nats, of each token's distribution at the temperature over the full
            vocabulary; `None` unless `RolloutConfig(entropies=True)`.
        kept_mass: Probability, in that distribution, of all tokens among which each was drawn;
            `None` unless `RolloutConfig(kept_mass=True)`.
    """

    row: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    policy_versions: list[tuple[int, int]]
    entropies: list[float] | None = None
    kept_mass: list[float] | None = None

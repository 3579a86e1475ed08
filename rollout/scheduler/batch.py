"""What one step runs (`Batch`), and how the scheduler builds it (`Plan`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.request import Ints
from rollout.sampling_params import SETTINGS, Draw
from rollout.scheduler.row import Row
from rollout.scheduler.token_flags import token_flags


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive prompt tokens of one row, from position `start` on, to prefill in one step."""

    lane: int
    start: int
    tokens: Ints


@dataclass(frozen=True)
class Demand:
    """Upper bounds for the decode steps of all unfinished rows. `max_context` is in tokens."""

    num_rows: int
    max_context: int
    draws: frozenset[Draw]


# Fields of 8 bytes come first, so that every field is aligned.
ADMITTED_ROW = np.dtype(
    [
        ("token", np.int64),
        ("position", np.int64),
        ("seed", np.int64),
        ("settings", np.float64, (len(SETTINGS),)),
        ("lane", np.int32),
        ("temperature", np.float32),
    ]
)
"""State of a row that enters a lane, for the device's arrays.

`token`, at `position`, is the row's newest token: the input of its first decode step. `settings`
are in the order of `SETTINGS`.
"""


@dataclass(frozen=True, eq=False)
class Batch:
    """What one step runs. Settling it needs no other state of the time of launch.

    Attributes:
        rows: Ids of the rows that decode, `(rows,)`.
        lanes: The lane of each row at launch, `(rows,)`.
        max_context: Longest context of a decoding row, in tokens, including the new token.
        admitted: Rows that enter their lanes first, as `ADMITTED_ROW`, `(admitted,)`.
        flags: One `(entries, 3)` per penalised admitted row: lane, token id, flags.
        new_pages: `(pages, 3)`: lane, index in its page table, page id.
        copies: `(copies, 2)`: source page, target page; copied between prefill and decode.
        state_copies: `(copies, 2)`: source lane, target lane of recurrent states; likewise.
        offloads: `(pages, 2)`: page, host page; copied to the host before anything else.
        restores: `(pages, 2)`: host page, page; copied to the device for the next batch.
        num_shared: Prompt tokens of admitted rows whose KV another row computes or has computed.
        num_preempted: Rows that lost their lane because pages ran out.
        draw: The most demanding draw of the rows.
    """

    rows: Ints
    lanes: Ints
    policy_version: int
    max_context: int
    admitted: NDArray[np.void]
    flags: Sequence[Ints]
    segments: Sequence[Segment]
    new_pages: Ints
    copies: Ints
    state_copies: Ints
    offloads: Ints
    restores: Ints
    num_shared: int
    num_preempted: int
    draw: Draw = Draw.PLAIN

    @property
    def num_prefilled(self) -> int:
        """Prompt tokens to prefill."""
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def num_attended(self) -> int:
        """Sum over the tokens to prefill of the tokens that each attends to, itself included."""
        sizes = [(segment.start, len(segment.tokens)) for segment in self.segments]
        return sum(size * start + size * (size + 1) // 2 for start, size in sizes)


_NO_PAGES, _NO_PAIRS = np.empty((0, 3), np.int64), np.empty((0, 2), np.int64)
_NO_ROWS = np.empty(0, ADMITTED_ROW)


@dataclass(eq=False)
class Plan:
    """A batch that the scheduler is building. The fields are those of `Batch`."""

    admitted: list[tuple[Any, ...]] = field(default_factory=list)
    flags: list[Ints] = field(default_factory=list)
    new_pages: list[Ints] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    offloads: list[tuple[int, int]] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    num_shared: int = 0
    num_preempted: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch unless a row decodes."""
        # A preempted row may come back without a copy, if the device still has all its pages.
        return not (self.segments or self.restores or self.offloads or self.admitted)

    def admit(self, lane: int, row: Row) -> None:
        """Tell the device the state of a row that enters a lane."""
        request, sampling = row.request, row.request.sampling
        token = (row.tokens if len(row.tokens) else request.prompt)[-1]
        position, settings = row.num_tokens - 1, request.settings
        state = (token, position, request.seed, settings, lane, sampling.temperature)
        self.admitted.append(state)
        if sampling.draw >= Draw.PENALISED:
            self.flags.append(token_flags(lane, request, row.tokens))

    def batch(
        self, rows: Ints, lanes: Ints, max_context: int, draw: Draw, policy_version: int
    ) -> Batch:
        """The finished batch, in which `rows` decode."""
        return Batch(
            rows=rows,
            lanes=lanes,
            policy_version=policy_version,
            max_context=max_context,
            admitted=np.array(self.admitted, ADMITTED_ROW) if self.admitted else _NO_ROWS,
            flags=self.flags,
            segments=self.segments,
            new_pages=np.concatenate(self.new_pages) if self.new_pages else _NO_PAGES,
            copies=_pairs(self.copies),
            state_copies=_pairs(self.state_copies),
            offloads=_pairs(self.offloads),
            restores=_pairs(self.restores),
            num_shared=self.num_shared,
            num_preempted=self.num_preempted,
            draw=draw,
        )


def _pairs(pairs: list[tuple[int, int]]) -> Ints:
    return np.array(pairs, np.int64) if pairs else _NO_PAIRS

"""What one step runs, and the plan that it is put together in."""

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
    """A run of one row's prompt tokens to prefill in one step.

    Attributes:
        lane: The row's lane.
        start: Position of the first token.
        tokens: Token ids, `(segment_tokens,)`.
    """

    lane: int
    start: int
    tokens: Ints


@dataclass(frozen=True)
class Demand:
    """What the rows at hand can need of one decode step.

    Attributes:
        num_rows: Most rows that decode together.
        max_context: Longest context, in tokens.
        draws: Each kind of draw that some of them need.
    """

    num_rows: int
    max_context: int
    draws: frozenset[Draw]


# Fields of 8 bytes come first, so that each field is aligned.
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
"""What the device is told of a row that enters a lane.

`token` is the row's last token, which its first decode step feeds, at `position`; `settings` are in
the order of `SETTINGS`.
"""


@dataclass(frozen=True, eq=False)
class Batch:
    """What one step runs. It is complete in itself: settling it looks nothing up.

    Attributes:
        rows: Ids of the rows that decode, `(rows,)`.
        lanes: The lane of each at launch, `(rows,)`.
        policy_version: Weights under which it runs.
        max_context: Longest context among the decoding rows, in tokens, the new token included.
        admitted: Rows that enter their lanes first, an `ADMITTED_ROW` each, `(admitted,)`.
        flags: `(entries, 3)` of each admitted row that is penalised: lane, token id, flags.
        segments: Prompt tokens to prefill before decoding.
        new_pages: `(pages, 3)`: lane, index in the lane's page table, page id.
        copies: `(copies, 2)`: page to copy, and where to, between prefill and decode.
        offloads: `(pages, 2)`: page and host page to copy it to, before anything else.
        restores: `(pages, 2)`: host page and page to copy it to; only the next batch reads it.
        num_shared: Prompt tokens of admitted rows whose KV another row has computed.
        num_preempted: Rows that lost their lane because pages ran out.
        draw: The most demanding draw of its rows.
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
        """Tokens that those attend to, summed: each to itself, and to all of its row before it."""
        sizes = [(segment.start, len(segment.tokens)) for segment in self.segments]
        return sum(size * start + size * (size + 1) // 2 for start, size in sizes)


_NO_PAGES, _NO_PAIRS = np.empty((0, 3), np.int64), np.empty((0, 2), np.int64)
_NO_ROWS = np.empty(0, ADMITTED_ROW)


@dataclass(eq=False)
class Plan:
    """The next batch in the making; the fields are those of `Batch`."""

    admitted: list[tuple[Any, ...]] = field(default_factory=list)
    flags: list[Ints] = field(default_factory=list)
    new_pages: list[Ints] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    offloads: list[tuple[int, int]] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    num_shared: int = 0
    num_preempted: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch if no row decodes.

        A restored row may be admitted without any copy: all its pages may still be there.
        """
        return not (self.segments or self.restores or self.offloads or self.admitted)

    def admit(self, lane: int, row: Row) -> None:
        """Let a row enter a lane."""
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
        """The batch, with the rows that decode."""
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
            offloads=_pairs(self.offloads),
            restores=_pairs(self.restores),
            num_shared=self.num_shared,
            num_preempted=self.num_preempted,
            draw=draw,
        )


def _pairs(pages: list[tuple[int, int]]) -> Ints:
    return np.array(pages, np.int64) if pages else _NO_PAIRS

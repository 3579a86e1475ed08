"""What the host knows of each lane, in arrays that are updated for all rows at once."""

from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout.config import EngineConfig
from rollout.request import Floats, Ints
from rollout.sampling_params import Draw
from rollout.scheduler.pages import PageAllocator, page_keys
from rollout.scheduler.prefill import PrefillQueue
from rollout.scheduler.row import Row
from rollout.stop_strings import StopStrings

NO_ROW = NO_TOKEN = -1

# To count on more leaves pages free that most rows never need, while others wait for them; a
# preemption costs less than that. `tests/test_order.py` simulates it.
UNKNOWN_PART = 16

Number = TypeVar("Number", int, Ints)


class Ended(NamedTuple):
    """Lanes whose rows end with the token that was settled."""

    by_stop: Ints
    by_length: Ints


class LaneTable:
    """Rows in lanes, and their pages and prompts.

    Arrays are by lane, `(lanes,)`; a free lane holds zeros and `NO_ROW`.

    Args:
        config: `max_rows` lanes, `page_tokens`.
        max_row_pages: Pages of the longest row: the width of a page table.

    Attributes:
        num_left: Rows that have left a lane so far.
    """

    def __init__(self, config: EngineConfig, max_row_pages: int) -> None:
        num_lanes, self._page_tokens = config.max_rows, config.page_tokens
        self.pages = PageAllocator()
        self.prefill_queue = PrefillQueue()
        self.rows: dict[int, Row] = {}
        self.free = list(range(num_lanes - 1, -1, -1))
        self.num_left = 0
        self.restoring: set[int] = set()  # lanes whose KV is being copied back from the host
        self.row = np.full(num_lanes, NO_ROW, np.int64)
        self.ready = np.zeros(num_lanes, bool)
        self.position = np.zeros(num_lanes, np.int64)
        self.num_launched = np.zeros(num_lanes, np.int64)
        self.num_settled = np.zeros(num_lanes, np.int64)
        self.max_new = np.zeros(num_lanes, np.int64)
        self.expected_new = np.zeros(num_lanes, np.int64)
        self.num_pages = np.zeros(num_lanes, np.int64)
        self.age = np.zeros(num_lanes, np.int64)
        self._draw = np.full(num_lanes, Draw.PLAIN, np.int64)
        self.page_table = np.zeros((num_lanes, max_row_pages), np.int64)
        self._eos = np.full((1, num_lanes), NO_TOKEN, np.int64)
        self._stops: dict[StopStrings, NDArray[np.bool_]] = {}  # which lanes have them
        self._log = TokenLog(num_lanes, config.num_scores)

    def __len__(self) -> int:
        return len(self.rows)

    def running(self) -> Ints:
        """Lanes that can decode next."""
        has_page = self.position < self.num_pages * self._page_tokens
        return (self._unfinished() & has_page).nonzero()[0]

    def growing(self) -> Ints:
        """Lanes that could if they had one page more."""
        has_none = self.position >= self.num_pages * self._page_tokens
        return (self._unfinished() & has_none).nonzero()[0]

    def _unfinished(self) -> NDArray[np.bool_]:
        # ORDER: a row with `max_new_tokens` launched is not launched again; only EOS and
        # stop strings overrun
        return self.ready & (self.num_launched < self.max_new)

    def draw(self, lanes: Ints) -> Draw:
        """The most demanding draw of the rows in `lanes`."""
        if np.count_nonzero(self._draw) == 0:
            return Draw.PLAIN
        return Draw(int(self._draw[lanes].max(initial=Draw.PLAIN)))

    def growth(self) -> int:
        """Pages that the rows in lanes are expected to need besides those that they have."""
        state = self.position, self.num_launched, self.max_new, self.expected_new
        return int(expected_growth(*state, self.num_pages, self._page_tokens).sum())

    def youngest(self) -> int:
        """The lane of the row that was admitted last."""
        return int(np.where(self.row == NO_ROW, -1, self.age).argmax())

    def enter(self, row: Row) -> int:
        """Give a row a free lane. It has no page yet, and is not ready."""
        lane, sampling = self.free.pop(), row.request.sampling
        self.rows[lane] = row
        self.row[lane], self.age[lane] = row.id, row.age
        self.position[lane] = row.num_tokens - 1
        self.num_launched[lane] = self.num_settled[lane] = len(row.tokens)
        self.max_new[lane], self._draw[lane] = sampling.max_new_tokens, sampling.draw
        self.expected_new[lane] = row.expected_new
        self._eos = extend(self._eos, len(sampling.eos_token_ids), NO_TOKEN)
        self._eos[:, lane] = NO_TOKEN
        self._eos[: len(sampling.eos_token_ids), lane] = sampling.eos_token_ids
        if sampling.stop_strings is not None:
            none = np.zeros(len(self.row), bool)
            self._stops.setdefault(sampling.stop_strings, none)[lane] = True
        self._log.enter(lane, row)
        return lane

    def leave(self, lane: int) -> Row:
        """Take a row out of its lane, with its tokens, and free its pages.

        A batch in flight may still run it, and write into its pages.
        """
        row = self.rows.pop(lane)
        self.num_left += 1
        row.num_launched = int(self.num_launched[lane])
        self._log.leave(lane, self.num_settled[lane], row)
        # ORDER: lanes and pages are touched on the compute stream alone, or behind it, so whatever
        # reuses them is launched behind the batch in flight
        self.prefill_queue.leave(lane)
        self.pages.free(self.pages_of(lane))
        self.free.append(lane)
        self.restoring.discard(lane)
        self.row[lane], self.ready[lane] = NO_ROW, False
        for array in (self.position, self.num_launched, self.num_settled, self.max_new, self._draw):
            array[lane] = 0
        self.expected_new[lane] = self.num_pages[lane] = 0
        self._forget_stops(lane, row)
        return row

    def pages_of(self, lane: int) -> Ints:
        """The pages of a lane's row, in order."""
        return self.page_table[lane, : self.num_pages[lane]]

    def take_pages(self, lane: int, pages: Ints) -> Ints:
        """Put pages into a lane's empty page table. Returns `(pages, 3)`, as in `Batch`."""
        count = self.num_pages[lane] = len(pages)
        self.page_table[lane, :count] = pages
        table = np.empty((count, 3), np.int64)
        table[:, 0], table[:, 1], table[:, 2] = lane, np.arange(count), pages
        return table

    def take_page(self, lanes: Ints) -> Ints:
        """Give each of `lanes` one page more. Returns `(pages, 3)`, as in `Batch`."""
        pages, index = self.pages.allocate(len(lanes)), self.num_pages[lanes]
        self.page_table[lanes, index] = pages
        self.num_pages[lanes] += 1
        return np.stack([lanes, index, pages], axis=1)

    def settle(self, lanes: Ints, tokens: Ints, scores: Floats, policy_version: int) -> Ended:
        """Record each lane's token; the lanes whose rows end with it."""
        settled = self.num_settled[lanes]
        self._log.record(lanes, settled, tokens, scores, policy_version)
        self.num_settled[lanes] = settled + 1
        stop = np.logical_or.reduce(self._eos.take(lanes, axis=1) == tokens)
        if self._stops:
            stop[self._ended_by_text(lanes, tokens)] = True
        return Ended(lanes[stop], lanes[~stop & (settled + 1 == self.max_new[lanes])])

    def _forget_stops(self, lane: int, row: Row) -> None:
        stop = row.request.sampling.stop_strings
        if stop is not None:
            self._stops[stop][lane] = False
            if not self._stops[stop].any():
                del self._stops[stop]

    def _ended_by_text(self, lanes: Ints, tokens: Ints) -> list[int]:
        """Places in `lanes` of those whose row the token ends, which is recorded."""
        ended = []
        for stop, has in self._stops.items():
            for index in (has[lanes] & stop.may_end(tokens)).nonzero()[0].tolist():
                lane = lanes[index]
                if self.rows[lane].ends_with_text(self._log.tokens(lane, self.num_settled[lane])):
                    ended.append(index)
        return ended

    def enter_prefixes(self, lane: int, policy_version: int) -> None:
        """Let later rows find the pages that a row's tokens fill wholly."""
        row = self.rows[lane]
        if row.policy_version == policy_version:
            # ORDER: a page is entered only with tokens whose KV is written, or queued to be; that
            # of the last sampled token is not
            tokens = self._log.tokens(lane, self.num_settled[lane])
            written = np.concatenate([row.request.prompt, tokens])[:-1]
            keys = page_keys(written, self._page_tokens)
            self.pages.prefixes.add(keys, self.pages_of(lane).tolist())

    def check(self) -> None:
        """Assert what always holds between steps: every page and every lane has one owner."""
        self.pages.check(np.concatenate([self.pages_of(lane) for lane in range(len(self.row))]))
        assert sorted(self.free) == list(np.flatnonzero(self.row == NO_ROW))
        assert sorted(self.rows) == list(np.flatnonzero(self.row != NO_ROW))


def expected_growth(
    position: Number,
    launched: Number,
    max_new: Number,
    expected_new: Number,
    num_pages: Number,
    page_tokens: int,
) -> Number:
    """Pages that a row, or each of many, is expected to need besides those it has.

    A row goes on to the length that is expected of it; where none is, or it is past that, for a
    `UNKNOWN_PART`th of what it still may.

    Args:
        position: Tokens that have KV.
        launched: Tokens generated.
        max_new: Most tokens to generate.
        expected_new: Tokens that it is expected to generate, or 0.
        num_pages: Pages that it has.
        page_tokens: Tokens in a page.

    Example:
        >>> expected_growth(7, 0, 64, 0, 2, 4), expected_growth(7, 0, 64, 12, 2, 4)
        (1, 3)
    """
    known, unknown = expected_new - launched, -((launched - max_new) // UNKNOWN_PART)
    more = known * (known > 0) + unknown * (known <= 0)
    growth = -(-(position + more) // page_tokens) - num_pages
    return growth * (growth > 0)


_NO_VERSION = -1


class TokenLog:
    """Arrays by position, then lane, so that what one step writes lies together.

    Args:
        num_lanes: Lanes.
        num_scores: Numbers that come with each token.
    """

    def __init__(self, num_lanes: int, num_scores: int) -> None:
        self._tokens = np.zeros((0, num_lanes), np.int64)
        self._scores = np.zeros((0, num_lanes, num_scores), np.float32)
        self._version = np.full(num_lanes, _NO_VERSION, np.int64)  # of the newest token
        self._versions: dict[int, list[tuple[int, int]]] = {}

    def enter(self, lane: int, row: Row) -> None:
        """Go on with a row, and be able to hold all that it may generate."""
        most, count = row.request.sampling.max_new_tokens, len(row.tokens)
        self._tokens = extend(self._tokens, most, 0)
        self._scores = extend(self._scores, most, 0)
        self._tokens[:count, lane] = row.tokens
        self._scores[:count, lane] = row.scores
        self._versions[lane] = row.versions
        self._version[lane] = row.versions[-1][0] if row.versions else _NO_VERSION

    def record(
        self, lanes: Ints, index: Ints, tokens: Ints, scores: Floats, policy_version: int
    ) -> None:
        """Write each lane's token number `index`, and its scores `(lanes, num_scores)`."""
        self._tokens[index, lanes] = tokens
        self._scores[index, lanes] = scores
        changed = self._version[lanes] != policy_version
        if np.count_nonzero(changed):
            self._version[lanes] = policy_version
            for lane, first in zip(lanes[changed].tolist(), index[changed].tolist(), strict=True):
                self._versions[lane].append((policy_version, first))

    def tokens(self, lane: int, count: int) -> Ints:
        """The first `count` tokens of a lane."""
        return self._tokens[:count, lane]

    def leave(self, lane: int, count: int, row: Row) -> None:
        """Hand a lane's `count` tokens, and what comes with them, to its row."""
        row.tokens = self._tokens[:count, lane].copy()
        row.scores = self._scores[:count, lane].copy()
        row.versions = self._versions.pop(lane)


def extend(array: NDArray[Any], length: int, fill: int) -> NDArray[Any]:
    """`array` with at least `length` rows, the new ones holding `fill`.

    Rows at least double, so that rollouts of ever longer limits cost no copy each.
    """
    if length <= len(array):
        return array
    missing = max(length, 2 * len(array)) - len(array)
    widths = ((0, missing), *((0, 0) for _ in array.shape[1:]))
    return np.pad(array, widths, constant_values=fill)

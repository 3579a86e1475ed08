"""The host's state of each lane, in arrays that are updated for all rows at once."""

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
# Trainers compute a recurrent state in chunks of this many tokens. Parts that end with a chunk
# give the same bits as the whole prompt.
STATE_CHUNK = 64

# Without a known length, admission reserves 1/16 of what a row may still generate. Reserving more
# makes rows wait for pages that most rows never use, which costs more than the preemptions it
# avoids: see the simulation in tests/test_order.py.
UNKNOWN_PART = 16

Number = TypeVar("Number", int, Ints)


class Ended(NamedTuple):
    """Lanes whose rows end with the token just settled."""

    by_stop: Ints
    by_length: Ints


class LaneTable:
    """The rows in lanes, their pages and their prompts.

    Arrays are indexed by lane, `(lanes,)`. A free lane has zeros and `NO_ROW`. The page tables are
    `(lanes, max_row_pages)`. `num_left` counts the rows that have left a lane so far. Rows use the
    first `most` lanes.

    If the model `keeps_state`, a row cannot start from KV pages alone, so no prefix is cached.
    """

    def __init__(
        self, config: EngineConfig, max_row_pages: int, *, keeps_state: bool = False
    ) -> None:
        num_lanes, self._page_tokens = config.max_rows, config.page_tokens
        self.keeps_state = keeps_state
        self.pages = PageAllocator()
        self.prefill_queue = PrefillQueue(STATE_CHUNK if keeps_state else 1)
        self.rows: dict[int, Row] = {}
        self.most = 0
        self.limit(num_lanes)
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
        self._stops: dict[StopStrings, NDArray[np.bool_]] = {}  # the lanes that use each, (lanes,)
        self._log = TokenLog(num_lanes, config.num_scores)

    def __len__(self) -> int:
        return len(self.rows)

    def limit(self, most: int) -> None:
        """Use only the first lanes. Those in use must be among them."""
        assert all(lane < most for lane in self.rows)
        self.most = most
        self.free = [lane for lane in range(most - 1, -1, -1) if lane not in self.rows]

    def running(self) -> Ints:
        """Lanes that can decode in the next batch."""
        has_page = self.position < self.num_pages * self._page_tokens
        return (self._unfinished() & has_page).nonzero()[0]

    def growing(self) -> Ints:
        """Lanes that need one more page before they can decode."""
        lacks_page = self.position >= self.num_pages * self._page_tokens
        return (self._unfinished() & lacks_page).nonzero()[0]

    def _unfinished(self) -> NDArray[np.bool_]:
        # ORDER: a row is launched at most `max_new_tokens` times, so only EOS and stop strings
        # overrun
        return self.ready & (self.num_launched < self.max_new)

    def draw(self, lanes: Ints) -> Draw:
        """The most demanding draw of the rows in `lanes`."""
        if np.count_nonzero(self._draw) == 0:
            return Draw.PLAIN
        return Draw(int(self._draw[lanes].max(initial=Draw.PLAIN)))

    def growth(self) -> int:
        """Pages that the rows in lanes are expected to need beyond their present ones."""
        state = self.position, self.num_launched, self.max_new, self.expected_new
        return int(expected_growth(*state, self.num_pages, self._page_tokens).sum())

    def youngest(self) -> int:
        """The lane of the row that was admitted last."""
        return int(np.where(self.row == NO_ROW, -1, self.age).argmax())

    def enter(self, row: Row) -> int:
        """Put a row into a free lane and return the lane. It has no page and is not ready yet."""
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

        A batch in flight may still run the row and write into its pages.
        """
        row = self.rows.pop(lane)
        self.num_left += 1
        row.num_launched = int(self.num_launched[lane])
        self._log.leave(lane, self.num_settled[lane], row)
        # ORDER: lanes and pages are only used on the compute stream or after it, so their next use
        # comes after the batch in flight
        self.prefill_queue.leave(lane)
        self.pages.free(self.pages_of(lane))
        self.free.append(lane)
        self.restoring.discard(lane)
        self.row[lane], self.ready[lane] = NO_ROW, False
        for array in (self.position, self.num_launched, self.num_settled, self.max_new, self._draw):
            array[lane] = 0
        self.expected_new[lane] = self.num_pages[lane] = 0
        stop = row.request.sampling.stop_strings
        if stop is not None:
            self._stops[stop][lane] = False
            if not self._stops[stop].any():
                del self._stops[stop]
        return row

    def pages_of(self, lane: int) -> Ints:
        """The pages of a lane's row, in order: a view."""
        return self.page_table[lane, : self.num_pages[lane]]

    def take_pages(self, lane: int, pages: Ints) -> Ints:
        """Fill a lane's empty page table. Returns `Batch.new_pages` for it, `(pages, 3)`."""
        count = self.num_pages[lane] = len(pages)
        self.page_table[lane, :count] = pages
        table = np.empty((count, 3), np.int64)
        table[:, 0], table[:, 1], table[:, 2] = lane, np.arange(count), pages
        return table

    def take_page(self, lanes: Ints) -> Ints:
        """Give each of `lanes` one more page. Returns `Batch.new_pages` for it, `(pages, 3)`."""
        pages, index = self.pages.allocate(len(lanes)), self.num_pages[lanes]
        self.page_table[lanes, index] = pages
        self.num_pages[lanes] += 1
        return np.stack([lanes, index, pages], axis=1)

    def settle(self, lanes: Ints, tokens: Ints, scores: Floats, policy_version: int) -> Ended:
        """Record each lane's token and return the lanes whose rows end with it."""
        settled = self.num_settled[lanes]
        self._log.record(lanes, settled, tokens, scores, policy_version)
        self.num_settled[lanes] = settled + 1
        stop = np.logical_or.reduce(self._eos.take(lanes, axis=1) == tokens)
        if self._stops:
            stop[self._ended_by_text(lanes, tokens)] = True
        return Ended(lanes[stop], lanes[~stop & (settled + 1 == self.max_new[lanes])])

    def _ended_by_text(self, lanes: Ints, tokens: Ints) -> list[int]:
        """Indices into `lanes` of rows whose newest token, already recorded, completes a string."""
        ended = []
        for stop, uses in self._stops.items():
            for index in (uses[lanes] & stop.may_end(tokens)).nonzero()[0].tolist():
                lane = lanes[index]
                if self.rows[lane].ends_with_text(self._log.tokens(lane, self.num_settled[lane])):
                    ended.append(index)
        return ended

    def enter_prefixes(self, lane: int, policy_version: int) -> None:
        """Let later rows share this row's full pages."""
        row = self.rows[lane]
        if row.policy_version == policy_version and not self.keeps_state:
            # ORDER: only pages whose KV is written or queued may be shared; the newest token has
            # no KV yet
            tokens = self._log.tokens(lane, self.num_settled[lane])
            written = np.concatenate([row.request.prompt, tokens])[:-1]
            keys = page_keys(written, self._page_tokens)
            self.pages.prefixes.add(keys, self.pages_of(lane).tolist())

    def check(self) -> None:
        """Assert that pages and lanes are consistent. Valid between steps."""
        self.pages.check(np.concatenate([self.pages_of(lane) for lane in range(len(self.row))]))
        assert sorted(self.free) == list(np.flatnonzero(self.row[: self.most] == NO_ROW))
        assert sorted(self.rows) == list(np.flatnonzero(self.row != NO_ROW))


def expected_growth(
    position: Number,
    launched: Number,
    max_new: Number,
    expected_new: Number,
    num_pages: Number,
    page_tokens: int,
) -> Number:
    """Pages that a row, or each of an array of rows, is expected to need beyond its present ones.

    A row is expected to reach `expected_new` tokens. If that is 0 (unknown) or already passed, it
    is expected to generate `1 / UNKNOWN_PART` of the tokens that it still may. `position` counts
    tokens with KV, `launched` generated tokens, in flight included.

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
    """Tokens, scores and policy versions of the rows in lanes, without their prompts.

    Arrays are indexed by position, then lane, so that one step writes to adjacent memory.
    """

    def __init__(self, num_lanes: int, num_scores: int) -> None:
        self._tokens = np.zeros((0, num_lanes), np.int64)
        self._scores = np.zeros((0, num_lanes, num_scores), np.float32)
        self._version = np.full(num_lanes, _NO_VERSION, np.int64)  # of the newest token
        self._versions: dict[int, list[tuple[int, int]]] = {}

    def enter(self, lane: int, row: Row) -> None:
        """Take over a row's tokens and make room for all that it may generate."""
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
        """Write each lane's token number `index` and its scores, `(lanes, num_scores)`."""
        self._tokens[index, lanes] = tokens
        self._scores[index, lanes] = scores
        changed = self._version[lanes] != policy_version
        if np.count_nonzero(changed):
            self._version[lanes] = policy_version
            for lane, first in zip(lanes[changed].tolist(), index[changed].tolist(), strict=True):
                self._versions[lane].append((policy_version, first))

    def tokens(self, lane: int, count: int) -> Ints:
        """The first `count` tokens of a lane: a view."""
        return self._tokens[:count, lane]

    def leave(self, lane: int, count: int, row: Row) -> None:
        """Copy a lane's first `count` tokens, their scores and versions to its row."""
        row.tokens = self._tokens[:count, lane].copy()
        row.scores = self._scores[:count, lane].copy()
        row.versions = self._versions.pop(lane)


def extend(array: NDArray[Any], length: int, fill: int) -> NDArray[Any]:
    """`array` with at least `length` entries along axis 0; new entries are `fill`.

    The length at least doubles, so that slowly rising limits do not cost a copy each time.
    """
    if length <= len(array):
        return array
    missing = max(length, 2 * len(array)) - len(array)
    widths = ((0, missing), *((0, 0) for _ in array.shape[1:]))
    return np.pad(array, widths, constant_values=fill)

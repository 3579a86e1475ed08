"""Which row gets a lane next: preempted rows first, then groups, the longest expected first."""

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from rollout.request import Ints
from rollout.scheduler.row import NO_AGE, Row

_MAX_PROMPTS = 65_536
_MEAN_OVER = 16  # completions


class Lengths:
    """Moving mean of each prompt's completion lengths, for the `capacity` most recent prompts."""

    def __init__(self, capacity: int = _MAX_PROMPTS) -> None:
        self._capacity = capacity
        self._means: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def note(self, prompt: bytes, num_tokens: int) -> None:
        """Record that a completion of the prompt had `num_tokens` tokens."""
        count, mean = self._means.pop(prompt, (0, 0.0))
        count = min(count + 1, _MEAN_OVER)
        self._means[prompt] = count, mean + (num_tokens - mean) / count
        if len(self._means) > self._capacity:
            self._means.popitem(last=False)

    def expected(self, prompt: bytes) -> float | None:
        """Mean length of the prompt's completions, in tokens; `None` if unknown."""
        _, mean = self._means.get(prompt, (0, None))
        return mean


def digest(prompt: Sequence[int] | Ints) -> bytes:
    """The key of a prompt, given as token ids, in `Lengths`."""
    return blake2b(np.asarray(prompt, np.int64).tobytes(), digest_size=16).digest()


class _Priority(NamedTuple):
    """Orders groups: the smallest goes first."""

    is_known: bool  # unknown goes first, because it may be the longest of all
    minus_expected: float
    serial: int


@dataclass(eq=False)
class _Group:
    """The waiting rows of one prompt that were submitted together."""

    prompt: bytes
    serial: int
    rows: deque[Row]
    expected: float | None

    @property
    def priority(self) -> _Priority:
        return _Priority(self.expected is not None, -(self.expected or 0.0), self.serial)


class WaitingQueue:
    """The rows without a lane."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._preempted: list[Row] = []  # oldest first
        self._groups: dict[int, _Group] = {}  # serial -> group, if it has a waiting row
        self._heap: list[_Priority] = []  # may contain stale entries
        self._group_of: dict[int, _Group] = {}  # row id -> group, for rows in lanes, too
        self._num_new = self._num_admitted = self._num_groups = 0

    def __len__(self) -> int:
        return len(self._preempted) + self._num_new

    def __iter__(self) -> Iterator[Row]:
        yield from self._preempted
        for group in self._groups.values():
            yield from group.rows

    def add(self, rows: Sequence[Row]) -> None:
        """Queue rows submitted together."""
        groups: dict[bytes, _Group] = {}
        for row in rows:
            prompt = digest(row.request.prompt)
            if prompt not in groups:
                expected, self._num_groups = self._lengths.expected(prompt), self._num_groups + 1
                groups[prompt] = _Group(prompt, self._num_groups, deque(), expected)
            groups[prompt].rows.append(row)
            self._group_of[row.id] = groups[prompt]
        self._num_new += len(rows)
        for group in groups.values():
            self._groups[group.serial] = group
            heappush(self._heap, group.priority)

    def first(self) -> Row:
        """The row that gets the next lane."""
        return self._preempted[0] if self._preempted else self._first_group().rows[0]

    def pop(self) -> Row:
        """Remove and return the first row."""
        if self._preempted:
            return self._preempted.pop(0)
        row = self._first_group().rows[0]
        self._take(row)
        row.age, self._num_admitted = self._num_admitted, self._num_admitted + 1
        return row

    def put_back(self, row: Row) -> None:
        """Queue a preempted row behind older preempted rows and before all other rows."""
        insort(self._preempted, row, key=lambda row: row.age)

    def preempted(self, row_id: int) -> Row | None:
        """The row with this id if it was preempted and waits."""
        return next((row for row in self._preempted if row.id == row_id), None)

    def remove(self, ids: Collection[int]) -> list[Row]:
        """Remove and return the waiting rows among these ids."""
        removed = [row for row in self if row.id in ids]
        self._preempted = [row for row in self._preempted if row.id not in ids]
        for row in removed:
            if row.age == NO_AGE:
                self._take(row)
        return removed

    def forget(self, row: Row, num_tokens: int | None) -> None:
        """Forget a row that ended after `num_tokens` tokens; `None` if it was aborted."""
        group = self._group_of.pop(row.id)
        if num_tokens is None:
            return
        self._lengths.note(group.prompt, num_tokens)
        if group.serial in self._groups:
            group.expected = self._lengths.expected(group.prompt)
            heappush(self._heap, group.priority)

    def expected_new(self, row: Row) -> int:
        """Expected number of generated tokens of a row; 0 if unknown."""
        return round(self._lengths.expected(self._group_of[row.id].prompt) or 0)

    def _take(self, row: Row) -> None:
        group = self._group_of[row.id]
        group.rows.remove(row)
        if not group.rows:
            del self._groups[group.serial]
        self._num_new -= 1

    def _first_group(self) -> _Group:
        while True:
            group = self._groups.get(self._heap[0].serial)
            if group is not None and group.priority == self._heap[0]:
                return group
            heappop(self._heap)

"""Which row is given a lane next: preempted ones, then whole groups, expected-longest first."""

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heappop, heappush

import numpy as np

from rollout.request import Ints
from rollout.scheduler.row import NO_AGE, Row

# Prompts whose lengths are remembered, and completions that a prompt's mean goes back to.
_PROMPTS = 65_536
_COMPLETIONS = 16

_Place = tuple[bool, float, int]
"""Order of a group: is a length known, the longest first, the earliest first."""


class Lengths:
    """How long the completions of a prompt were: of the prompts that were seen last.

    Args:
        capacity: Prompts that are remembered.
    """

    def __init__(self, capacity: int = _PROMPTS) -> None:
        self._capacity = capacity
        self._means: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def note(self, prompt: bytes, num_tokens: int) -> None:
        """A completion of the prompt had `num_tokens` tokens."""
        count, mean = self._means.pop(prompt, (0, 0.0))
        count = min(count + 1, _COMPLETIONS)
        self._means[prompt] = count, mean + (num_tokens - mean) / count
        if len(self._means) > self._capacity:
            self._means.popitem(last=False)

    def expected(self, prompt: bytes) -> float | None:
        """Mean length of the last completions, where there were any."""
        found = self._means.get(prompt)
        return found and found[1]


def digest(prompt: Sequence[int] | Ints) -> bytes:
    """What a prompt's lengths are remembered by.

    Args:
        prompt: Token ids.
    """
    return blake2b(np.asarray(prompt, np.int64).tobytes(), digest_size=16).digest()


@dataclass(eq=False)
class _Group:
    """Waiting rows of one prompt that were submitted together."""

    prompt: bytes
    serial: int
    rows: deque[Row]
    expected: float | None

    @property
    def place(self) -> _Place:
        # Nothing known may be the longest of all, so that these come first, as they came.
        return self.expected is not None, -(self.expected or 0.0), self.serial


class WaitingLine:
    """Rows without a lane.

    Args:
        lengths: What is known of prompts from earlier on. Outlives the line.
    """

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._parked: list[Row] = []  # oldest first
        self._groups: dict[int, _Group] = {}
        self._places: list[_Place] = []  # a heap; groups that have moved or gone have stale ones
        self._prompt_of: dict[int, tuple[bytes, int]] = {}  # rows in lanes, too
        self._num_waiting = self._num_admitted = self._num_groups = 0

    def __len__(self) -> int:
        return len(self._parked) + self._num_waiting

    def __iter__(self) -> Iterator[Row]:
        yield from self._parked
        for group in self._groups.values():
            yield from group.rows

    def add(self, rows: Sequence[Row]) -> None:
        """Queue rows that were submitted together."""
        groups: dict[bytes, _Group] = {}
        for row in rows:
            prompt = digest(row.request.prompt)
            if prompt not in groups:
                expected, self._num_groups = self._lengths.expected(prompt), self._num_groups + 1
                groups[prompt] = _Group(prompt, self._num_groups, deque(), expected)
            groups[prompt].rows.append(row)
            self._prompt_of[row.id] = prompt, groups[prompt].serial
        self._num_waiting += len(rows)
        for group in groups.values():
            self._groups[group.serial] = group
            heappush(self._places, group.place)

    def first(self) -> Row:
        """The row that is next."""
        return self._parked[0] if self._parked else self._first_group().rows[0]

    def pop(self) -> Row:
        """Take it out of the line."""
        if self._parked:
            return self._parked.pop(0)
        row = self._first_group().rows[0]
        self._take(row)
        row.age, self._num_admitted = self._num_admitted, self._num_admitted + 1
        return row

    def put_back(self, row: Row) -> None:
        """A row has lost its lane: it goes before all that never had one, behind older ones."""
        insort(self._parked, row, key=lambda row: row.age)

    def parked(self, row_id: int) -> Row | None:
        """The row of that id, if it has lost its lane."""
        return next((row for row in self._parked if row.id == row_id), None)

    def remove(self, ids: Collection[int]) -> list[Row]:
        """Take these rows out of the line, those of them that are in it."""
        gone = [row for row in self if row.id in ids]
        self._parked = [row for row in self._parked if row.id not in ids]
        for row in gone:
            if row.age == NO_AGE:
                self._take(row)
        return gone

    def forget(self, row: Row, num_tokens: int | None) -> None:
        """A row is no more; `num_tokens` is its length if it was completed."""
        prompt, serial = self._prompt_of.pop(row.id)
        if num_tokens is None:
            return
        self._lengths.note(prompt, num_tokens)
        group = self._groups.get(serial)
        if group is not None:
            group.expected = self._lengths.expected(prompt)
            heappush(self._places, group.place)

    def expected_new(self, row: Row) -> int:
        """Tokens that a row is expected to generate; 0 where nothing is known."""
        prompt, _ = self._prompt_of[row.id]
        return round(self._lengths.expected(prompt) or 0)

    def _take(self, row: Row) -> None:
        """Take a row that never had a lane out of its group."""
        group = self._groups[self._prompt_of[row.id][1]]
        group.rows.remove(row)
        if not group.rows:
            del self._groups[group.serial]
        self._num_waiting -= 1

    def _first_group(self) -> _Group:
        while True:
            group = self._groups.get(self._places[0][2])
            if group is not None and group.place == self._places[0]:
                return group
            heappop(self._places)

"""The page allocator against plain sets, and pages found by their content."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.scheduler.pages import (
    TRASH_PAGE,
    PageAllocator,
    PageUse,
    PrefixIndex,
    page_keys,
    pages_for,
)

many = settings(max_examples=5 * settings.default.max_examples)


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_pages_for_is_the_fewest_that_hold_the_tokens(num_tokens, page_tokens):
    num_pages = pages_for(num_tokens, page_tokens)
    assert num_pages * page_tokens >= num_tokens
    assert num_pages == 0 or (num_pages - 1) * page_tokens < num_tokens


def make_pool(num_pages: int) -> PageAllocator:
    pool = PageAllocator()
    pool.grow(num_pages)
    return pool


# An operation, and a number that selects its amount or row.
asked = st.tuples(
    st.sampled_from(["grow", "allocate", "allocate", "share", "free"]), st.integers(0, 12)
)


class Rows:
    """Rows that start, grow and end at random, as in the scheduler."""

    def __init__(self) -> None:
        self.pool = PageAllocator()
        self.num_pages = 1
        self.rows: list[list[int]] = [[]]
        self.uses: dict[PageUse, int] = {}  # number of rows per use

    @property
    def pages(self) -> list[int]:
        return [page for pages in self.rows for page in pages]

    def grow(self, number: int) -> None:
        self.pool.grow(4 * number)
        self.num_pages = max(self.num_pages, 4 * number)

    def allocate(self, number: int) -> None:
        if not number % 3:
            self.rows.append([])
        count = min(number // 3, self.pool.num_free)
        taken = self.pool.allocate(count).tolist()
        assert len(taken) == count
        assert not set(taken) & {TRASH_PAGE, *self.pages}
        self.rows[number % len(self.rows)] += taken
        self.uses.update((self.pool.use(page), 1) for page in taken)

    def share(self, number: int) -> None:
        """A new row shares the first pages of another."""
        shared = self.rows[number % len(self.rows)][: number // 2]
        self.pool.share(np.array(shared, np.int64))
        self.rows.append(list(shared))
        for page in shared:
            self.uses[self.pool.use(page)] += 1

    def free(self, number: int) -> None:
        pages = self.rows.pop(number % len(self.rows))
        for page in pages:
            self.uses[self.pool.use(page)] -= 1
        self.pool.free(np.array(pages, np.int64))
        self.rows = self.rows or [[]]

    def check(self) -> None:
        assert self.pool.num_pages == self.num_pages
        assert self.pool.num_used == len(set(self.pages))
        assert self.pool.num_free == self.num_pages - 1 - len(set(self.pages))
        assert self.pool.num_shared == sum(count > 1 for count in Counter(self.pages).values())
        assert all(self.pool.is_current(use) == (count > 0) for use, count in self.uses.items())
        self.pool.check(np.array(self.pages, np.int64))


@many
@given(st.lists(asked, max_size=60))
def test_every_page_is_free_or_one_rows(steps):
    rows = Rows()
    for what, number in steps:
        getattr(rows, what)(number)
        rows.check()
    for _ in range(len(rows.rows)):
        rows.free(0)
    rows.check()
    everything = rows.num_pages - 1
    assert sorted(rows.pool.allocate(everything)) == list(range(1, rows.num_pages))


def test_pages_come_lowest_first_and_grown_ones_last():
    pool = make_pool(4)
    assert pool.allocate(1).tolist() == [1]
    pool.grow(6)
    assert pool.allocate(2).tolist() == [2, 3]
    assert pool.allocate(2).tolist() == [4, 5]


def test_freed_pages_are_the_next_ones_given():
    pool = make_pool(10)
    pages = pool.allocate(3)
    pool.free(pages)
    assert set(pool.allocate(3)) == set(pages)


def test_a_page_that_is_kept_for_its_beginning_still_holds_it():
    pool = make_pool(4)
    pages = pool.allocate(3)
    uses = [pool.use(page) for page in pages.tolist()]
    pool.prefixes.add([b"beginning"], pages.tolist())
    pool.free(pages)
    assert [pool.is_current(use) for use in uses] == [True, False, False]
    pool.allocate(3)
    assert not any(pool.is_current(use) for use in uses)


def test_taking_more_than_all_pages_is_a_bug_of_ours():
    with pytest.raises(AssertionError, match="more pages than are free"):
        make_pool(3).allocate(3)


# A check must be able to fail.
@pytest.mark.parametrize("pages", [[1, 2], [1, 2, 3, 3], [1, 2, 4], [0, 1, 2]], ids=str)
def test_check_notices(pages):
    pool = make_pool(6)
    pool.check(pool.allocate(3))
    with pytest.raises(AssertionError, match="a page leaked or is shared"):
        pool.check(np.array(pages))


# --- known prefixes

tokens = st.lists(st.integers(0, 3), max_size=24)


@given(tokens, tokens, st.integers(1, 6))
def test_keys_are_equal_as_far_as_tokens_are(left, right, page_tokens):
    keys = [list(page_keys(np.array(row, np.int64), page_tokens)) for row in (left, right)]
    assert [len(each) for each in keys] == [len(row) // page_tokens for row in (left, right)]
    for index, (mine, theirs) in enumerate(zip(*keys, strict=False)):
        stop = (index + 1) * page_tokens
        assert (mine == theirs) == (left[:stop] == right[:stop])


@given(st.lists(tokens, max_size=8), tokens, st.integers(1, 4))
def test_the_longest_known_beginning_is_found(rows, wanted, page_tokens):
    index, contents = PrefixIndex(), {}
    for number, row in enumerate(rows):
        pages = [100 * number + place for place in range(len(row) // page_tokens)]
        index.add(page_keys(np.array(row, np.int64), page_tokens), pages)
        contents.update(
            {page: row[: (place + 1) * page_tokens] for place, page in enumerate(pages)}
        )
    matched = index.match(page_keys(np.array(wanted, np.int64), page_tokens))
    known = [stop for row in rows for stop in range(len(row) + 1) if row[:stop] == wanted[:stop]]
    longest = max(known, default=0) // page_tokens
    assert len(matched) == longest
    for place, page in enumerate(matched):
        assert contents[page] == wanted[: (place + 1) * page_tokens]


def test_a_page_that_is_forgotten_is_not_found_and_ends_the_match():
    index, row = PrefixIndex(), np.arange(6)
    index.add(page_keys(row, 2), [7, 8, 9])
    index.forget(8)
    assert index.match(page_keys(row, 2)) == [7]
    assert 9 in index
    index.clear()
    assert index.match(page_keys(row, 2)) == []
    assert 9 not in index

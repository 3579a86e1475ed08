"""The page allocator against plain sets."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.scheduler.pages import TRASH_PAGE, PageAllocator, pages_for

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


# What is asked next, and a number that says how much or of whom.
asked = st.tuples(
    st.sampled_from(["grow", "allocate", "allocate", "share", "free"]),
    st.integers(0, 12),
)


class Rows:
    """Rows that begin, grow and end at random, as the scheduler asks for them."""

    def __init__(self) -> None:
        self.pool = PageAllocator()
        self.num_pages = 1
        self.rows: list[list[int]] = [[]]
        self.uses: dict[tuple[int, int], int] = {}  # of held pages, and how many rows hold each

    @property
    def held(self) -> list[int]:
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
        assert not set(taken) & {TRASH_PAGE, *self.held}
        self.rows[number % len(self.rows)] += taken
        self.uses.update((self.pool.use(page), 1) for page in taken)

    def share(self, number: int) -> None:
        """A new row holds the first pages of another."""
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
        assert self.pool.num_used == len(set(self.held))
        assert self.pool.num_free == self.num_pages - 1 - len(set(self.held))
        assert self.pool.num_shared == sum(count > 1 for count in Counter(self.held).values())
        assert all(self.pool.is_current(use) == (count > 0) for use, count in self.uses.items())
        self.pool.check(np.array(self.held, np.int64))


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


def test_a_pool_starts_with_the_trash_page_alone():
    pool = PageAllocator()
    assert (pool.num_pages, pool.num_used, pool.num_free) == (1, 0, 0)
    pool.check(np.empty(0, np.int64))


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


def test_no_pages_are_an_empty_array_of_ints():
    pages = make_pool(4).allocate(0)
    assert (pages.shape, pages.dtype) == ((0,), np.int64)


def test_growing_to_fewer_pages_takes_none_away():
    pool = make_pool(8)
    pages = pool.allocate(7)
    for num_pages in (8, 3, 0):
        pool.grow(num_pages)
        assert pool.num_pages == 8
        pool.check(pages)


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


# A check that cannot fail holds nothing.
@pytest.mark.parametrize(
    ("held", "why"),
    [
        ([1, 2], "leaked"),
        ([1, 2, 3, 3], "shared"),
        ([1, 2, 4], "free and held"),
        ([0, 1, 2], "trash"),
    ],
)
def test_check_notices(held, why):
    pool = make_pool(6)
    pool.check(pool.allocate(3))
    with pytest.raises(AssertionError, match="a page leaked or is shared"):
        pool.check(np.array(held))

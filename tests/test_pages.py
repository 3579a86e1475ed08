"""The page allocator against plain sets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import OutOfPages, RolloutError
from rollout.pages import TRASH_PAGE, PageAllocator, pages_for

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
    st.sampled_from(["grow", "reserve", "allocate", "allocate", "share", "free"]),
    st.integers(0, 12),
)


class Rows:
    """Rows that reserve, grow and end at random, as the scheduler asks for them."""

    def __init__(self) -> None:
        self.pool = PageAllocator()
        self.num_pages = 1
        self.rows: list[tuple[int, list[int]]] = []  # pages promised, pages held

    @property
    def held(self) -> list[int]:
        return [page for _, pages in self.rows for page in pages]

    def grow(self, number: int) -> None:
        self.pool.grow(4 * number)
        self.num_pages = max(self.num_pages, 4 * number)

    def reserve(self, count: int) -> None:
        num_promised = sum(promised - len(pages) for promised, pages in self.rows)
        if num_promised + len(set(self.held)) + count < self.num_pages:
            self.pool.reserve(count)
            self.rows.append((count, []))
        else:
            with pytest.raises(OutOfPages):
                self.pool.reserve(count)

    def allocate(self, number: int) -> None:
        if self.rows:
            promised, pages = self.rows[number % len(self.rows)]
            count = min(number // 3, promised - len(pages))
            taken = self.pool.allocate(count).tolist()  # never refused: it was promised
            assert len(taken) == count
            assert not set(taken) & {TRASH_PAGE, *self.held}
            pages += taken

    def share(self, number: int) -> None:
        """A new row holds the first pages of another."""
        if self.rows:
            shared = self.rows[number % len(self.rows)][1][: number // 2]
            self.pool.share(np.array(shared, np.int64))
            self.rows.append((len(shared), list(shared)))

    def free(self, number: int) -> None:
        if self.rows:
            promised, pages = self.rows.pop(number % len(self.rows))
            self.pool.free(np.array(pages, np.int64), promised - len(pages))

    def check(self) -> None:
        assert self.pool.num_pages == self.num_pages
        assert self.pool.num_used == len(set(self.held))
        promised = sum(promised - len(pages) for promised, pages in self.rows)
        assert self.pool.num_unreserved == self.num_pages - 1 - len(set(self.held)) - promised
        self.pool.check(np.array(self.held, np.int64))


@many
@given(st.lists(asked, max_size=60))
def test_every_page_is_free_or_one_rows(steps):
    rows = Rows()
    for what, number in steps:
        getattr(rows, what)(number)
        rows.check()
    while rows.rows:
        rows.free(0)
    rows.check()
    everything = rows.num_pages - 1
    rows.pool.reserve(everything)
    assert sorted(rows.pool.allocate(everything)) == list(range(1, rows.num_pages))


def test_a_pool_starts_with_the_trash_page_alone():
    pool = PageAllocator()
    assert (pool.num_pages, pool.num_used, pool.num_unreserved) == (1, 0, 0)
    pool.check(np.empty(0, np.int64))
    with pytest.raises(OutOfPages):
        pool.reserve(1)


def test_pages_come_lowest_first_and_grown_ones_last():
    pool = make_pool(4)
    pool.reserve(3)
    assert pool.allocate(1).tolist() == [1]
    pool.grow(6)
    assert pool.allocate(2).tolist() == [2, 3]
    pool.reserve(2)
    assert pool.allocate(2).tolist() == [4, 5]


def test_freed_pages_are_the_next_ones_given():
    pool = make_pool(10)
    pool.reserve(3)
    pages = pool.allocate(3)
    pool.free(pages, 0)
    pool.reserve(3)
    assert set(pool.allocate(3)) == set(pages)


def test_no_pages_are_an_empty_array_of_ints():
    pages = make_pool(4).allocate(0)
    assert (pages.shape, pages.dtype) == ((0,), np.int64)


def test_growing_to_fewer_pages_takes_none_away():
    pool = make_pool(8)
    pool.reserve(7)
    pages = pool.allocate(7)
    for num_pages in (8, 3, 0):
        pool.grow(num_pages)
        assert pool.num_pages == 8
        pool.check(pages)


def test_out_of_pages_says_how_many_and_changes_nothing():
    pool = make_pool(6)
    pool.reserve(3)
    with pytest.raises(
        OutOfPages, match=r"^3 KV pages wanted, 2 of 5 neither held by nor promised .*kv_bytes"
    ):
        pool.reserve(3)
    assert pool.num_unreserved == 2
    pool.reserve(2)  # still there
    assert issubclass(OutOfPages, RolloutError)


def test_taking_more_than_all_pages_is_a_bug_of_ours():
    with pytest.raises(AssertionError, match="more pages than it was promised"):
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
    pool.reserve(3)
    pool.check(pool.allocate(3))
    with pytest.raises(AssertionError, match="a page leaked or is shared"):
        pool.check(np.array(held))

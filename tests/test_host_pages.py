"""Host pages against a plain list of each row's contents."""

from itertools import count

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from rollout.scheduler.host_pages import NO_PAGE, HostPages
from rollout.scheduler.pages import PageAllocator

many = settings(max_examples=5 * settings.default.max_examples)

# An operation, and a number that selects its amount or row.
asked = st.tuples(
    st.sampled_from(
        ["enter", "fork", "fork", "write", "leave", "leave", "come_back", "end", "renew"]
    ),
    st.integers(0, 30),
)


class Rows:
    """Rows that start, are preempted and come back, as in the scheduler."""

    def __init__(self, num_pages: int, num_host_pages: int) -> None:
        self.pool = PageAllocator()
        self.pool.grow(1 + num_pages)
        self.host = HostPages(num_host_pages, self.pool)
        self.on_device: dict[int, int] = {}  # page -> content
        self.on_host: dict[int, int] = {}
        self.contents = count()
        self.live: list[tuple[list[int], list[int]]] = []  # contents and pages of each row
        self.preempted: list[tuple[list[int], list[int]]] = []  # contents and host pages
        self.seen: set[str] = set()

    def take(self, number: int) -> list[int]:
        return self.pool.allocate(min(number, self.pool.num_free)).tolist()

    def enter(self, number: int) -> None:
        self.write_all([], [], self.take(1 + number % 4))

    def fork(self, number: int) -> None:
        """A new row shares all pages of another except the last."""
        if self.live:
            contents, pages = self.live[number % len(self.live)]
            self.pool.share(np.array(pages[:-1], np.int64))
            self.write_all(contents[:-1], pages[:-1], self.take(1))

    def write_all(self, contents: list[int], shared: list[int], own: list[int]) -> None:
        self.on_device.update((page, next(self.contents)) for page in own)
        row = [*contents, *(self.on_device[page] for page in own)], [*shared, *own]
        self.live.append(row)

    def write(self, number: int) -> None:
        if self.live and self.pool.num_free:
            contents, pages = self.live.pop(number % len(self.live))
            self.write_all(contents, pages, self.take(1))

    def leave(self, number: int) -> None:
        """Preempt a row: all its pages except the last, which is not full, stay as prefixes."""
        if not self.live:
            return
        contents, pages = self.live[number % len(self.live)]
        self.pool.prefixes.add([b"%d" % content for content in contents[:-1]], pages)
        offload = self.host.offload(np.array(pages, np.int64))
        if offload is None:
            self.seen.add("no host page is left")
            return
        for page, host in offload.copies:
            self.on_host[host] = self.on_device[page]
        if len(offload.copies) < len(offload.host_pages):
            self.seen.add("copied once for several rows")
        self.live.remove((contents, pages))
        self.pool.free(np.array(pages, np.int64))
        self.preempted.append((contents, offload.host_pages))

    def come_back(self, number: int) -> None:
        if not self.preempted:
            return
        contents, host_pages = self.preempted[number % len(self.preempted)]
        pages = self.host.originals(host_pages)
        taken = pages == NO_PAGE
        kept = pages[~taken]
        if taken.sum() + self.pool.num_idle(kept) > self.pool.num_free:
            return
        self.pool.share(kept)
        pages[taken] = self.pool.allocate(int(taken.sum()))
        for page, host in zip(
            pages[taken].tolist(), np.array(host_pages)[taken].tolist(), strict=True
        ):
            self.on_device[page] = self.on_host[host]
        self.seen |= {"brought back"} if taken.any() else set()
        self.seen |= {"still there"} if len(kept) else set()
        self.host.restored(host_pages, pages)
        self.preempted.remove((contents, host_pages))
        self.live.append((contents, pages.tolist()))

    def end(self, number: int) -> None:
        """End a live row, or drop a preempted one."""
        if number % 2 and self.preempted:
            self.host.free(self.preempted.pop(number % len(self.preempted))[1])
        elif self.live:
            self.pool.free(np.array(self.live.pop(number % len(self.live))[1], np.int64))

    def renew(self, number: int) -> None:
        """The weights change."""
        self.pool.forget_prefixes()

    def check(self) -> None:
        pages = [page for _, pages in self.live for page in pages]
        self.pool.check(np.array(pages, np.int64))
        host_pages = [host for _, host_pages in self.preempted for host in host_pages]
        self.host.check(host_pages)
        assert self.host.num_used == len(set(host_pages))
        for contents, pages in self.live:
            assert [self.on_device[page] for page in pages] == contents
        for contents, host_pages in self.preempted:
            assert [self.on_host[host] for host in host_pages] == contents
            originals = self.host.originals(host_pages).tolist()
            for content, page in zip(contents, originals, strict=True):
                assert page == NO_PAGE or self.on_device[page] == content


def play(work: tuple[int, int, list[tuple[str, int]]]) -> Rows:
    num_pages, num_host_pages, steps = work
    rows = Rows(num_pages, num_host_pages)
    for what, number in steps:
        getattr(rows, what)(number)
        rows.check()
    return rows


works = st.tuples(
    st.integers(3, 14), st.sampled_from([0, 2, 6, 40, 40]), st.lists(asked, max_size=60)
)


@many
@given(works)
def test_a_row_comes_back_to_what_it_left_whoever_shares_it(work):
    rows = play(work)
    for _ in range(len(rows.live) + len(rows.preempted)):
        rows.end(0)
        rows.end(1)
    rows.check()
    assert rows.host.num_used == rows.pool.num_used == 0


@pytest.mark.parametrize(
    "place", ["no host page is left", "copied once for several rows", "brought back", "still there"]
)
def test_works_come_by_the_hard_places(place):
    once = settings(max_examples=5000, phases=[Phase.generate], database=None)
    find(works, lambda work: place in play(work).seen, settings=once)


def test_rows_that_find_no_room_leave_the_host_as_it_was():
    rows = Rows(num_pages=5, num_host_pages=2)
    rows.enter(2)
    rows.leave(0)
    assert rows.seen == {"no host page is left"}
    assert (rows.host.num_used, len(rows.live)) == (0, 1)
    rows.enter(0)
    rows.leave(1)
    assert rows.host.num_used == 1
    rows.check()


# A check must be able to fail.
@pytest.mark.parametrize("host_pages", [[0], [0, 0, 1], [0, 1, 2], []])
def test_check_notices(host_pages):
    rows = Rows(num_pages=5, num_host_pages=3)
    rows.enter(1)
    rows.leave(0)
    rows.host.check(sorted(rows.preempted[0][1]))
    with pytest.raises(AssertionError):
        rows.host.check(host_pages)

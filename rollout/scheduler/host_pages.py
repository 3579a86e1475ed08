"""Page ids in host memory, and which page on the device each is a copy of."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rollout.request import Ints
from rollout.scheduler.pages import PageAllocator, PageUse

NO_PAGE = -1


@dataclass(frozen=True)
class Offload:
    """Where the host keeps a row's pages.

    Attributes:
        host_pages: One per page of the row, in order.
        copies: `(page, host page)` still to be copied; other rows have copied the rest.
    """

    host_pages: list[int]
    copies: list[tuple[int, int]]


class HostPages:
    """Hands out host pages to preempted rows.

    A page that several rows share is copied to the host once and back once. Nothing is copied back
    while the device still has the contents, in use or cached as a prefix.
    """

    def __init__(self, num_pages: int, pages: PageAllocator) -> None:
        self._pages = pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._ref_counts = np.zeros(num_pages, np.int64)
        self._copy_of: dict[PageUse, int] = {}
        self._original: dict[int, PageUse] = {}

    @property
    def num_used(self) -> int:
        """Host pages in use by rows."""
        return len(self._ref_counts) - len(self._free)

    def offload(self, pages: Ints) -> Offload | None:
        """Take host pages for a row's `pages`; `None` if too few are free."""
        uses = [self._pages.use(page) for page in pages.tolist()]
        missing = [use for use in uses if use not in self._copy_of]
        if len(missing) > len(self._free):
            return None
        for use in missing:
            host_page = self._free.pop()
            self._copy_of[use], self._original[host_page] = host_page, use
        host_pages = [self._copy_of[use] for use in uses]
        self._ref_counts[host_pages] += 1
        return Offload(host_pages, [(use.page, self._copy_of[use]) for use in missing])

    def originals(self, host_pages: list[int]) -> Ints:
        """For each host page, the page on the device with the same contents, or `NO_PAGE`."""
        uses = [self._original[host_page] for host_page in host_pages]
        pages = [use.page if self._pages.is_current(use) else NO_PAGE for use in uses]
        return np.array(pages, np.int64)

    def restored(self, host_pages: list[int], pages: Ints) -> None:
        """Free a row's host pages, whose contents are in `pages` on the device again."""
        for host_page, page in zip(host_pages, pages.tolist(), strict=True):
            del self._copy_of[self._original[host_page]]
            use = self._original[host_page] = self._pages.use(page)
            self._copy_of[use] = host_page
        self.free(host_pages)

    def free(self, host_pages: Iterable[int]) -> None:
        """Take back a row's host pages."""
        for host_page in host_pages:
            self._ref_counts[host_page] -= 1
            if self._ref_counts[host_page] == 0:
                del self._copy_of[self._original.pop(host_page)]
                self._free.append(host_page)

    def check(self, host_pages: list[int]) -> None:
        """Assert that exactly these host pages are in use, listed once per row that uses them."""
        ref_counts = np.bincount(np.array(host_pages, np.int64), minlength=len(self._ref_counts))
        assert np.array_equal(ref_counts, self._ref_counts), "a host page leaked or is shared"
        assert sorted(self._free) == list(np.flatnonzero(ref_counts == 0))
        assert set(self._original) == set(self._copy_of.values()) == set(host_pages)

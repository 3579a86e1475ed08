"""Ids of pages in host memory, and which pages on the device they are copies of."""

from collections.abc import Iterable

import numpy as np

from rollout.request import Ints
from rollout.scheduler.pages import PageAllocator

NO_PAGE = -1

_Use = tuple[int, int]


class HostPages:
    """Hands out host pages to rows that lose their lane.

    A page that several rows share is copied once, and brought back once: as long as a row holds
    it, or it is kept for its beginning, the others need no copy.

    Args:
        num_pages: Host pages that there are.
        pages: Pages on the device.
    """

    def __init__(self, num_pages: int, pages: PageAllocator) -> None:
        self._pages = pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = np.zeros(num_pages, np.int64)
        self._copy_of: dict[_Use, int] = {}
        self._original: dict[int, _Use] = {}

    @property
    def num_used(self) -> int:
        """Host pages that rows hold."""
        return len(self._holders) - len(self._free)

    def offload(self, pages: Ints) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Have the host hold what `pages` do.

        Returns:
            Host pages, one a page, and the copies `(page, host page)` to make; `None` if there
            are not enough.
        """
        uses = [self._pages.use(page) for page in pages.tolist()]
        missing = [use for use in uses if use not in self._copy_of]
        if len(missing) > len(self._free):
            return None
        for use in missing:
            host = self._free.pop()
            self._copy_of[use], self._original[host] = host, use
        held = [self._copy_of[use] for use in uses]
        self._holders[held] += 1
        return held, [(use[0], self._copy_of[use]) for use in missing]

    def originals(self, held: list[int]) -> Ints:
        """The page on the device that still holds the same as each host page, or `NO_PAGE`."""
        uses = [self._original[host] for host in held]
        found = [use[0] if self._pages.still_holds(use) else NO_PAGE for use in uses]
        return np.array(found, np.int64)

    def restored(self, held: list[int], pages: Ints) -> None:
        """A row holds `pages` with the same as these host pages, and gives those up."""
        for host, page in zip(held, pages.tolist(), strict=True):
            del self._copy_of[self._original[host]]
            use = self._original[host] = self._pages.use(page)
            self._copy_of[use] = host
        self.free(held)

    def free(self, held: Iterable[int]) -> None:
        """Take back a row's host pages."""
        for host in held:
            self._holders[host] -= 1
            if self._holders[host] == 0:
                del self._copy_of[self._original.pop(host)]
                self._free.append(host)

    def check(self, held: list[int]) -> None:
        """Assert that `held`, with those of several rows several times, are all in use."""
        holders = np.bincount(np.array(held, np.int64), minlength=len(self._holders))
        assert np.array_equal(holders, self._holders), "a host page leaked or has two contents"
        assert sorted(self._free) == list(np.flatnonzero(holders == 0))
        assert set(self._original) == set(self._copy_of.values()) == set(held)

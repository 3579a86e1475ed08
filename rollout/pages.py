"""KV page ids: reserve, allocate, share, free, keep for a later row.

Page 0 is the trash page: padding rows and unused block-table entries point at it.
"""

import numpy as np

from rollout.errors import OutOfPages
from rollout.prefixes import PrefixIndex
from rollout.request import Ints

TRASH_PAGE = 0


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens.

    Example:
        >>> pages_for(256, 256), pages_for(257, 256)
        (1, 2)
    """
    return -(-num_tokens // page_tokens)


class PageAllocator:
    """Hands out page ids, and promises them ahead.

    A row is admitted only when every page it can ever need is promised (`reserve`); ids are
    taken one by one as it grows (`allocate`). So a running row never finds the pool empty. Rows
    with the same beginning hold the same pages (`share`), which are free when the last one ends.
    Free pages whose beginning is known in `prefixes` are given away last, longest unused first.

    Example:
        >>> pool = PageAllocator()
        >>> pool.grow(8)
        >>> pool.reserve(3)
        >>> pages = pool.allocate(2)
        >>> pool.num_used, pool.num_unreserved
        (2, 4)
        >>> pool.free(pages, promised=1)
        >>> pool.num_used, pool.num_unreserved
        (0, 7)
    """

    def __init__(self) -> None:
        self.prefixes = PrefixIndex()
        self._free: list[int] = []
        self._cached: dict[int, None] = {}  # free, and known; in the order of their last use
        self._promised = 0
        self._holders = np.zeros(1, np.int64)

    @property
    def num_pages(self) -> int:
        """All pages, the trash page included."""
        return len(self._holders)

    @property
    def num_used(self) -> int:
        """Pages that rows hold; one that several hold counts once."""
        return self.num_pages - 1 - len(self._free) - len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that no row holds and that a row with a known beginning could."""
        return len(self._cached)

    @property
    def num_unreserved(self) -> int:
        """Pages that a new row could still be promised."""
        return len(self._free) + len(self._cached) - self._promised

    def grow(self, num_pages: int) -> None:
        """Have `num_pages` pages in all, the trash page included. Never fewer than now."""
        self._free[:0] = range(num_pages - 1, self.num_pages - 1, -1)
        missing = max(0, num_pages - self.num_pages)
        self._holders = np.pad(self._holders, (0, missing))

    def reserve(self, count: int) -> None:
        """Promise `count` pages to a row.

        Raises:
            OutOfPages: Fewer are left. Nothing has changed then.
        """
        if count > self.num_unreserved:
            raise OutOfPages(
                f"{count} KV pages wanted, {self.num_unreserved} of {self.num_pages - 1} neither "
                "held by nor promised to other rows; raise kv_bytes or lower max_rows"
            )
        self._promised += count

    def allocate(self, count: int) -> Ints:
        """Take `count` page ids out of what was promised."""
        assert count <= self._promised, "a row took more pages than it was promised"
        if count == 0:
            return np.empty(0, np.int64)
        while len(self._free) < count:
            page = next(iter(self._cached))
            del self._cached[page]
            self.prefixes.forget(page)
            self._free.append(page)
        pages = np.array(self._free[-count:][::-1], np.int64)
        del self._free[-count:]
        self._promised -= count
        self._holders[pages] = 1
        return pages

    def num_idle(self, pages: Ints) -> int:
        """How many of `pages` no row holds: so many fewer can be promised once one does."""
        return int((self._holders[pages] == 0).sum())

    def share(self, pages: Ints) -> None:
        """Let one more row hold `pages`, which rows hold or `prefixes` knows."""
        for page in pages[self._holders[pages] == 0]:
            del self._cached[int(page)]
        self._holders[pages] += 1

    def free(self, pages: Ints, promised: int) -> None:
        """Take back a row's pages, and the `promised` ones that it never took."""
        self._holders[pages] -= 1
        for page in pages[self._holders[pages] == 0][::-1].tolist():
            if page in self.prefixes:  # its successors are in front, and go first
                self._cached[page] = None
            else:
                self._free.append(page)
        self._promised -= promised

    def forget_prefixes(self) -> None:
        """Share no page of what was computed so far with rows to come."""
        self._free.extend(self._cached)
        self._cached.clear()
        self.prefixes.clear()

    def check(self, held: Ints) -> None:
        """Assert that `held`, with pages of several rows several times, and free ones are all."""
        holders = np.bincount(held, minlength=self.num_pages)
        assert np.array_equal(holders, self._holders), "a page leaked or is shared unasked"
        free = sorted([*self._free, *self._cached])
        assert free == list(np.flatnonzero(holders[1:] == 0) + 1)
        assert all(page in self.prefixes for page in self._cached)

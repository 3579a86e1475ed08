"""KV page ids: reserve, allocate, free.

Page 0 is the trash page: padding rows and unused block-table entries point at it.
"""

import numpy as np

from rollout.errors import OutOfPages
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
    taken one by one as it grows (`allocate`). So a running row never finds the pool empty.

    Example:
        >>> pool = PageAllocator()
        >>> pool.grow(8)
        >>> pool.reserve(3)
        >>> pages = pool.allocate(2)
        >>> pool.num_used, pool.num_unreserved
        (2, 4)
        >>> pool.free(pages, reserved=3)
        >>> pool.num_used, pool.num_unreserved
        (0, 7)
    """

    def __init__(self) -> None:
        self.num_pages = 1
        self._free: list[int] = []
        self._reserved = 0

    @property
    def num_used(self) -> int:
        """Pages that rows hold."""
        return self.num_pages - 1 - len(self._free)

    @property
    def num_unreserved(self) -> int:
        """Pages that a new row could still be promised."""
        return self.num_pages - 1 - self._reserved

    def grow(self, num_pages: int) -> None:
        """Have `num_pages` pages in all, the trash page included. Never fewer than now."""
        self._free[:0] = range(num_pages - 1, self.num_pages - 1, -1)
        self.num_pages = max(self.num_pages, num_pages)

    def reserve(self, count: int) -> None:
        """Promise `count` pages to a row.

        Raises:
            OutOfPages: Fewer are left. Nothing has changed then.
        """
        if count > self.num_unreserved:
            raise OutOfPages(
                f"{count} KV pages wanted, {self.num_unreserved} of {self.num_pages - 1} not "
                "promised to other rows; raise kv_bytes or lower max_rows"
            )
        self._reserved += count

    def allocate(self, count: int) -> Ints:
        """Take `count` page ids out of what was reserved."""
        assert count <= len(self._free), "a row took more pages than it had reserved"
        if count == 0:
            return np.empty(0, np.int64)
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        return np.array(pages, np.int64)

    def free(self, pages: Ints, reserved: int) -> None:
        """Take back a row's pages and its promise of `reserved` pages."""
        self._free.extend(int(page) for page in pages)
        self._reserved -= reserved

    def check(self, held: Ints) -> None:
        """Assert that free and `held` pages are all pages, each once."""
        everything = np.sort(np.concatenate([np.array(self._free, np.int64), held]))
        assert np.array_equal(everything, np.arange(1, self.num_pages)), (
            "a page leaked or is shared"
        )

"""KV page ids: allocate, share, free, keep for a later row.

Page 0 is the trash page: padding rows and unused page-table entries point at it.
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from rollout.request import Ints

Key = bytes
"""Names a page by every token from the row's first to the page's last."""


def page_keys(tokens: Ints, page_tokens: int) -> Iterator[Key]:
    """The key of each page that `tokens` fill wholly, in order."""
    key = b""
    for stop in range(page_tokens, len(tokens) + 1, page_tokens):
        page = tokens[stop - page_tokens : stop].tobytes()
        key = blake2b(key + page, digest_size=16).digest()
        yield key


class PrefixIndex:
    """Finds pages by what they hold.

    A page is entered when every token of it has its KV written or queued to be, so a row that is
    launched later may read it.

    Attributes:
        num_entered: Pages that have been entered so far.
    """

    def __init__(self) -> None:
        self.num_entered = 0
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    def add(self, keys: Iterable[Key], pages: Sequence[int]) -> None:
        """Enter pages; of two that hold the same, the first stays."""
        for key, page in zip(keys, pages, strict=False):
            if key not in self._page_of and page not in self._key_of:
                self._page_of[key], self._key_of[page] = page, key
                self.num_entered += 1

    def match(self, keys: Iterable[Key]) -> list[int]:
        """Pages of the longest known beginning."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def forget(self, page: int) -> None:
        """The page is about to hold something else."""
        del self._page_of[self._key_of.pop(page)]

    def clear(self) -> None:
        """Forget every page: the weights have changed."""
        self._page_of.clear()
        self._key_of.clear()


TRASH_PAGE = 0


class PageUse(NamedTuple):
    """One use of a page, from when it is handed out until it is handed out again."""

    page: int
    serial: int  # which use of this page it is


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens.

    Example:
        >>> pages_for(256, 256), pages_for(257, 256)
        (1, 2)
    """
    return -(-num_tokens // page_tokens)


class PageAllocator:
    """Hands out page ids.

    Rows with the same beginning hold the same pages (`share`), which are free when the last one
    ends. Free pages whose beginning is known in `prefixes` are given away last, longest unused
    first.

    Example:
        >>> pool = PageAllocator()
        >>> pool.grow(8)
        >>> pages = pool.allocate(2)
        >>> pool.num_used, pool.num_free
        (2, 5)
        >>> pool.share(pages[:1])
        >>> pool.free(pages)
        >>> pool.num_used, pool.num_free
        (1, 6)
    """

    def __init__(self) -> None:
        self.prefixes = PrefixIndex()
        self._free: list[int] = []
        self._cached: dict[int, None] = {}  # free, and known; in the order of their last use
        self._ref_counts = np.zeros(1, np.int64)
        self._uses = np.zeros(1, np.int64)  # how often a page was handed out
        self.num_shared = 0

    @property
    def num_pages(self) -> int:
        """All pages, the trash page included."""
        return len(self._ref_counts)

    @property
    def num_used(self) -> int:
        """Pages that rows hold; one that several hold counts once."""
        return self.num_pages - 1 - len(self._free) - len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that no row holds and that a row with a known beginning could."""
        return len(self._cached)

    @property
    def num_free(self) -> int:
        """Pages that no row holds."""
        return len(self._free) + len(self._cached)

    def grow(self, num_pages: int) -> None:
        """Have `num_pages` pages in all, the trash page included. Never fewer than now."""
        self._free[:0] = range(num_pages - 1, self.num_pages - 1, -1)
        missing = max(0, num_pages - self.num_pages)
        self._ref_counts = np.pad(self._ref_counts, (0, missing))
        self._uses = np.pad(self._uses, (0, missing))

    def allocate(self, count: int) -> Ints:
        """Take `count` page ids."""
        assert count <= self.num_free, "a row was given more pages than are free"
        if count == 0:
            return np.empty(0, np.int64)
        while len(self._free) < count:
            page = next(iter(self._cached))
            del self._cached[page]
            self.prefixes.forget(page)
            self._free.append(page)
        pages = np.array(self._free[-count:][::-1], np.int64)
        del self._free[-count:]
        self._ref_counts[pages] = 1
        self._uses[pages] += 1
        return pages

    def num_idle(self, pages: Ints) -> int:
        """How many of `pages` no row holds: so many fewer are free once one does."""
        return int((self._ref_counts[pages] == 0).sum())

    def share(self, pages: Ints) -> None:
        """Let one more row hold `pages`, which rows hold or `prefixes` knows."""
        if not len(pages):
            return
        for page in pages[self._ref_counts[pages] == 0]:
            del self._cached[int(page)]
        self._ref_counts[pages] += 1
        self.num_shared += int((self._ref_counts[pages] == 2).sum())

    def free(self, pages: Ints) -> None:
        """Take back a row's pages."""
        self._ref_counts[pages] -= 1
        self.num_shared -= int((self._ref_counts[pages] == 1).sum())
        unused = pages[self._ref_counts[pages] == 0].tolist()
        # A row's last pages are handed out first, known prefixes or not.
        self._free += [page for page in unused if page not in self.prefixes]
        self._cached.update((page, None) for page in reversed(unused) if page in self.prefixes)

    def use(self, page: int) -> PageUse:
        """The present use of a page."""
        return PageUse(page, int(self._uses[page]))

    def is_current(self, use: PageUse) -> bool:
        """Whether a page still has the contents of that use, and rows can share it."""
        page = use.page
        has_contents = self._ref_counts[page] > 0 or page in self._cached
        return bool(has_contents and self.use(page) == use)

    def forget_prefixes(self) -> None:
        """Share no page of what was computed so far with rows to come."""
        self._free.extend(self._cached)
        self._cached.clear()
        self.prefixes.clear()

    def check(self, pages: Ints) -> None:
        """Assert that `pages`, once for each row that has them, and free ones are all there are."""
        ref_counts = np.bincount(pages, minlength=self.num_pages)
        assert np.array_equal(ref_counts, self._ref_counts), "a page leaked or is shared unasked"
        free = sorted([*self._free, *self._cached])
        assert free == list(np.flatnonzero(ref_counts[1:] == 0) + 1)
        assert all(page in self.prefixes for page in self._cached)
        assert self.num_shared == (ref_counts > 1).sum()

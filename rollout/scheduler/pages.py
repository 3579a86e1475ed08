"""KV page ids: allocating, sharing, freeing, and caching prefixes for later rows."""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from rollout.request import Ints

Key = bytes
"""Hash of all tokens from the row's first to the page's last."""


def page_keys(tokens: Ints, page_tokens: int) -> Iterator[Key]:
    """The key of each full page of `tokens`, in order."""
    key = b""
    for stop in range(page_tokens, len(tokens) + 1, page_tokens):
        page = tokens[stop - page_tokens : stop].tobytes()
        key = blake2b(key + page, digest_size=16).digest()
        yield key


class PrefixIndex:
    """Finds pages by the tokens that they hold. `num_entered` counts all pages ever added.

    The KV of every token of an added page is written or queued, so rows launched later can read it.
    """

    def __init__(self) -> None:
        self.num_entered = 0
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    def add(self, keys: Iterable[Key], pages: Sequence[int]) -> None:
        """Add pages. If two have the same key, the first stays."""
        for key, page in zip(keys, pages, strict=False):
            if key not in self._page_of and page not in self._key_of:
                self._page_of[key], self._key_of[page] = page, key
                self.num_entered += 1

    def match(self, keys: Iterable[Key]) -> list[int]:
        """Pages of the longest known prefix."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def forget(self, page: int) -> None:
        """Remove a page, because its contents are about to change."""
        del self._page_of[self._key_of.pop(page)]

    def clear(self) -> None:
        """Remove every page, because the weights have changed."""
        self._page_of.clear()
        self._key_of.clear()


TRASH_PAGE = 0
"""Padding rows and unused page-table entries point at this page."""


class PageUse(NamedTuple):
    """One use of a page: from one allocation to the next."""

    page: int
    serial: int  # counts the page's uses


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_tokens)


class PageAllocator:
    """Hands out page ids and counts their users.

    Rows with the same prefix share pages. A shared page becomes free when its last row ends. Free
    pages in `prefixes` stay cached: they are reallocated last, least recently used first.
    """

    def __init__(self) -> None:
        self.prefixes = PrefixIndex()
        self._free: list[int] = []
        self._cached: dict[int, None] = {}  # free pages in `prefixes`, least recently used first
        self._ref_counts = np.zeros(1, np.int64)
        self._uses = np.zeros(1, np.int64)  # allocations of each page so far
        self.num_shared = 0

    @property
    def num_pages(self) -> int:
        """All pages, including the trash page."""
        return len(self._ref_counts)

    @property
    def num_used(self) -> int:
        """Pages that rows use. A shared page counts once."""
        return self.num_pages - 1 - len(self._free) - len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free pages that a row with a known prefix can share."""
        return len(self._cached)

    @property
    def num_free(self) -> int:
        """Pages that no row uses, including cached ones."""
        return len(self._free) + len(self._cached)

    def grow(self, num_pages: int) -> None:
        """Grow to `num_pages` pages, including the trash page. Never shrinks."""
        self._free[:0] = range(num_pages - 1, self.num_pages - 1, -1)
        missing = max(0, num_pages - self.num_pages)
        self._ref_counts = np.pad(self._ref_counts, (0, missing))
        self._uses = np.pad(self._uses, (0, missing))

    def allocate(self, count: int) -> Ints:
        """Take `count` page ids; at least as many must be free."""
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
        """How many of `pages` are free and stop being free if a row shares them."""
        return int((self._ref_counts[pages] == 0).sum())

    def share(self, pages: Ints) -> None:
        """Let one more row use `pages`, each of which is in use or cached."""
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
        # A row's last pages are reallocated first: a shorter prefix is still useful without them.
        self._free += [page for page in unused if page not in self.prefixes]
        self._cached.update((page, None) for page in reversed(unused) if page in self.prefixes)

    def use(self, page: int) -> PageUse:
        """The current use of a page."""
        return PageUse(page, int(self._uses[page]))

    def is_current(self, use: PageUse) -> bool:
        """Whether the page still has the contents of that use, so rows can share it."""
        page = use.page
        has_contents = self._ref_counts[page] > 0 or page in self._cached
        return bool(has_contents and self.use(page) == use)

    def forget_prefixes(self) -> None:
        """Stop sharing existing pages with later rows."""
        self._free.extend(self._cached)
        self._cached.clear()
        self.prefixes.clear()

    def check(self, pages: Ints) -> None:
        """Assert that each page is free or in `pages`, which lists it once per row that uses it."""
        ref_counts = np.bincount(pages, minlength=self.num_pages)
        assert np.array_equal(ref_counts, self._ref_counts), "a page leaked or is shared unasked"
        free = sorted([*self._free, *self._cached])
        assert free == list(np.flatnonzero(ref_counts[1:] == 0) + 1)
        assert all(page in self.prefixes for page in self._cached)
        assert self.num_shared == (ref_counts > 1).sum()

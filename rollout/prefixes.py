"""Which KV pages hold which beginnings of rows, under one policy version."""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

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

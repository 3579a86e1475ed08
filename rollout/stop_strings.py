"""Texts that end a row, found by looking up a token and decoding few of those before it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import RequestError

# What a decoder makes of bytes that are no character, or not yet.
_NO_CHARACTER = "\ufffd"


class StopStrings:
    """Ends a row with the token that completes one of some strings in what it has generated.

    Which tokens can be such a last one is looked up in a table, so that a step decodes the ends of
    those rows alone that drew one. The table takes two calls of `decode` a token of the vocabulary,
    which are seconds in all: make one object for all rows.

    Args:
        strings: Texts, one of which is enough. They must lie in the completion wholly, and may end
            anywhere in its last token.
        decode: Text of some tokens, with special ones and all spaces. It may give U+FFFD for
            tokens that hold parts of characters.
        vocab_size: Tokens that `decode` knows; others have no text.

    Raises:
        RequestError: There is no string, or one is empty or holds U+FFFD.

    Example:
        >>> stop = StopStrings(["ca"], lambda ids: "".join("abc"[i] for i in ids), vocab_size=3)
        >>> stop.may_end(np.array([0, 1, 2, 5])).tolist()
        [True, False, False, False]
        >>> stop.ends(np.array([1, 2, 0])), stop.ends(np.array([2, 0, 0]))
        (True, False)
    """

    def __init__(
        self, strings: Sequence[str], decode: Callable[[list[int]], str], vocab_size: int
    ) -> None:
        _check_strings(strings)
        self.strings = tuple(strings)
        # What a last token begins with, if its string begins in a token before.
        self._endings = tuple(s[first:] for s in strings for first in range(1, len(s)))
        self._decode = decode
        self._longest = max(len(string.encode()) for string in strings)
        # Each with a last entry for the tokens that `decode` does not know.
        self._may_end = np.zeros(vocab_size + 1, bool)
        self._is_part = np.zeros(vocab_size + 1, bool)
        self._has_text = np.zeros(vocab_size + 1, bool)
        for token in range(vocab_size):
            self._look_at(token)

    def __repr__(self) -> str:
        return f"StopStrings({list(self.strings)!r})"

    def may_end(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each token can be the last of one of the strings, `(tokens,)`."""
        return self._may_end[np.minimum(tokens, len(self._may_end) - 1)]

    def ends(self, tokens: NDArray[np.int64]) -> bool:
        """Whether a row ends with the last of what it has generated, `(tokens,)`."""
        tail = self._tail(tokens)
        text = self._decode(tail)
        if not any(string in text for string in self.strings):
            return False
        # One that was there before has been passed over: the row was not to end yet.
        before = len(self._decode(tail[:-1]).rstrip(_NO_CHARACTER))
        return any(text.find(s, max(before - len(s) + 1, 0)) >= 0 for s in self.strings)

    def _look_at(self, token: int) -> None:
        """Fill the tables in for one token, as it reads at the beginning and further on."""
        first, both = self._decode([token]), self._decode([token, token])
        # Tokenizers may treat a leading space, or a prefix, unlike others.
        later = both.removeprefix(first)
        is_part = _NO_CHARACTER in both
        self._is_part[token], self._has_text[token] = is_part, bool(first or later)
        self._may_end[token] = (
            not both.startswith(first)
            or any(string in first or string in later for string in self.strings)
            or later.startswith(self._endings)
            or (is_part and not all(string.isascii() for string in self.strings))
        )

    def _tail(self, tokens: NDArray[np.int64]) -> list[int]:
        """The last tokens, as many as one of the strings can be in, and one more.

        That one may read otherwise without those before it, but no string that ends in the last
        token reaches back to it. A tail does not begin within a character.
        """
        count = self._longest + 1
        while count < len(tokens) and not self._is_enough(tokens[-count:]):
            count *= 2
        return tokens[-count:].tolist()

    def _is_enough(self, tail: NDArray[np.int64]) -> bool:
        known = np.minimum(tail, len(self._is_part) - 1)
        return not self._is_part[known[0]] and self._has_text[known].sum() > self._longest


def _check_strings(strings: Any) -> None:
    if isinstance(strings, str) or not isinstance(strings, Sequence) or not strings:
        raise RequestError(f"stop_strings={strings!r}: it must be some strings")
    for string in strings:
        if not isinstance(string, str) or not string or _NO_CHARACTER in string:
            raise RequestError(
                f"a string of stop_strings={string!r}: it must be text, without U+FFFD"
            )

"""Stop strings: texts that end a row."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import RequestError

# Tokenizers decode incomplete or invalid UTF-8 to this character.
_NO_CHARACTER = "\ufffd"


class StopStrings:
    """Ends a row with the token that completes one of `strings` in the completion.

    A table says which tokens can complete a string. A step therefore decodes only the last few
    tokens of the rows that drew one of these. Building the table calls `decode` twice per token of
    the vocabulary, which takes seconds: share one object among all rows.

    Args:
        strings: Any one of them ends the row. It must lie wholly in the completion and may end
            inside the last token.
        decode: Text of a list of token ids. It must keep special tokens and all spaces. It may
            return U+FFFD for tokens that hold part of a character.
        vocab_size: `decode` is called with ids below this; other tokens have no text.

    Raises:
        RequestError: `strings` is empty, or a string is empty or contains U+FFFD.

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
        # A last token begins with one of these if its string began in an earlier token.
        self._endings = tuple(s[first:] for s in strings for first in range(1, len(s)))
        self._decode = decode
        self._longest = max(len(string.encode()) for string in strings)
        # The last entry of each table stands for all tokens from `vocab_size` on.
        self._may_end = np.zeros(vocab_size + 1, bool)
        self._is_part = np.zeros(vocab_size + 1, bool)
        self._has_text = np.zeros(vocab_size + 1, bool)
        for token in range(vocab_size):
            self._fill_tables(token)

    def __repr__(self) -> str:
        return f"StopStrings({list(self.strings)!r})"

    def may_end(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each token can complete one of the strings, `(tokens,)`."""
        return self._may_end[np.minimum(tokens, len(self._may_end) - 1)]

    def ends(self, tokens: NDArray[np.int64]) -> bool:
        """Whether the last of a row's generated tokens, `(tokens,)`, completes a string."""
        tail = self._tail(tokens)
        text = self._decode(tail)
        if not any(string in text for string in self.strings):
            return False
        # A string that was complete before the last token came before `min_new_tokens`.
        before = len(self._decode(tail[:-1]).rstrip(_NO_CHARACTER))
        return any(text.find(s, max(before - len(s) + 1, 0)) >= 0 for s in self.strings)

    def _fill_tables(self, token: int) -> None:
        first, both = self._decode([token]), self._decode([token, token])
        # Tokenizers may decode a leading space or prefix differently at the start of a text.
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
        """The last tokens: as many as a string can span, and one more.

        The extra first token may decode differently without its predecessors, but no string that
        ends in the last token reaches it. The tail does not begin inside a character.
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
        raise RequestError(f"stop_strings={strings!r}: must be a non-empty list of strings")
    for string in strings:
        if not isinstance(string, str) or not string or _NO_CHARACTER in string:
            raise RequestError(
                f"string in stop_strings={string!r}: must be non-empty text without U+FFFD"
            )

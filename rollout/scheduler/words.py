"""Words of several tokens that a row must not generate, as the device keeps them.

Each lane has a table of lines, all back to front: line 0 is what the row ends with, each other line
one word. So a word is about to be completed where line 0 goes on as the word does behind its first
entry, and the row advances by pushing its new token onto line 0.
"""

from collections.abc import Sequence

import numpy as np

from rollout.request import Ints, Request
from rollout.sampling_params import SamplingParams

NO_TOKEN = -1
"""Fills what a line, or a table, is longer than needed."""


def table_shape(sampling: Sequence[SamplingParams]) -> tuple[int, int]:
    """Lines and their length, in tokens, of a table that serves each of these rows.

    Example:
        >>> how = SamplingParams(max_new_tokens=9, bad_words_ids=((5,), (4, 7), (4, 9, 9)))
        >>> table_shape([how, SamplingParams(max_new_tokens=9)])
        (3, 3)
    """
    words = [how.long_words for how in sampling if how.long_words]
    longest = max((len(word) for row in words for word in row), default=0)
    return 1 + max(map(len, words), default=0), longest


def lines_of(lane: int, request: Request, tokens: Ints) -> Ints:
    """What a row that enters a lane has in its table.

    Args:
        lane: The lane.
        request: What was asked.
        tokens: Generated so far, `(tokens,)`.

    Returns:
        `(entries, 4)`: lane, line, place in the line, token id.

    Example:
        >>> sampling = SamplingParams(max_new_tokens=9, bad_words_ids=((5,), (4, 9, 8)))
        >>> lines_of(0, Request(np.array([3, 2, 1]), sampling), np.array([6])).tolist()
        [[0, 0, 0, 6], [0, 0, 1, 1], [0, 1, 0, 8], [0, 1, 1, 9], [0, 1, 2, 4]]
    """
    words = request.sampling.long_words
    longest = max(map(len, words))
    context = np.concatenate([request.prompt[-longest:], tokens[-longest:]])
    lines = [context[1 - longest :].tolist(), *words]
    entries = [
        (lane, line, place, token)
        for line, word in enumerate(lines)
        for place, token in enumerate(reversed(word))
    ]
    return np.array(entries, np.int64)

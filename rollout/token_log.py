"""Tokens and scores of the rows in lanes, until they are completions."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.request import Floats, Ints


class TokenLog:
    """Arrays by position, then lane, so that what one step writes lies together.

    Args:
        num_lanes: Lanes.
        num_scores: Numbers that come with each token.
    """

    def __init__(self, num_lanes: int, num_scores: int) -> None:
        self._tokens = np.zeros((0, num_lanes), np.int64)
        self._scores = np.zeros((0, num_lanes, num_scores), np.float32)

    def make_room(self, num_tokens: int) -> None:
        """Be able to hold `num_tokens` tokens a lane."""
        self._tokens = extend(self._tokens, num_tokens, 0)
        self._scores = extend(self._scores, num_tokens, 0)

    def record(self, lanes: Ints, index: Ints, tokens: Ints, scores: Floats) -> None:
        """Write each lane's token number `index`, and its scores `(lanes, num_scores)`."""
        self._tokens[index, lanes] = tokens
        self._scores[index, lanes] = scores

    def tokens(self, lane: int, count: int) -> Ints:
        """The first `count` tokens of a lane."""
        return self._tokens[:count, lane]

    def scores(self, lane: int, count: int) -> list[list[float]]:
        """Each score of the first `count` tokens of a lane."""
        found: list[list[float]] = self._scores[:count, lane].T.tolist()
        return found


def extend(array: NDArray[Any], length: int, fill: int) -> NDArray[Any]:
    """`array` with at least `length` rows, the new ones holding `fill`.

    Rows at least double, so that rollouts of ever longer limits cost no copy each.
    """
    if length <= len(array):
        return array
    missing = max(length, 2 * len(array)) - len(array)
    widths = ((0, missing), *((0, 0) for _ in array.shape[1:]))
    return np.pad(array, widths, constant_values=fill)

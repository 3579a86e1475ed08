"""Tokens, scores and policy versions of the rows in lanes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.request import Floats, Ints
from rollout.row import Row

_NO_VERSION = -1


class TokenLog:
    """Arrays by position, then lane, so that what one step writes lies together.

    Args:
        num_lanes: Lanes.
        num_scores: Numbers that come with each token.
    """

    def __init__(self, num_lanes: int, num_scores: int) -> None:
        self._tokens = np.zeros((0, num_lanes), np.int64)
        self._scores = np.zeros((0, num_lanes, num_scores), np.float32)
        self._version = np.full(num_lanes, _NO_VERSION, np.int64)  # of the newest token
        self._versions: dict[int, list[tuple[int, int]]] = {}

    def enter(self, lane: int, row: Row) -> None:
        """Go on with a row, and be able to hold all that it may generate."""
        most, count = row.request.sampling.max_new_tokens, len(row.tokens)
        self._tokens = extend(self._tokens, most, 0)
        self._scores = extend(self._scores, most, 0)
        self._tokens[:count, lane] = row.tokens
        self._scores[:count, lane] = row.scores
        self._versions[lane] = row.versions
        self._version[lane] = row.versions[-1][0] if row.versions else _NO_VERSION

    def record(
        self, lanes: Ints, index: Ints, tokens: Ints, scores: Floats, policy_version: int
    ) -> None:
        """Write each lane's token number `index`, and its scores `(lanes, num_scores)`."""
        self._tokens[index, lanes] = tokens
        self._scores[index, lanes] = scores
        changed = self._version[lanes] != policy_version
        if np.count_nonzero(changed):
            self._version[lanes] = policy_version
            for lane, first in zip(lanes[changed].tolist(), index[changed].tolist(), strict=True):
                self._versions[lane].append((policy_version, first))

    def tokens(self, lane: int, count: int) -> Ints:
        """The first `count` tokens of a lane."""
        return self._tokens[:count, lane]

    def leave(self, lane: int, count: int, row: Row) -> None:
        """Hand a lane's `count` tokens, and what comes with them, to its row."""
        row.tokens = self._tokens[:count, lane].copy()
        row.scores = self._scores[:count, lane].copy()
        row.versions = self._versions.pop(lane)


def extend(array: NDArray[Any], length: int, fill: int) -> NDArray[Any]:
    """`array` with at least `length` rows, the new ones holding `fill`.

    Rows at least double, so that rollouts of ever longer limits cost no copy each.
    """
    if length <= len(array):
        return array
    missing = max(length, 2 * len(array)) - len(array)
    widths = ((0, missing), *((0, 0) for _ in array.shape[1:]))
    return np.pad(array, widths, constant_values=fill)

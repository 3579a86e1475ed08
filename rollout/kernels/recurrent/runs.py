"""Runs of prompt tokens, and the states from which rows start."""

from collections.abc import Sequence

import torch
from torch import Tensor

Run = tuple[int, int, int]
"""Consecutive tokens of one row: slot, position of the first, number of tokens."""
Runs = Sequence[Run]


def begun(states_R: Tensor, positions_R: Tensor) -> Tensor:
    """States of rows, `(R, ...)`: zeros at position 0, where a slot may hold anything, even NaN."""
    first = (positions_R == 0).view(-1, *[1] * (states_R.dim() - 1))
    return states_R.masked_fill(first, 0.0)


def first_state(states_S: Tensor, slot: int, start: int) -> Tensor:
    """State from which a run begins, `(1, ...)`."""
    state = states_S[slot : slot + 1]
    return state if start else torch.zeros_like(state)

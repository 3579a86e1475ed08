"""What the device has to know of each token of a row, where that changes the row's draws.

A mark is one whole number for a row and a token: three flags, and above them how often the row has
generated it.
"""

import numpy as np

from rollout.request import Ints, Request

HELD = 1
"""The token is in the prompt or the completion."""
SUPPRESSED = 2
"""It is never drawn."""
STOPS = 4
"""It ends the row, and is not drawn before the row may end."""
ONCE = 8
"""It was generated once; twice this, twice; and so on."""


def marks_of(lane: int, request: Request, tokens: Ints) -> Ints:
    """Marks of a row that enters a lane.

    Args:
        lane: The lane.
        request: What was asked.
        tokens: Generated so far, `(tokens,)`.

    Returns:
        `(marks, 3)`: lane, token id, and its mark; each token once.

    Example:
        >>> from rollout.sampling_params import SamplingParams
        >>> sampling = SamplingParams(max_new_tokens=9, suppress_tokens=(4,))
        >>> marks_of(0, Request(np.array([5, 4]), sampling), np.array([5, 5, 7])).tolist()
        [[0, 4, 3], [0, 5, 17], [0, 7, 9]]
    """
    sampling = request.sampling
    parts = [request.prompt, tokens, np.array(sampling.barred_tokens, np.int64)]
    flags = [HELD, HELD, SUPPRESSED]
    if sampling.min_new_tokens:
        parts.append(np.array(sampling.eos_token_ids, np.int64))
        flags.append(STOPS)
    ids, places = np.unique(np.concatenate(parts), return_inverse=True)
    marks = np.zeros(len(ids), np.int64)
    ends = np.cumsum([len(part) for part in parts])
    for flag, end, part in zip(flags, ends, parts, strict=True):
        marks[places[end - len(part) : end]] |= flag
    generated, counts = np.unique(tokens, return_counts=True)
    marks[np.searchsorted(ids, generated)] += ONCE * counts
    return np.stack([np.full(len(ids), lane), ids, marks], axis=1)

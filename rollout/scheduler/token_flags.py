"""Per-token flags and counts that penalties and suppression read.

One integer stands for a token of the vocabulary in a row: three flags in its lowest bits, and above
them how often the row has generated the token.
"""

import numpy as np

from rollout.request import Ints, Request

SEEN = 1
"""The token is in the prompt or in the completion."""
SUPPRESSED = 2
"""The token is never drawn."""
EOS = 4
"""The token ends the row; it is not drawn before `min_new_tokens` are."""
COUNT_UNIT = 8
"""What each time that the row generates the token adds."""


def token_flags(lane: int, request: Request, tokens: Ints) -> Ints:
    """The flags of a row that enters a lane, of all tokens that have any.

    Args:
        lane: The lane.
        request: The row's request.
        tokens: Tokens generated so far, `(tokens,)`.

    Returns:
        `(entries, 3)`: lane, token id, flags; each token id once.

    Example:
        >>> from rollout.sampling_params import SamplingParams
        >>> sampling = SamplingParams(max_new_tokens=9, suppress_tokens=(4,))
        >>> token_flags(0, Request(np.array([5, 4]), sampling), np.array([5, 5, 7])).tolist()
        [[0, 4, 3], [0, 5, 17], [0, 7, 9]]
    """
    sampling = request.sampling
    parts = [request.prompt, tokens, np.array(sampling.suppressed_tokens, np.int64)]
    part_flags = [SEEN, SEEN, SUPPRESSED]
    if sampling.min_new_tokens:
        parts.append(np.array(sampling.eos_token_ids, np.int64))
        part_flags.append(EOS)
    ids, index = np.unique(np.concatenate(parts), return_inverse=True)
    flags = np.zeros(len(ids), np.int64)
    ends = np.cumsum([len(part) for part in parts])
    for flag, end, part in zip(part_flags, ends, parts, strict=True):
        flags[index[end - len(part) : end]] |= flag
    generated, counts = np.unique(tokens, return_counts=True)
    flags[np.searchsorted(ids, generated)] += COUNT_UNIT * counts
    return np.stack([np.full(len(ids), lane), ids, flags], axis=1)

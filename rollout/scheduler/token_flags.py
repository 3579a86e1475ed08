"""Per-token flags and counts for penalties and suppression.

One integer per row and token of the vocabulary: three flags in the lowest bits, and above them the
number of times that the row has generated the token.
"""

import numpy as np

from rollout.request import Ints, Request

SEEN = 1  # the token is in the prompt or the completion
SUPPRESSED = 2  # the token is never drawn
EOS = 4  # the token ends the row; it is not drawn before the row has `min_new_tokens`
COUNT_UNIT = 8  # added each time that the row generates the token


def token_flags(lane: int, request: Request, tokens: Ints) -> Ints:
    """Nonzero flags of a row that enters a lane and has generated `tokens`, `(tokens,)`.

    Returns:
        `(entries, 3)`: lane, token id, flags. Each token id occurs once.

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

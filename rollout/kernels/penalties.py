"""What a row's own tokens do to its logits, in plain torch.

Shape letters: R rows, V vocabulary.
"""

import torch
from torch import Tensor

from rollout.scheduler.token_flags import HELD, ONCE, STOPS, SUPPRESSED


def penalise(logits_RV: Tensor, marks_RV: Tensor, penalties_R3: Tensor, early_R: Tensor) -> Tensor:
    """Logits after the repetition penalty, then the other two, then suppression.

    Args:
        logits_RV: float32.
        marks_RV: int32, as `rollout.scheduler.token_flags` has them.
        penalties_R3: float32. The first divides positive logits of tokens that the row holds, and
            multiplies negative ones; the second is taken off those of generated tokens; and so is
            the third, for each time that they were.
        early_R: Whether the row must not end yet, bool.

    Returns:
        float32, `(R, V)`; the same bits where nothing is asked, and `-inf` for what is suppressed.
    """
    repetition_R1, presence_R1, frequency_R1 = penalties_R3.split(1, dim=1)
    harsher_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV = torch.where((marks_RV & HELD) > 0, harsher_RV, logits_RV)
    counts_RV = marks_RV // ONCE
    logits_RV = logits_RV - presence_R1 * (counts_RV > 0) - frequency_R1 * counts_RV
    barred_R1 = (SUPPRESSED + STOPS * early_R)[:, None]
    return logits_RV.masked_fill((marks_RV & barred_R1) > 0, -torch.inf)

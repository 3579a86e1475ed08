"""Penalties and suppressed tokens, in plain torch. Shape letters: R rows, V vocabulary."""

import torch
from torch import Tensor

from rollout.scheduler.token_flags import COUNT_UNIT, EOS, SEEN, SUPPRESSED


def penalise(logits_RV: Tensor, flags_RV: Tensor, penalties_R3: Tensor, early_R: Tensor) -> Tensor:
    """Logits after repetition, presence and frequency penalty, then suppression.

    Args:
        logits_RV: float32.
        flags_RV: int32; see `rollout.scheduler.token_flags`.
        penalties_R3: float32. Repetition divides positive logits of seen tokens and multiplies
            negative ones. Presence is subtracted once from generated tokens, frequency once for
            each time they were generated.
        early_R: Whether EOS is suppressed because the row must not end yet, bool.

    Returns:
        float32: `-inf` for suppressed tokens, the same bits if nothing applies.
    """
    repetition_R1, presence_R1, frequency_R1 = penalties_R3.split(1, dim=1)
    harsher_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV = torch.where((flags_RV & SEEN) > 0, harsher_RV, logits_RV)
    counts_RV = flags_RV // COUNT_UNIT
    logits_RV = logits_RV - presence_R1 * (counts_RV > 0) - frequency_R1 * counts_RV
    suppressed_R1 = (SUPPRESSED + EOS * early_R)[:, None]
    return logits_RV.masked_fill((flags_RV & suppressed_R1) > 0, -torch.inf)

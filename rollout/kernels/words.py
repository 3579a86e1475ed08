"""Which tokens would complete a word that a row must not generate, in plain torch.

Shape letters: R rows, V vocabulary, N lines of a row's table, W tokens of its longest word.
"""

import torch
from torch import Tensor

from rollout.scheduler.words import NO_TOKEN


def bar_words(logits_RV: Tensor, tables_RNW: Tensor) -> Tensor:
    """Logits with `-inf` for the last token of each word whose beginning the row ends with.

    Args:
        logits_RV: float32.
        tables_RNW: Whole numbers, as `rollout.scheduler.words` has them.

    Returns:
        float32, `(R, V)`; the same bits where no word is about to be completed.
    """
    own_R1W, words_RNW = tables_RNW[:, :1, :-1], tables_RNW[:, 1:]
    ends_RN, beginnings_RNW = words_RNW[:, :, 0], words_RNW[:, :, 1:]
    # A shorter row has `NO_TOKEN` where a longer word has one, so that they differ.
    same_RNW = (beginnings_RNW == own_R1W) | (beginnings_RNW == NO_TOKEN)
    barred_RN = same_RNW.all(dim=2) & (ends_RN != NO_TOKEN)
    most_RN = logits_RV.new_full(ends_RN.shape, torch.inf).masked_fill(barred_RN, -torch.inf)
    # Words may share their last token: the least of what they allow it counts.
    return logits_RV.scatter_reduce(1, ends_RN.clamp(min=0).long(), most_RN, "amin")


def push(tables_RNW: Tensor, tokens_R: Tensor) -> Tensor:
    """What each row ends with, back to front, `(R, W)`, once it has drawn a token more."""
    return torch.cat([tokens_R[:, None].to(tables_RNW.dtype), tables_RNW[:, 0, :-1]], dim=1)

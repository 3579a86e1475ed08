"""Which tokens top-k, top-p and min-p keep, in plain torch.

Shape letters: R rows, V vocabulary.
"""

import torch
from torch import Tensor


def keep(scaled_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """The tokens that each row keeps: those above a bound, so ties stay or go together.

    Top-p adds up what top-k has left, most likely first, up to the token that reaches `top_p`.

    Args:
        scaled_RV: Logits at temperature, float32; `-inf` for tokens that are out already.
        top_k_R: int64; 0 keeps all.
        top_p_R: float32, above 0; 1 keeps all.
        min_p_R: float32; 0 keeps all.

    Returns:
        bool, `(R, V)`; all where nothing is asked, and the most likely token always.
    """
    vocab, top_p_R1 = scaled_RV.shape[1], top_p_R[:, None]
    ordered_RV = scaled_RV.sort(dim=1, descending=True).values
    last_R = top_k_R.masked_fill(top_k_R == 0, vocab).clamp(max=vocab) - 1
    by_k_R1 = ordered_RV.gather(1, last_R[:, None])
    shares_RV = ordered_RV.masked_fill(ordered_RV < by_k_R1, -torch.inf).softmax(dim=1)
    before_RV = shares_RV.cumsum(dim=1) - shares_RV
    # With all of them kept, what rounding adds up to must not decide.
    out_RV = (before_RV >= top_p_R1) & (top_p_R1 < 1)
    by_p_R1 = ordered_RV.masked_fill(out_RV, torch.inf).amin(dim=1, keepdim=True)
    by_min_R1 = ordered_RV[:, :1] + min_p_R[:, None].log()
    return scaled_RV >= by_k_R1.maximum(by_p_R1).maximum(by_min_R1)

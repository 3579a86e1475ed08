"""Top-k, top-p and min-p masks, in plain torch. Shape letters: R rows, V vocabulary."""

import torch
from torch import Tensor


def top_k_top_p(scaled_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Mask of the tokens to keep, bool. Ties are kept or dropped together.

    Top-p sums what top-k kept, most likely first, up to the token that reaches `top_p`. The most
    likely token is always kept.

    Args:
        scaled_RV: Logits at temperature, float32; `-inf` for excluded tokens.
        top_k_R: int64; 0 keeps all.
        top_p_R: float32, above 0; 1 keeps all.
        min_p_R: float32; 0 keeps all.
    """
    vocab, top_p_R1 = scaled_RV.shape[1], top_p_R[:, None]
    ordered_RV = scaled_RV.sort(dim=1, descending=True).values
    last_R = top_k_R.masked_fill(top_k_R == 0, vocab).clamp(max=vocab) - 1
    top_k_R1 = ordered_RV.gather(1, last_R[:, None])
    shares_RV = ordered_RV.masked_fill(ordered_RV < top_k_R1, -torch.inf).softmax(dim=1)
    before_RV = shares_RV.cumsum(dim=1) - shares_RV
    # `top_p=1` keeps all, even if rounding makes the sum reach 1 early.
    out_RV = (before_RV >= top_p_R1) & (top_p_R1 < 1)
    top_p_bound_R1 = ordered_RV.masked_fill(out_RV, torch.inf).amin(dim=1, keepdim=True)
    min_p_R1 = ordered_RV[:, :1] + min_p_R[:, None].log()
    return scaled_RV >= top_k_R1.maximum(top_p_bound_R1).maximum(min_p_R1)

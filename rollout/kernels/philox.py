"""Philox4x32-10 noise, which depends on a key and a counter alone.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A draw
keyed by (row seed, position) is the same in any batch, lane or slot, and does not touch torch's
global random state. Logarithms use only operations that every device rounds the same way, so CPU,
CUDA and Triton draw the same bits.
"""

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
ROUNDS = 10

# ln 2 in two parts; the product of an exponent and the first part is exact.
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.4286068203094172e-06
SQRT2_BITS = 0x3FB504F3
# log(m) = 2 atanh(s) = 2s + 2s^3/3 + 2s^5/5 + ..., s = (m - 1) / (m + 1), for m near 1
ATANH = (2.0, 2.0 / 3, 2.0 / 5, 2.0 / 7, 2.0 / 9)

Uint32x4 = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(key: Tensor, counter: Uint32x4) -> Uint32x4:
    """Four random 32-bit words for each int64 key and counter, as int64 in `[0, 2**32)`.

    The counter is four 32-bit words, lowest first, int64; they broadcast against `key`.
    """
    key_0, key_1 = key & MASK, (key >> 32) & MASK
    word_0, word_1, word_2, word_3 = counter
    for _ in range(ROUNDS):
        # int64 products wrap around but have the same 64 bits as unsigned products.
        product_0, product_1 = word_0 * MULTIPLIERS[0], word_2 * MULTIPLIERS[1]
        word_0, word_2 = (
            ((product_1 >> 32) & MASK) ^ word_1 ^ key_0,
            ((product_0 >> 32) & MASK) ^ word_3 ^ key_1,
        )
        word_1, word_3 = product_1 & MASK, product_0 & MASK
        key_0, key_1 = (key_0 + WEYL[0]) & MASK, (key_1 + WEYL[1]) & MASK
    return word_0, word_1, word_2, word_3


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive, normal float32 numbers, to 2 units in the last place."""
    bits = x.view(torch.int32)
    # x = m * 2**e with sqrt(1/2) <= m < sqrt(2)
    exponent = (bits - (SQRT2_BITS - 0x00800000)) >> 23
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = torch.full_like(square, ATANH[-1])
    for coefficient in ATANH[-2::-1]:
        series = series * square + coefficient
    exponent = exponent.to(torch.float32)
    return exponent * LN2_HIGH + (exponent * LN2_LOW + s * series)


def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise, finite float32, `(rows, vocab)`, from int64 seeds and positions.

    Token `v` takes word `v % 4` of counter `(v // 4, position, 0, 0)`.
    """
    quads, positions = torch.broadcast_tensors(
        torch.arange(-(-vocab // 4), device=seeds.device), positions[:, None]
    )
    zeros = torch.zeros_like(quads)
    random = philox(seeds[:, None], (quads, positions, zeros, zeros))
    return noise(torch.stack(random, dim=-1).flatten(1)[:, :vocab])


def noise(word: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, from random words in `[0, 2**32)`, int64.

    A word `w` gives the uniform number `u = (w + 0.5) / 2**32` and the noise `-log(-log1p(-u))`. A
    small `u` wins an argmax, and this form keeps all its bits.
    """
    uniform = ((word.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    # -log1p(-u) = u * log(w) / (w - 1) with w = 1 - u: the rounding of w cancels (Kahan).
    rest = 1.0 - uniform
    exponential = torch.where(rest == 1.0, uniform, uniform * log(rest) / (rest - 1.0))
    return -log(exponential)

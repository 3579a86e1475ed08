"""Philox4x32-10: random numbers that depend on a key and a counter, and on nothing else.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A draw
keyed by (row seed, position) is the same in any batch, lane or slot, and leaves the global
random state alone.
"""

import torch
from torch import Tensor

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10


Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(key: Tensor, counter: Words) -> Words:
    """Four random words for each key and counter.

    Args:
        key: int64, the 64 key bits.
        counter: The counter's four 32-bit words, lowest first, int64, broadcast against `key`.

    Returns:
        Four int64 tensors of the broadcast shape, each in `[0, 2**32)`.
    """
    key_0, key_1 = key & _MASK, (key >> 32) & _MASK
    word_0, word_1, word_2, word_3 = counter
    for _ in range(_ROUNDS):
        # Products wrap around in int64, which leaves all 64 of their bits right.
        product_0, product_1 = word_0 * _MULTIPLIER_0, word_2 * _MULTIPLIER_1
        word_0, word_2 = (
            ((product_1 >> 32) & _MASK) ^ word_1 ^ key_0,
            ((product_0 >> 32) & _MASK) ^ word_3 ^ key_1,
        )
        word_1, word_3 = product_1 & _MASK, product_0 & _MASK
        key_0, key_1 = (key_0 + _WEYL_0) & _MASK, (key_1 + _WEYL_1) & _MASK
    return word_0, word_1, word_2, word_3


def exponential(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard exponential noise, one number for each row and token.

    Token `v` takes word `v % 4` of counter `(v // 4, position, 0, 0)`. A word `w` becomes
    `-log1p(-(w + 0.5) / 2**32)`: small values, which decide an argmax, keep all their bits.

    Args:
        seeds: Key of each row, int64, `(rows,)`.
        positions: Position of the token to draw, int64, `(rows,)`.
        vocab: Tokens.

    Returns:
        float32, `(rows, vocab)`, positive and finite.
    """
    quads, positions = torch.broadcast_tensors(
        torch.arange(-(-vocab // 4), device=seeds.device), positions[:, None]
    )
    zeros = torch.zeros_like(quads)
    words = philox(seeds[:, None], (quads, positions, zeros, zeros))
    uniform = (torch.stack(words, dim=-1).flatten(1)[:, :vocab].to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))

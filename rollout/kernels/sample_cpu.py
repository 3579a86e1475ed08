"""Sampling on a CPU, in NumPy: the tokens of `rollout.kernels.sample`, several times as fast.

int64 products make Philox slow in torch. Here it runs in place, over blocks that stay in the
cache. The noise itself is computed only for the few tokens that can win.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.kernels import philox
from rollout.kernels.philox import MASK, MULTIPLIERS, ROUNDS, WEYL
from rollout.kernels.sample import scale, scores_of

_BLOCK = 12_288  # counters; six uint64 arrays of this size fit in 1 MiB of cache
_SHIFT, _LOW = np.uint64(32), np.uint64(MASK)
_M0, _M1 = map(np.uint64, MULTIPLIERS)

# Noise is g = -log(-log1p(-u)). If u is in [2**k, 2**(k+1)), then g <= -k ln 2, because
# u <= -log1p(-u). The noise lies at most _SPAN below this bound:
# - u < 1/2: -log1p(-u) < 2 ln(2) u, so at most ln 2 + ln(2 ln 2) = 1.02 below.
# - u >= 1/2: the bound is ln 2, and u <= 1 - 2**-24 gives g >= -2.82.
_SPAN = math.log(2) + 2.82
_LN2 = np.float32(math.log(2))
_TOP = 159  # biased exponent of w + 0.5 at u = 1
_SLACK = 0.01  # for rounding of the noise; a sum rounds by less than 1e-6 of itself


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    num_scores: int = 1,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row, as `rollout.kernels.sample.sample` does."""
    scaled_RV = scale(logits_RV, temperature_R)
    tokens_R = torch.empty_like(seeds_R)
    greedy = (temperature_R == 0).nonzero()[:, 0]  # SYNC: on a CPU, nothing waits
    drawn = temperature_R.nonzero()[:, 0]  # SYNC: as above
    if len(greedy):
        tokens_R[greedy] = scaled_RV[greedy].argmax(dim=1)
    if len(drawn):
        tokens_R[drawn] = _draw(scaled_RV, drawn, seeds_R, positions_R)
    return tokens_R, scores_of(scaled_RV, tokens_R, num_scores)


def _draw(scaled_RV: Tensor, rows: Tensor, seeds_R: Tensor, positions_R: Tensor) -> Tensor:
    """The token with the largest sum of logit and noise in each of `rows`; the first of equals."""
    vocab = scaled_RV.shape[1]
    words_V, scratch_2V = np.empty(vocab, np.uint32), np.empty((2, vocab), np.int32)
    tokens, able_words = list[Tensor](), list[Tensor]()
    for row in rows:
        fill_words(words_V, int(seeds_R[row]), int(positions_R[row]))
        able = candidates(scaled_RV[row].numpy(), words_V, scratch_2V)
        tokens.append(torch.from_numpy(able))
        able_words.append(torch.from_numpy(words_V[able].astype(np.int64)))
    parts = philox.noise(torch.cat(able_words)).split([len(each) for each in tokens])
    drawn = (
        able[(scaled_RV[row, able] + noise).argmax()]
        for row, able, noise in zip(rows, tokens, parts, strict=True)
    )
    return torch.stack(list(drawn))


def fill_words(words_V: NDArray[np.uint32], seed: int, position: int) -> None:
    """Write word `v % 4` of counter `(v // 4, position, 0, 0)` for each token `v`."""
    counters = -(-len(words_V) // 4)
    buffers = np.empty((6, min(counters, _BLOCK)), np.uint64)
    for first in range(0, counters, _BLOCK):
        count = min(_BLOCK, counters - first)
        block = buffers[:, :count]
        block[0] = np.arange(first, first + count)
        block[1], block[2:4] = position, 0
        _philox(block, seed)
        for index in range(4):
            part = words_V[4 * first + index : 4 * (first + count) : 4]
            part[:] = block[index, : len(part)]


def _philox(block: NDArray[np.uint64], seed: int) -> None:
    """Replace the first four arrays, 32-bit words of counters, by Philox's four words."""
    word_0, word_1, word_2, word_3, product_0, product_1 = block
    for number in range(ROUNDS):
        key_0 = np.uint64((seed + number * WEYL[0]) & MASK)
        key_1 = np.uint64(((seed >> 32) + number * WEYL[1]) & MASK)
        np.multiply(word_0, _M0, out=product_0)
        np.multiply(word_2, _M1, out=product_1)
        np.right_shift(product_1, _SHIFT, out=word_0)
        np.bitwise_xor(word_0, word_1, out=word_0)
        np.bitwise_xor(word_0, key_0, out=word_0)
        np.right_shift(product_0, _SHIFT, out=word_2)
        np.bitwise_xor(word_2, word_3, out=word_2)
        np.bitwise_xor(word_2, key_1, out=word_2)
        np.bitwise_and(product_1, _LOW, out=word_1)
        np.bitwise_and(product_0, _LOW, out=word_3)


def candidates(
    scaled_V: NDArray[np.float32], words_V: NDArray[np.uint32], scratch_2V: NDArray[np.int32]
) -> NDArray[np.intp]:
    """All tokens whose sum of logit and noise may be the largest."""
    most_V, exponents_V = scratch_2V[0].view(np.float32), scratch_2V[1]
    most_V[:] = words_V
    most_V += np.float32(0.5)
    np.right_shift(scratch_2V[0], 23, out=exponents_V)
    most_V[:] = exponents_V
    np.subtract(np.float32(_TOP), most_V, out=most_V)
    most_V *= _LN2
    most_V += scaled_V
    largest = most_V.max()
    if not np.isfinite(largest):  # a logit is NaN or infinite
        return np.arange(len(words_V))
    return np.flatnonzero(most_V >= largest - _SPAN - _SLACK - 1e-6 * abs(largest))

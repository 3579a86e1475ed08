"""Sampling in one read of the logits, in Triton; defined by `sample.sample`.

Each program takes a chunk of one row's vocabulary: temperature, Gumbel noise, argmax and
log-sum-exp in one pass. A second kernel puts a row's chunks together.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.philox import ATANH, LN2_HIGH, LN2_LOW, SQRT2_BITS

_CHUNK = 8192
_BLOCK = 1024
_HIGH, _LOW = tl.constexpr(LN2_HIGH), tl.constexpr(LN2_LOW)
_SQRT2 = tl.constexpr(SQRT2_BITS - 0x00800000)
_A0, _A1, _A2, _A3, _A4 = (tl.constexpr(coefficient) for coefficient in ATANH)


@triton.jit
def _log(x):
    """`philox.log`, operation by operation."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT2) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = tl.div_rn(mantissa - 1.0, mantissa + 1.0)
    square = s * s
    series = (((_A4 * square + _A3) * square + _A2) * square + _A1) * square + _A0
    power = exponent.to(tl.float32)
    return power * _HIGH + (power * _LOW + s * series)


@triton.jit
def _gumbel(seed, position, quads):
    """`philox.gumbel` of tokens `4 * quads` to `4 * quads + 3`, `(quads, 4)`."""
    zeros = tl.zeros_like(quads)
    w0, w1, w2, w3 = tl.philox(
        seed, quads.to(tl.uint32), (zeros + position).to(tl.uint32),
        zeros.to(tl.uint32), zeros.to(tl.uint32), 10,
    )  # fmt: skip
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (quads.shape[0], 4))
    uniform = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 0.999999940395355224609375)
    rest = 1.0 - uniform
    gap = tl.where(rest == 1.0, 1.0, rest - 1.0)
    exponential = tl.where(rest == 1.0, uniform, tl.div_rn(uniform * _log(rest), gap))
    return -_log(exponential)


@triton.jit
def _chunk_kernel(
    LOGITS,
    TEMPERATURES,
    SEEDS,
    POSITIONS,
    SCORES,
    CHOICES,
    CHOSEN,
    PEAKS,
    TOTALS,
    MASSES,
    stride,
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(TEMPERATURES + row)
    seed, position = tl.load(SEEDS + row), tl.load(POSITIONS + row)
    one = tl.full((1, 1), 1.0, tl.float32)
    inverse = tl.div_rn(one, one * tl.where(temperature == 0.0, 1.0, temperature))
    best, choice, chosen = -float("inf"), 0, -float("inf")
    peak, total, mass = -float("inf"), 0.0, 0.0
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, vocab), BLOCK):
        quads = start // 4 + tl.arange(0, BLOCK // 4)
        tokens = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
        there = tokens < vocab
        logits = tl.load(LOGITS + row * stride + tokens, mask=there, other=-float("inf"))
        scaled = logits.to(tl.float32) * inverse
        noise = tl.where(temperature == 0.0, 0.0, _gumbel(seed, position, quads))
        scores = tl.where(there, scaled + noise, -float("inf"))
        block_best = tl.max(tl.max(scores, 1), 0)
        index = tl.min(tl.min(tl.where(scores == block_best, tokens, vocab), 1), 0)
        block_chosen = tl.sum(tl.sum(tl.where(tokens == index, scaled, 0.0), 1), 0)
        better = block_best > best
        choice = tl.where(better, index, choice)
        chosen = tl.where(better, block_chosen, chosen)
        best = tl.where(better, block_best, best)
        new_peak = tl.maximum(peak, tl.max(tl.max(scaled, 1), 0))
        # While every logit so far is masked the peak is -inf, and -inf - -inf is no number.
        anchor = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = tl.exp(scaled - anchor)
        fade = tl.exp(peak - anchor)
        if ENTROPY:
            # Below the peak, for accuracy. A masked logit is -inf, and 0 * -inf is no number.
            lower = tl.where(total > 0.0, (peak - anchor) * total, 0.0)
            share = tl.where(weights > 0.0, weights * (scaled - anchor), 0.0)
            mass = (mass + lower) * fade + tl.sum(tl.sum(share, 1), 0)
        total = total * fade + tl.sum(tl.sum(weights, 1), 0)
        peak = new_peak
    at = row * num_chunks + chunk
    tl.store(SCORES + at, best)
    tl.store(CHOICES + at, choice)
    tl.store(CHOSEN + at, chosen)
    tl.store(PEAKS + at, peak)
    tl.store(TOTALS + at, total)
    if ENTROPY:
        tl.store(MASSES + at, mass)


@triton.jit
def _row_kernel(
    SCORES,
    CHOICES,
    CHOSEN,
    PEAKS,
    TOTALS,
    MASSES,
    TOKENS,
    OUT,
    num_chunks,
    CHUNKS_PAD: tl.constexpr,
    NUM_SCORES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_PAD)
    at, there = row * num_chunks + chunks, chunks < num_chunks
    scores = tl.load(SCORES + at, mask=there, other=-float("inf"))
    _, index = tl.max(scores, 0, return_indices=True)
    peaks = tl.load(PEAKS + at, mask=there, other=-float("inf"))
    peak = tl.max(peaks, 0)
    fades = tl.exp(peaks - peak)
    totals = tl.load(TOTALS + at, mask=there, other=0.0)
    total = tl.sum(totals * fades, 0)
    best = row * num_chunks + index
    tl.store(TOKENS + row, tl.load(CHOICES + best).to(tl.int64))
    tl.store(OUT + row * NUM_SCORES, tl.load(CHOSEN + best) - peak - tl.log(total))
    if NUM_SCORES == 2:
        lower = tl.where(totals > 0.0, (peaks - peak) * totals, 0.0)
        masses = tl.load(MASSES + at, mask=there, other=0.0) + lower
        tl.store(OUT + row * NUM_SCORES + 1, tl.log(total) - tl.sum(masses * fades, 0) / total)


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    num_scores: int = 1,
) -> tuple[Tensor, Tensor]:
    """`sample.sample` on a GPU: the same draws, bit for bit."""
    num_rows, vocab = logits_RV.shape
    num_chunks = triton.cdiv(vocab, _CHUNK)
    device = logits_RV.device
    shape = (num_rows, num_chunks)
    # A tensor each: parts of one begin anywhere, and Triton compiles for where they begin.
    scores, chosen, peaks, totals, masses = (
        torch.empty(shape, dtype=torch.float32, device=device) for _ in range(5)
    )
    choices = torch.empty(shape, dtype=torch.int32, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    output = torch.empty((num_rows, num_scores), dtype=torch.float32, device=device)
    # Fused multiply-adds would round unlike the definition.
    _chunk_kernel[(num_rows, num_chunks)](
        logits_RV, temperature_R, seeds_R, positions_R, scores, choices, chosen, peaks, totals,
        masses, logits_RV.stride(0), vocab, num_chunks,
        CHUNK=_CHUNK, BLOCK=_BLOCK, ENTROPY=num_scores == 2, enable_fp_fusion=False,
    )  # fmt: skip
    _row_kernel[(num_rows,)](
        scores, choices, chosen, peaks, totals, masses, tokens, output, num_chunks,
        CHUNKS_PAD=triton.next_power_of_2(num_chunks), NUM_SCORES=num_scores,
    )  # fmt: skip
    return tokens, output

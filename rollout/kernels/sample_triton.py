"""Sampling with one read of the logits, in Triton; defined by `sample.sample`.

Each program computes temperature, Gumbel noise, argmax and log-sum-exp for a chunk of one row's
vocabulary. A second kernel merges the chunks. `m_i` is the maximum of the logits at temperature,
`l_i` the sum of the weights `exp(logit - m_i)`, and `e_i` the sum of `weight * (logit - m_i)`,
which gives the entropy.

Shape letters: R rows, V vocabulary, C chunks.
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
    random = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (quads.shape[0], 4))
    uniform = (random.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 0.999999940395355224609375)
    rest = 1.0 - uniform
    gap = tl.where(rest == 1.0, 1.0, rest - 1.0)
    exponential = tl.where(rest == 1.0, uniform, tl.div_rn(uniform * _log(rest), gap))
    return -_log(exponential)


@triton.jit
def _chunk_kernel(
    LOGITS, TEMPERATURES, SEEDS, POSITIONS, SCORES, TOKENS, CHOSEN, M, L, E,
    stride, vocab, num_chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Draw among the tokens of one chunk; `CHOSEN` gets the drawn token's logit at temperature."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(TEMPERATURES + row)
    seed, position = tl.load(SEEDS + row), tl.load(POSITIONS + row)
    one = tl.full((1, 1), 1.0, tl.float32)
    inverse = tl.div_rn(one, one * tl.where(temperature == 0.0, 1.0, temperature))
    best, token, chosen = -float("inf"), 0, -float("inf")
    m_i, l_i, e_i = -float("inf"), 0.0, 0.0
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, vocab), BLOCK):
        quads = start // 4 + tl.arange(0, BLOCK // 4)
        tokens = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
        mask = tokens < vocab
        logits = tl.load(LOGITS + row * stride + tokens, mask=mask, other=-float("inf"))
        scaled = logits.to(tl.float32) * inverse
        noise = tl.where(temperature == 0.0, 0.0, _gumbel(seed, position, quads))
        scores = tl.where(mask, scaled + noise, -float("inf"))
        block_best = tl.max(tl.max(scores, 1), 0)
        index = tl.min(tl.min(tl.where(scores == block_best, tokens, vocab), 1), 0)
        block_chosen = tl.sum(tl.sum(tl.where(tokens == index, scaled, 0.0), 1), 0)
        better = block_best > best
        token = tl.where(better, index, token)
        chosen = tl.where(better, block_chosen, chosen)
        best = tl.where(better, block_best, best)
        m_new = tl.maximum(m_i, tl.max(tl.max(scaled, 1), 0))
        # While every logit so far is masked, the maximum is -inf, and -inf - -inf is NaN.
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        weights = tl.exp(scaled - shift)
        alpha = tl.exp(m_i - shift)
        if ENTROPY:
            # Relative to the maximum, for accuracy. Masked logits would give 0 * -inf, NaN.
            moved = tl.where(l_i > 0.0, (m_i - shift) * l_i, 0.0)
            terms = tl.where(weights > 0.0, weights * (scaled - shift), 0.0)
            e_i = (e_i + moved) * alpha + tl.sum(tl.sum(terms, 1), 0)
        l_i = l_i * alpha + tl.sum(tl.sum(weights, 1), 0)
        m_i = m_new
    at = row * num_chunks + chunk
    tl.store(SCORES + at, best)
    tl.store(TOKENS + at, token)
    tl.store(CHOSEN + at, chosen)
    tl.store(M + at, m_i)
    tl.store(L + at, l_i)
    if ENTROPY:
        tl.store(E + at, e_i)


@triton.jit
def _row_kernel(
    SCORES, TOKENS, CHOSEN, M, L, E, OUT_TOKENS, OUT_SCORES, num_chunks,
    CHUNKS_PAD: tl.constexpr, NUM_SCORES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_PAD)
    at, mask = row * num_chunks + chunks, chunks < num_chunks
    scores = tl.load(SCORES + at, mask=mask, other=-float("inf"))
    _, index = tl.max(scores, 0, return_indices=True)
    m_chunks = tl.load(M + at, mask=mask, other=-float("inf"))
    m_i = tl.max(m_chunks, 0)
    alpha = tl.exp(m_chunks - m_i)
    l_chunks = tl.load(L + at, mask=mask, other=0.0)
    l_i = tl.sum(l_chunks * alpha, 0)
    best = row * num_chunks + index
    tl.store(OUT_TOKENS + row, tl.load(TOKENS + best).to(tl.int64))
    tl.store(OUT_SCORES + row * NUM_SCORES, tl.load(CHOSEN + best) - m_i - tl.log(l_i))
    if NUM_SCORES == 2:
        moved = tl.where(l_chunks > 0.0, (m_chunks - m_i) * l_chunks, 0.0)
        e_chunks = tl.load(E + at, mask=mask, other=0.0) + moved
        entropy = tl.log(l_i) - tl.sum(e_chunks * alpha, 0) / l_i
        tl.store(OUT_SCORES + row * NUM_SCORES + 1, entropy)


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    num_scores: int = 1,
) -> tuple[Tensor, Tensor]:
    """`sample.sample`, bit for bit the same draws."""
    num_rows, vocab = logits_RV.shape
    num_chunks = triton.cdiv(vocab, _CHUNK)
    device = logits_RV.device
    shape = (num_rows, num_chunks)
    # Separate tensors: slices may be unaligned, and Triton compiles anew for those.
    scores_RC, chosen_RC, m_RC, l_RC, e_RC = (
        torch.empty(shape, dtype=torch.float32, device=device) for _ in range(5)
    )
    tokens_RC = torch.empty(shape, dtype=torch.int32, device=device)
    tokens_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    scores_RS = torch.empty((num_rows, num_scores), dtype=torch.float32, device=device)
    # Fused multiply-adds would round differently from `sample.sample`.
    _chunk_kernel[(num_rows, num_chunks)](
        logits_RV, temperature_R, seeds_R, positions_R, scores_RC, tokens_RC, chosen_RC,
        m_RC, l_RC, e_RC, logits_RV.stride(0), vocab, num_chunks,
        CHUNK=_CHUNK, BLOCK=_BLOCK, ENTROPY=num_scores == 2, enable_fp_fusion=False,
    )  # fmt: skip
    _row_kernel[(num_rows,)](
        scores_RC, tokens_RC, chosen_RC, m_RC, l_RC, e_RC, tokens_R, scores_RS, num_chunks,
        CHUNKS_PAD=triton.next_power_of_2(num_chunks), NUM_SCORES=num_scores,
    )  # fmt: skip
    return tokens_R, scores_RS

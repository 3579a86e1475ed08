"""Decoding by the gated delta rule in Triton: a state is read once and written once.

Shape letters are those of `delta_rule`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.pdl_triton import gdc_wait, pdl_options
from rollout.kernels.recurrent.delta_rule import EPSILON

_BLOCK = 32  # values of a state in one program


@triton.jit
def _delta_rule_kernel(
    QUERY, KEY, VALUE, DECAY, BETA, STATES, SLOTS, POSITIONS, OUT,
    query_stride, key_stride, value_stride, slot_stride, scale, epsilon, GROUP,
    K: tl.constexpr, V: tl.constexpr, K_PAD: tl.constexpr, BLOCK: tl.constexpr,
    NORMALISED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at_k, at_v = tl.arange(0, K_PAD), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    k_mask, v_mask = at_k < K, at_v < V
    first = row * tl.num_programs(1) + head
    slot = tl.load(SLOTS + row)
    if slot == 0:  # a padding row: no state is its own
        tl.store(OUT + first * V + at_v, 0.0, mask=v_mask)
        return
    key_head = head // GROUP
    query = tl.load(QUERY + row * query_stride + key_head * K + at_k, mask=k_mask, other=0.0)
    key = tl.load(KEY + row * key_stride + key_head * K + at_k, mask=k_mask, other=0.0)
    query, key = query.to(tl.float32), key.to(tl.float32)
    if NORMALISED:
        query = query * tl.rsqrt(tl.sum(query * query, 0) + epsilon)
        key = key * tl.rsqrt(tl.sum(key * key, 0) + epsilon)
    value = tl.load(VALUE + row * value_stride + head * V + at_v, mask=v_mask, other=0.0)
    mask = v_mask[:, None] & k_mask[None, :]
    places = STATES + slot * slot_stride + (head * V + at_v[:, None]) * K + at_k[None, :]
    # A row's first token begins from zeros, whatever the slot holds.
    state = tl.load(places, mask=mask & (tl.load(POSITIONS + row) > 0), other=0.0)
    state *= tl.exp(tl.load(DECAY + first).to(tl.float32))
    missing = value.to(tl.float32) - tl.sum(state * key[None, :], 1)
    state += (tl.load(BETA + first).to(tl.float32) * missing)[:, None] * key[None, :]
    tl.store(places, state, mask=mask)
    out = tl.sum(state * (query * scale)[None, :], 1)
    tl.store(OUT + first * V + at_v, out.to(OUT.dtype.element_ty), mask=v_mask)


def decode(
    query_RGK: Tensor,
    key_RGK: Tensor,
    value_RHV: Tensor,
    decay_RH: Tensor,
    beta_RH: Tensor,
    states_SHVK: Tensor,
    slots_R: Tensor,
    positions_R: Tensor,
    *,
    normalised: bool,
) -> Tensor:
    """As `delta_rule.decode`. Rows in slot 0 are padding: their output is 0, and no state moves.

    Heads of a token must be adjacent in memory; so must the values of one state.
    """
    num_rows, num_heads, num_values = value_RHV.shape
    num_keys = key_RGK.shape[2]
    for states in (query_RGK, key_RGK, value_RHV):
        assert states.stride()[1:] == (states.shape[2], 1)
    assert states_SHVK.stride()[1:] == (num_values * num_keys, num_keys, 1)
    decay, beta = decay_RH.contiguous(), beta_RH.contiguous()
    output = torch.empty(value_RHV.shape, dtype=value_RHV.dtype, device=value_RHV.device)
    block = min(_BLOCK, triton.next_power_of_2(num_values))
    _delta_rule_kernel[(num_rows, num_heads, triton.cdiv(num_values, block))](
        query_RGK, key_RGK, value_RHV, decay, beta, states_SHVK, slots_R, positions_R, output,
        query_RGK.stride(0), key_RGK.stride(0), value_RHV.stride(0), states_SHVK.stride(0),
        num_keys**-0.5, EPSILON, num_heads // key_RGK.shape[1],
        K=num_keys, V=num_values, K_PAD=triton.next_power_of_2(num_keys), BLOCK=block,
        NORMALISED=normalised, **pdl_options(),
    )  # fmt: skip
    return output

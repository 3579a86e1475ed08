"""The gated delta rule over slots of states, in plain torch.

Shape letters: S slots, T packed tokens, R rows of one token, H value heads, G key heads, K key
size, V value size.

A token's output is the new state times its query, and the new state is

    exp(g) state + beta (v - exp(g) state k) k^T

(Yang et al., Gated Delta Networks, 2024). A state is `(H, V, K)`, float32: the value index comes
first, because a kernel's program computes some of the values and so reads adjacent memory. A row at
position 0 begins from zeros, whatever its slot holds.
"""

import logging
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from rollout.kernels.recurrent.runs import Runs, begun, first_state

logger = logging.getLogger(__name__)

EPSILON = 1e-6


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
    """Feed one token of each row to its state; return `(R, H, V)` in the dtype of the values.

    Args:
        decay_RH: `g`, the logarithm of the state's decay, at most 0.
        states_SHVK: float32, written in place.
        slots_R: Slot of each row, int64.
        positions_R: Position of each token in its row, int64.
        normalised: Divide queries and keys by their length.
    """
    query, key, value = (each.float() for each in (query_RGK, key_RGK, value_RHV))
    if normalised:
        query, key = _unit(query), _unit(key)
    group = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(group, dim=1) for x in (query * key.shape[-1] ** -0.5, key))
    state = begun(states_SHVK[slots_R], positions_R) * decay_RH.float().exp()[..., None, None]
    missing = value - (state * key[:, :, None]).sum(-1)
    state = state + (beta_RH.float()[..., None] * missing)[..., None] * key[:, :, None]
    states_SHVK[slots_R] = state
    return (state * query[:, :, None]).sum(-1).to(value_RHV.dtype)


@cache
def warn_without_fla() -> None:
    """Say once what makes prefill fast, unless it is there."""
    if find_spec("fla") is None:
        logger.warning(
            "fla-core is not installed: prompts run through recurrent layers in plain torch "
            "(correct, but slower); pip install fla-core einops"
        )


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


def prefill(
    query_TGK: Tensor,
    key_TGK: Tensor,
    value_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    states_SHVK: Tensor,
    runs: Runs,
    *,
    normalised: bool,
) -> Tensor:
    """Feed the packed tokens of `runs` in chunks, as trainers do; arguments as in `decode`.

    On a GPU transformers takes fla's kernel for it, if that is installed.
    """
    if value_THV.is_cuda:
        warn_without_fla()
    # It takes seconds to import, and only models with such layers need it.
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    tokens = (query_TGK, key_TGK, value_THV, decay_TH, beta_TH)
    outputs, end = [], 0
    for slot, start, count in runs:
        begin, end = end, end + count
        query, key, value, decay, beta = (each[None, begin:end] for each in tokens)
        output, last = torch_chunk_gated_delta_rule(
            query,
            key,
            value,
            g=decay,
            beta=beta,
            initial_state=first_state(states_SHVK, slot, start).transpose(-1, -2).contiguous(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=normalised,
        )
        states_SHVK[slot] = last[0].transpose(-1, -2)
        outputs.append(output[0])
    return torch.cat(outputs)

"""Operators of compiled layers that give torch's bits, each one node to a compiler."""

import torch
from torch import Tensor, nn


@torch.library.custom_op("twinslot::mean", mutates_args=())
def mean(states: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    """`states.mean(dim, keepdim)`, by torch's kernel."""
    return states.mean(dim, keepdim)


@mean.register_fake
def _(states: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    return states.mean(dim, keepdim)


@torch.library.custom_op("twinslot::rms_norm", mutates_args=())
def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * (states / sqrt(mean(states ** 2) + eps))` over the last dimension."""
    if states.is_cuda:
        from rollout.kernels import norm_triton  # Triton is not there on every CPU

        return norm_triton.rms_norm(states, weight, eps)[0]
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(states.dtype)


@rms_norm.register_fake
def _(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    dtype = torch.promote_types(states.dtype, weight.dtype)
    return states.new_empty(states.shape, dtype=dtype)


@torch.library.custom_op("twinslot::add_rms_norm", mutates_args=())
def add_rms_norm(
    states: Tensor, added: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum of two, and its norm."""
    if states.is_cuda:
        from rollout.kernels import norm_triton  # as above

        normed, total = norm_triton.rms_norm(states, weight, eps, added)
        return total, normed
    total = states + added
    return total, rms_norm(total, weight, eps)


@add_rms_norm.register_fake
def _(states: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = states.new_empty(states.shape, dtype=torch.promote_types(states.dtype, added.dtype))
    return total, rms_norm(total, weight, eps)


# By number: a compiler's graph holds no function.
activations: list[nn.Module] = []


@torch.library.custom_op("twinslot::activation", mutates_args=())
def activation(states: Tensor, index: int) -> Tensor:
    """What the activation of this number makes of `states`."""
    return activations[index](states)


@activation.register_fake
def _(states: Tensor, index: int) -> Tensor:
    return torch.empty_like(states)


@torch.library.custom_op("twinslot::silu_gate", mutates_args=())
def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    if gate.is_cuda:
        from rollout.kernels import gate_triton  # as above

        return gate_triton.silu_gate(gate, up)
    return nn.functional.silu(gate) * up


@silu_gate.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)

"""Operators with torch's bits for compiled layers; each is one opaque node to torch.compile."""

import torch
from torch import Tensor, nn

from rollout.kernels.custom_op import custom_op


def _fake_mean(states: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    return states.mean(dim, keepdim)


@custom_op(_fake_mean)
def mean(states: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    """`states.mean(dim, keepdim)`, by torch's kernel."""
    return states.mean(dim, keepdim)


def _fake_rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    dtype = torch.promote_types(states.dtype, weight.dtype)
    return states.new_empty(states.shape, dtype=dtype)


@custom_op(_fake_rms_norm)
def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * (states / sqrt(mean(states ** 2) + eps))` over the last dimension."""
    if states.is_cuda:
        from rollout.kernels import rms_norm_triton as kernel  # Triton may be missing on a CPU

        return kernel.rms_norm(states, weight, eps)[0]
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(states.dtype)


def _fake_add_rms_norm(
    states: Tensor, added: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = states.new_empty(states.shape, dtype=torch.promote_types(states.dtype, added.dtype))
    return total, rms_norm(total, weight, eps)


@custom_op(_fake_add_rms_norm)
def add_rms_norm(
    states: Tensor, added: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum `states + added`, and its RMSNorm."""
    if states.is_cuda:
        from rollout.kernels import rms_norm_triton as kernel  # as above

        normed, total = kernel.rms_norm(states, weight, eps, added)
        return total, normed
    total = states + added
    return total, rms_norm(total, weight, eps)


# A compiled graph holds numbers, not functions, so activations are passed by index.
activations: list[nn.Module] = []


def _fake_activation(states: Tensor, index: int) -> Tensor:
    return torch.empty_like(states)


@custom_op(_fake_activation)
def activation(states: Tensor, index: int) -> Tensor:
    """`activations[index](states)`."""
    return activations[index](states)


def _fake_silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@custom_op(_fake_silu_and_mul)
def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    if gate.is_cuda:
        from rollout.kernels import silu_and_mul_triton as kernel  # as above

        return kernel.silu_and_mul(gate, up)
    return nn.functional.silu(gate) * up

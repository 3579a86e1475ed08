"""Linear layers of the twin: skinny GEMM for few rows, and a float32 head.

A decode step runs hundreds of products of some microseconds each. Our skinny GEMM overlaps their
launches by PDL (programmatic dependent launch); cuBLAS does not.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rollout.kernels.custom_op import custom_op


def _fake(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return states.new_empty((*states.shape[:-1], len(weight)))


@custom_op(_fake)
def _skinny_linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from rollout.kernels import skinny_linear_triton as kernel  # Triton may be missing on a CPU

    if states.numel() // states.shape[-1] > kernel.MOST_ROWS:
        return linear(states, weight, bias)
    return kernel.skinny_linear(states, weight, bias)


def skinny_linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear(states, weight, bias)` without a gradient; with many rows cuBLAS computes it.

    `weight` must pass `serves`. The result has its dtype.
    """
    # Under autocast the weight has autocast's dtype, and `linear` would cast in the same way.
    bias = None if bias is None else bias.to(weight.dtype)
    return _skinny_linear(states.to(weight.dtype), weight, bias)


def serves(weight: Tensor) -> bool:
    """Whether `skinny_linear` supports this weight: 16 bits, contiguous, on Hopper or newer."""
    if not weight.is_cuda or weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.cuda.get_device_capability(weight.device) < (9, 0):
        return False
    from rollout.kernels.skinny_linear_triton import divides

    return weight.dim() == 2 and weight.is_contiguous() and divides(*weight.shape)


class SkinnyLinear(nn.Linear):
    """A linear layer that uses `skinny_linear` if its weight allows."""

    skinny: bool

    def choose_kernel(self) -> None:
        """Choose by the current weight. Call it before the first forward and after a change."""
        self.skinny = serves(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply, as `nn.Linear` does."""
        multiply = skinny_linear if self.skinny else linear
        return multiply(input, self.weight, self.bias)


class Float32Head(nn.Linear):
    """An output head that computes in float32, whatever the dtypes of weights and states."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute logits, float32."""
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(input.device.type, enabled=False):
            return linear(input.float(), self.weight.float(), bias)


class CastEmbedding(nn.Embedding):
    """An embedding that shares the head's float32 weights, and returns the model's dtype.

    Attributes:
        embed: Forward of the embedding that this one replaces, with its scaling or adapters.
        states_dtype: Dtype of all other weights.
    """

    embed: Any
    states_dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        """Embed, then cast to `states_dtype`."""
        states: Tensor = self.embed(input)
        return states.to(self.states_dtype)

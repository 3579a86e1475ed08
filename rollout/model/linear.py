"""Linear layers of the twin: products of few rows by a kernel of ours, and a float32 head.

cuBLAS takes no part in launching a kernel while the one before it ends, and a decode step is
hundreds of products that last microseconds each.
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
    from rollout.kernels import skinny_linear_triton as kernel  # Triton is not there on every CPU

    if states.numel() // states.shape[-1] > kernel.MOST_ROWS:
        return linear(states, weight, bias)
    return kernel.skinny_linear(states, weight, bias)


def skinny_linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear(states, weight, bias)` without a gradient.

    Args:
        states: `(..., inputs)`.
        weight: `(outputs, inputs)`, which `serves`; a product of many rows stays cuBLAS's.
        bias: `(outputs,)`.

    Returns:
        `(..., outputs)`.
    """
    # In autocast, whose dtype the weight has, `linear` would do this.
    bias = None if bias is None else bias.to(weight.dtype)
    return _skinny_linear(states.to(weight.dtype), weight, bias)


def serves(weight: Tensor) -> bool:
    """Whether products with this weight can be ours: on Hopper and newer, in 16 bits."""
    if not weight.is_cuda or weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.cuda.get_device_capability(weight.device) < (9, 0):
        return False
    from rollout.kernels.skinny_linear_triton import divides

    return weight.dim() == 2 and weight.is_contiguous() and divides(*weight.shape)


class SkinnyLinear(nn.Linear):
    """A linear layer that computes by `skinny_linear` where that serves.

    Attributes:
        skinny: Whether it serves the present weight, as `choose_kernel` has found.
    """

    skinny: bool

    def choose_kernel(self) -> None:
        """Look at the present weight."""
        self.skinny = serves(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """What `nn.Linear` would return."""
        multiply = skinny_linear if self.skinny else linear
        return multiply(input, self.weight, self.bias)


class Float32Head(nn.Linear):
    """A head whose products are float32, whatever its weights and states are."""

    def forward(self, input: Tensor) -> Tensor:
        """Logits, float32."""
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(input.device.type, enabled=False):
            return linear(input.float(), self.weight.float(), bias)


class CastEmbedding(nn.Embedding):
    """An embedding that shares the head's float32 weights, and gives the model's dtype.

    Attributes:
        embed: The forward of the embedding that it stands for, scaled or adapted as that is.
        states_dtype: The dtype of every other weight.
    """

    embed: Any
    states_dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        """What the embedding itself would return, in that dtype."""
        states: Tensor = self.embed(input)
        return states.to(self.states_dtype)

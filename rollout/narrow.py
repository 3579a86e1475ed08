"""Linear layers of few outputs, whose products of few rows must not be split."""

from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Shape = tuple[int, int]

# From here on cuBLASLt splits no product that was looked at.
UNSPLIT_ROWS = 256


@torch.library.custom_op("twinslot::narrow_linear", mutates_args=())
def narrow_linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear(states, weight, bias)`, added up in the order of a product of many rows."""
    states = states.to(weight.dtype)
    bias = None if bias is None else bias.to(weight.dtype)
    if not states.is_cuda or states.numel() // states.shape[-1] >= UNSPLIT_ROWS:
        return linear(states, weight, bias)
    from rollout.kernels.product_triton import product  # Triton is not there on every CPU

    return product(states, weight, bias)


@narrow_linear.register_fake
def _(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return states.new_empty((*states.shape[:-1], len(weight)), dtype=weight.dtype)


class _Narrow:
    """A linear layer whose product is not split."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """What the layer itself would return."""
        return narrow_linear(input, self.weight, self.bias)


@cache
def _narrow(plain: Any) -> Any:
    return type(f"Narrow{plain.__name__}", (_Narrow, plain), {})


def narrow(base: nn.Module, shapes: Collection[Shape]) -> int:
    """Let the twin's layers of these shapes run unsplit products.

    Args:
        base: The twin's tree, after `fuse`: layers that are part of a group's product are left.
        shapes: Outputs and inputs.

    Returns:
        Layers that will.
    """
    layers = [m for m in base.modules() if type(m) is nn.Linear and tuple(m.weight.shape) in shapes]
    for layer in layers:
        layer.__class__ = _narrow(nn.Linear)
    return len(layers)

"""Linear layers of the twin whose products of few rows are ours, as close mode decodes them.

cuBLAS takes no part in launching a kernel while the one before it ends, and a decode step is
hundreds of products that last microseconds each.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rollout.kernels.custom_op import custom_op


def _fake(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return states.new_empty((*states.shape[:-1], len(weight)))


@custom_op(_fake)
def _few_rows_linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from rollout.kernels import (
        skinny_linear_triton as few_rows_triton,  # Triton is not there on every CPU
    )

    if states.numel() // states.shape[-1] > few_rows_triton.MOST_ROWS:
        return linear(states, weight, bias)
    return few_rows_triton.skinny_linear(states, weight, bias)


def few_rows_linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
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
    return _few_rows_linear(states.to(weight.dtype), weight, bias)


def serves(weight: Tensor) -> bool:
    """Whether products with this weight can be ours: on Hopper and newer, in 16 bits."""
    if not weight.is_cuda or weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.cuda.get_device_capability(weight.device) < (9, 0):
        return False
    from rollout.kernels.skinny_linear_triton import divides

    return weight.dim() == 2 and weight.is_contiguous() and divides(*weight.shape)


class FewRowsLinear(nn.Linear):
    """A linear layer that computes by `few_rows_linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """What the layer itself would return."""
        return few_rows_linear(input, self.weight, self.bias)


def use_few_rows(layers: Iterable[nn.Module]) -> None:
    """Let the plain linear layers in these decoder layers compute by `few_rows_linear`.

    Args:
        layers: Of the twin's tree, after `fuse`: layers that are part of a group's product are
            left.
    """
    for layer in (module for each in layers for module in each.modules()):
        if type(layer) is nn.Linear and serves(layer.weight):
            layer.__class__ = FewRowsLinear
        elif type(layer) is FewRowsLinear and not serves(layer.weight):
            layer.__class__ = nn.Linear  # type: ignore[assignment]


class Float32Head(nn.Linear):
    """A head whose products are float32, whatever its weights and states are."""

    def forward(self, input: Tensor) -> Tensor:
        """Logits, float32."""
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(input.device.type, enabled=False):
            return linear(input.float(), self.weight.float(), bias)


class _Narrowing:
    """An embedding that shares the head's float32 weights, and gives the model's dtype."""

    states_dtype: torch.dtype

    def forward(self: Any, input: Tensor) -> Tensor:
        """What the embedding itself would return, in that dtype."""
        states: Tensor = super().forward(input)  # type: ignore[misc]
        return states.to(self.states_dtype)


@cache
def _narrowing(plain: Any) -> Any:
    return type(f"Narrowing{plain.__name__}", (_Narrowing, plain), {})


def use_float32_head(base: nn.Module) -> None:
    """Let the twin's head compute in float32.

    Args:
        base: The twin's tree, changed in place.
    """
    model: Any = base
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    head.__class__ = Float32Head
    if embedding.weight.data_ptr() == head.weight.data_ptr():
        embedding.__class__ = _narrowing(cast(Any, type(embedding)))
        # Every other weight still has the dtype that the shared one had.
        others = (p for p in base.parameters() if p.data_ptr() != head.weight.data_ptr())
        embedding.states_dtype = next(others).dtype

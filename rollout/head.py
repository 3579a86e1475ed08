"""A head that computes in float32, outside autocast, as TRL's `cast_lm_head_to_fp32` has it."""

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


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

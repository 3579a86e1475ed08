"""Batch-invariant linear layers: a row's output has the same bits for any number of rows.

cuBLASLt splits a product with few outputs along its inner dimension (split-K), depending on the
number of rows. Trainer and rollout run such layers in one kernel of ours.
"""

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Shape = tuple[int, int]
"""Output and input features of a linear layer."""

InvariantShapes = Mapping[Shape, int]
"""Shapes that our kernel runs, and for each the rows from which cuBLASLt gives the same bits."""


@torch.library.custom_op("twinslot::batch_invariant_linear", mutates_args=())
def _batch_invariant_linear(
    states: Tensor, weight: Tensor, bias: Tensor | None, library_rows: int
) -> Tensor:
    if not states.is_cuda or states.numel() // states.shape[-1] >= library_rows:
        return linear(states, weight, bias)
    # Imported here: a machine without a GPU may lack Triton.
    from rollout.kernels.batch_invariant_linear_triton import batch_invariant_linear

    return batch_invariant_linear(states, weight, bias)


@_batch_invariant_linear.register_fake
def _(states: Tensor, weight: Tensor, bias: Tensor | None, library_rows: int) -> Tensor:
    return states.new_empty((*states.shape[:-1], len(weight)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    states, weight, bias, _ = inputs
    ctx.save_for_backward(states, weight)
    ctx.has_bias = bias is not None


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients by plain matrix products: only the forward has to be exact."""
    states, weight = ctx.saved_tensors
    flat = gradient.flatten(0, -2)
    for_states = gradient @ weight if ctx.needs_input_grad[0] else None
    for_weight = flat.T @ states.flatten(0, -2) if ctx.needs_input_grad[1] else None
    return for_states, for_weight, flat.sum(0) if ctx.has_bias else None, None


_batch_invariant_linear.register_autograd(_differentiate, setup_context=_save)


def batch_invariant_linear(
    states: Tensor, weight: Tensor, bias: Tensor | None, library_rows: int
) -> Tensor:
    """`linear(states, weight, bias)`, batch-invariant, in autocast's dtype as `linear` returns it.

    `weight` is `(outputs, inputs)`. With `library_rows` rows or more, cuBLASLt gives the same bits
    and runs the product.
    """
    dtype, kind = weight.dtype, states.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    bias = None if bias is None else bias.to(dtype)
    return _batch_invariant_linear(states.to(dtype), weight.to(dtype), bias, library_rows)


class BatchInvariantLinear(nn.Linear):
    """A linear layer that computes by `batch_invariant_linear`."""

    library_rows: int

    def forward(self, input: Tensor) -> Tensor:
        """Return what `nn.Linear` returns, batch-invariant."""
        return batch_invariant_linear(input, self.weight, self.bias, self.library_rows)


def patch_forwards(base: nn.Module, shapes: InvariantShapes) -> Callable[[], None]:
    """Run the trainer's linear layers of these shapes in `batch_invariant_linear`.

    Hooks, optimizers and adapters refer to the trainer's modules, so the modules stay and get a
    `forward` on the instance. It is a bound method: torch.compile then makes one graph for all
    layers. The returned function undoes it and restores an instance `forward` set before.
    """
    before = {}
    for layer in base.modules():
        if type(layer) is nn.Linear and shape_of(layer) in shapes:
            before[layer] = vars(layer).get("forward")
            method: Any = MethodType(BatchInvariantLinear.forward, layer)
            vars(layer).update(library_rows=shapes[shape_of(layer)], forward=method)

    def undo() -> None:
        for layer, forward in before.items():
            for name in ("library_rows", "forward"):
                vars(layer).pop(name, None)
            if forward is not None:
                vars(layer)["forward"] = forward

    return undo


def shape_of(layer: nn.Linear) -> Shape:
    """Output and input features."""
    return layer.weight.shape[0], layer.weight.shape[1]

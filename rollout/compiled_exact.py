"""What a compiler leaves to torch's own kernels, so that layers round as the trainer's do.

A compiler adds up in another order than torch's reductions, and computes activations by other
formulas. Everything else in a decoder layer is rounded one operation at a time, as torch does it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files


@torch.library.custom_op("twinslot::mean", mutates_args=())
def _mean(states: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    return states.mean(dim, keepdim)


@_mean.register_fake
def _(states: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    return states.mean(dim, keepdim)


class _LeaveMeans(CustomGraphPass):
    """Leaves means, as norms compute them, to torch's kernel."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is torch.ops.aten.mean.dim:
                node.target = torch.ops.twinslot.mean.default

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


options: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "post_grad_custom_pre_pass": _LeaveMeans(),
}


# By number: a compiler's graph holds no function.
_activations: list[nn.Module] = []


@torch.library.custom_op("twinslot::activation", mutates_args=())
def _activation(states: Tensor, index: int) -> Tensor:
    return _activations[index](states)


@_activation.register_fake
def _(states: Tensor, index: int) -> Tensor:
    return torch.empty_like(states)


class _Left(nn.Module):
    """An activation that no compiler looks into."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, states: Tensor) -> Tensor:
        """What the activation itself would return."""
        return _activation(states, self.index)


def leave_activations(layers: Iterable[nn.Module]) -> None:
    """Hide the activations of the twin's layers from the compiler.

    Args:
        layers: Decoder layers, changed in place.
    """
    for layer in layers:
        for module in list(layer.modules()):
            activation = getattr(module, "act_fn", None)
            if isinstance(activation, nn.Module) and not isinstance(activation, _Left):
                module.act_fn = _Left(_index(activation))


def _index(activation: nn.Module) -> int:
    """The number of an activation, one for each class."""
    for index, known in enumerate(_activations):
        if type(known) is type(activation):
            return index
    _activations.append(activation)
    return len(_activations) - 1

"""Projections of one input as one product: q/k/v, and gate/up.

Weights that lie next to each other in memory are read by one product, without a copy. The trainer
keeps its parameters; `lay_together` only moves their storage into one buffer a group.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# Linear layers that models apply to the same input, by the names they have in transformers.
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedLinear(nn.Linear):
    """A linear layer of a group, which takes its part of the group's one product.

    Attributes:
        product: The group's.
        index: Place of this layer in the group.
    """

    product: "_Product"
    index: int

    def forward(self, input: Tensor) -> Tensor:
        """`linear(input, self.weight, self.bias)`."""
        return self.product.output(self.index, input)


class _Product:
    """One product for several layers; the first that is called computes for all."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        first = layers[0].weight.detach()
        shape = (sum(layer.out_features for layer in layers), *first.shape[1:])
        # ALIAS: one view of what the optimizer writes
        self._weight = nn.Parameter(first.as_strided(shape, first.stride()), requires_grad=False)
        self._biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        self._sizes = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def output(self, index: int, states: Tensor) -> Tensor:
        """What one layer makes of `states`; the last one called lets the results go."""
        if states is not self._input:
            bias = torch.cat(self._biases) if self._biases else None
            joined = linear(states, self._weight, bias)
            self._input, self._outputs = states, joined.split(self._sizes, dim=-1)
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return output


@torch.no_grad()
def lay_together(base: nn.Module, among: Collection[nn.Module] | None = None) -> int:
    """Move the weights of each group into one buffer; parameters, values and names stay.

    To be called before an optimizer or a wrapper has looked at where parameters lie.

    Args:
        base: The trainer's model, changed in place.
        among: Layers that may be moved. `None`: all.

    Returns:
        Groups that were moved. Layers with adapters, unequal dtypes or quantised weights are no
        group.
    """
    groups = [
        layers
        for layers in _groups(base)
        if not _lie_together(layers) and (among is None or all(layer in among for layer in layers))
    ]
    for layers in groups:
        buffer = torch.cat([layer.weight.data for layer in layers])
        parts = buffer.split([layer.out_features for layer in layers])
        for layer, part in zip(layers, parts, strict=True):
            # ALIAS: the group's weights share one buffer from now on
            layer.weight.data = part
    return len(groups)


def fuse(base: nn.Module) -> int:
    """Let the twin compute each group whose weights lie together by one product.

    Args:
        base: The twin's tree, bound to its weights.

    Returns:
        Groups that are one product.
    """
    fused = 0
    for layers in _groups(base):
        together = _lie_together(layers)
        fused += together
        product = _Product(layers) if together else None
        for index, layer in enumerate(layers):
            layer.__class__ = FusedLinear if together else nn.Linear
            layer.product, layer.index = product, index  # type: ignore[assignment]
    return fused


def _groups(base: nn.Module) -> Iterator[list[nn.Linear]]:
    """Plain linear layers of one input, dtype and device, all with a bias or all without."""
    for module in base.modules():
        for names in _GROUPS:
            found = (getattr(module, name, None) for name in names)
            # Not every subclass: adapters and quantised layers compute something else.
            layers: list[nn.Linear] = [x for x in found if type(x) in (nn.Linear, FusedLinear)]  # type: ignore[misc]
            kinds = {
                (layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None)
                for layer in layers
            }
            if len(layers) == len(names) and len(kinds) == 1:
                yield layers


def _lie_together(layers: Sequence[nn.Linear]) -> bool:
    """Whether each weight begins where the one before ends, in one piece of memory."""
    weights = [layer.weight for layer in layers]
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    ends = [weight.data_ptr() + weight.nbytes for weight in weights[:-1]]
    starts = [weight.data_ptr() for weight in weights[1:]]
    return len(storages) == 1 and ends == starts and all(w.is_contiguous() for w in weights)

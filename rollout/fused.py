"""Projections of one input as one product: q/k/v, and gate/up.

Weights that lie next to each other in memory are read by one product, without a copy. The trainer
keeps its parameters; `lay_together` only moves their storage into one buffer a group.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# Linear layers that models apply to the same input, by the names they have in transformers.
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@torch.no_grad()
def lay_together(base: nn.Module) -> int:
    """Move the weights of each group into one buffer; parameters, values and names stay.

    To be called before an optimizer or a wrapper has looked at where parameters lie.

    Args:
        base: The trainer's model, changed in place.

    Returns:
        Groups that were moved. Layers with adapters, unequal dtypes or quantised weights are no
        group.
    """
    groups = list(_groups(base))
    for layers in groups:
        for kind in ("weight", "bias"):
            parameters = [getattr(layer, kind) for layer in layers]
            if parameters[0] is not None:
                buffer = torch.cat([parameter.data for parameter in parameters])
                sizes = [len(parameter) for parameter in parameters]
                for parameter, part in zip(parameters, buffer.split(sizes), strict=True):
                    # ALIAS: the group's parameters share one buffer from now on
                    parameter.data = part
    return len(groups)


def fuse(base: nn.Module) -> int:
    """Let the twin compute each group whose weights lie together by one product.

    Args:
        base: The twin's tree, bound to its weights; each layer's own `forward` is replaced.

    Returns:
        Groups that are one product.
    """
    fused = 0
    for layers in _groups(base):
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        if _lie_together(weights) and (biases[0] is None or _lie_together(biases)):
            product = _Product(_join(weights), None if biases[0] is None else _join(biases), layers)
            for index, layer in enumerate(layers):
                layer.forward = partial(product.output, index)  # type: ignore[method-assign]
            fused += 1
    return fused


class _Product:
    """One product for several layers; the first that is called computes for all."""

    def __init__(self, weight: Tensor, bias: Tensor | None, layers: Sequence[nn.Linear]) -> None:
        # ALIAS: views of what the optimizer writes
        self._weight, self._bias = weight, bias
        self._sizes = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def output(self, index: int, states: Tensor) -> Tensor:
        """What one layer makes of `states`; the last one called lets the results go."""
        if states is not self._input:
            joined = linear(states, self._weight, self._bias)
            self._input, self._outputs = states, joined.split(self._sizes, dim=-1)
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return output


def _groups(base: nn.Module) -> Iterator[list[nn.Linear]]:
    """Plain linear layers of one input, dtype and device, all with a bias or all without."""
    for module in base.modules():
        for names in _GROUPS:
            found = (getattr(module, name, None) for name in names)
            layers = [layer for layer in found if type(layer) is nn.Linear]
            kinds = {
                (layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None)
                for layer in layers
            }
            if len(layers) == len(names) and len(kinds) == 1:
                yield layers


def _lie_together(tensors: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before ends, in one piece of memory."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors[:-1]]
    starts = [tensor.data_ptr() for tensor in tensors[1:]]
    return len(storages) == 1 and ends == starts and all(t.is_contiguous() for t in tensors)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """One view over tensors that lie together."""
    first = tensors[0].detach()
    return first.as_strided((sum(len(t) for t in tensors), *first.shape[1:]), first.stride())

"""Projections of one input as one product: q/k/v, and gate/up.

Weights that lie next to each other in memory are read by one product, without a copy. The trainer
keeps its parameters; `lay_together` only moves their storage into one buffer a group. Where such
layers have LoRA adapters, the small products with their A matrices become one as well.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rollout.exact.linear import BatchInvariantLinear, InvariantShapes, batch_invariant_linear
from rollout.model.linear import FewRowsLinear, few_rows_linear, serves

# Linear layers that models apply to the same input, by the names they have in transformers.
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Fused:
    """A layer of a group, which takes its part of the group's one product.

    Attributes:
        product: The group's.
        index: Place of this layer in the group.
        plain: Its class where it stands alone.
    """

    product: "_Product"
    index: int
    plain: type[nn.Module]

    def forward(self, input: Tensor) -> Tensor:
        """What the layer itself would return."""
        return self.product.output(self.index, input)


@cache
def _fused(plain: Any) -> Any:
    """`plain`, which it still is to whoever asks, with a part in a product."""
    return type(f"Fused{plain.__name__}", (Fused, plain), {"plain": plain})


def _plain(layer: Any) -> Any:
    """Its class in the trainer's tree."""
    if isinstance(layer, BatchInvariantLinear | FewRowsLinear):
        return nn.Linear
    return layer.plain if isinstance(layer, Fused) else type(layer)


class _Adapter(NamedTuple):
    """One layer's LoRA adapter: `up(down(input)) * scaling` is added to the layer's output."""

    down: nn.Parameter
    up: nn.Parameter
    scaling: float


class _Product:
    """One product for several layers; the first that is called computes for all."""

    def __init__(self, shapes: InvariantShapes | None) -> None:
        self._shapes = shapes
        self._down: nn.Parameter | None = None
        self._input: Tensor | None = None
        self._outputs: list[Tensor] = []

    def bind(self, layers: Sequence[nn.Module]) -> None:
        """Take over the layers' present weights."""
        linears = [_linear(layer) for layer in layers]
        first = linears[0].weight.detach()
        shape = (sum(layer.out_features for layer in linears), *first.shape[1:])
        # ALIAS: one view of what the optimizer writes
        self.weight = nn.Parameter(first.as_strided(shape, first.stride()), requires_grad=False)
        self._biases: list[Tensor] = [x.bias for x in linears if x.bias is not None]
        self.sizes = [layer.out_features for layer in linears]
        self._adapters = [_adapter(layer) for layer in layers]
        downs: list[Tensor] = [x.down for x in self._adapters if x is not None]
        self._ranks = [len(down) for down in downs]
        if not downs:
            self._down = None
        elif self._down is None or self._down.shape[0] != sum(self._ranks):
            self._down = nn.Parameter(torch.cat(downs), requires_grad=False)
        else:
            torch.cat(downs, out=self._down)

    def output(self, index: int, states: Tensor) -> Tensor:
        """What one layer makes of `states`; the last one called lets the results go."""
        if states is not self._input:
            self._input, self._outputs = states, self._compute(states)
        output = self._outputs[index]
        if index == len(self.sizes) - 1:
            self._input, self._outputs = None, []
        return output

    def _compute(self, states: Tensor) -> list[Tensor]:
        bias = torch.cat(self._biases) if self._biases else None
        outputs = self._multiply(states, self.weight, bias).split(self.sizes, dim=-1)
        if self._down is None:
            return list(outputs)
        lows = self._multiply(states.to(self._down.dtype), self._down).split(self._ranks, dim=-1)
        low = iter(lows)
        # Operation by operation what PEFT does, so that it rounds alike.
        return [
            output
            if adapter is None
            else (output + self._multiply(next(low), adapter.up) * adapter.scaling).to(output.dtype)
            for output, adapter in zip(outputs, self._adapters, strict=True)
        ]

    def _multiply(self, states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._shapes is None:
            multiply = few_rows_linear if serves(weight) else linear
            return multiply(states, weight, bias)
        library_rows = self._shapes.get((weight.shape[0], weight.shape[1]))
        if library_rows is not None:
            return batch_invariant_linear(states, weight, bias, library_rows)
        return linear(states, weight, bias)


@torch.no_grad()
def lay_together(base: nn.Module, among: Collection[nn.Module] | None = None) -> int:
    """Move the weights of each group into one buffer; parameters, values and names stay.

    To be called before an optimizer or a wrapper has looked at where parameters lie.

    Args:
        base: The trainer's model, changed in place.
        among: Linear layers that may be moved. `None`: all.

    Returns:
        Groups that were moved. Layers with unequal dtypes or quantised weights are no group.
    """
    found = ([_linear(layer) for layer in layers] for layers in _groups(base))
    groups = [
        layers
        for layers in found
        if not _lie_together(layers) and (among is None or all(layer in among for layer in layers))
    ]
    for layers in groups:
        buffer = torch.cat([layer.weight.data for layer in layers])
        parts = buffer.split([layer.out_features for layer in layers])
        for layer, part in zip(layers, parts, strict=True):
            # ALIAS: the group's weights share one buffer from now on
            layer.weight.data = part
    return len(groups)


@torch.no_grad()
def fuse(base: nn.Module, shapes: InvariantShapes | None = None) -> int:
    """Let the twin compute each group whose weights lie together by one product.

    Args:
        base: The twin's tree, bound to its weights.
        shapes: Shapes whose products are ours at any number of rows, in exact mode.
            `None`: those of few rows are ours; see `few_rows`.

    Returns:
        Groups that are one product.
    """
    fused = 0
    for layers in _groups(base):
        together = _lie_together([_linear(layer) for layer in layers])
        fused += together
        product = getattr(layers[0], "product", None) or _Product(shapes)
        if together:
            product.bind(layers)
        for index, layer in enumerate(layers):
            layer.__class__ = _fused(_plain(layer)) if together else _plain(layer)
            layer.product, layer.index = product, index
    return fused


def _groups(base: nn.Module) -> Iterator[list[Any]]:
    """Layers of one input, dtype and device, all with a bias or all without."""
    for module in base.modules():
        for names in _GROUPS:
            layers = [getattr(module, name, None) for name in names]
            if all(_can_fuse(layer) for layer in layers):
                linears = [_linear(layer) for layer in layers]
                kinds = {
                    (layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None)
                    for layer in linears
                }
                if len(kinds) == 1:
                    yield layers


def _can_fuse(layer: Any) -> bool:
    """Whether it is a plain linear layer, or one under a plain LoRA adapter of PEFT's.

    By exact type: subclasses, quantised layers for one, compute something else.
    """
    if _plain(layer) is nn.Linear:
        return True
    is_lora = _plain(layer).__name__ == "Linear" and hasattr(layer, "lora_A")
    if not is_lora or _plain(layer.base_layer) is not nn.Linear:
        return False
    active = _active(layer)
    parts = [part[name] for part in (layer.lora_A, layer.lora_B) for name in active]
    plain = all(_plain(part) is nn.Linear and part.bias is None for part in parts)
    return plain and len(active) < 2 and not any(name in layer.lora_variant for name in active)


def _active(layer: Any) -> list[str]:
    """Names of the adapters that a LoRA layer adds to its output."""
    if layer.disable_adapters or layer.merged_adapters:
        return []
    active = layer.active_adapter
    names = [active] if isinstance(active, str) else active
    return [name for name in names if name in layer.lora_A]


def _adapter(layer: Any) -> _Adapter | None:
    if not hasattr(layer, "lora_A") or not (active := _active(layer)):
        return None
    (name,) = active
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    return _Adapter(down, up, layer.scaling[name])


def _linear(layer: Any) -> nn.Linear:
    """The layer whose weight is read, under an adapter or not."""
    return layer if isinstance(layer, nn.Linear) else layer.base_layer


def _lie_together(layers: Sequence[nn.Linear]) -> bool:
    """Whether each weight begins where the one before ends, in one piece of memory."""
    weights = [layer.weight for layer in layers]
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    ends = [weight.data_ptr() + weight.nbytes for weight in weights[:-1]]
    starts = [weight.data_ptr() for weight in weights[1:]]
    return len(storages) == 1 and ends == starts and all(w.is_contiguous() for w in weights)

"""Projections of one input as one product: q/k/v, and gate/up.

Weights that lie next to each other in memory are read by one product, without a copy. The trainer
keeps its parameters; `lay_together` only moves their storage into one buffer a group. Where such
layers have LoRA adapters, the small products with their A matrices become one as well.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rollout.exact.linear import InvariantShapes, batch_invariant_linear
from rollout.model.linear import serves, skinny_linear

# Linear layers that models apply to the same input, by the names they have in transformers.
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Adapter(NamedTuple):
    """One layer's LoRA adapter: `up(down(input)) * scaling` is added to the layer's output."""

    down: nn.Parameter
    up: nn.Parameter
    scaling: float


class ProjectionGroup:
    """Layers of one input; one product computes them where their weights lie together.

    The first layer that is called computes for all, the last one lets the results go. Shapes are
    those of exact mode, as in `replace_modules`.

    Attributes:
        layers: Linear layers, or LoRA adapters over such, as they compute alone.
        joined: Whether one product computes them.
        weight: All of their weights, one below the other; `None` where they lie apart.
    """

    def __init__(self, layers: Sequence[nn.Module], shapes: InvariantShapes | None) -> None:
        self.layers = layers
        self.joined = False
        self.weight: nn.Parameter | None = None
        self._shapes = shapes
        self._down: nn.Parameter | None = None
        self._input: Tensor | None = None
        self._outputs: list[Tensor] = []

    @property
    def linears(self) -> list[nn.Linear]:
        """The layers whose weights are read, under adapters or not."""
        return [_linear(layer) for layer in self.layers]

    def bind(self) -> bool:
        """Take over the layers' present weights; whether one product computes them."""
        self.joined, self.weight = False, None  # an interrupt leaves layers that compute alone
        if _are_alike(self.linears) and _lie_together(self.linears):
            self._bind_weights()
            self._bind_adapters()
            self.joined = True
        return self.joined

    def _bind_weights(self) -> None:
        linears = self.linears
        first = linears[0].weight.detach()
        shape = (sum(layer.out_features for layer in linears), *first.shape[1:])
        # ALIAS: one view of what the optimizer writes
        self.weight = nn.Parameter(first.as_strided(shape, first.stride()), requires_grad=False)
        self._biases: list[Tensor] = [x.bias for x in linears if x.bias is not None]
        self._sizes = [layer.out_features for layer in linears]

    def _bind_adapters(self) -> None:
        self._adapters = [_adapter(layer) for layer in self.layers]
        downs: list[Tensor] = [x.down for x in self._adapters if x is not None]
        self._ranks = [len(down) for down in downs]
        if not downs:
            self._down = None
        elif self._down is None or self._down.shape[0] != sum(self._ranks):
            self._down = nn.Parameter(torch.cat(downs), requires_grad=False)
        else:
            torch.cat(downs, out=self._down)

    def output(self, index: int, states: Tensor) -> Tensor:
        """What one layer makes of `states`."""
        if not self.joined:
            output: Tensor = self.layers[index].forward(states)
            return output
        if states is not self._input:
            self._input, self._outputs = states, self._compute(states)
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, []
        return output

    def _compute(self, states: Tensor) -> list[Tensor]:
        bias = torch.cat(self._biases) if self._biases else None
        assert self.weight is not None
        outputs = self._multiply(states, self.weight, bias).split(self._sizes, dim=-1)
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
            multiply = skinny_linear if serves(weight) else linear
            return multiply(states, weight, bias)
        library_rows = self._shapes.get((weight.shape[0], weight.shape[1]))
        if library_rows is not None:
            return batch_invariant_linear(states, weight, bias, library_rows)
        return linear(states, weight, bias)


class _Grouped:
    """A layer that takes its part of what its group computes."""

    group: ProjectionGroup
    index: int

    def forward(self, input: Tensor) -> Tensor:
        """What the layer itself would return."""
        return self.group.output(self.index, input)


class GroupedLinear(_Grouped, nn.Linear):
    """A linear layer of a group."""


class GroupedAdapter(_Grouped, nn.Module):
    """A LoRA adapter of a group, with the linear layer under it."""


@torch.no_grad()
def lay_together(groups: Iterable[Sequence[nn.Module]]) -> int:
    """Move the weights of each group into one buffer; parameters, values and names stay.

    To be called before an optimizer or a wrapper has looked at where parameters lie. Groups of
    unequal dtypes or devices stay; how many were moved is returned.
    """
    linears = [[_linear(layer) for layer in layers] for layers in groups]
    moved = [each for each in linears if _are_alike(each) and not _lie_together(each)]
    for layers in moved:
        buffer = torch.cat([layer.weight.data for layer in layers])
        parts = buffer.split([layer.out_features for layer in layers])
        for layer, part in zip(layers, parts, strict=True):
            # ALIAS: the group's weights share one buffer from now on
            layer.weight.data = part
    return len(moved)


def groups_of(base: nn.Module) -> Iterator[list[Any]]:
    """Layers that a model, the trainer's or a clone, applies to one input."""
    for module in base.modules():
        for names in _GROUPS:
            layers = [getattr(module, name, None) for name in names]
            if all(_may_join(layer) for layer in layers):
                yield layers


def _may_join(layer: Any) -> bool:
    """Whether it is a plain linear layer, or one under a plain LoRA adapter of PEFT's.

    By exact type: subclasses, quantised layers for one, compute something else.
    """
    if type(layer) is nn.Linear:
        return True
    is_lora = type(layer).__name__ == "Linear" and hasattr(layer, "lora_A")
    if not is_lora or type(layer.base_layer) is not nn.Linear:
        return False
    active = _active(layer)
    parts = [part[name] for part in (layer.lora_A, layer.lora_B) for name in active]
    plain = all(type(part) is nn.Linear and part.bias is None for part in parts)
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


def _are_alike(layers: Sequence[nn.Linear]) -> bool:
    """Whether they have one dtype, device and number of inputs, and all a bias or none."""
    kinds = {
        (layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None)
        for layer in layers
    }
    return len(kinds) == 1

"""Fused projections: one product for layers that read one input, such as q/k/v and gate/up.

One product can read weights that are adjacent in memory, without a copy. The trainer keeps its
parameters; `lay_together` only moves their storage into one buffer a group. If the layers have LoRA
adapters, the small products with their A matrices are fused, too.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rollout.exact.linear import InvariantShapes, batch_invariant_linear
from rollout.model.linear import serves, skinny_linear

logger = logging.getLogger(__name__)

# Names of linear layers in transformers that read the same input.
_GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),  # Qwen3.5's recurrent layers
    ("in_proj_qkvz", "in_proj_ba"),  # Qwen3-Next's
)


class _Adapter(NamedTuple):
    """A LoRA adapter: it adds `up(down(input)) * scaling` to the layer's output."""

    down: nn.Parameter
    up: nn.Parameter
    scaling: float


class ProjectionGroup:
    """Layers that read one input; one product computes them if their weights are adjacent.

    The first layer that is called computes all outputs. The last layer frees them.

    Args:
        layers: Linear layers, or LoRA adapters around them.
        shapes: Exact mode: weight shapes that need `batch_invariant_linear`. `None`: close mode.

    Attributes:
        joined: Whether one product computes the layers.
        weight: One view of all weights, `(sum of outputs, inputs)`; `None` unless joined.
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
        """The linear layers, without adapters around them."""
        return [_linear(layer) for layer in self.layers]

    @property
    def products(self) -> list[Tensor]:
        """Weights that one product multiplies with: the layers' and their adapters' A matrices."""
        return [weight for weight in (self.weight, self._down) if weight is not None]

    def bind(self) -> bool:
        """Take the layers' current weights; return whether one product computes them."""
        self.joined, self.weight = False, None  # after an interrupt here, each layer runs alone
        if _are_alike(self.linears) and _lie_together(self.linears):
            self._bind_weights()
            self._bind_adapters()
            self.joined = True
        return self.joined

    def _bind_weights(self) -> None:
        linears = self.linears
        first = linears[0].weight.detach()
        shape = (sum(layer.out_features for layer in linears), *first.shape[1:])
        # ALIAS: a view of the weights that the optimizer writes
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
        """Output of one layer for `states`."""
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
        # The operations of PEFT in PEFT's order, so that both round alike.
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
    """A layer whose output its group computes."""

    group: ProjectionGroup
    index: int

    def forward(self, input: Tensor) -> Tensor:
        """Return this layer's output."""
        return self.group.output(self.index, input)


class GroupedLinear(_Grouped, nn.Linear):
    """A linear layer in a group."""


class GroupedAdapter(_Grouped, nn.Module):
    """A linear layer with a LoRA adapter, in a group."""


@torch.no_grad()
def lay_together(groups: Iterable[Sequence[nn.Module]]) -> int:
    """Move the weights of each group into one buffer; return how many groups moved.

    Parameters, values and names stay. Call it before an optimizer or a wrapper records addresses.
    Weights of one group that differ in dtype or device do not move.
    """
    linears = [[_linear(layer) for layer in layers] for layers in groups]
    moved = [each for each in linears if _are_alike(each) and not _lie_together(each)]
    if moved:
        text = "fuse_projections: %d groups of weights (as q/k/v) moved into joint buffers"
        logger.info(text, len(moved))
    for layers in moved:
        buffer = torch.cat([layer.weight.data for layer in layers])
        parts = buffer.split([layer.out_features for layer in layers])
        for layer, part in zip(layers, parts, strict=True):
            # ALIAS: the group's weights share one buffer from now on
            layer.weight.data = part
    return len(moved)


def groups_of(base: nn.Module) -> Iterator[list[Any]]:
    """Lists of layers that read the same input and that one product may compute."""
    for module in base.modules():
        for names in _GROUPS:
            layers = [getattr(module, name, None) for name in names]
            if all(_may_join(layer) for layer in layers):
                yield layers


def _may_join(layer: Any) -> bool:
    """Whether it is a plain linear layer, alone or under a plain LoRA adapter.

    Subclasses, such as quantised layers, compute something else, so the type must match exactly.
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
    """Names of the adapters that the layer adds to its output."""
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
    return layer if isinstance(layer, nn.Linear) else layer.base_layer


def _lie_together(layers: Sequence[nn.Linear]) -> bool:
    """Whether the weights are adjacent, in order, in one storage."""
    weights = [layer.weight for layer in layers]
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    ends = [weight.data_ptr() + weight.nbytes for weight in weights[:-1]]
    starts = [weight.data_ptr() for weight in weights[1:]]
    return len(storages) == 1 and ends == starts and all(w.is_contiguous() for w in weights)


def _are_alike(layers: Sequence[nn.Linear]) -> bool:
    """Whether input size, dtype, device and presence of a bias are equal."""
    kinds = {(x.in_features, x.weight.dtype, x.weight.device, x.bias is None) for x in layers}
    return len(kinds) == 1

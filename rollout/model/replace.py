"""Replaces modules in the twin's tree; no other file does.

A replacement shares parameters, buffers and children with its original, under the same names, so
the trainer's names stay valid in the twin.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from rollout.exact.linear import BatchInvariantLinear, InvariantShapes, shape_of
from rollout.model.compile import compiled_layers, decoder_layers
from rollout.model.linear import CastEmbedding, Float32Head, SkinnyLinear
from rollout.model.projections import GroupedAdapter, GroupedLinear, ProjectionGroup, groups_of

Module = TypeVar("Module", bound=nn.Module)
Replacements = dict[nn.Module, nn.Module]


@dataclass(frozen=True)
class Replaced:
    """Replacements that depend on the weights of a policy version."""

    groups: list[ProjectionGroup]
    linears: list[SkinnyLinear]

    @torch.no_grad()
    def refresh(self) -> int:
        """Take the current weights; return how many groups one product computes."""
        for layer in self.linears:
            layer.choose_kernel()
        return sum(group.bind() for group in self.groups)


def replace_modules(
    base: nn.Module,
    shapes: InvariantShapes | None,
    *,
    float32_head: bool = False,
    compiled: bool = False,
) -> Replaced:
    """Replace modules of a clone by ours, which are faster or round as the mode demands.

    Refresh the result before the first forward and after each change of weights.

    Args:
        base: The twin's tree, still made of the trainer's classes.
        shapes: Exact mode: weight shapes that need `batch_invariant_linear`. `None`: close mode,
            where skinny GEMM computes few rows.
        float32_head: The head computes in float32.
        compiled: `compile_layers` will follow. In exact mode torch.compile must not look into
            norms and activations.
    """
    linears = _skinny_linears(base) if shapes is None else _invariant_linears(base, shapes)
    if float32_head:
        linears |= _float32_head(base)
    groups: list[ProjectionGroup] = []
    grouped: Replacements = {}
    for layers in groups_of(base):
        group = ProjectionGroup([linears.get(layer, layer) for layer in layers], shapes)
        groups.append(group)
        grouped |= zip(layers, _members(group), strict=True)
    opaque: Replacements = {}
    if compiled and shapes is not None:
        from rollout.exact.compile import opaque_modules  # the compiler takes a second to import

        opaque = opaque_modules(compiled_layers(base, exact=True))
    replace(base, linears | grouped | opaque)
    return Replaced(groups, [each for each in linears.values() if isinstance(each, SkinnyLinear)])


def replace(base: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put each replacement in all places where its original is in the tree."""
    for parent in list(base.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in replacements:
                setattr(parent, name, replacements[child])


def in_place_of(module: nn.Module, kind: type[Module]) -> Module:
    """A module of class `kind` with all attributes of `module`: only its methods differ."""
    made = kind.__new__(kind)
    # ALIAS: both modules share the dicts of parameters, buffers and children
    vars(made).update(vars(module))
    return made


def _members(group: ProjectionGroup) -> Iterator[nn.Module]:
    for index, layer in enumerate(group.layers):
        kind: Any = GroupedLinear if isinstance(layer, nn.Linear) else GroupedAdapter
        made = in_place_of(layer, kind)
        made.group, made.index = group, index
        yield made


def _skinny_linears(base: nn.Module) -> Replacements:
    modules = (module for layer in decoder_layers(base) for module in layer.modules())
    return {each: in_place_of(each, SkinnyLinear) for each in modules if type(each) is nn.Linear}


def _invariant_linears(base: nn.Module, shapes: InvariantShapes) -> Replacements:
    replacements: Replacements = {}
    for layer in base.modules():
        if type(layer) is nn.Linear and shape_of(layer) in shapes:
            replacements[layer] = made = in_place_of(layer, BatchInvariantLinear)
            made.library_rows = shapes[shape_of(layer)]
    return replacements


def _float32_head(base: nn.Module) -> Replacements:
    """A float32 head. An embedding that shares its weights still returns the model's dtype."""
    model: Any = base
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    replacements: Replacements = {head: in_place_of(head, Float32Head)}
    if embedding.weight.data_ptr() == head.weight.data_ptr():
        replacements[embedding] = made = in_place_of(embedding, CastEmbedding)
        made.embed = embedding.forward
        # The shared weight is float32 by now; all others keep the model's dtype.
        others = (p for p in base.parameters() if p.data_ptr() != head.weight.data_ptr())
        made.states_dtype = next(others).dtype
    return replacements

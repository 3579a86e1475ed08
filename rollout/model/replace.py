"""Modules of ours that take the place of others in the twin's tree: here alone.

A module of ours shares parameters, buffers and children with the one that it replaces, under the
same names. So the twin still finds them by the trainer's names.
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
    """Modules of ours that depend on the weights of each policy version."""

    groups: list[ProjectionGroup]
    linears: list[SkinnyLinear]

    @torch.no_grad()
    def refresh(self) -> int:
        """Take over the present weights; return how many groups are one product."""
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

    In exact mode linear layers of `shapes` are batch-invariant, and where layers are going to be
    compiled no compiler looks into their norms and activations. In close mode, where `shapes` is
    `None`, those of few rows run on a kernel of ours.

    Returns:
        What to refresh before the twin first runs, and after each change of weights.
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
    opaque = _opaque_modules(base) if compiled and shapes is not None else {}
    replace(base, linears | grouped | opaque)
    return Replaced(groups, [each for each in linears.values() if isinstance(each, SkinnyLinear)])


def replace(base: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Set modules in the places of others, wherever those are in a tree of ours."""
    for parent in list(base.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in replacements:
                setattr(parent, name, replacements[child])


def _in_place_of(module: nn.Module, kind: type[Module]) -> Module:
    """A module of `kind` that has everything that `module` has, but another forward."""
    made = kind.__new__(kind)
    # ALIAS: one dict of parameters, of buffers and of children for both
    vars(made).update(vars(module))
    return made


def _members(group: ProjectionGroup) -> Iterator[nn.Module]:
    for index, layer in enumerate(group.layers):
        kind: Any = GroupedLinear if isinstance(layer, nn.Linear) else GroupedAdapter
        made = _in_place_of(layer, kind)
        made.group, made.index = group, index
        yield made


def _skinny_linears(base: nn.Module) -> Replacements:
    modules = (module for layer in decoder_layers(base) for module in layer.modules())
    return {each: _in_place_of(each, SkinnyLinear) for each in modules if type(each) is nn.Linear}


def _invariant_linears(base: nn.Module, shapes: InvariantShapes) -> Replacements:
    replacements: Replacements = {}
    for layer in base.modules():
        if type(layer) is nn.Linear and shape_of(layer) in shapes:
            replacements[layer] = made = _in_place_of(layer, BatchInvariantLinear)
            made.library_rows = shapes[shape_of(layer)]
    return replacements


def _opaque_modules(base: nn.Module) -> Replacements:
    from rollout.exact.compile import opaque_modules  # the compiler takes a second to import

    return opaque_modules(compiled_layers(base, exact=True))


def _float32_head(base: nn.Module) -> Replacements:
    """The head in float32, and an embedding that shares its weights and must not be."""
    model: Any = base
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    replacements: Replacements = {head: _in_place_of(head, Float32Head)}
    if embedding.weight.data_ptr() == head.weight.data_ptr():
        replacements[embedding] = made = _in_place_of(embedding, CastEmbedding)
        made.embed = embedding.forward
        # Every other weight still has the dtype that the shared one had.
        others = (p for p in base.parameters() if p.data_ptr() != head.weight.data_ptr())
        made.states_dtype = next(others).dtype
    return replacements

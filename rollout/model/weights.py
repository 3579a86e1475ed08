"""Weights that the engine holds a second time: cast ones, and sharded ones, gathered whole."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rollout.errors import UnsupportedModel
from rollout.memory.arena import Arena
from rollout.model.linear import Float32Head
from rollout.model.projections import ProjectionGroup, lay_together

_ALIGN = 512  # bytes; where torch would let a tensor begin


@dataclass(frozen=True)
class ShadowWeight:
    """A parameter of the twin that does not share the trainer's storage.

    Attributes:
        name: Of its module.
        module: The twin's.
        key: Its name in the module.
        source: The trainer's parameter.
        dtype: What the twin has it in.
    """

    name: str
    module: nn.Module
    key: str
    source: Tensor
    dtype: torch.dtype

    @property
    def path(self) -> tuple[str, str]:
        """Its place in the tree."""
        return self.name, self.key


class Shadow:
    """Places in an arena for the parameters that the twin holds itself.

    Args:
        arena: Memory for them, which may be given back and taken again.

    Attributes:
        num_gathered: How often a parameter was gathered from all ranks.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.num_gathered = 0
        self.clear()

    def clear(self) -> None:
        """Hold nothing: another tree is to come."""
        self._parameters: dict[tuple[str, str], nn.Parameter] = {}
        self._end = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of what is held."""
        return sum(parameter.nbytes for parameter in set(self._parameters.values()))

    @property
    def num_weights(self) -> int:
        """Parameters that are held."""
        return len(self._parameters)

    @property
    def missing_bytes(self) -> int:
        """Bytes that were given back, and that `fill` takes again."""
        return max(0, self._end - self.arena.num_bytes)

    def fill(self, weights: Sequence[ShadowWeight]) -> None:
        """Give the twin's modules the weights that have been placed, as the trainer's are now.

        Where a source is sharded this is a collective of all ranks that share it.
        """
        self.arena.grow(self._end)
        filled = set()
        for weight in weights:
            parameter = weight.module._parameters[weight.key] = self._parameters[weight.path]
            if parameter not in filled:
                with whole(weight.source, weight.dtype) as numbers:
                    self.num_gathered += is_part(weight.source)
                    parameter.copy_(numbers)
                filled.add(parameter)

    def place(self, weights: Sequence[ShadowWeight], groups: Iterable[ProjectionGroup]) -> None:
        """Give each parameter its place, once; those of a group lie together, tied ones are one.

        Until `clear` the weights have to be the same each time.
        """
        if self._parameters:
            return
        tied: dict[tuple[int, torch.dtype], nn.Parameter] = {}
        blanks: dict[tuple[str, str], nn.Parameter] = {}
        for each in weights:
            there = torch.empty(shape_of(each.source), dtype=each.dtype, device="meta")
            blank = nn.Parameter(there, requires_grad=False)
            blanks[each.path] = tied.setdefault((id(each.source), each.dtype), blank)
            each.module._parameters[each.key] = blanks[each.path]
        placed = set(blanks.values())
        linears = (group.linears for group in groups)
        lay_together(each for each in linears if all(layer.weight in placed for layer in each))
        begins = self._begins(blanks.values())
        self.arena.grow(self._end)
        made = {blank: self._view(blank, begins) for blank in placed}
        # All or none, should an interrupt come.
        self._parameters = {path: made[blank] for path, blank in blanks.items()}

    def _begins(self, blanks: Iterable[Tensor]) -> dict[int, int]:
        """Where each storage begins in the arena."""
        self._end, begins = 0, dict[int, int]()
        for storage in (blank.untyped_storage() for blank in blanks):
            if storage._cdata not in begins:
                begins[storage._cdata] = self._end
                self._end += -(-int(storage.nbytes()) // _ALIGN) * _ALIGN
        return begins

    def _view(self, blank: Tensor, begins: dict[int, int]) -> nn.Parameter:
        begin = begins[blank.untyped_storage()._cdata] + blank.storage_offset() * blank.itemsize
        place = self.arena.data[begin : begin + blank.nbytes]
        return nn.Parameter(place.view(blank.dtype).view(blank.shape), requires_grad=False)


def find_shadowed(
    live: nn.Module,
    base: nn.Module,
    autocast_dtype: torch.dtype | None,
    param_dtype: torch.dtype | None,
) -> Iterator[ShadowWeight]:
    """Find weights that are sharded, and those that autocast would cast.

    Args:
        live: The trainer's model, without an adapter's wrapper.
        base: The twin's tree, of the same names.
        autocast_dtype: Of the autocast that the trainer's forward runs under, if any.
        param_dtype: What FSDP or DeepSpeed casts parameters to, if anything.

    Raises:
        UnsupportedModel: A layer is both sharded and quantised.
    """
    modules = dict(live.named_modules())
    cast = set() if autocast_dtype is None else set(_cast_layers(base))
    for name, module in base.named_modules():
        for key, source in modules[name]._parameters.items():
            if source is None:
                continue
            dtype, sharded = source.dtype, is_part(source)
            if sharded and _is_4_bit(module):
                raise UnsupportedModel(
                    f"{name} is a 4-bit layer whose weight lies in parts on several ranks, and "
                    "parts of one were not tried; use DDP, or load the model in bfloat16"
                )
            if sharded and dtype.is_floating_point:
                dtype = param_dtype or dtype
            if key == "weight" and name in cast and dtype.is_floating_point:
                dtype = autocast_dtype or dtype
            if sharded or dtype != source.dtype:
                yield ShadowWeight(name, module, key, source, dtype)


def _cast_layers(base: nn.Module) -> Iterator[str]:
    """Layers whose weights autocast would cast: those of `nn.Linear`."""
    # DoRA reads the weights themselves, before autocast could cast them.
    dora = tuple(f"{name}." for name, module in base.named_modules() if _uses_dora(module))
    for name, module in base.named_modules():
        is_linear = isinstance(module, nn.Linear) and not isinstance(module, Float32Head)
        # Bytes of 4-bit weights may be stored as if they were numbers of any dtype.
        if is_linear and not _is_4_bit(module) and not name.startswith(dora):
            yield name


def _is_4_bit(module: nn.Module) -> bool:
    """Whether bitsandbytes has packed its weight."""
    return getattr(module, "quant_state", None) is not None


def _uses_dora(module: nn.Module) -> bool:
    uses = getattr(module, "use_dora", None)
    return isinstance(uses, dict) and any(uses.values())


def is_part(parameter: Tensor) -> bool:
    """Whether this rank has a part of a parameter."""
    return isinstance(parameter, DTensor) or _by_zero(parameter)


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters lie in parts on several ranks."""
    return any(is_part(parameter) for parameter in model.parameters())


def shape_of(parameter: Tensor) -> torch.Size:
    """The shape of the whole; a parameter of ZeRO-3 is empty itself."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def local_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes that parameters take on this rank."""
    return sum(_local(parameter).nbytes for parameter in parameters)


@contextmanager
def whole(parameter: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """A parameter with the parts of all ranks; where it has parts, a collective of those ranks.

    Args:
        parameter: Whole, or sharded.
        dtype: What FSDP's parts are cast to before they travel.

    Yields:
        Its numbers, `shape_of(parameter)`, in the dtype that they have or travel in.
    """
    if isinstance(parameter, DTensor):
        cast = parameter.detach().to(dtype)
        assert isinstance(cast, DTensor)
        yield cast.full_tensor()
    elif _by_zero(parameter):
        import deepspeed  # which is there, as it has made the parameter

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter
    else:
        yield parameter


def reshard(model: nn.Module) -> None:
    """Let FSDP drop whole parameters that a forward without backward has left behind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _by_zero(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_id")


def _local(parameter: Any) -> Tensor:
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    return parameter.ds_tensor if _by_zero(parameter) else parameter

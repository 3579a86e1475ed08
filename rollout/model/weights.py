"""Shadow weights: the twin's own copies of weights that are cast, or sharded over ranks."""

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

_ALIGN = 512  # bytes; torch aligns its own tensors alike


@dataclass(frozen=True)
class ShadowWeight:
    """A parameter of the twin that does not share the trainer's storage.

    Attributes:
        name: Name of the module in the tree.
        key: Name of the parameter in the module.
        source: The trainer's parameter.
    """

    name: str
    module: nn.Module
    key: str
    source: Tensor
    dtype: torch.dtype

    @property
    def path(self) -> tuple[str, str]:
        """Names of module and parameter."""
        return self.name, self.key


class Shadow:
    """The shadow weights in their arena, whose memory can be released and grown again."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.num_gathered = 0
        self.clear()

    def clear(self) -> None:
        """Forget all weights, before another tree is placed."""
        self._parameters: dict[tuple[str, str], nn.Parameter] = {}
        self._end = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights; tied ones count once."""
        return sum(parameter.nbytes for parameter in set(self._parameters.values()))

    @property
    def num_weights(self) -> int:
        """Number of weights; tied ones count each."""
        return len(self._parameters)

    @property
    def missing_bytes(self) -> int:
        """Bytes that were released. `fill` allocates them again."""
        return max(0, self._end - self.arena.num_bytes)

    def fill(self, weights: Sequence[ShadowWeight]) -> None:
        """Copy the trainer's current values, and set the parameters in the twin's modules.

        Call `place` first. If a source is sharded, this is a collective of all its ranks.
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
        """Give each weight a place in the arena, once until `clear`.

        Weights of one group become adjacent. Tied weights share one place.
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
        # One assignment, so that an interrupt leaves all or none.
        self._parameters = {path: made[blank] for path, blank in blanks.items()}

    def _begins(self, blanks: Iterable[Tensor]) -> dict[int, int]:
        """Offset of each storage in the arena, in bytes."""
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
    """Find weights that are sharded, and weights that autocast would cast.

    `live` is the trainer's model without a PEFT wrapper, `base` is the twin's tree.

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
                    f"{name} is a 4-bit layer with a sharded weight, which the engine does not "
                    "support; use DDP, or load the model in bfloat16"
                )
            if sharded and dtype.is_floating_point:
                dtype = param_dtype or dtype
            if key == "weight" and name in cast and dtype.is_floating_point:
                dtype = autocast_dtype or dtype
            if sharded or dtype != source.dtype:
                yield ShadowWeight(name, module, key, source, dtype)


def _cast_layers(base: nn.Module) -> Iterator[str]:
    """Names of linear layers whose weights autocast would cast."""
    # DoRA reads the weights itself, before autocast can cast them.
    dora = tuple(f"{name}." for name, module in base.named_modules() if _uses_dora(module))
    for name, module in base.named_modules():
        is_linear = isinstance(module, nn.Linear) and not isinstance(module, Float32Head)
        # Packed 4-bit weights are bytes, whatever dtype their storage has.
        if is_linear and not _is_4_bit(module) and not name.startswith(dora):
            yield name


def _is_4_bit(module: nn.Module) -> bool:
    return getattr(module, "quant_state", None) is not None


def _uses_dora(module: nn.Module) -> bool:
    uses = getattr(module, "use_dora", None)
    return isinstance(uses, dict) and any(uses.values())


def is_part(parameter: Tensor) -> bool:
    """Whether this rank holds only a shard of the parameter."""
    return isinstance(parameter, DTensor) or _by_zero(parameter)


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter is sharded over ranks."""
    return any(is_part(parameter) for parameter in model.parameters())


def shape_of(parameter: Tensor) -> torch.Size:
    """Shape of the whole parameter. ZeRO-3 leaves an empty tensor in its place."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def local_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of parameters on this rank."""
    return sum(_local(parameter).nbytes for parameter in parameters)


@contextmanager
def whole(parameter: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the whole parameter. If it is sharded, this is a collective of its ranks.

    FSDP's shards are cast to `dtype` before they travel; other parameters keep their dtype.
    """
    if isinstance(parameter, DTensor):
        cast = parameter.detach().to(dtype)
        assert isinstance(cast, DTensor)
        yield cast.full_tensor()
    elif _by_zero(parameter):
        import deepspeed  # installed: it made the parameter

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter
    else:
        yield parameter


def reshard(model: nn.Module) -> None:
    """Let FSDP drop whole parameters that a forward without a backward left behind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _by_zero(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_id")


def _local(parameter: Any) -> Tensor:
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    return parameter.ds_tensor if _by_zero(parameter) else parameter

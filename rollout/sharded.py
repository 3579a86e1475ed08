"""Parameters that lie in parts on several ranks, by FSDP2 or by ZeRO-3."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


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

"""The twin's parameters that do not share the trainer's storage, and the dtype that they have."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rollout.errors import UnsupportedModel
from rollout.head import Float32Head
from rollout.sharded import is_part


class Held(NamedTuple):
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


def held_weights(
    live: nn.Module,
    base: nn.Module,
    autocast_dtype: torch.dtype | None,
    param_dtype: torch.dtype | None,
) -> Iterator[Held]:
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
                yield Held(name, module, key, source, dtype)


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

"""Dtypes that a trainer computes in."""

from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType

_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision(NamedTuple):
    """What a trainer's forward casts to.

    Attributes:
        autocast_dtype: Of the autocast that it runs under, if any.
        param_dtype: What FSDP2 casts parameters to for it, or DeepSpeed for good, if any.
    """

    autocast_dtype: torch.dtype | None
    param_dtype: torch.dtype | None


def precision_of(accelerator: Any) -> Precision:
    """What a trainer's `accelerator` does about dtypes."""
    dtype = _DTYPES[accelerator.mixed_precision]
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return Precision(None, dtype)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    return Precision(dtype, getattr(policy, "param_dtype", None))

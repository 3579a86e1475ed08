"""Builds the engine on a trainer's model, with the dtypes of the trainer's forward."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType
from rich.console import Console
from torch import nn
from tqdm import tqdm

from rollout.engine import RolloutEngine
from rollout.errors import UnsupportedTrainer
from rollout.memory.plan import MemoryPlan
from trainers.adapter.seams import Settings
from trainers.adapter.support import check_trainer
from trainers.config import RolloutConfig

_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED)


class Precision(NamedTuple):
    """The dtypes of a trainer's forward; `None`: no cast."""

    autocast_dtype: torch.dtype | None
    param_dtype: torch.dtype | None  # FSDP2 casts parameters in each forward, DeepSpeed once


def precision_of(accelerator: Any) -> Precision:
    """Read the dtypes from accelerate's settings."""
    dtype = _DTYPES[accelerator.mixed_precision]
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return Precision(None, dtype)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    return Precision(dtype, getattr(policy, "param_dtype", None))


def open_engine(trainer: Any, config: RolloutConfig) -> RolloutEngine:
    """Check a constructed TRL trainer and build its engine; may move the model to the GPU.

    Raises:
        UnsupportedTrainer: The engine cannot serve the trainer or one of its settings.
        UnsupportedModel: The engine cannot run the model.
    """
    check_trainer(trainer)
    accelerator, args = trainer.accelerator, Settings(trainer).args
    if config.exact:
        _check_exact(accelerator.distributed_type, args)
    if (longest := args.vllm_max_model_length) is not None:
        most = min(longest, config.max_row_tokens or longest)
        config = replace(config, max_row_tokens=most)
    precision, model = precision_of(accelerator), accelerator.unwrap_model(trainer.model)
    _place(model, accelerator.device)
    return RolloutEngine(
        model,
        config,
        autocast_dtype=precision.autocast_dtype,
        float32_head=args.cast_lm_head_to_fp32,
        param_dtype=precision.param_dtype,
        show_plan=_print_plan if accelerator.is_main_process else None,
    )


def _place(model: nn.Module, device: torch.device) -> None:
    """Move the model to `device` now: FSDP and DeepSpeed would do so after `attach`."""
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        model.to(device)


def _check_exact(kind: DistributedType, args: Any) -> None:
    if args.cast_lm_head_to_fp32:
        raise UnsupportedTrainer(
            "on_policy='exact' does not support a float32 head; drop `cast_lm_head_to_fp32`, or "
            "set on_policy='close'"
        )
    if args.neftune_noise_alpha is not None:
        raise UnsupportedTrainer(
            f"on_policy='exact': neftune_noise_alpha={args.neftune_noise_alpha} adds noise to the "
            "trainer's embeddings but not to a rollout's; drop it, or set on_policy='close'"
        )
    if kind in _SHARDING:
        raise UnsupportedTrainer(
            f"on_policy='exact' is not tested under {kind.value}; use DDP, or set on_policy='close'"
        )


def _print_plan(plan: MemoryPlan) -> None:
    with tqdm.external_write_mode():  # keeps progress bars out of the table
        Console(stderr=True).print(plan.table())

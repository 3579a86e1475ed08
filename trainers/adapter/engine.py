"""An engine on a trainer's model, made to compute as the trainer's forward does."""

from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType
from rich.console import Console
from torch import nn
from tqdm import tqdm

from rollout.engine import RolloutEngine
from rollout.errors import UnsupportedTrainer
from rollout.memory.plan import MemoryPlan
from trainers.adapter.seams import settings_of
from trainers.adapter.support import check_trainer
from trainers.config import RolloutConfig

_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED)


class Precision(NamedTuple):
    """The dtypes of a trainer's forward; `None` where nothing is cast.

    Attributes:
        autocast_dtype: Of the autocast that it runs under.
        param_dtype: What FSDP2 casts parameters to for each forward, or DeepSpeed once.
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


def open_engine(trainer: Any, config: RolloutConfig) -> RolloutEngine:
    """Check a constructed TRL trainer, and make the engine that serves it.

    Raises:
        UnsupportedTrainer: The trainer or its settings; the message says what to change.
        UnsupportedModel: The model; likewise.
    """
    check_trainer(trainer)
    accelerator, args = trainer.accelerator, settings_of(trainer).args
    if config.exact:
        _check_exact(accelerator.distributed_type, args)
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
    """Move a model from the CPU now, which training under FSDP or DeepSpeed would do later.

    An engine is made for the device that it finds the weights on.
    """
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        model.to(device)


def _check_exact(kind: DistributedType, args: Any) -> None:
    if args.cast_lm_head_to_fp32:
        raise UnsupportedTrainer(
            "on_policy='exact' cannot reproduce a float32 head; drop `cast_lm_head_to_fp32`, or "
            "use on_policy='close'"
        )
    if args.neftune_noise_alpha is not None:
        raise UnsupportedTrainer(
            f"on_policy='exact': neftune_noise_alpha={args.neftune_noise_alpha} adds noise to the "
            "trainer's embeddings, and a rollout has none; drop it, or use on_policy='close'"
        )
    if kind in _SHARDING:
        raise UnsupportedTrainer(
            f"on_policy='exact' was not tried under {kind.value}; use DDP, or on_policy='close'"
        )


def _print_plan(plan: MemoryPlan) -> None:
    with tqdm.external_write_mode():  # the trainer's bar and the rollout's are being drawn
        Console(stderr=True).print(plan.table())

"""Which trainers the generator refuses, and the sentence for each."""

import inspect
from collections.abc import Iterator
from typing import Any

import trl
from accelerate.utils import DistributedType
from packaging.version import Version
from torch.distributed.fsdp import CPUOffloadPolicy
from trl.generation.vllm_generation import VLLMGeneration

from rollout.errors import UnsupportedTrainer
from trainers.adapter.sampling import refused_settings
from trainers.adapter.seams import find_seam, settings_of

TESTED_TRL = ("1.15", "1.16")
_SEAM = ("prompts", "images", "num_generations", "profiler")


def check_trl() -> None:
    """Refuse a TRL whose generation seam is not known.

    Raises:
        UnsupportedTrainer: The version was never tested, or the seam has moved.
    """
    version = Version(trl.__version__)
    if f"{version.major}.{version.minor}" not in TESTED_TRL:
        raise UnsupportedTrainer(
            f"TRL {version} is unknown to this version of twinslot, which was tested with "
            f"{' and '.join(TESTED_TRL)}; install one of them, or a newer twinslot"
        )
    parameters = tuple(inspect.signature(VLLMGeneration.generate).parameters)[1:]
    if parameters != _SEAM:
        raise UnsupportedTrainer(
            f"TRL {version} calls its generator with {parameters}, and twinslot knows {_SEAM}; "
            f"install TRL {' or '.join(TESTED_TRL)}"
        )


def check_trainer(trainer: Any) -> None:
    """Refuse a constructed TRL trainer whose rollouts would not be what it asks for.

    Raises:
        UnsupportedTrainer: The reason, and the way out.
    """
    check_trl()
    find_seam(trainer)
    for reason in _reasons(settings_of(trainer)):
        raise UnsupportedTrainer(f"{type(trainer).__name__} cannot use the engine: {reason}")


def _reasons(trainer: Any) -> Iterator[str]:
    args = trainer.args
    if trainer.use_vllm or args.use_vllm or args.use_transformers_continuous_batching:
        yield (
            "it has another generator; drop `use_vllm`, `use_transformers_continuous_batching` "
            "and generators attached before"
        )
    if trainer._is_vlm:
        yield "its model takes images; the engine takes text alone"
    if args.vllm_structured_outputs_regex is not None:
        yield "structured outputs (`vllm_structured_outputs_regex`) are not supported; drop it"
    if trainer.loss_type == "vespo" and trainer.vllm_importance_sampling_correction:
        yield from _vespo_reasons(trainer.vllm_importance_sampling_mode)
    yield from refused_settings(trainer)
    yield from _parallelism_reasons(trainer.accelerator)


def _vespo_reasons(mode: str) -> Iterator[str]:
    if not mode.startswith("token"):
        yield (
            "the VESPO loss needs `vllm_importance_sampling_mode` token_truncate or token_mask, or "
            "`vllm_importance_sampling_correction=False`"
        )


def _parallelism_reasons(accelerator: Any) -> Iterator[str]:
    if accelerator.distributed_type == DistributedType.FSDP:
        yield from _fsdp_reasons(accelerator.state.fsdp_plugin)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        yield from _deepspeed_reasons(accelerator.state.deepspeed_plugin.deepspeed_config)
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        yield "MEGATRON_LM splits the weights after construction; use FSDP2, ZeRO or DDP"
    if accelerator.mixed_precision == "fp8":
        yield "mixed_precision='fp8' is not supported; use bf16"
    parallelism = accelerator.parallelism_config
    for kind in ("tp", "cp", "sp"):
        if getattr(parallelism, f"{kind}_size", 1) > 1:
            yield f"{kind}_size > 1 splits each sequence or layer over GPUs; use DDP"


def _fsdp_reasons(plugin: Any) -> Iterator[str]:
    if plugin.fsdp_version != 2:
        yield "FSDP1 flattens parameters, which hides them; use FSDP2 (`fsdp_version: 2`) or DDP"
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        yield "FSDP keeps its parameters on the CPU; drop `fsdp_offload_params`"
    if plugin.activation_checkpointing:
        yield (
            "`fsdp_activation_checkpointing` wraps layers of the model; use the trainer's "
            "`gradient_checkpointing` instead"
        )


def _deepspeed_reasons(config: dict[str, Any]) -> Iterator[str]:
    zero = config.get("zero_optimization", {})
    if (zero.get("offload_param") or {}).get("device", "none") != "none":
        yield "ZeRO-3 keeps its parameters off the GPU; drop `offload_param`"
    if zero.get("zero_quantized_weights"):
        yield "`zero_quantized_weights` rounds what ranks tell each other; drop it"
    if config.get("torch_autocast", {}).get("enabled"):
        yield "DeepSpeed's `torch_autocast` was not tried; use `bf16` instead"
    if config.get("tensor_parallel", {}).get("autotp_size", 0) > 1:
        yield "`autotp_size` > 1 splits each layer over GPUs; use ZeRO or DDP"

"""Refuses trainers and settings that the generator cannot serve; each error says what to change."""

import inspect
from collections.abc import Iterator
from typing import Any

import trl
from accelerate.utils import DistributedType
from packaging.version import Version
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import TrainingArguments
from trl.generation.vllm_generation import VLLMGeneration

from rollout.errors import UnsupportedTrainer
from trainers.adapter.sampling import refused_settings
from trainers.adapter.seams import Settings, find_seam

TESTED_TRL = ("1.15", "1.16")
_SEAM = ("prompts", "images", "num_generations", "profiler")


def check_trl() -> None:
    """Raise UnsupportedTrainer if TRL is untested or calls its generator with other arguments."""
    version = Version(trl.__version__)
    if f"{version.major}.{version.minor}" not in TESTED_TRL:
        raise UnsupportedTrainer(
            f"TRL {version} is not tested with this version of twinslot; install TRL "
            f"{' or '.join(TESTED_TRL)}, or a newer twinslot"
        )
    parameters = tuple(inspect.signature(VLLMGeneration.generate).parameters)[1:]
    if parameters != _SEAM:
        raise UnsupportedTrainer(
            f"TRL {version} calls its generator with {parameters}, but twinslot expects {_SEAM}; "
            f"install an unmodified TRL {' or '.join(TESTED_TRL)}"
        )


def refuse_vllm(*arguments: Any) -> None:
    """Raise UnsupportedTrainer if TRL's config among these arguments asks for vLLM."""
    for each in arguments:
        if isinstance(each, TrainingArguments) and getattr(each, "use_vllm", False):
            raise UnsupportedTrainer(
                f"{type(each).__name__}(use_vllm=True): this trainer generates on the engine, in "
                "vLLM's place; remove `use_vllm`"
            )


def check_trainer(trainer: Any) -> None:
    """Raise UnsupportedTrainer for a constructed TRL trainer that the engine cannot serve."""
    check_trl()
    find_seam(trainer)
    for reason in _reasons(Settings(trainer)):
        raise UnsupportedTrainer(f"{type(trainer).__name__} cannot use the engine: {reason}")


def _reasons(trainer: Any) -> Iterator[str]:
    args = trainer.args
    if trainer.use_vllm or args.use_vllm or args.use_transformers_continuous_batching:
        yield (
            "it already has a generator; drop `use_vllm`, `use_transformers_continuous_batching` "
            "and any generator attached before"
        )
    if args.vllm_structured_outputs_regex is not None:
        yield "structured outputs (`vllm_structured_outputs_regex`) are not supported; drop it"
    if trainer.loss_type == "vespo" and trainer.vllm_importance_sampling_correction:
        mode = trainer.vllm_importance_sampling_mode
        if not mode.startswith("token"):
            yield (
                f"vllm_importance_sampling_mode={mode!r} does not work with the VESPO loss; set "
                "'token_truncate', 'token_mask' or `vllm_importance_sampling_correction=False`"
            )
    yield from refused_settings(trainer)
    yield from _parallelism_reasons(trainer.accelerator)


def _parallelism_reasons(accelerator: Any) -> Iterator[str]:
    if accelerator.distributed_type == DistributedType.FSDP:
        yield from _fsdp_reasons(accelerator.state.fsdp_plugin)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        yield from _deepspeed_reasons(accelerator.state.deepspeed_plugin.deepspeed_config)
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        yield "MEGATRON_LM splits the weights after construction; use DDP, FSDP2 or ZeRO"
    if accelerator.mixed_precision == "fp8":
        yield "mixed_precision='fp8' is not supported; use bf16"
    parallelism = accelerator.parallelism_config
    for kind in ("tp", "cp", "sp"):
        if getattr(parallelism, f"{kind}_size", 1) > 1:
            yield f"{kind}_size > 1 splits sequences or layers over GPUs; use DDP"


def _fsdp_reasons(plugin: Any) -> Iterator[str]:
    if plugin.fsdp_version != 2:
        yield "FSDP1 flattens parameters; use FSDP2 (`fsdp_version: 2`) or DDP"
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        yield "FSDP keeps its parameters on the CPU; drop `fsdp_offload_params`"
    if plugin.activation_checkpointing:
        yield (
            "`fsdp_activation_checkpointing` wraps the model's layers; use the trainer's "
            "`gradient_checkpointing` instead"
        )


def _deepspeed_reasons(config: dict[str, Any]) -> Iterator[str]:
    zero = config.get("zero_optimization", {})
    if (zero.get("offload_param") or {}).get("device", "none") != "none":
        yield "ZeRO-3 keeps its parameters off the GPU; drop `offload_param`"
    if zero.get("zero_quantized_weights"):
        yield "`zero_quantized_weights` rounds the weights that ranks gather; drop it"
    if config.get("torch_autocast", {}).get("enabled"):
        yield "DeepSpeed's `torch_autocast` is not tested; use `bf16` instead"
    if config.get("tensor_parallel", {}).get("autotp_size", 0) > 1:
        yield "`autotp_size` > 1 splits each layer over GPUs; use ZeRO or DDP"

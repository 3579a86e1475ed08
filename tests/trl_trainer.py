"""Stock TRL trainers on small models, as a user would build them."""

from typing import Any

import tiny
from accelerate import DeepSpeedPlugin, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from transformers.integrations.deepspeed import propagate_args_to_deepspeed
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from trainers import RolloutConfig, RolloutGenerator

ENGINE = RolloutConfig(max_rows=5, page_tokens=4, prefill_tokens=16, num_slots=2)
_NOT_IN_CONFIG = ("rollout_func", "peft_config", "callbacks", "tools", "environment_factory")
_NOT_IN_CONFIG += ("train_dataset", "processing_class")


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Share of even token ids, which any policy can raise."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


# Arguments for every TRL trainer: three short steps on the CPU.
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "max_completion_length": 9,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


def build(tmp_path, model=None, **changes: Any) -> GRPOTrainer:
    extra = {name: changes.pop(name) for name in _NOT_IN_CONFIG if name in changes}
    arguments = {
        "output_dir": str(tmp_path),
        **ARGUMENTS,
        "per_device_eval_batch_size": 8,
        "num_generations": 4,
        **changes,
    }
    trainer = GRPOTrainer(
        model=model or tiny.build(),
        reward_funcs=reward,
        args=GRPOConfig(**arguments),
        eval_dataset=tiny.dataset(16),
        **{"train_dataset": tiny.dataset(), "processing_class": tiny.tokenizer(), **extra},
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def attach(trainer: GRPOTrainer, config: RolloutConfig = ENGINE) -> RolloutGenerator:
    return RolloutGenerator(config).attach(trainer)


def shard(trainer: GRPOTrainer) -> None:
    """Make `train` shard the model by FSDP2; accelerate refuses that on a CPU."""
    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        reshard_after_forward=True,
    )
    if trainer.accelerator.mixed_precision != "no":
        state.fsdp_plugin.set_mixed_precision(trainer.accelerator.mixed_precision)
    trainer.is_fsdp_enabled = True


ZERO = {
    "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def use_zero(trainer: GRPOTrainer, stage: int) -> None:
    """Make `train` pass the model to DeepSpeed; accelerate refuses that on a CPU."""
    import deepspeed

    # DeepSpeed would compile this for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    accelerator = trainer.accelerator
    state = accelerator.state
    state.deepspeed_plugins = DeepSpeedPlugin(
        hf_ds_config={**ZERO, "zero_optimization": {"stage": stage}}
    )
    state.deepspeed_plugins.set_mixed_precision(state.mixed_precision)
    # Each new state copies this one.
    PartialState().distributed_type = state.distributed_type = DistributedType.DEEPSPEED
    accelerator.native_amp = False
    accelerator.deepspeed_engine_wrapped = None
    trainer.is_deepspeed_enabled = True
    propagate_args_to_deepspeed(accelerator, trainer.args)


def logged(trainer: GRPOTrainer, name: str) -> list[float]:
    """All values of a metric, in the order of the log."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]

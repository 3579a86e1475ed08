"""Trainers learn the demo's task, with answers of up to six letters, on the engine's rollouts."""

from importlib import import_module
from statistics import mean

import pytest
import run_length
import trl_family
import trl_trainer
import wrappers
from peft import LoraConfig
from transformers.trainer_callback import PrinterCallback

from trainers import RolloutConfig

STEPS, WINDOW = 50, 10
LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
# Trainer, adapters, learning rate, least gain of the mean reward from first to last ten steps, and
# family. Qwen3.5 is the class that TRL loads, with a processor.
RUNS = {
    "GRPO": ("GRPO", None, 3e-3, 0.2, "qwen3"),
    "RLOO": ("RLOO", None, 3e-3, 0.2, "qwen3"),
    "LoRA": ("GRPO", LORA, 5e-3, 0.12, "qwen3"),
    "Qwen3.5": ("GRPO", None, 3e-3, 0.2, "qwen3.5"),
    "Qwen3.5-MoE": ("GRPO", None, 3e-3, 0.2, "qwen3.5-moe"),
}


def build(kind, tmp_path, adapters, learning_rate, family):
    tokenizer = run_length.build_tokenizer()
    processing_class = tokenizer if family == "qwen3" else wrappers.Processor(tokenizer)
    arguments = {
        **trl_trainer.ARGUMENTS,
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_completion_length": 8,
        "max_steps": STEPS,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
    }
    dataset = run_length.build_dataset(seed=42)
    trainer = trl_family.trainer_class(kind)(
        model=run_length.build_model(tokenizer, 42, family),
        reward_funcs=run_length.reward,
        args=getattr(import_module("trl"), f"{kind}Config")(**arguments),
        train_dataset=dataset.filter(lambda row: len(row["answer"]) <= 6),
        processing_class=processing_class,
        peft_config=adapters,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_fifty_steps_raise_the_reward(tmp_path, run):
    kind, adapters, learning_rate, gain, family = RUNS[run]
    trainer = build(kind, tmp_path, adapters, learning_rate, family)
    trl_trainer.attach(trainer, RolloutConfig(max_rows=64, page_tokens=16))
    trainer.model.generate = None  # TRL would call it without the engine
    trainer.train()
    rewards = trl_trainer.logged(trainer, "reward")
    assert len(rewards) == STEPS
    assert mean(rewards[-WINDOW:]) - mean(rewards[:WINDOW]) > gain
    assert max(trl_trainer.logged(trainer, "rollout/logp_gap_max"), default=0.0) < 1e-4

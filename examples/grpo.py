"""Trains with GRPO. The rollouts come from the model that is being trained.

    python examples/grpo.py --config examples/demo.yaml            # a small model on a CPU
    accelerate launch examples/grpo.py --model Qwen/Qwen3-0.6B \
        --dataset trl-lib/DeepMath-103K --max_completion_length 4096 --learning_rate 1e-6

All arguments of TRL's GRPOConfig and of RolloutConfig work, on the command line and in the YAML.
"""

import logging
import os
import sys
import warnings
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, Literal

import run_length
import torch
import wandb
from datasets import load_dataset
from rich.console import Console
from rich.table import Table
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import GRPOConfig, GRPOTrainer, TrlParser
from trl.rewards import accuracy_reward

from trainers import RolloutConfig, RolloutGenerator

WINDOW = 10


@dataclass
class ScriptArguments:
    """Model, data set, generator, and the gain that the run must reach."""

    model: str | None = field(
        default=None, metadata={"help": "Name or folder of a model. Default: a small random model."}
    )
    model_family: run_length.Family = field(
        default="qwen3", metadata={"help": "Family of the small random model."}
    )
    dataset: str | None = field(
        default=None,
        metadata={
            "help": "Name or folder of a dataset with the columns `prompt` (conversations) and "
            "`solution`. trl.rewards.accuracy_reward scores it. Default: a generated task."
        },
    )
    rollouts: Literal["engine", "trl"] = field(
        default="engine", metadata={"help": "`trl` uses TRL's own generation."}
    )
    required_gain: float | None = field(
        default=None,
        metadata={"help": "Exit with an error if the mean reward rises less than this."},
    )


class RewardBar(ProgressCallback):
    """TRL's progress bar. It shows the reward instead of printing all metrics every step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        """Show the newest reward."""
        if self.training_bar is not None and "reward" in (logs or {}):
            self.training_bar.set_postfix(reward=f"{logs['reward']:.3f}")


def build_trainer(
    script: ScriptArguments, args: GRPOConfig, trainer_class: type[GRPOTrainer]
) -> GRPOTrainer:
    """Build a stock TRL trainer, without the engine."""
    model: Any = script.model
    tokenizer = None
    if model is None:
        torch.set_num_threads(1)  # more threads make so small a model slower
        tokenizer = run_length.build_tokenizer()
        model = run_length.build_model(tokenizer, args.seed, script.model_family)
    if script.dataset is None:
        dataset, reward = run_length.build_dataset(args.seed), run_length.reward
    else:
        dataset, reward = load_dataset(script.dataset, split="train"), accuracy_reward
        if missing := {"prompt", "solution"} - set(dataset.column_names):
            sys.exit(f"{script.dataset} has no column {' or '.join(sorted(missing))}; see --help")
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    if not args.disable_tqdm:
        trainer.add_callback(RewardBar())
    return trainer


def summarise(trainer: GRPOTrainer) -> float:
    """Print a summary on rank 0. Return by how much the mean reward rose."""
    log = trainer.state.log_history

    def values(name: str) -> list[float]:
        return [entry[name] for entry in log if name in entry]

    rewards, runtime = values("reward"), values("train_runtime")[0]
    if not rewards:
        sys.exit("No training step ran: the dataset has fewer prompts than one batch needs.")
    first, last = mean(rewards[:WINDOW]), mean(rewards[-WINDOW:])
    table = Table(title=trainer._name, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(f"mean reward, first {WINDOW} steps", f"{first:.3f}")
    table.add_row(f"mean reward, last {WINDOW} steps", f"{last:.3f}")
    if values("rollout/duration_s") and trainer.args.logging_steps == 1:
        table.add_row("generated tokens/s", f"{mean(values('rollout/generated_tok_s')):,.0f}")
        if trainer.args.gradient_accumulation_steps <= trainer.args.steps_per_generation:
            # With several rollouts a step the log has their mean, not their sum.
            generating = sum(values("rollout/duration_s")) / runtime
            table.add_row("share of time generating", f"{generating:.0%}")
        if gaps := values("rollout/logp_gap"):  # only if TRL scored the rollouts again
            largest = max(values("rollout/logp_gap_max"))
            table.add_row("|Δlogp| to the trainer", f"mean {mean(gaps):.1e}, max {largest:.1e}")
    if values("value/explained_variance"):
        explained = mean(values("value/explained_variance")[-WINDOW:])
        table.add_row(f"variance explained by the critic, last {WINDOW}", f"{explained:.2f}")
    table.add_row("training time", f"{runtime:.0f} s")
    if wandb.run is not None:
        table.add_row("W&B run folder", os.path.relpath(os.path.dirname(wandb.run.dir)))
    if trainer.accelerator.is_main_process:
        Console().print(table)
    return last - first


def main(
    trainer_class: type[GRPOTrainer] = GRPOTrainer, config_class: type[GRPOConfig] = GRPOConfig
) -> None:
    os.environ.setdefault("WANDB_MODE", "offline")  # needs no account; WANDB_MODE=online uploads
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    logging.basicConfig(format="%(message)s")
    parser = TrlParser((ScriptArguments, config_class, RolloutConfig))
    script, args, config = parser.parse_args_and_config()
    for name in ("rollout", "trainers"):  # --log_level info: one line a rollout
        logging.getLogger(name).setLevel(args.get_process_log_level())
    trainer = build_trainer(script, args, trainer_class)
    if script.rollouts == "engine":
        RolloutGenerator(config).attach(trainer)
    trainer.train()
    gain = summarise(trainer)
    if script.required_gain is not None and gain < script.required_gain:
        sys.exit(f"The mean reward rose by {gain:.3f}, less than {script.required_gain}.")


if __name__ == "__main__":
    main()

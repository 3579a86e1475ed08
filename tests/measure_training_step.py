"""Time a whole GRPO step with each generator: the table in README.md. Not a test.

    PYTHONPATH=.:examples python tests/measure_ranks_model.py /tmp/made
    PYTHONPATH=.:examples python tests/measure_training_step.py /tmp/made --generator close

Random weights almost never draw an EOS, so every completion has --new-tokens tokens. Prints one
line of JSON.
"""

import argparse
import json
import time
from functools import partial

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trainers import RolloutConfig, RolloutGenerator

GENERATORS = {
    "close": {},
    "exact": {"vllm_importance_sampling_correction": False},
    "vllm": {"use_vllm": True, "vllm_mode": "colocate"},
    "transformers": {"use_transformers_continuous_batching": True},
}
ON_GPU = torch.cuda.is_available()
LOGGED = ("rollout/logp_gap_max", "sampling/importance_sampling_ratio/mean")


def options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder that measure_ranks_model.py wrote")
    parser.add_argument("--generator", choices=GENERATORS, default="close")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--vllm-memory", type=float, default=0.3)
    return parser.parse_args()


def prompts(num_tokens, size=256):
    ids = np.random.default_rng(0).integers(100, 1000, (size, num_tokens))
    return Dataset.from_list([{"prompt": "".join(f"<w{i}>" for i in row)} for row in ids])


def reward(completion_ids, **columns):
    return [np.mean(np.array(ids) % 2 == 0) for ids in completion_ids]


def arguments(asked):
    settings = dict(GENERATORS[asked.generator])
    if asked.generator == "vllm":
        settings["vllm_gpu_memory_utilization"] = asked.vllm_memory
        settings["vllm_max_model_length"] = asked.prompt_tokens + asked.new_tokens + 16
    return GRPOConfig(
        output_dir="outputs/step",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=asked.rows // 4,
        num_generations=8,
        max_completion_length=asked.new_tokens,
        max_steps=asked.steps,
        model_init_kwargs={"dtype": "float32"},
        bf16=ON_GPU,
        use_cpu=not ON_GPU,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        **settings,
    )


class Steps(TrainerCallback):
    """Records when TRL logs each step, which is at the step's end."""

    def __init__(self):
        self.logged_s = []

    def on_log(self, args, state, control, logs=None, **rest):
        if "loss" in logs:
            self.logged_s.append(time.perf_counter())


def timed(generate, seconds, *args, **kwargs):
    began = time.perf_counter()
    generated = generate(*args, **kwargs)
    if ON_GPU:
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - began)
    return generated


def main():
    asked, steps, generating = options(), Steps(), []
    began = time.perf_counter()
    trainer = GRPOTrainer(
        model=asked.model,
        args=arguments(asked),
        reward_funcs=reward,
        train_dataset=prompts(asked.prompt_tokens),
    )
    if asked.generator in ("close", "exact"):
        RolloutGenerator(RolloutConfig(on_policy=asked.generator)).attach(trainer)
    trainer._generate = partial(timed, trainer._generate, generating)
    trainer.add_callback(steps)
    start_s = time.perf_counter() - began
    began = time.perf_counter()
    trainer.train()
    last = trainer.state.log_history[-2]
    free, total = torch.cuda.mem_get_info() if ON_GPU else (0, 0)
    numbers = {
        "generator": asked.generator,
        "engine_start_s": round(start_s, 1),
        "step_s": np.diff([began, *steps.logged_s]).round(2).tolist(),
        "generating_s": np.round(generating, 2).tolist(),
        "gpu_gib": round((total - free) / 2**30, 1),
        "torch_peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if ON_GPU else 0,
        **{name: last[name] for name in LOGGED if name in last},
    }
    print(json.dumps(numbers))  # noqa: T201


if __name__ == "__main__":
    main()

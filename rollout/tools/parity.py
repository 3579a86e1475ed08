"""Where rollout and trainer first differ, module by module."""

import argparse
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import nn

from rollout.config import EngineConfig
from rollout.engine import RolloutEngine
from rollout.errors import check_options
from rollout.exact.setup import prepare_trainer
from rollout.model.outputs import Difference, compared, recorded
from rollout.sampling_params import SamplingParams
from rollout.support import base_of, text_config_of
from rollout.tools.workload import MODEL_HELP, build_model

_SHOWN = 5


def differences(
    model: nn.Module,
    config: EngineConfig,
    *,
    num_rows: int = 32,
    num_tokens: int = 300,
    autocast_dtype: torch.dtype | None = None,
    compiled: bool = False,
) -> list[Difference]:
    """Compare a decode step in exact mode with the trainer's forward over the same tokens.

    `model` is as a trainer has it, and is left unchanged. Rows are random tokens of different
    lengths, at most `num_tokens`. `compiled` compiles the rollout's layers, and then compares
    whole layers only. Returns one entry for each module that both sides run, in running order.
    """
    base: Any = base_of(model)
    device = next(base.parameters()).device
    generator = torch.Generator().manual_seed(0)
    vocab_size = text_config_of(base).vocab_size
    ids = torch.randint(vocab_size, (num_rows, num_tokens), generator=generator)
    lengths = torch.randint(2, num_tokens + 1, (num_rows,), generator=generator)
    lengths[0] = num_tokens
    mask = torch.arange(num_tokens) >= num_tokens - lengths[:, None]  # left-padded
    settings: dict[str, Any] = {"on_policy": "exact", "enforce_eager": True}
    config = replace(config, max_rows=num_rows, compile_layers=compiled, **settings)
    engine = RolloutEngine(model, config, autocast_dtype=autocast_dtype)
    undo, was_training = prepare_trainer(model, engine.exact_shapes), model.training
    try:
        with (
            torch.no_grad(),
            torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None),
            recorded(base, lambda output: output[:, -1]) as trainers,
        ):
            model.eval()(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
        with engine:
            rows = ids.tolist()  # SYNC: on the CPU, nothing waits
            starts = (num_tokens - lengths).tolist()  # SYNC: on the CPU, nothing waits
            prompts = [row[start:] for row, start in zip(rows, starts, strict=True)]
            base, rows_of = engine.module, lambda output: output[0, :num_rows]
            with recorded(base, rows_of, within_layers=not compiled) as rollouts:
                engine.generate(prompts, SamplingParams(max_new_tokens=1))
    finally:
        undo()
        model.train(was_training)
    return list(compared(trainers, rollouts))


def main(arguments: list[str], console: Console) -> None:
    """`python -m rollout doctor --exact`: print what differs first, and how much is equal."""
    parser = argparse.ArgumentParser(
        prog="python -m rollout doctor --exact",
        description="Compare a decode step in exact mode with the trainer's forward, module by "
        "module, with random weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="qwen3-0.6b", help=MODEL_HELP)
    parser.add_argument("--rows", type=int, default=32, help="rows, of different lengths")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of the longest row")
    parser.add_argument("--lora-rank", type=int, default=0, help="LoRA rank, all linear layers")
    options = parser.parse_args(arguments)
    check_options(options, rows=1, tokens=2, lora_rank=0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(options.model, device, options.lora_rank)
    sizes: dict[str, Any] = {"num_rows": options.rows, "num_tokens": options.tokens}
    for compiled in (False, True) if device.type == "cuda" else (False,):
        compared = differences(model, EngineConfig(), compiled=compiled, **sizes)
        unequal = [difference for difference in compared if difference.num_rows]
        for difference in unequal[:_SHOWN]:
            console.print(
                f"{difference.module}: {difference.num_rows} of {options.rows} rows differ, "
                f"by {difference.largest:.1e} at most"
            )
        prefix = "compiled: " if compiled else ""
        equal = len(compared) - len(unequal)
        console.print(f"{prefix}{equal} of {len(compared)} modules give the trainer's numbers")
    if device.type == "cpu":
        console.print("exact mode is for GPUs: on a CPU, rounding depends on the number of rows")

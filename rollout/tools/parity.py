"""Where rollout and trainer first differ, module by module."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from rollout.config import EngineConfig
from rollout.engine import RolloutEngine
from rollout.errors import check_options
from rollout.exact.setup import prepare_trainer
from rollout.model.compile import decoder_layers
from rollout.sampling_params import SamplingParams
from rollout.support import base_of
from rollout.tools.workload import MODEL_HELP, build_model

_SHOWN = 5


@dataclass(frozen=True)
class Difference:
    """Rows of a module's output that differ from the trainer's forward, and by how much."""

    module: str
    rows: int
    largest: float


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
    ids = torch.randint(base.config.vocab_size, (num_rows, num_tokens), generator=generator)
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
            _recorded(base, lambda output: output[:, -1]) as trainers,
        ):
            model.eval()(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
        with engine:
            rows = ids.tolist()  # SYNC: on the CPU, nothing waits
            starts = (num_tokens - lengths).tolist()  # SYNC: on the CPU, nothing waits
            prompts = [row[start:] for row, start in zip(rows, starts, strict=True)]
            base, rows_of = engine.module, lambda output: output[0, :num_rows]
            with _recorded(base, rows_of, within_layers=not compiled) as rollouts:
                engine.generate(prompts, SamplingParams(max_new_tokens=1))
    finally:
        undo()
        model.train(was_training)
    return list(_compared(trainers, rollouts))


@contextmanager
def _recorded(
    base: nn.Module, rows_of: Callable[[Tensor], Tensor], *, within_layers: bool = True
) -> Iterator[dict[str, Tensor]]:
    """Record each module's output for the last token of each row, in its last run."""
    outputs: dict[str, Tensor] = {}

    def record(name: str) -> Any:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor) and output.dim() > 2:
                outputs.pop(name, None)  # keep the order of the last run
                outputs[name] = rows_of(output).clone()

        return hook

    with ExitStack() as stack:
        hidden: set[nn.Module] = set()
        if not within_layers:
            hidden = {part for layer in decoder_layers(base) for part in layer.modules()}
            hidden -= set(decoder_layers(base))
        for name, module in base.named_modules():
            if name and module not in hidden:
                stack.callback(module.register_forward_hook(record(name)).remove)
        yield outputs


def _compared(trainers: dict[str, Tensor], rollouts: dict[str, Tensor]) -> Iterator[Difference]:
    for name, ours in rollouts.items():
        if name in trainers:
            theirs = trainers[name]
            if theirs.shape == ours.shape:
                unequal = (theirs != ours).flatten(1).any(dim=1)
                largest = (theirs.float() - ours.float()).abs().max()
                yield Difference(name, int(unequal.sum()), float(largest))


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
        unequal = [difference for difference in compared if difference.rows]
        for difference in unequal[:_SHOWN]:
            console.print(
                f"{difference.module}: {difference.rows} of {options.rows} rows differ, "
                f"by {difference.largest:.1e} at most"
            )
        prefix = "compiled: " if compiled else ""
        equal = len(compared) - len(unequal)
        console.print(f"{prefix}{equal} of {len(compared)} modules give the trainer's numbers")
    if device.type == "cpu":
        console.print("exact mode is for GPUs: on a CPU, rounding depends on the number of rows")

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
    """How one module's output in a decode step differs from that in the trainer's forward.

    Attributes:
        module: Its name in the model.
        rows: Rows in which some number differs.
        largest: Largest distance of two numbers.
    """

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

    Args:
        model: A model as a trainer would have it; left as it was.
        config: Knobs of the engine.
        num_rows: Rows of random tokens, each of another length.
        num_tokens: Tokens of the longest.
        autocast_dtype: Dtype of the trainer's autocast.
        compiled: Compile the rollout's layers; then only whole layers are compared.

    Returns:
        One entry for each module that both sides run, in the order in which they run.
    """
    base: Any = base_of(model)
    device = next(base.parameters()).device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(base.config.vocab_size, (num_rows, num_tokens), generator=generator)
    lengths = torch.randint(2, num_tokens + 1, (num_rows,), generator=generator)
    lengths[0] = num_tokens
    mask = torch.arange(num_tokens) >= num_tokens - lengths[:, None]  # padded on the left
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
            rows = ids.tolist()  # SYNC: tensors of the CPU
            starts = (num_tokens - lengths).tolist()  # SYNC: likewise
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
    """What each module gave for the last token of each row, when it last ran."""
    outputs: dict[str, Tensor] = {}

    def record(name: str) -> Any:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor) and output.dim() > 2:
                outputs.pop(name, None)  # so that the order is that of the last run
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
    """`python -m rollout doctor --exact`: say whether, and where first.

    Raises:
        ConfigError: An argument that cannot work.
    """
    parser = argparse.ArgumentParser(
        prog="python -m rollout doctor --exact",
        description="Whether a decode step in exact mode gives the numbers of a trainer's forward, "
        "module by module, with random weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="qwen3-0.6b", help=MODEL_HELP)
    parser.add_argument("--rows", type=int, default=32, help="each of another length")
    parser.add_argument("--tokens", type=int, default=300, help="of the longest row")
    parser.add_argument("--lora-rank", type=int, default=0, help="adapters on all linear layers")
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
        console.print("exact mode is for GPUs: on a CPU products round with the number of rows")

"""`python -m rollout bench`: how fast the engine decodes here, beside what else there is.

Weights are random, so nothing is downloaded. Every mode runs the same prompts in the same process,
once to warm up and once to be timed. The floor is the time that the bytes of a decode step need at
the copy bandwidth measured in this run: weights without the input embedding, and the keys and
values of every row at its mean length.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.config import RolloutConfig
from rollout.doctor import copy_bandwidth
from rollout.engine import RolloutEngine
from rollout.errors import ConfigError
from rollout.request import SamplingParams

_QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}


@dataclass(frozen=True)
class Measurement:
    """What one mode did.

    Attributes:
        mode: `two-slot`, `one-slot` or `generate`.
        total_s: Seconds for all rows.
        tokens_per_s: Generated tokens a second, prefill included.
        step_ms: Milliseconds of a decode step: the run less a run of 2 tokens, over the steps.
        floor_ms: Milliseconds that the bytes of a decode step need.
        floor_share: `floor_ms / step_ms`.
        host_us: Microseconds a step that the scheduler takes; `nan` where there is none.
        peak_gib: Most GPU memory allocated, `nan` on a CPU.
        warmup_s: Seconds of the first run, compilation and capture included.
        num_graphs: CUDA graphs captured.
    """

    mode: str
    total_s: float
    tokens_per_s: float
    step_ms: float
    floor_ms: float
    floor_share: float
    host_us: float
    peak_gib: float
    warmup_s: float
    num_graphs: int


@dataclass(frozen=True)
class Workload:
    """Rows that all begin together: `rows` prompts of one length, each to the same new length."""

    model: nn.Module
    rows: int
    prompt_tokens: int
    new_tokens: int
    bandwidth: float

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids, different in each row."""
        config: Any = self.model.config
        generator = torch.Generator().manual_seed(0)
        shape = (self.rows, self.prompt_tokens)
        ids: list[list[int]] = torch.randint(
            config.vocab_size, shape, generator=generator
        ).tolist()  # SYNC: a CPU tensor
        return ids

    def floor_ms(self, kv_token_bytes: int) -> float:
        """Milliseconds that a decode step's bytes need at the measured bandwidth."""
        embedding = self.model.get_input_embeddings().weight  # type: ignore[operator]
        head = self.model.get_output_embeddings().weight  # type: ignore[operator]
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        unread = embedding.nbytes if embedding.data_ptr() != head.data_ptr() else 0
        mean_context = self.prompt_tokens + self.new_tokens / 2
        return (weights - unread + self.rows * mean_context * kv_token_bytes) / self.bandwidth * 1e3


def build_model(name: str, device: torch.device) -> nn.Module:
    """A model with random weights: one of `SHAPES`, or a name or folder with a config.

    Raises:
        ConfigError: No such shape, and no config under that name.
    """
    if name in SHAPES:
        config = AutoConfig.for_model(**{"max_position_embeddings": 40_960, **SHAPES[name]})
    else:
        try:
            config = AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--model {name}: neither one of {', '.join(SHAPES)} nor a config"
            ) from error
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def run_engine(work: Workload, mode: str) -> Measurement:
    """Time the engine with one slot or two."""
    num_slots = 2 if mode == "two-slot" else 1
    config = RolloutConfig(max_rows=work.rows, num_slots=num_slots)
    with RolloutEngine(work.model, config) as engine:

        def generate(new_tokens: int) -> None:
            sampling = SamplingParams(max_new_tokens=new_tokens)
            engine.generate(work.prompts, sampling, same_weights=True)

        with _timing(engine.scheduler, "schedule", "commit") as host:
            layout = engine.kv_cache.layout
            kv_token_bytes = layout.page_bytes // layout.page_tokens
            measured = _measure(mode, work, kv_token_bytes, generate)
        host_us = sum(host) / len(host) * 2e6  # a step schedules once and commits once
        return Measurement(**measured, host_us=host_us, num_graphs=engine.graphs.num_captured)


def run_generate(work: Workload, mode: str) -> Measurement:
    """Time transformers' own `generate` on the same prompts."""
    model: Any = work.model
    device = next(model.parameters()).device
    ids = torch.tensor(work.prompts, device=device)

    def generate(new_tokens: int) -> None:
        lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        model.generate(ids, do_sample=True, top_k=0, pad_token_id=0, **lengths)

    with RolloutEngine(work.model) as engine:
        layout = engine.kv_cache.layout
    kv_token_bytes = layout.page_bytes // layout.page_tokens
    measured = _measure(mode, work, kv_token_bytes, generate)
    return Measurement(**measured, host_us=float("nan"), num_graphs=0)


MODES: dict[str, Callable[[Workload, str], Measurement]] = {
    "two-slot": run_engine,
    "one-slot": run_engine,
    "generate": run_generate,
}


def _measure(
    mode: str, work: Workload, kv_token_bytes: int, generate: Callable[[int], None]
) -> dict[str, Any]:
    """Time a first run, one of 2 tokens, and the whole one."""
    on_gpu = torch.cuda.is_available()
    warmup_s = _seconds(lambda: generate(2))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    short_s = _seconds(lambda: generate(2))
    total_s = _seconds(lambda: generate(work.new_tokens))
    step_ms = (total_s - short_s) / (work.new_tokens - 2) * 1e3
    floor_ms = work.floor_ms(kv_token_bytes)
    return {
        "mode": mode,
        "total_s": total_s,
        "tokens_per_s": work.rows * work.new_tokens / total_s,
        "step_ms": step_ms,
        "floor_ms": floor_ms,
        "floor_share": floor_ms / step_ms,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan"),
        "warmup_s": warmup_s,
    }


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()  # SYNC: `generate` may return before it is done
    return time.perf_counter() - began


@contextmanager
def _timing(owner: Any, *names: str) -> Iterator[list[float]]:
    """Collect the seconds of every call of the named methods."""
    seconds: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                seconds.append(time.perf_counter() - began)

        return wrapper

    for name in names:
        setattr(owner, name, timed(getattr(owner, name)))
    yield seconds
    for name in names:
        delattr(owner, name)


def main(arguments: list[str]) -> None:
    """Read the command line, run the modes, print a table and write JSON.

    Raises:
        ConfigError: An argument that cannot work.
    """
    parser = argparse.ArgumentParser(prog="python -m rollout bench")
    parser.add_argument("--model", default="qwen3-0.6b", help=f"{', '.join(SHAPES)}, or a config")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--modes", default="two-slot,one-slot", help=f"of {','.join(MODES)}")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)
    modes = options.modes.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ConfigError(f"--modes {unknown[0]}: it must be of {', '.join(MODES)}")
    if options.new_tokens < 3:
        raise ConfigError(f"--new-tokens {options.new_tokens}: a step needs at least 3 to be timed")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work = Workload(
        model=build_model(options.model, device),
        rows=options.rows,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        bandwidth=copy_bandwidth(device.type, device.type),
    )
    found = [MODES[mode](work, mode) for mode in modes]
    _report(options.model, work, found)
    if options.json is not None:
        options.json.write_text(
            json.dumps([asdict(measurement) for measurement in found], indent=2)
        )


def _report(model: str, work: Workload, found: list[Measurement]) -> None:
    lengths = f"{work.rows} rows, {work.prompt_tokens} + {work.new_tokens} tokens"
    title = f"{model}, {lengths}, copy {work.bandwidth / 1e12:.2f} TB/s, torch {torch.__version__}"
    table = Table(title=title)
    columns = ("mode", "total s", "tok/s", "step ms", "floor ms", "of floor", "host µs", "GiB")
    for column in (*columns, "warm-up s", "graphs"):
        table.add_column(column, justify="right")
    for m in found:
        table.add_row(
            m.mode,
            f"{m.total_s:.2f}",
            f"{m.tokens_per_s:,.0f}",
            f"{m.step_ms:.2f}",
            f"{m.floor_ms:.2f}",
            f"{m.floor_share:.0%}",
            f"{m.host_us:.0f}",
            f"{m.peak_gib:.1f}",
            f"{m.warmup_s:.1f}",
            str(m.num_graphs),
        )
    Console(width=110).print(table)

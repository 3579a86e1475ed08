"""`python -m rollout bench`: how fast the engine decodes here, next to other generators.

Weights are random, so nothing is downloaded. Every mode runs the same prompts in the same process,
once to warm up and once timed. The floor is the time that decoding needs to move its bytes at the
copy bandwidth measured in this run. A step reads all weights but the input embedding, and the keys
and values of each row's tokens so far.
"""

import argparse
import json
import shlex
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from rollout.errors import ConfigError, check_options, is_real
from rollout.telemetry import timeline
from rollout.telemetry.roofline import copy_bandwidth
from rollout.telemetry.stats import RolloutStats
from rollout.telemetry.trace import Tracer
from rollout.tools import baselines
from rollout.tools.baselines import Generate
from rollout.tools.engine_run import engine_run, kernel_share
from rollout.tools.workload import LENGTHS, MODEL_HELP, Workload, build_model

_SHORT, _TRACED = 2, 130  # new tokens of the short runs and of the traced run
_NAN = float("nan")
_NO_ENGINE = dict.fromkeys(
    ("busy_share", "host_us", "host_median_us", "h2d_bytes", "num_graphs"), _NAN
)


@dataclass(frozen=True)
class Measurement:
    """What one mode did; `nan` if it has no such number.

    Attributes:
        tokens_per_s: Generated tokens a second, prefill included.
        prefill_s: Seconds of a run of 2 tokens a row.
        step_ms: Milliseconds of a decode step: the whole run less `prefill_s`, per remaining step.
        floor_ms: Milliseconds that moving a step's bytes takes at copy bandwidth.
        busy_share: Share of the time in which the device was inside a batch.
        kernel_share: Share of a step in which a kernel ran.
        host_us: Mean microseconds of planning and settling a step. The median is lower: steps in
            which rows begin or end take longer.
        h2d_bytes: Bytes uploaded in a decode step that admits no row.
        peak_gib: Most GPU memory allocated or mapped.
        warmup_s: Seconds of setup and a first run of 2 tokens, less `prefill_s`; at least 0.
    """

    total_s: float
    tokens_per_s: float
    prefill_s: float
    step_ms: float
    floor_ms: float
    floor_share: float
    busy_share: float
    kernel_share: float
    host_us: float
    host_median_us: float
    h2d_bytes: float
    peak_gib: float
    warmup_s: float
    num_graphs: float
    attention: str
    spent: str


_ROWS = {
    "total_s": ("whole run, s", "{:.2f}"),
    "tokens_per_s": ("generated tokens/s", "{:,.0f}"),
    "prefill_s": ("prefill, s", "{:.2f}"),
    "step_ms": ("decode step, ms", "{:.2f}"),
    "floor_ms": ("floor of the step, ms", "{:.2f}"),
    "floor_share": ("floor / step", "{:.1%}"),
    "busy_share": ("device inside a batch", "{:.2%}"),
    "kernel_share": ("device inside a kernel", "{:.1%}"),
    "host_us": ("host per step, mean, µs", "{:.0f}"),
    "host_median_us": ("host per step, median, µs", "{:.0f}"),
    "h2d_bytes": ("upload per step, bytes", "{:,.0f}"),
    "peak_gib": ("peak memory, GiB", "{:.1f}"),
    "warmup_s": ("warm-up, s", "{:.1f}"),
    "num_graphs": ("CUDA graphs", "{:.0f}"),
    "attention": ("attention", "{}"),
    "spent": ("where the time went", "{}"),
}

ENGINE_MODES = {"two-slot": 2, "one-slot": 1}
BASELINES: dict[str, Callable[[Workload], AbstractContextManager[tuple[Generate, str]]]] = {
    "transformers-cb": baselines.continuous_batching,
    "trl-cb": baselines.trl_continuous_batching,
    "generate": baselines.plain_generate,
}
MODES = (*ENGINE_MODES, *BASELINES)
GPU_MODES = ("transformers-cb", "trl-cb")


def measure(work: Workload, mode: str, timelines: dict[str, timeline.Timeline]) -> Measurement:
    """Run one mode. An engine's mode also adds its timeline to `timelines`."""
    began = time.perf_counter()
    if mode in BASELINES:
        with BASELINES[mode](work) as (generate, attention):
            numbers = _time(work, generate, began, lambda: work.new_tokens)
            # TRL makes a new manager for each call, which runs more kernels than the steps do.
            one_manager = mode != "trl-cb"
            step_s = numbers["step_ms"] / 1e3
            share = kernel_share(work, generate, step_s) if one_manager else _NAN
            rest = {"kernel_share": share, **_NO_ENGINE}
            return Measurement(**numbers, **rest, attention=attention, spent="-")
    with engine_run(work, ENGINE_MODES[mode]) as run:
        engine = run.engine
        numbers = _time(work, run.generate, began, lambda: engine.stats.decode_steps)
        whole, host_us, host_median_us = engine.stats, run.host_us, run.host_median_us
        numbers["peak_gib"] += whole.mapped_bytes / 2**30  # torch does not count mapped pages
        tracer = Tracer(engine.device)
        with engine.observing(tracer):
            run.generate([min(_TRACED, work.new_tokens // 2)] * work.rows)
        timelines[mode] = tracer.timeline
        traced, decoding = engine.stats, tracer.timeline.decoding()
        step_s = decoding.span_s("compute") / max(1, len(decoding.on("compute")))
        return Measurement(
            **numbers,
            busy_share=decoding.busy_share("compute"),
            kernel_share=kernel_share(work, run.generate, step_s),
            host_us=host_us,
            host_median_us=host_median_us,
            h2d_bytes=_slope(traced, whole),
            num_graphs=engine.num_graphs,
            attention="Triton, paged" if torch.cuda.is_available() else "plain torch, paged",
            spent=whole.largest_shares,
        )


def _slope(short: RolloutStats, long: RolloutStats) -> float:
    """Bytes uploaded per step, over the steps that `long` has more than `short`."""
    steps = long.decode_steps - short.decode_steps
    return (long.h2d_bytes - short.h2d_bytes) / steps if steps else _NAN


def _time(
    work: Workload, generate: Generate, began: float, num_steps: Callable[[], int]
) -> dict[str, float]:
    """Time a first run of 2 tokens, a second one, and the whole run."""
    on_gpu = torch.cuda.is_available()
    short = [_SHORT] * work.rows
    _seconds(partial(generate, short))
    first_s = time.perf_counter() - began
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    prefill_s = _seconds(partial(generate, short))
    total_s = _seconds(partial(generate, work.row_tokens))
    steps = num_steps()
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else _NAN
    step_ms = (total_s - prefill_s) / (steps - _SHORT) * 1e3
    floor_ms = (work.floor_s(steps) - work.floor_s(_SHORT, short)) / (steps - _SHORT) * 1e3
    return {
        "total_s": total_s,
        "tokens_per_s": sum(work.row_tokens) / total_s,
        "prefill_s": prefill_s,
        "step_ms": step_ms,
        "floor_ms": floor_ms,
        "floor_share": floor_ms / step_ms,
        "peak_gib": peak,
        "warmup_s": max(0.0, first_s - prefill_s),
    }


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()  # SYNC: the device may still be at work
    return time.perf_counter() - began


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rollout bench",
        description="Measure how fast the engine decodes here, with random weights. On a CPU use "
        "small sizes: --rows 1 --prompt-tokens 8 --new-tokens 8.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="qwen3-0.6b", help=MODEL_HELP)
    parser.add_argument("--rows", type=int, default=32, help="number of completions")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens of the longest row")
    lengths_help = "lengths of completions: all equal, or with a median of a quarter of the longest"
    parser.add_argument("--lengths", default="fixed", choices=LENGTHS, help=lengths_help)
    parser.add_argument("--kv-gib", type=float, help="limit of KV memory, GiB")
    parser.add_argument("--lora-rank", type=int, default=0, help="LoRA rank, all linear layers")
    parser.add_argument(
        "--fuse-projections", action=argparse.BooleanOptionalAction, help="see EngineConfig"
    )
    parser.add_argument(
        "--on-policy", default="close", choices=("close", "exact"), help="see EngineConfig"
    )
    modes_help = f"any of {','.join(MODES)}; {' and '.join(GPU_MODES)} need a GPU"
    parser.add_argument("--modes", default="two-slot,one-slot", help=modes_help)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--timeline", type=Path, help="draw host and device work to this picture")
    return parser


def _check(options: argparse.Namespace, modes: list[str]) -> None:
    """Refuse bad arguments before the modes run for minutes."""
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(f"--modes {mode}: must be one of {', '.join(MODES)}")
        if mode in GPU_MODES and not torch.cuda.is_available():
            raise ConfigError(f"--modes {mode}: needs a GPU, remove it from --modes")
    check_options(options, rows=1, prompt_tokens=1, lora_rank=0)
    if options.new_tokens <= _SHORT:
        raise ConfigError(f"--new-tokens {options.new_tokens}: must be >= 3 to time a step")
    if options.kv_gib is not None and not (is_real(options.kv_gib) and options.kv_gib > 0):
        raise ConfigError(f"--kv-gib {options.kv_gib}: must be > 0")
    for path in filter(None, (options.json, options.timeline)):
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: folder {path.parent} does not exist, create it first")
    if options.timeline is not None:
        timeline.open_pyplot()


def main(arguments: list[str]) -> None:
    """Run the modes that the command line names, print a table and write the files it asks for."""
    options = _parser().parse_args(arguments)
    modes = options.modes.split(",")
    _check(options, modes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work = Workload(
        model=build_model(options.model, device, options.lora_rank),
        rows=options.rows,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        bandwidth=copy_bandwidth(device.type, device.type),
        lengths=options.lengths,
        kv_bytes=options.kv_gib and int(options.kv_gib * 2**30),
        fuse_projections=options.fuse_projections,
        on_policy=options.on_policy,
    )
    timelines: dict[str, timeline.Timeline] = {}
    measurements = {mode: measure(work, mode, timelines) for mode in modes}
    facts = _facts(arguments, work)
    Console(width=110).print(_table(facts, measurements))
    if options.json is not None:
        numbers = {mode: _plain(measurement) for mode, measurement in measurements.items()}
        options.json.write_text(json.dumps({**facts, "modes": numbers}, indent=2))
    if options.timeline is not None and timelines:
        middles = {m: timeline.middle_steps(each.decoding()) for m, each in timelines.items()}
        timeline.draw(middles, options.timeline)


def _plain(measurement: Measurement) -> dict[str, Any]:
    """A measurement for JSON, which has no `nan`."""
    return {name: None if value != value else value for name, value in asdict(measurement).items()}


def _facts(arguments: list[str], work: Workload) -> dict[str, str]:
    """What a reader needs to repeat the measurement."""
    on_gpu = torch.cuda.is_available()
    return {
        "command": f"python -m rollout bench {shlex.join(arguments)}",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "copy": f"{work.bandwidth / 1e12:.2f} TB/s",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _table(facts: dict[str, str], measurements: dict[str, Measurement]) -> Table:
    table = Table(title=facts["command"], caption=", ".join(list(facts.values())[1:4]))
    table.add_column("")
    for mode in measurements:
        table.add_column(mode, justify="right")
    for name in (field.name for field in fields(Measurement)):
        label, form = _ROWS[name]
        values = [getattr(measurement, name) for measurement in measurements.values()]
        table.add_row(label, *("-" if value != value else form.format(value) for value in values))
    return table

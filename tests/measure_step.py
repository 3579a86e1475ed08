"""Time the kernels of a step: python tests/measure_step.py qwen3-8b warm-up 64x600 prefill

Not a test. `ROWSxCONTEXT` times a decode step, `prefill` 32 prompts of 4,096 tokens. `warm-up`
times what 256 rows of 16K tokens wait for before the first step, and must come first.
"""

import sys
from collections import Counter
from dataclasses import replace

import torch
from test_perf import CONFIG, milliseconds, opened, step_ms

from rollout import RolloutEngine, SamplingParams
from rollout.telemetry.roofline import copy_bandwidth
from rollout.tools.engine_run import kernel_events
from rollout.tools.workload import Workload, build_model

REPEATS = 5


def table(events, repeats):
    """Microseconds, launches and mean of each kernel, slowest first."""
    spent, launches = Counter(), Counter()
    for event in events:
        spent[event["name"]] += event["dur"]
        launches[event["name"]] += 1
    lines = [f"   kernels {sum(spent.values()) / repeats / 1e3:.3f} ms"]
    for name, us in spent.most_common(16):
        count = launches[name]
        lines.append(
            f"   {us / repeats:9.1f} us {count / repeats:6.1f} x {us / count:8.2f}  {name[:90]}"
        )
    return "\n".join(lines)


def decode(model, rows, context, bandwidth):
    """Replay a decode step as one graph over random keys and values."""
    with opened(model, replace(CONFIG, max_rows=max(rows, 8), kv_fraction=0.8)) as engine:
        ms = step_ms(engine, rows, context)
        graphs = engine.worker.graphs
        graph = graphs._graphs[graphs._key(rows, context)]

        def replays():
            for _ in range(REPEATS):
                graphs.forward.lanes.positions_L[:rows] = context - 1
                graph.replay()

        with torch.cuda.stream(engine.streams.compute):
            events = kernel_events(replays)
    floor = (
        Workload(model, 1, 1, 3, bandwidth).cost.decode_bytes(1, rows, rows * context) / bandwidth
    )
    share = f"{floor * 1e5 / ms:.1f} % of the floor"
    return f"{rows} rows x {context}: {ms:.3f} ms, {share}\n{table(events, REPEATS)}"


def prefill(model):
    """One rollout of one token per prompt, without cached prefixes."""
    prompts = torch.randint(100, 1000, (32, 4097)).tolist()
    with opened(model, replace(CONFIG, max_rows=32, max_row_tokens=4200)) as engine:

        def run():
            engine.generate(prompts, SamplingParams(max_new_tokens=1))

        run()
        ms = milliseconds(run, repeats=4)
        return f"prefill of 32 x 4,096: {ms:.0f} ms\n{table(kernel_events(run), 1)}"


def warm_up(model):
    """Capture all graphs that long rows can need. Every token is an EOS, so rows end at once."""
    every = tuple(range(model.config.vocab_size))
    ends = SamplingParams(max_new_tokens=16_384, eos_token_ids=every)
    config = replace(CONFIG, max_rows=256, kv_fraction=0.9)
    with torch.no_grad(), RolloutEngine(model, config) as engine:
        engine.generate([[row, *range(63)] for row in range(256)], ends)
        return f"warm-up {engine.stats.warmup_s:.1f} s, {engine.stats.captured_graphs} graphs"


def main(name, *works):
    model = build_model(name, torch.device("cuda"))
    bandwidth = copy_bandwidth("cuda", "cuda")
    others = {"prefill": prefill, "warm-up": warm_up}
    for work in works:
        if work in others:
            told = others[work](model)
        else:
            told = decode(model, *map(int, work.split("x")), bandwidth)
        print(told, flush=True)  # noqa: T201


main(*sys.argv[1:])

"""The share of a decode step in which the device is inside a kernel, by torch's profiler."""

import json
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollout.baselines import Generate
from rollout.timeline import Interval, Timeline
from rollout.workload import Workload

_SHORT, _LONG = 2, 34  # new tokens of the two runs that are profiled


def kernel_share(work: Workload, generate: Generate, step_s: float) -> float:
    """Share of a decode step in which at least one kernel runs.

    A profiler slows steps down and kernels not, so that the time inside kernels is the profiler's
    and the time of a step is not.

    Args:
        work: What is generated.
        generate: By what.
        step_s: Seconds of a step without a profiler.

    Returns:
        `nan` on a CPU, and where no step can be told from prefill.
    """
    if not torch.cuda.is_available():
        return float("nan")
    steps = min(_LONG, work.new_tokens) - _SHORT
    short, long = (kernel_events(partial(generate, [n + _SHORT] * work.rows)) for n in (0, steps))
    # Prefill first, then steps of as many kernels each: the last half of them is steps alone.
    a_step = (len(long) - len(short)) // steps
    if a_step < 1:
        return float("nan")
    last = kernels(long[-a_step * (steps // 2) :])
    return last.busy_s("compute") / (steps // 2) / step_s


def kernel_events(run: Callable[[], None]) -> list[dict[str, Any]]:
    """Every kernel of a run by start, as Chrome's trace format has it: `ts` and `dur` in us."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.current_stream().synchronize()  # SYNC: until all of it has been recorded
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    return sorted((e for e in events if e.get("cat") == "kernel"), key=lambda event: event["ts"])


def kernels(events: Iterable[dict[str, Any]]) -> Timeline:
    """Kernels of a profiler, as work of the device."""
    spans = ((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in events)
    return Timeline([Interval("compute", "kernel", start, stop) for start, stop in spans])

"""The engine on a benchmark's workload."""

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from rollout.config import EngineConfig
from rollout.engine import RolloutEngine
from rollout.request import Completion, Ints
from rollout.sampling_params import SamplingParams
from rollout.scheduler.batch import Batch
from rollout.telemetry.device_time import Stamps
from rollout.telemetry.observer import Observer
from rollout.telemetry.timeline import Interval, Timeline
from rollout.tools.baselines import Generate
from rollout.tools.workload import Workload

_SHORT, _LONG = 2, 34  # new tokens of the two profiled runs


class _Host(Observer):
    """Times planning and settling, and counts the tokens of each row."""

    def __init__(self, num_rows: int) -> None:
        self.planning, self.settling = list[float](), list[float]()
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.first_row = self.num_steps = 0
        self.began_s = 0.0  # of the current step

    def planned(self, batch: Batch | None) -> None:
        """Note the time of planning, empty plans included."""
        self.planning.append(time.perf_counter() - self.began_s)
        self.num_steps += batch is not None

    def settled(self, batch: Batch, completions: Sequence[Completion], stamps: Stamps) -> None:
        """Note the time of settling, and count a token for each row."""
        self.settling.append(time.perf_counter() - stamps.arrived_s)
        self.num_tokens[batch.rows - self.first_row] += 1


class EngineRun:
    """The engine on a workload.

    As in training, the engine does not know row lengths in advance: a row is aborted when it has
    its tokens. So memory and graphs allow for the longest row from the start.
    """

    def __init__(self, engine: RolloutEngine, work: Workload) -> None:
        self.engine = engine
        self._work, self._num_runs = work, 0
        self._host = _Host(work.rows)

    def generate(self, row_tokens: Sequence[int]) -> None:
        """Generate `row_tokens[i]` new tokens in row `i`."""
        engine, host, lengths = self.engine, _Host(len(row_tokens)), np.array(row_tokens)
        self._host = host
        self._num_runs += 1
        # New prompts in each run, so that the engine knows neither their prefixes nor lengths.
        prompts = (np.array(self._work.prompts) + self._num_runs) % engine.vocab_size
        sampling = SamplingParams(max_new_tokens=self._work.new_tokens)
        rows = engine.submit_all(prompts.tolist(), sampling)  # SYNC: an array of the host's
        host.first_row = rows[0]
        with engine.observing(host):
            while engine.busy:
                host.began_s = time.perf_counter()
                engine.step()
                done = np.flatnonzero(host.num_tokens == lengths)
                if len(done):
                    engine.abort({rows[index] for index in done})

    @property
    def num_tokens(self) -> Ints:
        """Tokens that each row got in the last run."""
        return self._host.num_tokens

    @property
    def host_us(self) -> float:
        """Mean microseconds a step of planning and settling in the last run."""
        seconds = sum(self._host.planning) + sum(self._host.settling)
        return seconds / self._host.num_steps * 1e6

    @property
    def host_median_us(self) -> float:
        """Median microseconds, typical of steps in which no row begins or ends."""
        return (median(self._host.planning) + median(self._host.settling)) * 1e6


@contextmanager
def engine_run(work: Workload, num_slots: int) -> Iterator[EngineRun]:
    """The engine with `num_slots` slots; it takes most of the memory, as no trainer runs."""
    config = EngineConfig(
        max_rows=work.rows,
        max_row_tokens=work.prompt_tokens + work.new_tokens,
        num_slots=num_slots,
        kv_bytes=work.kv_bytes,
        kv_fraction=0.9,
        fuse_projections=work.fuse_projections,
        on_policy=work.on_policy,
    )
    with RolloutEngine(work.model, config) as engine:
        yield EngineRun(engine, work)


def kernel_share(work: Workload, generate: Generate, step_s: float) -> float:
    """Share of a decode step in which at least one kernel runs.

    A profiler slows steps down but not kernels. So kernel time comes from the profiler, and
    `step_s` is a step's seconds without it. `nan` on a CPU, or if longer runs add no kernels.
    """
    if not torch.cuda.is_available():
        return float("nan")
    steps = min(_LONG, work.new_tokens) - _SHORT
    short, long = (kernel_events(partial(generate, [n + _SHORT] * work.rows)) for n in (0, steps))
    # Prefill comes first, and all steps have as many kernels: the last half is only steps.
    a_step = (len(long) - len(short)) // steps
    if a_step < 1:
        return float("nan")
    last = kernels(long[-a_step * (steps // 2) :])
    return last.busy_s("compute") / (steps // 2) / step_s


def kernel_events(run: Callable[[], None]) -> list[dict[str, Any]]:
    """Every kernel of a run by start, in Chrome's trace format: `ts` and `dur` in us."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.current_stream().synchronize()  # SYNC: the profiler must record all of it
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    return sorted((e for e in events if e.get("cat") == "kernel"), key=lambda event: event["ts"])


def kernels(events: Iterable[dict[str, Any]]) -> Timeline:
    """Profiled kernels, as intervals of the compute track."""
    spans = ((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in events)
    return Timeline([Interval("compute", "kernel", start, stop) for start, stop in spans])

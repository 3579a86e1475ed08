"""The engine at work on a benchmark's workload."""

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

from rollout.config import RolloutConfig
from rollout.engine import RolloutEngine
from rollout.request import Completion, Floats, Ints
from rollout.sampling_params import SamplingParams
from rollout.scheduler.batch import Batch
from rollout.telemetry.timeline import Interval, Timeline
from rollout.tools.baselines import Generate
from rollout.tools.workload import Workload

_EOS = 0


class EngineRun:
    """The engine at work on a workload.

    Rows end by a token that they do not know beforehand, as rows of a training do: every row may
    grow to the longest, so that memory and graphs are those of the whole run from the start.
    """

    def __init__(self, engine: RolloutEngine, work: Workload) -> None:
        self.engine = engine
        self._work = work
        self._planning, self._settling, self._num_runs = list[float](), list[float](), 0
        self._settle, schedule = engine.scheduler.settle, engine.scheduler.schedule
        planning = _timed(schedule, self._planning)
        engine.scheduler.schedule = planning  # type: ignore[method-assign]
        engine.scheduler.settle = self._ending  # type: ignore[method-assign]

    def generate(self, row_tokens: Sequence[int]) -> None:
        """Generate so many new tokens in each row."""
        self._planning.clear()
        self._settling.clear()
        self._lengths = np.array(row_tokens)
        self._settled = np.zeros(len(row_tokens), np.int64)
        self._first_row: int | None = None
        sampling = SamplingParams(max_new_tokens=self._work.new_tokens, eos_token_ids=(_EOS,))
        self._num_runs += 1
        vocab = self.engine.worker.twin.vocab_size
        # Other prompts each time: neither their beginnings nor their lengths are known.
        ids = (np.array(self._work.prompts) + self._num_runs) % vocab
        self.engine.generate(ids.tolist(), sampling)  # SYNC: an array of the host's

    @property
    def host_us(self) -> float:
        """Microseconds a step that planning and settling took in the last run."""
        seconds = sum(self._planning) + sum(self._settling)
        return seconds / self.engine.stats.engine_steps * 1e6

    @property
    def host_median_us(self) -> float:
        """Those of a step in which no row comes or goes, which is most of them."""
        return (median(self._planning) + median(self._settling)) * 1e6

    def _ending(self, batch: Batch, tokens: Ints, scores: Floats) -> list[Completion]:
        """Settle, with an end of sequence for each row that has its tokens."""
        if self._first_row is None:
            self._first_row = int(batch.rows.min(initial=2**62)) if len(batch.rows) else None
        rows = batch.rows - (self._first_row or 0)
        self._settled[rows] += 1
        ends = self._settled[rows] >= self._lengths[rows]
        tokens = np.where(ends, _EOS, np.maximum(tokens, _EOS + 1))
        return _timed(self._settle, self._settling)(batch, tokens, scores)


def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args)
        finally:
            seconds.append(time.perf_counter() - began)

    return timed


@contextmanager
def engine_run(work: Workload, num_slots: int) -> Iterator[EngineRun]:
    """The engine with one slot or two; no trainer needs memory beside it."""
    config = RolloutConfig(
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

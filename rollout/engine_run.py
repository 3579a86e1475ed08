"""The engine at work on a benchmark's workload."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np

from rollout.config import RolloutConfig
from rollout.engine import RolloutEngine
from rollout.request import Batch, Completion, Floats, Ints
from rollout.sampling_params import SamplingParams
from rollout.workload import Workload

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
        self._commit, schedule = engine.scheduler.commit, engine.scheduler.schedule
        planning = _timed(schedule, self._planning)
        engine.scheduler.schedule = planning  # type: ignore[method-assign]
        engine.scheduler.commit = self._ending  # type: ignore[method-assign]

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
        return _timed(self._commit, self._settling)(batch, tokens, scores)


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

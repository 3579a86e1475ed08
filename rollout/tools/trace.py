"""Records a timeline of an engine's steps from outside: what is not traced pays nothing."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from rollout.engine import RolloutEngine
from rollout.runner.slots import IOSlot
from rollout.telemetry.device_time import make_stamp
from rollout.telemetry.timeline import PREFILL, WAIT, Interval, Timeline


@contextmanager
def tracing(engine: RolloutEngine) -> Iterator[Timeline]:
    """Record what is run inside; the timeline is filled when the block ends.

    Args:
        engine: An idle engine.
    """
    trace = _Trace(engine)
    with ExitStack() as undo:
        for owner, method, name in trace.host_methods():
            undo.enter_context(wrapped(owner, method, partial(trace.on_host, name)))
        for slot in trace.slots:
            undo.enter_context(wrapped(slot, "computing", partial(trace.computing, slot)))
            for method in ("upload", "download"):
                undo.enter_context(wrapped(slot, method, partial(trace.copying, slot)))
        yield trace.timeline
    trace.settle()


class _Trace:
    def __init__(self, engine: RolloutEngine) -> None:
        self.timeline = Timeline()
        self.slots: list[IOSlot] = engine.slots.slots
        self._engine = engine
        self._streams = engine.streams
        self._device: list[tuple[str, str, int, Any, Any, float]] = []
        self._origin = self._mark(self._streams.compute)
        if engine.worker.device.type == "cuda":
            self._origin.synchronize()  # SYNC: once, to lay the device's clock over the host's
        self._origin_s = time.perf_counter()

    def host_methods(self) -> Iterator[tuple[Any, str, str]]:
        """What the host does in a step, and its name on the timeline."""
        yield self._engine.scheduler, "schedule", "plan"
        yield self._engine.scheduler, "settle", "settle"
        yield self._engine.worker.graphs, "run", "launch"
        for slot in self.slots:
            yield slot, "stage", "stage"
            yield slot, "wait", WAIT

    def on_host(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Run a method of the host's and note when."""
        began = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.timeline.intervals.append(Interval("host", name, began, time.perf_counter()))

    def copying(self, slot: IOSlot, call: Callable[[], None]) -> None:
        """Queue a slot's copies between two marks."""
        track = "h2d" if call.__name__ == "upload" else "d2h"
        stream = getattr(self._streams, track)
        before = self._mark(stream)
        call()
        # A download waits for the batch first, so it begins no earlier than the batch ends.
        begin = self._device[-1][4] if track == "d2h" and self._device else before
        self._device.append((track, track, 0, begin, self._mark(stream), 0.0))

    @contextmanager
    def computing(self, slot: IOSlot, call: Callable[[], Any]) -> Iterator[None]:
        """Queue a slot's batch between two marks, behind its upload."""
        assert slot.batch is not None
        name, num_rows = PREFILL if slot.batch.segments else "decode", len(slot.batch.rows)
        with call():
            begin = self._mark(self._streams.compute)
            yield
            end = self._mark(self._streams.compute)
        late_s = slot.stamps.late_s
        self._device.append(("compute", name, num_rows, begin, end, late_s))

    def settle(self) -> None:
        """Turn marks into seconds, once the device has reached them all."""
        self._streams.wait()
        for track, name, num_rows, begin, end, late_s in self._device:
            stop_s = self._seconds(end)
            start_s = min(self._seconds(begin) + late_s, stop_s)
            self.timeline.intervals.append(Interval(track, name, start_s, stop_s, num_rows))

    def _mark(self, stream: Any) -> Any:
        """A point in a stream."""
        stamp = make_stamp(self._engine.worker.device)
        stamp.record(stream)
        return stamp

    def _seconds(self, mark: Any) -> float:
        return self._origin_s + float(self._origin.elapsed_time(mark)) / 1e3


@contextmanager
def wrapped(owner: Any, method: str, around: Callable[..., Any]) -> Iterator[None]:
    """`owner.method` handed to `around` as its first argument while inside."""
    before = vars(owner).get(method)
    setattr(owner, method, partial(around, getattr(owner, method)))
    try:
        yield
    finally:
        if before is None:
            delattr(owner, method)
        else:
            setattr(owner, method, before)  # someone else's

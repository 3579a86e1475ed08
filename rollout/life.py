"""The engine's life: open, pause, sleep, close."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self, SupportsIndex

import torch
from torch import nn

from rollout.config import RolloutConfig
from rollout.device_stats import open_meter
from rollout.errors import (
    ConfigError,
    EngineBusy,
    EngineClosed,
    EnginePaused,
    OutOfMemory,
    RolloutError,
)
from rollout.intake import Limits
from rollout.memory_plan import MemoryPlan
from rollout.scheduler import Scheduler
from rollout.stamps import BatchClock
from rollout.telemetry import RolloutStats
from rollout.worker import Worker, is_out_of_memory

logger = logging.getLogger(__name__)

# What is made in inference mode cannot be written outside of it, and the engine's buffers outlive
# whatever mode its caller is in.
no_inference_mode = torch.inference_mode(mode=False)


class EngineLife:
    """Opens, pauses, puts to sleep and closes what `RolloutEngine` runs.

    Args:
        model: As the engine takes it.
        config: Knobs.
        autocast_dtype: Dtype of the autocast that the trainer's forward runs under.
        float32_head: Whether its head computes in float32, outside autocast.
        param_dtype: Dtype that FSDP or DeepSpeed casts parameters to for the trainer's forward, if
            any.
        show_plan: Is given the memory plan before the first batch. `None`: it is logged.
    """

    @no_inference_mode
    def __init__(
        self,
        model: nn.Module,
        config: RolloutConfig | None = None,
        *,
        autocast_dtype: torch.dtype | None = None,
        float32_head: bool = False,
        param_dtype: torch.dtype | None = None,
        show_plan: Callable[[MemoryPlan], None] | None = None,
    ) -> None:
        if not isinstance(config, RolloutConfig | None):
            raise ConfigError(f"config={config!r:.80}: it must be a RolloutConfig(...)")
        self.config = config or RolloutConfig()
        self.policy_version = 0
        self.stats = RolloutStats()
        self.worker = Worker(
            model,
            self.config,
            autocast_dtype,
            float32_head=float32_head,
            param_dtype=param_dtype,
        )
        num_host_pages = self.worker.swap.num_host_pages
        self.scheduler = Scheduler(self.config, self.worker.max_row_pages, num_host_pages)
        self.max_row_tokens = self.worker.max_row_tokens
        self.slots = self.worker.slots
        self.streams = self.worker.streams
        self._meter = open_meter(self.worker.device_uuid)
        self._clock = BatchClock(self.worker.device)
        self._show_plan = show_plan or logger.info
        self._planned = self._paused = self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: a copy's arrays would not lie where its tensors do."""
        raise RolloutError(
            "an engine cannot be copied or pickled, nor can what holds it: its memory and streams "
            "are the device's own. Copy a trainer before `attach` or after `detach`; its model and "
            "its arguments alone can be copied at any time"
        )

    @property
    def busy(self) -> bool:
        """Whether a row is live or waiting, or a batch in flight."""
        rows = self.scheduler.num_live + self.scheduler.num_waiting
        return not self._closed and (rows > 0 or self.slots.in_flight)

    @property
    def asleep(self) -> bool:
        """Whether there is no memory that `sleep` could give back."""
        return self._closed or self.worker.asleep

    @property
    def num_gathered(self) -> int:
        """How often a sharded parameter was gathered from all ranks."""
        return 0 if self._closed else self.worker.twin.num_gathered

    @no_inference_mode
    def sleep(self) -> None:
        """Give the memory of KV pages and of cast weights back, until `wake` or the next row.

        Beginnings of rows are forgotten; captured graphs stay. Sleeping twice is fine.

        Raises:
            EngineBusy: Rows are unfinished.
            EngineClosed: The engine was closed.
        """
        self._check_open()
        if self.busy:
            raise EngineBusy(
                f"{self.scheduler.num_live} rows are live and {self.scheduler.num_waiting} wait; "
                "sleep() would lose their KV, so call step() until they are finished"
            )
        if self.asleep:
            return
        began = time.perf_counter()
        try:
            self.scheduler.reset(num_pages=1)
            self.worker.sleep()
        except BaseException as error:
            # A scheduler that is half new would lose the rows to come.
            self._give_up(error)
            raise
        self.stats.sleep_s += time.perf_counter() - began

    @no_inference_mode
    def wake(self) -> None:
        """Take back as much memory as `sleep` gave away. Waking twice is fine.

        `generate` and `submit` wake the engine by themselves, with what their rows need.

        Raises:
            OutOfMemory: Something else has taken it.
            EngineClosed: The engine was closed.
        """
        self._check_open()
        if not self.asleep:
            return
        try:
            self._open_version(same_weights=True)
            self._grow(self.worker.pages_before_sleep)
        except BaseException as error:
            self._give_up(error)
            raise

    def pause(self) -> None:
        """Let the trainer work on the weights from now on, while rows stay as they are.

        Call it between two steps; whatever the trainer queues follows the batch in flight.

        Example:
            ```python
            engine.step()
            engine.pause()
            optimizer.step()
            engine.resume()
            engine.step()
            ```
        """
        self._check_running()
        self.streams.hand_back()
        self.stats.attribution.paused()
        self._paused = True

    def resume(self, kv: str = "keep", *, same_weights: bool = False) -> None:
        """Go on under the weights as they are now.

        Args:
            kv: `keep`: the KV of tokens that rows already have stays as the old weights made it.
                `recompute`: it is computed again under the new ones before a row goes on. Rows
                that are to be prefilled all the same, because they were preempted and the host
                had no room for their KV, always get the KV of the new ones.
            same_weights: The weights have not changed. Otherwise a policy version is opened.

        Raises:
            EnginePaused: The engine is not paused.
            ConfigError: No such `kv`.
            OutOfMemory: The GPU ran out of memory. After this, or any other failure to follow the
                weights, every row has been given up.
        """
        self._check_open()
        if not self._paused:
            raise EnginePaused("resume() without pause(): call pause() before weights change")
        if kv not in ("keep", "recompute"):
            raise ConfigError(f"kv={kv!r}: it must be 'keep' or 'recompute'")
        self._paused = False
        try:
            self._open_version(same_weights)
            if kv == "recompute":
                self.scheduler.recompute()
            self._prepare()
        except BaseException as error:
            # Rows that went on would run on weights that no policy version names.
            self._give_up(error)
            raise

    @contextmanager
    def paused(self, kv: str = "keep", *, same_weights: bool = False) -> Iterator[None]:
        """`pause`, and `resume` with these arguments whatever happens inside."""
        self.pause()
        try:
            yield
        finally:
            self.resume(kv, same_weights=same_weights)

    def close(self) -> None:
        """End every row and give the memory back. Closing twice is fine."""
        if not self._closed:
            try:
                self._drop_rows()
                self.worker.sleep()
            finally:
                self._closed = True
                del self.worker, self.slots

    def _give_up(self, error: BaseException) -> None:
        """End every row after a failure, and say of a lack of memory what helps."""
        self._drop_rows()
        if is_out_of_memory(error):
            num_bytes = self.worker.kv_cache.num_bytes
            raise OutOfMemory(
                f"the GPU has no memory left (KV pages take {num_bytes} bytes; "
                f"kv_bytes={self.config.kv_bytes}, kv_fraction={self.config.kv_share}, "
                f"prefill_tokens={self.config.prefill_tokens}, max_rows={self.config.max_rows}); "
                "lower one of them"
            ) from error

    def _drop_rows(self) -> None:
        """Forget every row, live or waiting, and wait until the device has, too."""
        if self._closed:
            return
        self._meter.end()
        try:
            self.slots.drain()
            self.scheduler.reset(num_pages=self.worker.kv_cache.num_pages)
        except BaseException:
            # An interrupt may have left it half new, or the device has failed.
            self.scheduler.reset(num_pages=self.worker.kv_cache.num_pages)
            raise
        finally:
            self.streams.hand_back()

    @no_inference_mode
    def _open_version(self, same_weights: bool) -> None:
        """Run behind whatever the trainer has queued, on a new policy version if it may be one."""
        self.streams.take_over()
        if not self.busy:
            self.worker.twin.casts.forget()  # of another rollout, or before the first
        try:
            if not same_weights or self.worker.twin.missing_bytes:
                self.worker.refresh()
            self.policy_version += not same_weights
        finally:
            if not self.busy:
                self.streams.hand_back()  # there may be no batch to do it

    def _prepare(self) -> None:
        """Have a graph for whatever the rows at hand can need."""
        began, before = time.perf_counter(), self.worker.graphs.num_captures
        self.worker.prepare(*self.scheduler.largest_batch())
        num_graphs = self.worker.graphs.num_captures - before
        self.stats.warmed_up(num_graphs, time.perf_counter() - began)

    def _grow(self, num_pages: int) -> None:
        """Have so many KV pages at least; those that there are keep what they hold."""
        self.worker.grow(num_pages)
        self.scheduler.pages.grow(num_pages)
        self.stats.mapped(self.worker.kv_cache.num_bytes, *self.worker.take_costs())

    def _plan_once(self) -> None:
        """Say before the first batch what memory is taken for what, now that it is."""
        if not self._planned:
            self._planned = True
            self._show_plan(self.worker.plan())

    def _limits(self) -> Limits:
        """What one row may ask for, now that so much memory is free."""
        max_pages = self.worker.max_pages()
        return Limits(
            vocab_size=self.worker.twin.vocab_size,
            max_row_tokens=self.max_row_tokens,
            max_pages=sys.maxsize if max_pages is None else max_pages,
            page_bytes=self.worker.kv_cache.layout.page_bytes,
            config=self.config,
        )

    def _check_idle(self) -> None:
        if self.busy:
            raise EngineBusy("rows given to submit() are unfinished; call step() until they are")

    def _check_running(self) -> None:
        self._check_open()
        if self._paused:
            raise EnginePaused("the engine is paused; call resume() first")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine was closed; make a new one")

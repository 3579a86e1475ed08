"""RolloutEngine: takes prompts, runs one batch after another, returns completions."""

import logging
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, NoReturn, Self, SupportsIndex

import torch
from torch import nn

from rollout.config import EngineConfig
from rollout.errors import (
    ConfigError,
    EngineBusy,
    EngineClosed,
    EnginePaused,
    OutOfMemory,
    RolloutError,
)
from rollout.exact.linear import Shape
from rollout.memory.plan import MemoryPlan
from rollout.request import Completion, Request
from rollout.runner.worker import Worker, is_out_of_memory
from rollout.sampling_params import SamplingParams
from rollout.scheduler.scheduler import Scheduler
from rollout.scheduler.validation import Limits, build_requests
from rollout.scheduler.waiting import Lengths
from rollout.telemetry.gpu_counters import open_meter
from rollout.telemetry.observer import Observer, Observers
from rollout.telemetry.recorder import Recorder
from rollout.telemetry.roofline import Cost
from rollout.telemetry.stats import RolloutStats

logger = logging.getLogger(__name__)

# Tensors made in inference mode cannot be written outside it. The engine's buffers outlive the
# caller's inference mode, so the engine leaves it while it allocates or writes.
no_inference_mode = torch.inference_mode(mode=False)


class RolloutEngine:
    """Generates completions from the weights that a trainer is training.

    After `close`, calls raise `EngineClosed`. Between `pause` and `resume`, `generate`, `stream`,
    `submit` and `step` raise `EnginePaused`.

    Args:
        model: A transformers decoder, with or without PEFT adapters. The engine runs a twin of its
            module tree over the same storage. It never runs `model` itself, and changes it only if
            `fuse_projections` is set.
        autocast_dtype: Dtype of the autocast around the trainer's forward, if any.
        float32_head: Whether the trainer's head computes in float32, outside autocast.
        param_dtype: Dtype that FSDP or DeepSpeed casts parameters to for the forward, if any.
        show_plan: Called once with the memory plan, before the first batch. `None`: log it.

    Raises:
        UnsupportedModel: The engine cannot run the model; the message says why.
    """

    @no_inference_mode
    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig | None = None,
        *,
        autocast_dtype: torch.dtype | None = None,
        float32_head: bool = False,
        param_dtype: torch.dtype | None = None,
        show_plan: Callable[[MemoryPlan], None] | None = None,
    ) -> None:
        if not isinstance(config, EngineConfig | None):
            raise ConfigError(f"config={config!r:.80}: must be an EngineConfig(...)")
        self.config = config or EngineConfig()
        self.policy_version = 0
        self.worker = Worker(
            model,
            self.config,
            autocast_dtype,
            float32_head=float32_head,
            param_dtype=param_dtype,
        )
        sizes = self.worker.max_row_pages, self.worker.swap.num_host_pages
        keeps_state = self.worker.states is not None
        self.scheduler = Scheduler(self.config, *sizes, keeps_state=keeps_state)
        self.max_row_tokens = self.worker.max_row_tokens
        self.slots = self.worker.slots
        self.streams = self.worker.streams
        meter = open_meter(self.worker.device_uuid)
        page_bytes = self.worker.kv_cache.layout.page_bytes
        self._recorder = Recorder(self.scheduler, meter, page_bytes)
        self.observer = Observers(self._recorder)
        self._show_plan = show_plan or logger.info
        self._planned = self._paused = self._closed = self._said_fewer_lanes = False
        self.streams.take_over()
        try:
            self.worker.check()
        finally:
            self.streams.hand_back()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        seeds: Sequence[int] | None = None,
        *,
        same_weights: bool = False,
    ) -> list[Completion]:
        """Generate one completion for each prompt, in the order of the prompts.

        Args:
            prompts: Token ids of each row.
            sampling: One for all rows, or one per row.
            seeds: Key of each row's random numbers, `0 <= seed < 2**63`. `None`: 0, 1, 2, ...
            same_weights: The weights have not changed since the last rollout. Skips refreshing the
                twin and keeps the policy version.

        Raises:
            RequestError: A prompt, a seed or a sampling parameter is invalid. No row runs.
            OutOfPages: One row needs more KV pages than memory allows. No row runs.
            OutOfMemory: The GPU ran out of memory. Every row is dropped.
            EngineBusy: Rows from `submit` are unfinished.
        """
        done: dict[int, Completion] = {}
        stream = self.stream(prompts, sampling, seeds, same_weights=same_weights)
        with closing(stream):  # an interrupt between two steps must drop the rows, too
            for completion in stream:
                done[completion.row] = completion
        return [done[row] for row in sorted(done)]

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        seeds: Sequence[int] | None = None,
        *,
        same_weights: bool = False,
    ) -> Generator[Completion]:
        """Yield completions as they finish. Arguments and errors are those of `generate`.

        Row ids count up in the order of the prompts. Completions of rows that you submit meanwhile
        are yielded, too. Closing the generator early drops every row.
        """
        self._check_running()
        limits = self._limits()
        requests = build_requests(prompts, sampling, seeds, limits)
        self._check_idle()
        return self._stream(requests, limits, same_weights)

    def _stream(
        self, requests: Sequence[Request], limits: Limits, same_weights: bool
    ) -> Generator[Completion]:
        # The generator starts at the first `next`; the engine may have changed since `stream`.
        self._check_running()
        self._check_idle()
        try:
            self._enqueue(requests, limits, same_weights)
            while self.busy:
                yield from self.step()
        except BaseException:
            self._drop_rows()
            raise

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        seed: int = 0,
        *,
        same_weights: bool = False,
    ) -> int:
        """Queue one row for `step` and return its id.

        Arguments and errors are those of `generate`, without `EngineBusy`. `same_weights` is
        ignored while other rows are unfinished: they keep the weights that they started with.
        """
        return self.submit_all([prompt], sampling, [seed], same_weights=same_weights)[0]

    def submit_all(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        seeds: Sequence[int] | None = None,
        *,
        same_weights: bool = False,
    ) -> list[int]:
        """Queue several rows for `step` at once; returns their ids, in the order of the prompts.

        Arguments are those of `generate`, errors those of `submit`. Rows of one prompt share its
        prefill.
        """
        self._check_running()
        limits = self._limits()
        requests = build_requests(prompts, sampling, seeds, limits)
        return self._enqueue(requests, limits, same_weights)

    @no_inference_mode
    def step(self) -> list[Completion]:
        """Launch the next batch, settle the one before it, and return the rows that finished.

        The host waits only for the previous batch, which ran while it planned this one. Before the
        first batch and after the last one, a slot is empty and there is nothing to settle. Any
        exception drops every row and frees every page.

        Raises:
            OutOfMemory: The GPU ran out of memory.
        """
        self._check_running()
        try:
            slot, previous = self.slots.flip()
            batch = self.scheduler.schedule(self.policy_version)  # reads no tensor
            self.observer.planned(batch)
            if batch is not None:
                slot.stage(batch)  # host: fill the pinned buffers
                slot.upload()  # h2d stream -> slot.uploaded
                self.worker.swap.move(batch)  # swap stream: pages to and from the host
                self.worker.graphs.run(slot)  # compute stream -> slot.computed
                slot.download()  # d2h stream -> slot.downloaded
                self.observer.launched(batch, slot.staged_bytes)
            if previous.batch is None:
                return []
            tokens, scores = previous.wait()  # SYNC: the only host wait in a step
            settled = previous.release()
            completions = self.scheduler.settle(settled, tokens, scores)
            self.observer.settled(settled, completions, previous.stamps)
            self._end_if_idle()
            return completions
        except BaseException as error:
            self._give_up(error)
            raise

    def abort(self, rows: Collection[int]) -> None:
        """Drop rows by id, between two steps, and free their pages. They get no completion.

        Unknown or finished ids are ignored. An exception meanwhile drops every row.
        """
        self._check_open()
        ids = set(rows)  # a bad argument raises here, before any row is lost
        try:
            self.scheduler.abort(ids)
            if not self.busy:
                self.streams.hand_back()
                self._recorder.give_up()
        except BaseException as error:
            self._give_up(error)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: NumPy views of the copy would miss its tensors."""
        raise RolloutError(
            "an engine cannot be copied or pickled, nor can an object that contains it, because it "
            "owns device memory and streams. Copy a trainer before `attach` or after `detach`. You "
            "can copy its model or its arguments at any time"
        )

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.worker.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes, and that of the KV pages."""
        return self.worker.kv_cache.layout.dtype

    @property
    def vocab_size(self) -> int:
        """Token ids must be below this."""
        return self.worker.twin.vocab_size

    @property
    def stats(self) -> RolloutStats:
        """Statistics of the current rollout, or else of the last one."""
        return self._recorder.stats

    @property
    def num_live(self) -> int:
        """Rows in a lane."""
        return self.scheduler.num_live

    @property
    def num_waiting(self) -> int:
        """Rows without a lane."""
        return self.scheduler.num_waiting

    @property
    def module(self) -> nn.Module:
        """The module tree that the engine runs, over the trainer's storage. Do not change it."""
        return self.worker.twin.base

    @property
    def num_graphs(self) -> int:
        """CUDA graphs captured and ready to replay."""
        return len(self.worker.graphs.captured)

    def observing(self, observer: Observer) -> AbstractContextManager[None]:
        """A context in which `observer` is told of every batch planned, launched or settled."""
        return self.observer.including(observer)

    @property
    def busy(self) -> bool:
        """Whether rows are live or waiting, or a batch is in flight."""
        rows = self.scheduler.num_live + self.scheduler.num_waiting
        return not self._closed and (rows > 0 or self.slots.in_flight)

    @property
    def asleep(self) -> bool:
        """Whether KV pages and cast weights are unmapped, so `sleep` has nothing to release."""
        return self._closed or self.worker.asleep

    @no_inference_mode
    def sleep(self) -> None:
        """Release the memory of KV pages and cast weights until `wake` or the next row.

        Cached prefixes are lost. Captured graphs stay valid. Sleeping twice is fine.

        Raises:
            EngineBusy: Rows are unfinished.
        """
        self._check_open()
        if self.busy:
            raise EngineBusy(
                f"{self.scheduler.num_live} rows are live and {self.scheduler.num_waiting} wait; "
                "sleep() would drop them, so call step() until they are finished"
            )
        if self.asleep:
            return
        began = time.perf_counter()
        try:
            self.scheduler.reset(num_pages=1)
            self.worker.sleep()
        except BaseException as error:
            # A half-reset scheduler would lose later rows; `_give_up` resets it again.
            self._give_up(error)
            raise
        self._recorder.slept(time.perf_counter() - began)

    @no_inference_mode
    def wake(self) -> None:
        """Map as much memory as `sleep` released. Waking twice is fine.

        You need not call it: `generate` and `submit` map what their rows need.

        Raises:
            OutOfMemory: Something else uses the memory now.
        """
        self._check_open()
        if not self.asleep:
            return
        try:
            self._open_version(same_weights=True)
            self._grow(*self.worker.before_sleep)
        except BaseException as error:
            self._give_up(error)
            raise

    def pause(self) -> None:
        """Let the trainer change the weights while rows are unfinished.

        Call it between two steps. Work that the trainer queues runs after the batch in flight.
        """
        self._check_running()
        self.streams.hand_back()
        self._recorder.paused()
        self._paused = True

    def resume(self, kv: str = "keep", *, same_weights: bool = False) -> None:
        """Continue with the current weights.

        Args:
            kv: `keep`: rows keep the KV that the old weights computed. `recompute`: the new
                weights compute it again before a row continues. Either way, preempted rows whose
                KV did not fit on the host get KV of the new weights.
            same_weights: The weights have not changed. Otherwise a new policy version starts.

        Raises:
            EnginePaused: The engine is not paused.
            OutOfMemory: The GPU ran out of memory. This and other failures drop every row.
        """
        self._check_open()
        if not self._paused:
            raise EnginePaused("resume() without pause(): call pause() before weights change")
        if kv not in ("keep", "recompute"):
            raise ConfigError(f"kv={kv!r}: must be 'keep' or 'recompute'")
        self._paused = False
        try:
            self._open_version(same_weights)
            if kv == "recompute":
                self.scheduler.recompute()
            self._prepare()
        except BaseException as error:
            # If rows continued, their tokens would carry the wrong policy version.
            self._give_up(error)
            raise

    @contextmanager
    def paused(self, kv: str = "keep", *, same_weights: bool = False) -> Iterator[None]:
        """`pause` on entry and `resume` with these arguments on exit, even after an exception."""
        self.pause()
        try:
            yield
        finally:
            self.resume(kv, same_weights=same_weights)

    def close(self) -> None:
        """Drop every row and release the memory. Closing twice is fine."""
        if not self._closed:
            try:
                self._drop_rows()
                self.worker.sleep()
            finally:
                self._closed = True
                del self.worker, self.slots

    # For trainers.

    @property
    def expected_lengths(self) -> Lengths:
        """Completion lengths of earlier prompts, which decide the order of admission."""
        return self.scheduler.lengths

    @property
    def exact_shapes(self) -> Mapping[Shape, int]:
        """`{(outputs, inputs): n}`: with fewer than n rows, such a layer runs our exact kernel."""
        return self.worker.invariant_shapes

    def cost(self) -> Cost:
        """Least bytes and operations per token, with the weights that rollouts read now."""
        return self.worker.cost()

    @property
    def num_gathered(self) -> int:
        """Gathers of sharded parameters so far."""
        return 0 if self._closed else self.worker.twin.num_gathered

    def join_gathers(self, num_done: int) -> None:
        """Join the gathers and the self-check that other ranks wait for, and drop the results.

        This rank has done `num_done` of the gathers.
        """
        self._check_open()
        self.worker.twin.join_gathers(num_done)
        self.worker.join_check()

    def _end_if_idle(self) -> None:
        if not self.busy:
            self.streams.hand_back()
            self._recorder.end(*self.worker.twin.casts.take())

    @no_inference_mode
    def _enqueue(
        self, requests: Sequence[Request], limits: Limits, same_weights: bool
    ) -> list[int]:
        """Queue checked requests. On an idle engine this starts a rollout."""
        try:
            if not self.busy:
                self._recorder.begin()
                self._open_version(same_weights)
                self.stats.policy_version = self.policy_version
                if requests:
                    self._recorder.start_counters()
            rows = self.scheduler.add(requests)
            num_lanes = self._limit_lanes()
            most = self._limits(num_lanes).max_pages if num_lanes else limits.max_pages
            self._grow(min(self.scheduler.pages_wanted(), most), num_lanes)
            self._prepare()
            if not self._planned:  # the plan reports memory that is mapped by now
                self._planned = True
                self._show_plan(self.worker.plan())
        except BaseException as error:
            self._give_up(error)
            raise
        return rows

    def _give_up(self, error: BaseException) -> None:
        """Drop every row after a failure. Raise `OutOfMemory` if it was a lack of GPU memory."""
        self._drop_rows()
        if is_out_of_memory(error):
            num_bytes = self.worker.kv_cache.num_bytes
            raise OutOfMemory(
                f"the GPU ran out of memory; KV pages take {num_bytes / 2**30:.2f} GiB; lower "
                f"one of kv_bytes={self.config.kv_bytes}, kv_fraction={self.config.kv_share}, "
                f"prefill_tokens={self.config.prefill_tokens}, max_rows={self.config.max_rows}"
            ) from error

    def _drop_rows(self) -> None:
        """Drop every row and wait until the device has finished the batches in flight."""
        if self._closed:
            return
        self._recorder.give_up()
        try:
            self.slots.drain()
            self.scheduler.reset(num_pages=self.worker.kv_cache.num_pages)
        except BaseException:
            # The device may have failed, or an interrupt may have left a half-reset scheduler.
            self.scheduler.reset(num_pages=self.worker.kv_cache.num_pages)
            raise
        finally:
            self.streams.hand_back()

    @no_inference_mode
    def _open_version(self, same_weights: bool) -> None:
        """Order the engine's streams after the trainer's work, then follow changed weights."""
        self.streams.take_over()
        if not self.busy:
            self.worker.twin.casts.forget()  # casts counted outside this rollout
        try:
            if not same_weights or self.worker.twin.missing_bytes:
                self.worker.refresh()
            self.policy_version += not same_weights
        finally:
            if not self.busy:
                self.streams.hand_back()  # there may be no batch to run, so no step would do it

    def _prepare(self) -> None:
        """Capture the graphs that the unfinished rows can need."""
        began, before = time.perf_counter(), self.worker.graphs.num_captures
        self.worker.prepare(self.scheduler.largest_batch())
        num_graphs = self.worker.graphs.num_captures - before
        self._recorder.warmed_up(num_graphs, time.perf_counter() - began)

    def _limit_lanes(self) -> int:
        """Run as many rows at once as have room for their states; 0: the model has no states."""
        if self.worker.states is None:
            return 0
        wanted = self.scheduler.lanes_wanted()
        fitting = self.worker.lanes_that_fit(wanted, self.scheduler.longest_row_pages())
        if fitting < wanted and not self._said_fewer_lanes:
            self._said_fewer_lanes = True
            size = self.worker.states.layout.lane_bytes / 2**20
            text = "%d of %d rows run at once: each keeps a state of %.1f MiB"
            logger.warning(text, fitting, wanted, size)
        self.scheduler.limit_lanes(fitting)
        return fitting

    def _grow(self, num_pages: int, num_lanes: int) -> None:
        """Map at least `num_pages` KV pages, and states. Existing ones keep their contents."""
        self.worker.grow(num_pages, num_lanes)
        self.scheduler.pages.grow(num_pages)
        self._recorder.mapped(self.worker.kv_cache.num_bytes, *self.worker.take_costs())

    def _limits(self, num_lanes: int = 1) -> Limits:
        max_pages = self.worker.max_pages(num_lanes)
        return Limits(
            vocab_size=self.worker.twin.vocab_size,
            max_row_tokens=self.max_row_tokens,
            max_pages=sys.maxsize if max_pages is None else max_pages,
            page_bytes=self.worker.kv_cache.layout.page_bytes,
            config=self.config,
        )

    def _check_idle(self) -> None:
        if self.busy:
            raise EngineBusy("rows from submit() are unfinished; call step() until `busy` is False")

    def _check_running(self) -> None:
        self._check_open()
        if self._paused:
            raise EnginePaused("the engine is paused; call resume() first")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine was closed; make a new one")

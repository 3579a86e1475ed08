"""The loop: rows in, one batch after another, completions out.

```
host     plan 0 | plan 1 | settle 0, plan 2 | settle 1, plan 3
h2d          0>       1>                 2>
compute        [ batch 0 ][ batch 1 ][ batch 2 ]
d2h                      <0         <1
```
"""

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

# What is made in inference mode cannot be written outside of it, and the engine's buffers outlive
# whatever mode its caller is in.
no_inference_mode = torch.inference_mode(mode=False)


class RolloutEngine:
    """Generates completions from the weights that a trainer is training.

    Args:
        model: A transformers decoder, perhaps with PEFT adapters. It is never run, and never
            changed but by `fuse_projections`: the engine runs a twin of its module tree over the
            same storage.
        config: Knobs.
        autocast_dtype: Dtype of the autocast that the trainer's forward runs under.
        float32_head: Whether its head computes in float32, outside autocast.
        param_dtype: Dtype that FSDP or DeepSpeed casts parameters to for the trainer's forward, if
            any.
        show_plan: Called with the memory plan, once, before the first batch. `None`: it is logged.

    Raises:
        UnsupportedModel: The model cannot run on the engine; the message says why.
        ConfigError: `config` is something else.

    Example:
        ```python
        with RolloutEngine(model) as engine:
            sampling = SamplingParams(max_new_tokens=64, eos_token_ids=(2,))
            for completion in engine.generate([[1, 5, 9], [1, 7]], sampling):
                print(completion.token_ids, completion.finish_reason)
        ```
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
            raise ConfigError(f"config={config!r:.80}: it must be an EngineConfig(...)")
        self.config = config or EngineConfig()
        self.policy_version = 0
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
        meter = open_meter(self.worker.device_uuid)
        page_bytes = self.worker.kv_cache.layout.page_bytes
        self._recorder = Recorder(self.scheduler, meter, page_bytes)
        self.observer = Observers(self._recorder)
        self._show_plan = show_plan or logger.info
        self._planned = self._paused = self._closed = False

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
            sampling: One for all rows, or one for each.
            seeds: Key of each row's random numbers, `0 <= seed < 2**63`. `None`: 0, 1, 2, ...
            same_weights: The weights have not changed since the last rollout.

        Returns:
            One completion a prompt.

        Raises:
            RequestError: A prompt, a seed or a sampling parameter cannot be served. Nothing runs.
            OutOfPages: One row alone needs more KV pages than there can be. Nothing runs.
            OutOfMemory: The GPU ran out of memory; every row has been given up.
            EngineBusy: Rows given to `submit` are unfinished.
            EnginePaused: The engine is paused.
            EngineClosed: The engine was closed.
        """
        done: dict[int, Completion] = {}
        stream = self.stream(prompts, sampling, seeds, same_weights=same_weights)
        with closing(stream):  # an interrupt can come between two steps
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
        """Yield completions as they finish; arguments and errors are those of `generate`.

        Row ids count up in the order of the prompts. Rows submitted meanwhile are yielded, too.
        Closing the generator early drops every row.

        Example:
            ```python
            for completion in engine.stream(prompts, sampling):
                print(completion.row, completion.token_ids)
            ```
        """
        self._check_running()
        limits = self._limits()
        requests = build_requests(prompts, sampling, seeds, limits)
        self._check_idle()
        return self._stream(requests, limits, same_weights)

    def _stream(
        self, requests: Sequence[Request], limits: Limits, same_weights: bool
    ) -> Generator[Completion]:
        # A generator begins when it is first asked.
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
        """Queue one row for `step`; returns its id.

        Args:
            prompt: Token ids.
            sampling: How to draw, when to stop.
            seed: Key of the row's random numbers, `0 <= seed < 2**63`.
            same_weights: The weights have not changed since the last rollout. Only read when
                the engine is idle: rows that are live keep the weights they began with.

        Raises:
            RequestError: The row cannot be served.
            OutOfPages: It alone needs more KV pages than there can be.
            OutOfMemory: The GPU ran out of memory; every row has been given up.
            EnginePaused: The engine is paused.
            EngineClosed: The engine was closed.
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
        """Launch the next batch on the device, then settle the one before it on the host.

        The host never waits for the batch it has just launched, only for its predecessor, which
        ran while this one was being planned. First and last batch are no special case: an empty
        slot has nothing to settle. A failure ends every row, frees every page and is raised.

        Returns:
            The rows that finished.

        Raises:
            OutOfMemory: The GPU ran out of memory.
            EnginePaused: The engine is paused.
            EngineClosed: The engine was closed.
        """
        self._check_running()
        try:
            slot, previous = self.slots.flip()
            batch = self.scheduler.schedule(self.policy_version)  # reads no tensor
            self.observer.planned(batch)
            if batch is not None:
                slot.stage(batch)  # host: fill the pinned buffers
                slot.upload()  # h2d stream -> slot.uploaded
                self.worker.swap.move(batch)  # swap stream: pages to the host and back
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
        """Drop rows between two steps, and free what they hold; they have no completion.

        An interrupt meanwhile ends every row, as one in a step does.

        Args:
            rows: Their ids. One that is unknown, or has finished, is none.
        """
        self._check_open()
        ids = set(rows)  # what is no collection costs no row
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
        """Refuse to be copied or pickled: a copy's arrays would not lie where its tensors do."""
        raise RolloutError(
            "an engine cannot be copied or pickled, nor can what holds it: its memory and streams "
            "are the device's own. Copy a trainer before `attach` or after `detach`; its model and "
            "its arguments alone can be copied at any time"
        )

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.worker.device

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.worker.twin.vocab_size

    @property
    def stats(self) -> RolloutStats:
        """Of the rollout that runs, or of the last one."""
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
    def num_graphs(self) -> int:
        """CUDA graphs that are ready to be replayed."""
        return len(self.worker.graphs.captured)

    def observing(self, observer: Observer) -> AbstractContextManager[None]:
        """Tell `observer` of each batch that is planned, launched or settled inside.

        Example:
            ```python
            with engine.observing(tracer):
                engine.generate(prompts, sampling)
            ```
        """
        return self.observer.including(observer)

    @property
    def busy(self) -> bool:
        """Whether a row is live or waiting, or a batch in flight."""
        rows = self.scheduler.num_live + self.scheduler.num_waiting
        return not self._closed and (rows > 0 or self.slots.in_flight)

    @property
    def asleep(self) -> bool:
        """Whether there is no memory that `sleep` could give back."""
        return self._closed or self.worker.asleep

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
        self._recorder.slept(time.perf_counter() - began)

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
        self._recorder.paused()
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

    # What a trainer asks of its engine.

    @property
    def expected_lengths(self) -> Lengths:
        """Completion lengths of earlier prompts; rows are admitted by them."""
        return self.scheduler.lengths

    @property
    def exact_shapes(self) -> Mapping[Shape, int]:
        """Layers that exact mode computes with the batch-invariant product, by their shape."""
        return self.worker.invariant_shapes

    def cost(self) -> Cost:
        """The least bytes and operations of a token, with the weights that rollouts read now."""
        return self.worker.cost()

    @property
    def num_gathered(self) -> int:
        """How often a sharded parameter was gathered from all ranks."""
        return 0 if self._closed else self.worker.twin.num_gathered

    def join_gathers(self, num_done: int) -> None:
        """Join the gathers that other ranks still wait for, and keep nothing of them.

        Args:
            num_done: Parameters of this rollout that this rank has already gathered.
        """
        self._check_open()
        self.worker.twin.join_gathers(num_done)

    def _end_if_idle(self) -> None:
        """After the last row, hand the device back to the trainer and complete the stats."""
        if not self.busy:
            self.streams.hand_back()
            self._recorder.end(*self.worker.twin.casts.take())

    @no_inference_mode
    def _enqueue(
        self, requests: Sequence[Request], limits: Limits, same_weights: bool
    ) -> list[int]:
        """Queue checked requests; on an idle engine this begins a rollout."""
        try:
            if not self.busy:
                self._recorder.begin()
                self._open_version(same_weights)
                self.stats.policy_version = self.policy_version
                if requests:
                    self._recorder.start_counters()
            rows = self.scheduler.add(requests)
            self._grow(min(self.scheduler.pages_wanted(), limits.max_pages))
            self._prepare()
            self._plan_once()
        except BaseException as error:
            self._give_up(error)
            raise
        return rows

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
        self._recorder.give_up()
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
        self.worker.prepare(self.scheduler.largest_batch())
        num_graphs = self.worker.graphs.num_captures - before
        self._recorder.warmed_up(num_graphs, time.perf_counter() - began)

    def _grow(self, num_pages: int) -> None:
        """Have so many KV pages at least; those that there are keep what they hold."""
        self.worker.grow(num_pages)
        self.scheduler.pages.grow(num_pages)
        self._recorder.mapped(self.worker.kv_cache.num_bytes, *self.worker.take_costs())

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

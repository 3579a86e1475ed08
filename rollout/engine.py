"""The loop, and the engine's life: open, step, generate, close.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn
from tqdm import tqdm

from rollout.config import RolloutConfig
from rollout.errors import EngineBusy, EngineClosed, OutOfMemory
from rollout.intake import Limits, build_requests
from rollout.memory_plan import MemoryPlan
from rollout.request import Completion, Request, SamplingParams
from rollout.scheduler import Scheduler
from rollout.telemetry import RolloutStats
from rollout.worker import Worker, is_out_of_memory

logger = logging.getLogger(__name__)

# What is made in inference mode cannot be written outside of it, and the engine's buffers outlive
# whatever mode its caller is in.
_no_inference_mode = torch.inference_mode(mode=False)


class RolloutEngine:
    """Generates completions from the weights that a trainer is training.

    Args:
        model: A transformers decoder, perhaps with PEFT adapters. It is never run, and never
            changed but by `fuse_projections`: the engine runs a twin of its module tree over the
            same storage.
        config: Knobs.
        autocast_dtype: Dtype of the autocast that the trainer's forward runs under.
        show_plan: Called with the memory plan, once, before the first batch. `None`: it is logged.

    Raises:
        UnsupportedModel: The model cannot run on the engine; the message says why.

    Example:
        ```python
        with RolloutEngine(model) as engine:
            sampling = SamplingParams(max_new_tokens=64, eos_token_ids=(2,))
            for completion in engine.generate([[1, 5, 9], [1, 7]], sampling):
                print(completion.token_ids, completion.finish_reason)
        ```
    """

    @_no_inference_mode
    def __init__(
        self,
        model: nn.Module,
        config: RolloutConfig | None = None,
        *,
        autocast_dtype: torch.dtype | None = None,
        show_plan: Callable[[MemoryPlan], None] | None = None,
    ) -> None:
        self.config = config or RolloutConfig()
        self.policy_version = 0
        self.stats = RolloutStats()
        self.worker = Worker(model, self.config, autocast_dtype)
        self.scheduler = Scheduler(self.config, self.worker.max_row_pages)
        self.max_row_tokens = self.worker.max_row_tokens
        self.slots = self.worker.slots
        self.streams = self.worker.streams
        self._show_plan = show_plan or logger.info
        self._planned = False
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    @property
    def busy(self) -> bool:
        """Whether a row is live or waiting, or a batch in flight."""
        rows = self.scheduler.num_live + self.scheduler.num_waiting
        return not self._closed and (rows > 0 or self.slots.in_flight)

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
            EngineBusy: Rows given to `submit` are unfinished.
            EngineClosed: The engine was closed.
        """
        self._check_open()
        limits = self._limits()
        requests = build_requests(prompts, sampling, seeds, limits)
        if self.busy:
            raise EngineBusy("rows given to submit() are unfinished; call step() until they are")
        rows = self._enqueue(requests, limits, same_weights)
        done: dict[int, Completion] = {}
        try:
            with tqdm(total=len(rows), unit="row", disable=not self.config.progress_bar) as bar:
                while self.busy:
                    finished = self.step()
                    done.update((completion.row, completion) for completion in finished)
                    bar.update(len(finished))
        except BaseException:
            self._abort()  # an interrupt can come between two steps
            raise
        return [done[row] for row in rows]

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
            EngineClosed: The engine was closed.
        """
        self._check_open()
        limits = self._limits()
        requests = build_requests([prompt], sampling, [seed], limits)
        return self._enqueue(requests, limits, same_weights)[0]

    @_no_inference_mode
    def step(self) -> list[Completion]:
        """Launch the next batch on the device, then settle the one before it on the host.

        The host never waits for the batch it has just launched, only for its predecessor, which
        ran while this one was being planned. First and last batch are no special case: an empty
        slot has nothing to settle. A failure ends every row, frees every page and is raised.

        Returns:
            The rows that finished.
        """
        self._check_open()
        try:
            slot, previous = self.slots.flip()
            batch = self.scheduler.schedule(self.policy_version)  # reads no tensor
            if batch is not None:
                slot.stage(batch)  # host: fill the pinned buffers
                slot.upload()  # h2d stream -> slot.uploaded
                self.worker.graphs.run(slot)  # compute stream -> slot.computed
                slot.download()  # d2h stream -> slot.downloaded
                num_pages = self.scheduler.pages.num_used
                self.stats.launched(len(batch.rows), num_pages, slot.staged_bytes)
                self.stats.prefilled(batch.num_prefilled, batch.num_shared)
            if previous.batch is None:
                return []
            tokens, scores = previous.wait()  # SYNC: the only host wait in a step
            completions = self.scheduler.commit(previous.release(), tokens, scores)
            return self._settled(completions)
        except BaseException as error:
            self._give_up(error)
            raise

    @property
    def asleep(self) -> bool:
        """Whether there is no memory that `sleep` could give back."""
        return self._closed or self.worker.asleep

    @_no_inference_mode
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
        self.scheduler.reset(num_pages=1)
        self.worker.sleep()
        self.stats.sleep_s += time.perf_counter() - began

    @_no_inference_mode
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

    def close(self) -> None:
        """End every row and give the memory back. Closing twice is fine."""
        if not self._closed:
            try:
                self._abort()
                self.worker.sleep()
            finally:
                self._closed = True
                del self.worker, self.slots

    def _settled(self, completions: list[Completion]) -> list[Completion]:
        self.stats.settled(sum(len(completion.token_ids) for completion in completions))
        if not self.busy:
            self.streams.hand_back()
        return completions

    def _give_up(self, error: BaseException) -> None:
        """End every row after a failure, and say of a lack of memory what helps."""
        self._abort()
        if is_out_of_memory(error):
            num_bytes = self.worker.kv_cache.num_bytes
            raise OutOfMemory(
                f"the GPU has no memory left (KV pages take {num_bytes} bytes; "
                f"kv_bytes={self.config.kv_bytes}, kv_fraction={self.config.kv_share}, "
                f"prefill_tokens={self.config.prefill_tokens}, max_rows={self.config.max_rows}); "
                "lower one of them"
            ) from error

    @contextmanager
    def paused(self, *, same_weights: bool = False) -> Iterator[None]:
        """Let the trainer work on the weights between two steps, while rows stay live.

        Args:
            same_weights: The weights will not change. Otherwise a policy version is opened;
                the KV of tokens that live rows already have stays as the old weights made it.

        Example:
            ```python
            engine.step()
            with engine.paused():
                optimizer.step()
            engine.step()
            ```
        """
        self._check_open()
        self.streams.hand_back()
        try:
            yield
        finally:
            self._open_version(same_weights)
            self._prepare()

    def _abort(self) -> None:
        """Forget every row, live or waiting, and wait until the device has, too."""
        try:
            self.slots.drain()
        finally:
            self.scheduler.reset(num_pages=self.worker.kv_cache.num_pages)
            self.streams.hand_back()

    @_no_inference_mode
    def _enqueue(
        self, requests: Sequence[Request], limits: Limits, same_weights: bool
    ) -> list[int]:
        """Queue checked requests; on an idle engine this begins a rollout."""
        try:
            if not self.busy:
                self._open_version(same_weights)
                self.stats = RolloutStats(policy_version=self.policy_version)
            rows = [self.scheduler.add(request) for request in requests]
            self._grow(min(self.scheduler.pages_wanted(), limits.max_pages))
            self._prepare()
            self._plan_once()
        except BaseException as error:
            self._give_up(error)
            raise
        return rows

    @_no_inference_mode
    def _open_version(self, same_weights: bool) -> None:
        """Run behind whatever the trainer has queued, on a new policy version if it may be one."""
        self.streams.take_over()
        try:
            if not same_weights or self.worker.twin.missing_bytes:
                self.worker.refresh()
            self.policy_version += not same_weights
        finally:
            if not self.busy:
                self.streams.hand_back()  # there may be no batch to do it

    def _prepare(self) -> None:
        """Have a graph for whatever the rows at hand can need."""
        began = time.perf_counter()
        self.worker.prepare(*self.scheduler.largest_batch())
        self.stats.warmup_s += time.perf_counter() - began

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

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine was closed; make a new one")

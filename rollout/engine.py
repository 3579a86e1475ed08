"""The loop, and the engine's life: open, step, generate, close.

```
host     plan 0 | plan 1 | settle 0, plan 2 | settle 1, plan 3
h2d          0>       1>                 2>
compute        [ batch 0 ][ batch 1 ][ batch 2 ]
d2h                      <0         <1
```
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn
from tqdm import tqdm

from rollout.config import RolloutConfig
from rollout.errors import (
    EngineBusy,
    EngineClosed,
    OutOfMemory,
    UnsupportedModel,
)
from rollout.exact import make_exact
from rollout.forward import Forward, Lanes
from rollout.fused import lay_together
from rollout.graphs import GraphCache
from rollout.intake import Limits, build_requests
from rollout.kv_cache import KVCache
from rollout.memory import max_kv_bytes
from rollout.pages import TRASH_PAGE, pages_for
from rollout.request import Completion, Request, SamplingParams
from rollout.scheduler import Scheduler
from rollout.slots import SlotPair, Streams
from rollout.support import base_of, check_model, check_placed
from rollout.telemetry import RolloutStats
from rollout.twin import Twin

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
    ) -> None:
        self.config = config or RolloutConfig()
        self.policy_version = 0
        self.stats = RolloutStats()
        check_model(model)
        check_placed(model)
        if self.config.fuse_projections:
            lay_together(base_of(model))
        exact, on_gpu = self.config.exact, next(model.parameters()).device.type == "cuda"
        compiled = self.config.compile_layers
        if compiled is None:
            compiled = on_gpu
        self.twin = Twin(model, autocast_dtype, compiled=compiled, exact=exact)
        self.max_row_tokens = self.config.max_row_tokens or self.twin.max_positions
        max_row_pages = pages_for(self.max_row_tokens, self.config.page_tokens)
        self._device = device = self.twin.device
        max_rows = self.config.max_rows
        self.scheduler = Scheduler(self.config, max_row_pages)
        self.kv_cache = KVCache(self.twin.kv_layout(self.config.page_tokens), device)
        self.streams = Streams(device)
        self.slots = SlotPair(
            self.config.num_slots,
            self.streams,
            max_rows=max_rows,
            max_row_pages=max_row_pages,
            prefill_tokens=self.config.prefill_tokens,
            num_scores=self.config.num_scores,
            device=device,
        )
        lanes = Lanes.empty(max_rows, max_row_pages, device)
        least_rows = make_exact(self.twin) if exact and on_gpu else 1
        forward = Forward(
            self.twin,
            self.kv_cache,
            lanes,
            self.config.num_scores,
            exact=exact,
            least_rows=least_rows,
        )
        self.graphs = GraphCache(forward, self.streams, max_rows, device)
        self._compiled_builds = 0
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
                self.graphs.run(slot)  # compute stream -> slot.computed
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

    def close(self) -> None:
        """End every row and give the memory back. Closing twice is fine."""
        if not self._closed:
            try:
                self._abort()
            finally:
                self._closed = True
                del self.graphs, self.kv_cache, self.slots, self.twin

    def _settled(self, completions: list[Completion]) -> list[Completion]:
        self.stats.settled(sum(len(completion.token_ids) for completion in completions))
        if not self.busy:
            self.streams.hand_back()
        return completions

    def _give_up(self, error: BaseException) -> None:
        """End every row after a failure, and say of a lack of memory what helps."""
        self._abort()
        if _is_out_of_memory(error):
            raise OutOfMemory(
                f"the GPU has no memory left (KV pages take {self.kv_cache.num_bytes} bytes; "
                f"kv_bytes={self.config.kv_bytes}, kv_fraction={self.config.kv_fraction}, "
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
            self._prepare_graphs()

    def _abort(self) -> None:
        """Forget every row, live or waiting, and wait until the device has, too."""
        try:
            self.slots.drain()
        finally:
            self.scheduler.reset(num_pages=self.kv_cache.num_pages)
            self.streams.hand_back()

    @_no_inference_mode
    def _enqueue(
        self, requests: Sequence[Request], limits: Limits, same_weights: bool
    ) -> list[int]:
        """Queue checked requests; on an idle engine this begins a rollout."""
        begins = not self.busy
        if begins:
            self._open_version(same_weights)
            self.stats = RolloutStats(policy_version=self.policy_version)
        rows = [self.scheduler.add(request) for request in requests]
        try:
            self._grow(limits, keep=not begins)
            self._prepare_graphs()
        except BaseException as error:
            self._give_up(error)
            raise
        return rows

    @_no_inference_mode
    def _open_version(self, same_weights: bool) -> None:
        """Run behind whatever the trainer has queued, on a new policy version if it may be one."""
        self.streams.take_over()
        try:
            if not same_weights:
                with self.streams.module.stream(self.streams.compute):
                    self.twin.refresh()
                self._check_unmoved()
                self.policy_version += 1
        finally:
            if not self.busy:
                self.streams.hand_back()  # there may be no batch to do it

    def _prepare_graphs(self) -> None:
        """Have a graph for whatever the rows at hand can need, over memory as it lies now."""
        began = time.perf_counter()
        self._compile()
        num_rows, longest = self.scheduler.largest_batch()
        addresses = (self.kv_cache.address, self.twin.addresses, self.twin.num_builds)
        self.graphs.prepare(num_rows, longest, addresses)
        self.stats.warmup_s += time.perf_counter() - began

    def _compile(self) -> None:
        """Compile the twin's layers before a row is served, or run them as they are."""
        if not self.twin.compiled or self._compiled_builds == self.twin.num_builds:
            return
        try:
            with self.streams.module.stream(self.streams.compute):
                self.graphs.forward.warm_up()
        except Exception as error:  # a compiler fails in many ways
            if _is_out_of_memory(error):
                raise
            self.twin.stop_compiling(error)
        self._compiled_builds = self.twin.num_builds

    def _grow(self, limits: Limits, *, keep: bool) -> None:
        """Have as many KV pages as the rows at hand can need, within the limit."""
        num_pages = min(self.scheduler.pages_wanted(), limits.max_pages)
        if not keep and self.scheduler.knows_prefixes(self.policy_version):
            keep = num_pages + self.kv_cache.num_pages <= limits.max_pages  # both at once
            if not keep and num_pages > self.kv_cache.num_pages:
                self.scheduler.pages.forget_prefixes()
        moved = num_pages > self.kv_cache.num_pages
        with self.streams.module.stream(self.streams.compute):
            if moved and not keep:
                # No entry may go on pointing at a page that is given up.
                self.graphs.forward.lanes.block_table_LP.fill_(TRASH_PAGE)
            self.kv_cache.grow(num_pages, keep=keep)
        self.scheduler.pages.grow(num_pages)

    def _limits(self) -> Limits:
        """What one row may ask for, now that so much memory is free."""
        page_bytes = self.kv_cache.layout.page_bytes
        kv_bytes = max_kv_bytes(self.config, self._device, self.kv_cache.num_bytes)
        max_pages = sys.maxsize if kv_bytes is None else kv_bytes // page_bytes
        return Limits(
            vocab_size=self.twin.vocab_size,
            max_row_tokens=self.max_row_tokens,
            max_pages=max(max_pages, self.kv_cache.num_pages),
            page_bytes=page_bytes,
            config=self.config,
        )

    def _check_unmoved(self) -> None:
        """The engine's buffers were made for the device and dtype that the model had."""
        device, layout = self.twin.device, self.twin.kv_layout(self.config.page_tokens)
        if (device, layout) != (self._device, self.kv_cache.layout):
            raise UnsupportedModel(
                f"the model was moved or cast after the engine was made: {layout.dtype} on "
                f"{device} now, {self.kv_cache.layout.dtype} on {self._device} before; make a new "
                "engine"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine was closed; make a new one")


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether a library of CUDA's means a lack of memory, by whatever class it says so."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "ALLOC_FAILED" in text)
    )

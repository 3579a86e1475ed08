"""The loop: rows in, one batch after another, completions out.

```
host     plan 0 | plan 1 | settle 0, plan 2 | settle 1, plan 3
h2d          0>       1>                 2>
compute        [ batch 0 ][ batch 1 ][ batch 2 ]
d2h                      <0         <1
```
"""

from collections.abc import Collection, Generator, Sequence
from contextlib import closing

from tqdm import tqdm

from rollout.intake import Limits, build_requests
from rollout.life import EngineLife, no_inference_mode
from rollout.request import Batch, Completion, FinishReason, Request
from rollout.sampling_params import SamplingParams
from rollout.slots import IOSlot
from rollout.telemetry import RolloutStats


class RolloutEngine(EngineLife):
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
        bar = tqdm(total=len(prompts), unit="row", disable=not self.config.progress_bar)
        with closing(stream), bar:  # an interrupt can come between two steps
            for completion in stream:
                done[completion.row] = completion
                bar.update()
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
        self._check_running()
        limits = self._limits()
        requests = build_requests([prompt], sampling, [seed], limits)
        return self._enqueue(requests, limits, same_weights)[0]

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
            if batch is not None:
                slot.stage(batch)  # host: fill the pinned buffers
                slot.upload()  # h2d stream -> slot.uploaded
                self.worker.swap.move(batch)  # swap stream: pages to the host and back
                self.worker.graphs.run(slot)  # compute stream -> slot.computed
                slot.download()  # d2h stream -> slot.downloaded
                self._count(batch, slot.staged_bytes)
            if previous.batch is None:
                return []
            tokens, scores = previous.wait()  # SYNC: the only host wait in a step
            self._time(previous)
            completions = self.scheduler.commit(previous.release(), tokens, scores)
            return self._settled(completions)
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
                self._meter.end()
        except BaseException as error:
            self._give_up(error)
            raise

    def _count(self, batch: Batch, num_bytes: int) -> None:
        """Tell telemetry of a batch that was launched."""
        pages, stats = self.scheduler.pages, self.stats
        stats.launched(len(batch.rows), pages.num_used, num_bytes)
        stats.paged(pages.num_shared, pages.num_free)
        stats.prefilled(batch.num_prefilled, batch.num_attended, batch.num_shared)
        page_bytes = self.worker.kv_cache.layout.page_bytes
        stats.preempted(batch.num_preempted, len(batch.offloads) * page_bytes)
        num_padded = self.worker.graphs.padded(len(batch.rows))
        stats.attribution.launched(batch, num_padded, self.scheduler.num_waiting)

    def _time(self, slot: IOSlot) -> None:
        """Tell telemetry when the device ran a batch, which the host has just waited for."""
        assert slot.batch is not None
        prefills = len(slot.batch.segments) > 0
        times, slot.stamps = self._clock.read(slot.stamps, prefills=prefills)
        self.stats.attribution.ran(times)

    def _settled(self, completions: list[Completion]) -> list[Completion]:
        lengths = [len(completion.token_ids) for completion in completions]
        stopped = [c for c in completions if c.finish_reason is FinishReason.STOP]
        self.stats.ended(lengths, len(stopped))
        self.stats.settled(sum(lengths))
        if not self.busy:
            self.streams.hand_back()
            self.stats.device = self._meter.end()
            self.stats.cast(*self.worker.twin.casts.take())
        return completions

    @no_inference_mode
    def _enqueue(
        self, requests: Sequence[Request], limits: Limits, same_weights: bool
    ) -> list[int]:
        """Queue checked requests; on an idle engine this begins a rollout."""
        try:
            if not self.busy:
                self.stats = RolloutStats()
                self._clock.begin()
                self._open_version(same_weights)
                self.stats.policy_version = self.policy_version
                if requests:
                    self._meter.begin()
            rows = self.scheduler.add(requests)
            self._grow(min(self.scheduler.pages_wanted(), limits.max_pages))
            self._prepare()
            self._plan_once()
        except BaseException as error:
            self._give_up(error)
            raise
        return rows

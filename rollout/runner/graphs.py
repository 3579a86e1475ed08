"""Captures the decode step as one CUDA graph per padded size, and replays it.

Both slots share the graphs and their memory pool: the compute stream copies a slot's lanes into the
graphs' input, and tokens out of their output. Input and output lie outside the pool.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count, product, takewhile
from typing import Any, NamedTuple

import torch

from rollout.kernels.paged_attention import SPLIT_TOKENS
from rollout.runner.forward import Forward
from rollout.runner.slots import IOSlot
from rollout.runner.streams import Streams
from rollout.sampling_params import Draw
from rollout.scheduler.batch import Batch, Demand

logger = logging.getLogger(__name__)

_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


class GraphKey(NamedTuple):
    """What is fixed in a graph. Keys sort by size."""

    num_rows: int  # padding included
    max_context: int
    draw: Draw


class GraphCache:
    """Runs batches: prefill eagerly, decode by a graph if one was captured, never on a CPU.

    Attributes:
        num_eager: Decode steps on a GPU that ran without a graph.
        num_captures: Graphs captured so far, dropped graphs included.
        pool_bytes: Memory of the captured graphs.
    """

    def __init__(
        self,
        forward: Forward,
        streams: Streams,
        max_rows: int,
        device: torch.device,
        *,
        enforce_eager: bool = False,
    ) -> None:
        self.forward = forward
        self.num_eager = self.num_captures = 0
        self.pool_bytes = 0
        self._streams = streams
        sizes = (min(size, max_rows) for size in (*_SIZES, max_rows))
        self._sizes = sorted({max(size, forward.least_rows) for size in sizes})
        self._on_gpu = device.type == "cuda"
        self._captures = self._on_gpu and not enforce_eager
        self._signature: Any = None
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._refused: set[GraphKey] = set()
        self._pool: Any = None
        self._anchor: torch.cuda.CUDAGraph | None = None
        trash_lane = forward.lanes.trash_lane
        # ALIAS: graphs read and write these buffers, so they never move
        most = self._sizes[-1]
        self._lanes = torch.full((most,), trash_lane, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        shape = (most, forward.num_scores)
        self._scores = torch.zeros(shape, dtype=torch.float32, device=device)

    @property
    def captured(self) -> list[GraphKey]:
        """Keys of the graphs that are ready to replay."""
        return list(self._graphs)

    def prepare(self, demand: Demand, signature: Any) -> None:
        """Capture every graph that a rollout can need, largest first.

        `signature` holds the addresses that graphs contain. If it changes, all graphs are dropped.
        """
        if not self._captures or demand.num_rows == 0:
            return
        if signature != self._signature:
            if self._graphs:
                logger.info("capturing CUDA graphs again: weights, adapters or KV pages have moved")
            self._graphs.clear()
            self._refused.clear()
            self.pool_bytes = 0
            self._open_pool()
        self._signature = None  # after an interrupt the pool is unusable: drop all
        for key in sorted(self._keys(demand), reverse=True):
            if key not in self._graphs and key not in self._refused:
                self._capture(key)
        self._signature = signature

    @torch.no_grad()
    def run(self, slot: IOSlot) -> None:
        """Queue a slot's batch on the compute stream."""
        batch = slot.batch
        assert batch is not None
        with slot.computing():
            self.forward.lanes.admit(slot)
            if batch.segments:
                self.forward.prefill(slot, batch.segments)
                slot.stamps.prefilled.record(self._streams.compute)
            # ORDER: after the prefill that fills a page or a state, before a row writes to the copy
            self.forward.fork(batch)
            if len(batch.rows):
                self._decode(slot, batch)

    def _decode(self, slot: IOSlot, batch: Batch) -> None:
        num_rows = len(batch.rows)
        key = self._key(num_rows, batch.max_context, batch.draw)
        self._lanes[:num_rows].copy_(slot.lanes.value)
        self._lanes[num_rows : key.num_rows].fill_(self.forward.lanes.trash_lane)
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            if not batch.segments:
                slot.stamps.graph_launched()
        else:
            self.num_eager += self._on_gpu
            self._step(key)
        slot.tokens[:num_rows].copy_(self._tokens[:num_rows])
        slot.scores[:num_rows].copy_(self._scores[:num_rows])

    def _step(self, key: GraphKey) -> None:
        lanes = self._lanes[: key.num_rows]
        tokens, scores = self.forward.decode(lanes, key.max_context, key.draw)
        self._tokens[: key.num_rows].copy_(tokens)
        self._scores[: key.num_rows].copy_(scores)

    @torch.no_grad()
    def _capture(self, key: GraphKey) -> None:
        """Capture one graph. If that fails, its steps run eagerly."""
        graph = torch.cuda.CUDAGraph()
        with self._streams.module.stream(self._streams.compute):
            self._lanes.fill_(self.forward.lanes.trash_lane)
            if self._runs_new_kernels(key):
                self._step(key)  # compiles kernels, which a capture must not do
            try:
                if all(captured.draw != key.draw for captured in self._graphs):
                    with _no_host_waits():
                        self._step(key)  # a host wait in a capture ruins the pool
                reserved = torch.cuda.memory_reserved()
                with _capturing(graph, self._pool):
                    self._step(key)
                self.pool_bytes += torch.cuda.memory_reserved() - reserved
            except RuntimeError as error:
                self._refuse(key, error)
                return
        self._graphs[key] = graph
        self.num_captures += 1

    def _runs_new_kernels(self, key: GraphKey) -> bool:
        """Whether a step may run a kernel that no captured graph runs.

        A kernel is compiled for rows and draw, or for the context; none is compiled for all three.
        """
        rows_and_draws = {(captured.num_rows, captured.draw) for captured in self._graphs}
        contexts = {captured.max_context for captured in self._graphs}
        return (key.num_rows, key.draw) not in rows_and_draws or key.max_context not in contexts

    def _refuse(self, key: GraphKey, error: RuntimeError) -> None:
        if not self._refused:
            text = "decode of %d rows runs eagerly (correct, but slower): graph capture failed: %s"
            logger.warning(text, key.num_rows, error)
        self._refused.add(key)
        self._open_pool()  # a failed capture ruins the pool

    def _open_pool(self) -> None:
        """Start a memory pool with one graph that stays: an emptied pool accepts no new graph."""
        self._pool, self._anchor = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        compute = self._streams.module.stream(self._streams.compute)
        with compute, _capturing(self._anchor, self._pool):
            self._lanes.fill_(self.forward.lanes.trash_lane)

    def padded(self, num_rows: int) -> int:
        """Rows that the device runs if `num_rows` decode."""
        if not (self._on_gpu and num_rows):
            return num_rows
        return next(size for size in self._sizes if size >= num_rows)

    def _key(self, num_rows: int, max_context: int, draw: Draw = Draw.PLAIN) -> GraphKey:
        """The smallest key that fits this many rows of this context."""
        if not self._on_gpu:
            return GraphKey(num_rows, max_context, draw)
        contexts = (context for context in _contexts() if context >= max_context)
        return GraphKey(self.padded(num_rows), next(contexts), draw)

    def _keys(self, demand: Demand) -> list[GraphKey]:
        """Every key that a batch can need."""
        largest = self._key(demand.num_rows, demand.max_context)
        sizes = [size for size in self._sizes if size <= largest.num_rows]
        contexts = takewhile(lambda context: context <= largest.max_context, _contexts())
        return [GraphKey(*key) for key in product(sizes, contexts, demand.draws)]


def _contexts() -> Iterator[int]:
    """Context bounds, each 4x the one before: few graphs, few idle thread blocks."""
    return (SPLIT_TOKENS * 4**power for power in count())


@contextmanager
def _no_host_waits() -> Iterator[None]:
    """Raise an error if the code inside makes the host wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture the work inside. `torch.cuda.graph` would also empty the trainer's block cache."""
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # others may use CUDA
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # the first error says more
            graph.capture_end()
        raise
    graph.capture_end()

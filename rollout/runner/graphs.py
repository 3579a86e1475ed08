"""Captures and replays a decode step per padded size; says why it captured.

One set of graphs and one memory pool serve both slots: a slot's lanes are copied into the graphs'
input on the compute stream, and tokens out of their output, which lies outside the pool.
"""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import count, product, takewhile
from typing import Any

import torch

from rollout.kernels.paged_attention import SPLIT_TOKENS
from rollout.runner.forward import Forward
from rollout.runner.slots import IOSlot
from rollout.runner.streams import Streams
from rollout.sampling_params import Draw
from rollout.scheduler.batch import Batch

logger = logging.getLogger(__name__)

_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


# Padded rows, the bound of the context, and what the draws take.
_Key = tuple[int, int, Draw]


class GraphCache:
    """Runs batches: prefill eagerly, decode by graph where one was captured.

    On a CPU nothing is captured and nothing is padded.

    Args:
        forward: What a step does.
        streams: The engine's streams.
        max_rows: Rows that may decode in one batch.
        device: Where the model lives.

    Attributes:
        num_eager: Decode steps on a GPU that no graph ran.
        num_captures: Graphs captured so far, those included that were dropped since.
        pool_bytes: Memory that captured graphs hold.
    """

    def __init__(
        self, forward: Forward, streams: Streams, max_rows: int, device: torch.device
    ) -> None:
        self.forward = forward
        self.num_eager = self.num_captures = 0
        self.pool_bytes = 0
        self._streams = streams
        sizes = (min(size, max_rows) for size in (*_SIZES, max_rows))
        self._sizes = sorted({max(size, forward.least_rows) for size in sizes})
        self._on_gpu = device.type == "cuda"
        self._signature: Any = None
        self._graphs: dict[_Key, torch.cuda.CUDAGraph] = {}
        self._refused: set[_Key] = set()
        self._pool: Any = None
        self._anchor: torch.cuda.CUDAGraph | None = None
        trash_lane = forward.lanes.trash_lane
        # ALIAS: what the graphs read and write; fixed for their lifetime
        most = self._sizes[-1]
        self._lanes = torch.full((most,), trash_lane, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        shape = (most, forward.num_scores)
        self._scores = torch.zeros(shape, dtype=torch.float32, device=device)

    @property
    def num_captured(self) -> int:
        """Graphs ready to be replayed."""
        return len(self._graphs)

    def prepare(
        self, num_rows: int, max_context: int, draws: Collection[Draw], signature: Any
    ) -> None:
        """Capture what a rollout can need, before it is served, largest first.

        Args:
            num_rows: Most rows that decode together.
            max_context: Longest context.
            draws: What draws of some of them take: a batch does for all its rows what one needs.
            signature: Addresses and settings that the graphs have baked in. Where they have
                changed, what was captured is dropped.
        """
        if not self._on_gpu or num_rows == 0:
            return
        if signature != self._signature:
            if self._graphs:
                logger.info("capturing again: weights, adapters or KV pages have moved")
            self._graphs.clear()
            self._refused.clear()
            self.pool_bytes = 0
            self._open_pool()
        self._signature = None  # an interrupt spoils the pool, and all is captured anew
        for key in sorted(self._keys(num_rows, max_context, draws), reverse=True):
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
            # ORDER: behind the prefill that fills a page, before a row writes to its copy
            self.forward.fork(batch.copies)
            if len(batch.rows):
                self._decode(slot, batch)

    def _decode(self, slot: IOSlot, batch: Batch) -> None:
        num_rows = len(batch.rows)
        size, context, draw = key = self._key(num_rows, batch.max_context, batch.draw)
        self._lanes[:num_rows].copy_(slot.lanes.value)
        self._lanes[num_rows:size].fill_(self.forward.lanes.trash_lane)
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            if not batch.segments:
                slot.stamps.replayed()
        else:
            self.num_eager += self._on_gpu
            self._step(size, context, draw)
        slot.tokens[:num_rows].copy_(self._tokens[:num_rows])
        slot.scores[:num_rows].copy_(self._scores[:num_rows])

    def _step(self, size: int, context: int, draw: Draw) -> None:
        """What is captured."""
        tokens, scores = self.forward.decode(self._lanes[:size], context, draw)
        self._tokens[:size].copy_(tokens)
        self._scores[:size].copy_(scores)

    @torch.no_grad()
    def _capture(self, key: _Key) -> None:
        """Capture one size, or note that it runs eagerly and warn once."""
        graph = torch.cuda.CUDAGraph()
        with self._streams.module.stream(self._streams.compute):
            self._lanes.fill_(self.forward.lanes.trash_lane)
            if self._compiles(*key):
                self._step(*key)  # else a capture would compile
            try:
                if all(draw != key[2] for *_, draw in self._graphs):
                    with _no_host_waits():
                        self._step(*key)  # what waits would spoil the capture and its pool
                reserved = torch.cuda.memory_reserved()
                with _capturing(graph, self._pool):
                    self._step(*key)
                self.pool_bytes += torch.cuda.memory_reserved() - reserved
            except RuntimeError as error:
                self._refuse(key, error)
                return
        self._graphs[key] = graph
        self.num_captures += 1

    def _compiles(self, size: int, context: int, draw: Draw) -> bool:
        """Whether a step may run what was not compiled. What a context takes is so at any size."""
        sized = any((s, d) == (size, draw) for s, _, d in self._graphs)
        return not sized or all(c != context for _, c, _ in self._graphs)

    def _refuse(self, key: _Key, error: RuntimeError) -> None:
        if not self._refused:
            text = "decode of %d rows cannot be captured and runs eagerly, more slowly: %s"
            logger.warning(text, key[0], error)
        self._refused.add(key)
        self._open_pool()

    def _open_pool(self) -> None:
        """Begin a memory pool, and keep it alive by a graph of its own.

        A pool that loses its last graph, or in which a capture has failed, takes no other.
        """
        self._pool, self._anchor = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        compute = self._streams.module.stream(self._streams.compute)
        with compute, _capturing(self._anchor, self._pool):
            self._lanes.fill_(self.forward.lanes.trash_lane)

    def padded(self, num_rows: int) -> int:
        """Rows that the device runs where so many decode."""
        if not (self._on_gpu and num_rows):
            return num_rows
        return next(size for size in self._sizes if size >= num_rows)

    def _key(self, num_rows: int, max_context: int, draw: Draw = Draw.PLAIN) -> _Key:
        """Every whole number that a graph bakes in."""
        if not self._on_gpu:
            return num_rows, max_context, draw
        contexts = (context for context in _contexts() if context >= max_context)
        return self.padded(num_rows), next(contexts), draw

    def _keys(self, num_rows: int, max_context: int, draws: Collection[Draw]) -> list[_Key]:
        """All keys up to a size and a context."""
        largest, longest, _ = self._key(num_rows, max_context)
        sizes = [size for size in self._sizes if size <= largest]
        contexts = takewhile(lambda context: context <= longest, _contexts())
        return list(product(sizes, contexts, draws))


def _contexts() -> Iterator[int]:
    """Bounds of the context, each four times the one before: few graphs, little idle grid."""
    return (SPLIT_TOKENS * 4**power for power in count())


@contextmanager
def _no_host_waits() -> Iterator[None]:
    """Raise where what is inside would let the host wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what is queued inside, in thread-local mode: other threads go on as they like.

    Without `torch.cuda.graph`, which would empty the trainer's block cache at every capture.
    """
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # the first error says more
            graph.capture_end()
        raise
    graph.capture_end()

"""Moves KV pages of preempted rows to pinned host memory and back, while batches run."""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.config import EngineConfig
from rollout.memory.kv_cache import KVCache
from rollout.runner.streams import Streams
from rollout.scheduler.batch import Batch

logger = logging.getLogger(__name__)

_HOST_SHARE = 16  # by default 1/16 of the host's memory
_MOST_BYTES = 1 << 29  # pinned at a time: pinning is slow, and rows wait for it


class Swap:
    """Host pages, and the copies to and from them on the swap stream.

    The scheduler decides which page goes where. A step's copies are queued before its batch.
    """

    def __init__(
        self, config: EngineConfig, kv_cache: KVCache, streams: Streams, device: torch.device
    ) -> None:
        self._kv_cache, self._streams = kv_cache, streams
        self._pinned = device.type == "cuda"
        num_bytes = config.offload_bytes
        if num_bytes is None:
            num_bytes = _host_bytes() // _HOST_SHARE if self._pinned else 0
        page_bytes = kv_cache.layout.page_bytes
        self._sizes = list(chunk_sizes(num_bytes, page_bytes))
        if num_bytes and not self._sizes:
            text = "no KV page (%.0f MiB) fits into offload_bytes=%d: preempted rows are recomputed"
            logger.warning(text, page_bytes / 2**20, num_bytes)
        self._ends = list(accumulate(self._sizes))
        self._chunks: list[Tensor] = []
        self._leaving: dict[int, Any] = {}  # page -> event after the copy that reads it
        self._restored: Any = None

    @property
    def num_host_pages(self) -> int:
        """Most host pages that can be allocated."""
        return sum(self._sizes)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory allocated so far."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def move(self, batch: Batch) -> None:
        """Queue a batch's copies, and make the batch wait for the copies it depends on."""
        compute = self._streams.compute
        if self._restored is not None:
            # ORDER: rows whose pages came back during the batch before run in this batch
            compute.wait_event(self._restored)
            self._restored = None
        if len(batch.offloads) or len(batch.restores):
            self._copy(batch)
        if self._leaving:
            for page in batch.new_pages[:, 2]:
                event = self._leaving.pop(int(page), None)
                if event is not None:
                    # ORDER: the page's next row must not write before the copy has read the page
                    compute.wait_event(event)

    def join(self) -> None:
        """Make the compute stream wait for all copies so far: pages are about to move."""
        self._streams.compute.wait_event(self._streams.swap.record_event())

    @torch.no_grad()
    def _copy(self, batch: Batch) -> None:
        swap = self._streams.swap
        # ORDER: the last launched batch still writes to the pages that leave. Its overruns write to
        # pages that now belong to a restored row.
        swap.wait_event(self._streams.compute.record_event())
        with self._streams.module.stream(swap):
            for page, host_page in batch.offloads:
                data = self._kv_cache.page(int(page))
                self._host_page(host_page).copy_(data, non_blocking=True)
                self._leaving[int(page)] = swap.record_event()
            for host_page, page in batch.restores:
                data = self._kv_cache.page(int(page))
                data.copy_(self._host_page(host_page), non_blocking=True)
            if len(batch.restores):
                self._restored = swap.record_event()

    def _host_page(self, index: int) -> Tensor:
        """A host page. Its chunk is allocated on first use."""
        chunk = next(chunk for chunk, end in enumerate(self._ends) if index < end)
        layout = self._kv_cache.layout
        while len(self._chunks) <= chunk:
            shape = (self._sizes[len(self._chunks)], *layout.page_shape)
            self._chunks.append(torch.empty(shape, dtype=layout.dtype, pin_memory=self._pinned))
        return self._chunks[chunk][index - self._ends[chunk] + self._sizes[chunk]]


def chunk_sizes(num_bytes: int, page_bytes: int) -> Iterator[int]:
    """Pages per chunk. A chunk is 2**n bytes: torch rounds pinned memory up to that."""
    most = max(_MOST_BYTES, 1 << (page_bytes - 1).bit_length())
    while num_bytes >= page_bytes:
        chunk_bytes = 1 << (min(num_bytes, most).bit_length() - 1)
        if chunk_bytes < page_bytes:
            return
        yield chunk_bytes // page_bytes
        num_bytes -= chunk_bytes


def _host_bytes() -> int:
    """Memory of the host, or the limit of its container if that is less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError):  # no such file, or "max"
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    return min(limits)

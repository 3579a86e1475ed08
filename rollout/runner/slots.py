"""Buffers and events of a batch: host and device exchange data only here.

The docstring of `rollout.engine` has the timeline. On a CPU every call below is synchronous.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.request import Floats, Ints
from rollout.runner.streams import Streams
from rollout.scheduler.batch import ADMITTED_ROW, Batch, Segment
from rollout.telemetry.device_time import Stamps


class Staged:
    """One array that is uploaded: a pinned host buffer and a device buffer of `shape`."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self._device = torch.zeros(shape, dtype=dtype, device=device)
        # ALIAS: NumPy writes into the pinned tensor
        self._array: NDArray[Any] = self._host.numpy()
        self.length = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the device buffer."""
        return self._device.nbytes

    @property
    def staged_bytes(self) -> int:
        """Bytes to upload."""
        return self._array[: self.length].nbytes

    def stage(self, values: Any) -> None:
        """Copy `values` into the host buffer. They may be shorter than the buffer."""
        self.length = len(values)
        if self.length:
            self._array[: self.length] = values

    def upload(self) -> None:
        """Queue the copy on the current stream."""
        if self.length:
            staged = self._host[: self.length]
            self._device[: self.length].copy_(staged, non_blocking=True)

    @property
    def value(self) -> Tensor:
        """The staged values, on the device."""
        return self._device[: self.length]


class StagedRecords(Staged):
    """Records of aligned fields, uploaded in one copy. `dtype` has a multiple of 8 bytes."""

    def __init__(self, num_records: int, dtype: np.dtype[np.void], device: torch.device) -> None:
        super().__init__((num_records, dtype.itemsize), torch.uint8, device)
        self._array = self._array.view(dtype)[:, 0]
        # ALIAS: the fields are views of the device buffer
        fields: Mapping[str, Any] = dtype.fields or {}
        self._fields = {name: self._view(*place[:2]) for name, place in fields.items()}

    def _view(self, dtype: np.dtype[Any], offset: int) -> Tensor:
        field_bytes = self._device[:, offset : offset + dtype.itemsize]
        values = field_bytes.view(getattr(torch, dtype.base.name))
        return values if dtype.shape else values[:, 0]

    def field(self, name: str) -> Tensor:
        """One field of the staged records, on the device: `(records,)` or `(records, values)`."""
        return self._fields[name][: self.length]


class StagedOnce:
    """One int64 array of any length that few batches have. Each upload allocates its buffers."""

    num_bytes = 0  # between batches

    def __init__(self, device: torch.device) -> None:
        self._there = device
        self._host = self._device = torch.zeros(0, dtype=torch.int64)

    @property
    def length(self) -> int:
        """Length of the staged array."""
        return len(self._host)

    @property
    def staged_bytes(self) -> int:
        """Bytes to upload."""
        return self._host.nbytes

    def stage(self, parts: Sequence[Ints]) -> None:
        """Concatenate `parts` in a new host buffer."""
        # ORDER: the slot's last buffers are freed only here, after that batch has settled
        self._host = self._device = torch.zeros(0, dtype=torch.int64)
        if parts:
            self._host = torch.from_numpy(np.concatenate(parts))
            if self._there.type == "cuda":
                self._host = self._host.pin_memory()

    def upload(self) -> None:
        """Queue the copy on the current stream, into new memory of that stream."""
        if self.length:
            self._device = self._host.to(self._there, non_blocking=True)

    @property
    def value(self) -> Tensor:
        """The staged values, on the device."""
        return self._device


class IOSlot:
    """Buffers and events of one batch, from upload to download."""

    def __init__(
        self,
        streams: Streams,
        *,
        max_rows: int,
        max_row_pages: int,
        prefill_tokens: int,
        num_scores: int,
        device: torch.device,
    ) -> None:
        def ints(*shape: int) -> Staged:
            return Staged(shape, torch.int64, device)

        self.batch: Batch | None = None
        self.lanes = ints(max_rows)
        self.new_pages = ints(max_rows * max_row_pages, 3)
        self.admitted = StagedRecords(max_rows, ADMITTED_ROW, device)
        self.flags = StagedOnce(device)
        self.prefill = ints(prefill_tokens, 3)
        self.runs = ints(max_rows, 4)
        staged = self.lanes, self.new_pages, self.admitted, self.flags, self.prefill, self.runs
        self._staged = staged
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.scores = torch.zeros((max_rows, num_scores), dtype=torch.float32, device=device)
        pinned = device.type == "cuda"
        self._host_tokens = torch.zeros_like(self.tokens, device="cpu", pin_memory=pinned)
        self._host_scores = torch.zeros_like(self.scores, device="cpu", pin_memory=pinned)
        # ALIAS: NumPy reads the pinned tensors
        self._read: tuple[Ints, Floats] = self._host_tokens.numpy(), self._host_scores.numpy()
        self._streams = streams
        events = (streams.module.Event() for _ in range(3))
        self.uploaded, self.computed, self.downloaded = events
        # Two sets in turn: a batch's stamps are read until the next batch has settled.
        self._stamps = cycle([Stamps(device), Stamps(device)])
        self.stamps = next(self._stamps)

    def stage(self, batch: Batch) -> None:
        """Fill the host buffers. The slot must have settled, so that no copy still reads them."""
        self.batch, self.stamps = batch, next(self._stamps)
        self.lanes.stage(batch.lanes)
        self.new_pages.stage(batch.new_pages)
        self.admitted.stage(batch.admitted)
        self.flags.stage(batch.flags)
        self._stage_prefill(batch.segments)

    def _stage_prefill(self, segments: Sequence[Segment]) -> None:
        self.runs.length = self.prefill.length = 0
        if not segments:
            return
        counts = np.array([len(segment.tokens) for segment in segments], np.int64)
        lanes = np.array([segment.lane for segment in segments], np.int64)
        firsts = np.array([segment.start for segment in segments], np.int64)
        starts = counts.cumsum() - counts
        self.runs.stage(np.stack([lanes, starts, counts, firsts], axis=1))
        positions = np.arange(counts.sum()) + (firsts - starts).repeat(counts)
        tokens = np.concatenate([segment.tokens for segment in segments])
        self.prefill.stage(np.stack([lanes.repeat(counts), positions, tokens], axis=1))

    @property
    def num_bytes(self) -> int:
        """Bytes of the device buffers."""
        results = self.tokens.nbytes + self.scores.nbytes
        return results + sum(staged.num_bytes for staged in self._staged)

    @property
    def staged_bytes(self) -> int:
        """Bytes that this batch uploads."""
        return sum(staged.staged_bytes for staged in self._staged)

    def upload(self) -> None:
        """Queue the uploads on the H2D stream."""
        with self._streams.module.stream(self._streams.h2d):
            self.stamps.uploading.record(self._streams.h2d)
            for staged in self._staged:
                staged.upload()
            self.stamps.uploaded.record(self._streams.h2d)
            self.uploaded.record(self._streams.h2d)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Queue the work inside on the compute stream, after this slot's upload."""
        with self._streams.module.stream(self._streams.compute):
            self.stamps.launching(self._streams.compute)
            # ORDER: the batch's first kernel reads the uploaded buffers
            self.uploaded.wait(self._streams.compute)
            self.stamps.started.record(self._streams.compute)
            yield
            self.stamps.ended.record(self._streams.compute)
            self.computed.record(self._streams.compute)

    def download(self) -> None:
        """Queue the copies of tokens and scores on the D2H stream."""
        assert self.batch is not None
        count = len(self.batch.lanes)
        with self._streams.module.stream(self._streams.d2h):
            # ORDER: the download reads what the batch's last kernel writes
            self.computed.wait(self._streams.d2h)
            self._host_tokens[:count].copy_(self.tokens[:count], non_blocking=True)
            self._host_scores[:count].copy_(self.scores[:count], non_blocking=True)
            self.stamps.downloaded.record(self._streams.d2h)
            self.downloaded.record(self._streams.d2h)

    def wait(self) -> tuple[Ints, Floats]:
        """Wait for this slot's tokens, `(rows,)`, and their scores, `(rows, num_scores)`.

        The arrays belong to the slot and are valid until it is staged again.
        """
        assert self.batch is not None
        count = len(self.batch.lanes)
        self.downloaded.synchronize()  # SYNC: the only host wait in a step
        self.stamps.arrived_s = time.perf_counter()
        tokens, scores = self._read
        return tokens[:count], scores[:count]

    def release(self) -> Batch:
        """Empty the slot and return its batch."""
        batch, self.batch = self.batch, None
        assert batch is not None
        return batch


class SlotPair:
    """Two slots used in turn, or one in the synchronous mode. `sizes` goes to each `IOSlot`."""

    def __init__(self, num_slots: int, streams: Streams, **sizes: Any) -> None:
        self._streams = streams
        self.slots = [IOSlot(streams, **sizes) for _ in range(num_slots)]
        self._turn = 0

    @property
    def in_flight(self) -> bool:
        """Whether a launched batch has not been settled yet."""
        return any(slot.batch is not None for slot in self.slots)

    def flip(self) -> tuple[IOSlot, IOSlot]:
        """The slot to launch now, and the slot to settle after that."""
        self._turn = (self._turn + 1) % len(self.slots)
        return self.slots[self._turn], self.slots[self._turn - 1]

    def drain(self) -> None:
        """Wait for the batches in flight, and drop them."""
        self._streams.wait()
        for slot in self.slots:
            slot.batch = None

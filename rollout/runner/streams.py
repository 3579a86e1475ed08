"""The engine's streams, and their order against the trainer's stream."""

from functools import cache
from typing import Any

import torch


@cache
def _streams(device: torch.device) -> list[Any]:
    """Streams that all engines on a device share: cuBLAS keeps a workspace per stream."""
    # The model may be on another device than the current one.
    where = [device] if device.type == "cuda" else []
    new_stream = torch.get_device_module(device).Stream
    return [new_stream(*where) for _ in range(4)]


class Streams:
    """Batches use `h2d`, `compute` and `d2h`. Pages to and from the host use `swap`."""

    def __init__(self, device: torch.device) -> None:
        self.module: Any = torch.get_device_module(device)
        self._all = _streams(device)
        self.h2d, self.compute, self.d2h, self.swap = self._all
        self._device = device

    def take_over(self) -> None:
        """Make the engine's streams wait for all work that the trainer has queued so far."""
        event = self.module.current_stream(self._device).record_event()
        for stream in self._all:
            # ORDER: batch 0 reads weights that an optimizer step may still write, and buffers
            # that the trainer's stream zeroes
            stream.wait_event(event)

    def hand_back(self) -> None:
        """Make the trainer's stream wait for the engine's last batch."""
        # ORDER: pages may be released after the last batch; no copy may still read them then
        self.compute.wait_event(self.swap.record_event())
        # ORDER: an optimizer step must not write weights that the last batch still reads
        self.module.current_stream(self._device).wait_event(self.compute.record_event())

    def wait_for_all(self) -> None:
        """Wait for all streams and the trainer's stream, where a new engine casts weights."""
        self.take_over()
        self.wait()

    def wait(self) -> None:
        """Wait until all streams are empty."""
        for stream in self._all:
            event = self.module.Event()
            event.record(stream)
            event.synchronize()  # SYNC: before memory is reused or given back

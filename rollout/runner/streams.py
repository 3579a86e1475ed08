"""The engine's streams on a device, and the hand-over with the trainer's."""

from functools import cache
from typing import Any

import torch


@cache
def _streams(device: torch.device) -> list[Any]:
    """Streams of a device, for every engine: cuBLAS keeps a workspace for each that it has met."""
    # The model's device need not be the current one.
    where = [device] if device.type == "cuda" else []
    new_stream = torch.get_device_module(device).Stream
    return [new_stream(*where) for _ in range(4)]


class Streams:
    """The engine's streams, and the hand-over with the trainer's.

    Batches travel on `h2d`, `compute` and `d2h`, pages to and from host memory on `swap`.

    Args:
        device: Where the model lives.
    """

    def __init__(self, device: torch.device) -> None:
        self.module: Any = torch.get_device_module(device)
        self._all = _streams(device)
        self.h2d, self.compute, self.d2h, self.swap = self._all
        self._device = device

    def take_over(self) -> None:
        """Let the engine's work follow whatever the trainer has queued so far."""
        event = self.module.current_stream(self._device).record_event()
        for stream in self._all:
            # ORDER: batch 0 reads weights that an optimizer step may still be writing, and
            # buffers that were filled with zeros on the trainer's stream
            stream.wait_event(event)

    def hand_back(self) -> None:
        """Let whatever the trainer queues from now on follow the engine's last batch."""
        # ORDER: pages may be given up behind the last batch, and no copy must read them then
        self.compute.wait_event(self.swap.record_event())
        # ORDER: an optimizer step must not write weights that the last batch still reads
        self.module.current_stream(self._device).wait_event(self.compute.record_event())

    def wait_for_all(self) -> None:
        """Wait until all streams are empty, and what the trainer has queued so far is done.

        Weights are cast for the first time on the trainer's stream, when an engine is made.
        """
        self.take_over()
        self.wait()

    def wait(self) -> None:
        """Wait until all streams are empty."""
        for stream in self._all:
            event = self.module.Event()
            event.record(stream)
            event.synchronize()  # SYNC: before memory is reused or given back

"""Arrays on their way to the device: a pinned host buffer beside one on the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.request import Ints


class Staged:
    """One array that travels to the device: a pinned host buffer and one on the device.

    Args:
        shape: Longest array that may be staged.
        dtype: Of both buffers.
        device: Where it travels to.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self._device = torch.zeros(shape, dtype=dtype, device=device)
        # ALIAS: NumPy writes into the pinned tensor
        self._array: NDArray[Any] = self._host.numpy()
        self.length = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer on the device."""
        return self._device.nbytes

    @property
    def staged_bytes(self) -> int:
        """Bytes that were staged."""
        return self._array[: self.length].nbytes

    def stage(self, values: Any) -> None:
        """Copy `values`, of any length up to the buffer's, into the host buffer."""
        self.length = len(values)
        if self.length:
            self._array[: self.length] = values

    def upload(self) -> None:
        """Queue the copy of what was staged on the current stream."""
        if self.length:
            staged = self._host[: self.length]
            self._device[: self.length].copy_(staged, non_blocking=True)

    @property
    def value(self) -> Tensor:
        """What was staged, on the device."""
        return self._device[: self.length]


class StagedOnce:
    """One array of any length that few batches have: it travels through memory of its own.

    Args:
        device: Where it travels to.
    """

    num_bytes = 0  # between batches

    def __init__(self, device: torch.device) -> None:
        self._there = device
        self._host = self._device = torch.zeros(0, dtype=torch.int64)

    @property
    def length(self) -> int:
        """Rows of what was staged."""
        return len(self._host)

    @property
    def staged_bytes(self) -> int:
        """Bytes that were staged."""
        return self._host.nbytes

    def stage(self, parts: Sequence[Ints]) -> None:
        """Join `parts` in a new host buffer, if there are any."""
        # ORDER: what the batch before was given is let go only here: that batch has been settled
        self._host = self._device = torch.zeros(0, dtype=torch.int64)
        if parts:
            self._host = torch.from_numpy(np.concatenate(parts))
            if self._there.type == "cuda":
                self._host = self._host.pin_memory()

    def upload(self) -> None:
        """Queue the copy of what was staged on the current stream, into memory of that stream."""
        if self.length:
            self._device = self._host.to(self._there, non_blocking=True)

    @property
    def value(self) -> Tensor:
        """What was staged, on the device."""
        return self._device

"""Arenas: memory that a rollout allocates and releases to the trainer afterwards.

On a GPU an arena is a range of addresses that never moves. Only the memory behind it comes and
goes, so captured CUDA graphs stay valid. On a CPU an arena is a plain tensor.
"""

import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rollout.config import EngineConfig
from rollout.memory.plan import kv_limit
from rollout.memory.virtual_memory import AddressRange, why_no_virtual_memory

logger = logging.getLogger(__name__)


class GrowthCost(NamedTuple):
    """Cost of an arena's growth."""

    released_bytes: int = 0  # that torch's cache gave back to make room
    seconds: float = 0.0


class Arena(ABC):
    """A block of bytes that grows and can be released."""

    def __init__(self) -> None:
        self._cost = GrowthCost()

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that are allocated now."""

    @property
    @abstractmethod
    def data(self) -> Tensor:
        """All bytes, uint8, `(num_bytes,)`. A view may be used whenever its bytes are allocated."""

    @property
    @abstractmethod
    def address(self) -> int:
        """Address of the first byte. Captured graphs contain it."""

    def grow(self, num_bytes: int) -> None:
        """Allocate at least `num_bytes` in total. Old bytes keep their values.

        Raises:
            torch.OutOfMemoryError: Nothing has changed then.
        """
        if num_bytes > self.num_bytes:
            began = time.perf_counter()
            released = self._grow(num_bytes)
            before, seconds = self._cost
            self._cost = GrowthCost(before + released, seconds + time.perf_counter() - began)

    def take_costs(self) -> GrowthCost:
        """Return the cost of growth since the last call, and reset it."""
        cost, self._cost = self._cost, GrowthCost()
        return cost

    @abstractmethod
    def _grow(self, num_bytes: int) -> int:
        """Grow to `num_bytes`. Return the bytes that torch's cache gave back."""

    @abstractmethod
    def release(self) -> None:
        """Release all bytes, once the engine's streams no longer use them."""


class PlainArena(Arena):
    """A tensor that moves when it grows. For CPUs, and GPUs without virtual memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        # Resized in place, so that views survive a release, as in a `MappedArena`.
        self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated now."""
        return self._storage.nbytes()

    @property
    def address(self) -> int:
        """Address of the first byte, until the arena grows or is released."""
        return self._storage.data_ptr()

    @property
    def data(self) -> Tensor:
        """All bytes."""
        empty = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
        return empty.set_(self._storage, 0, (self.num_bytes,), (1,))

    def _grow(self, num_bytes: int) -> int:
        self._storage.resize_(num_bytes)  # copies: old and new bytes coexist for a moment
        return 0  # torch empties its cache by itself

    def release(self) -> None:
        """Release all bytes."""
        self._storage.resize_(0)


class MappedArena(Arena):
    """A fixed range of GPU addresses. Memory backs the first `num_bytes` of them.

    `wait` must return only when all work that the engine has launched is done.
    """

    def __init__(self, device: torch.device, wait: Callable[[], None]) -> None:
        super().__init__()
        capacity = torch.cuda.get_device_properties(device).total_memory
        self._range = AddressRange(capacity, device)
        self._device = device
        self._wait = wait
        self._all: Tensor | None = None
        closing = weakref.finalize(self, _close, self._range, wait)
        closing.atexit = False  # the driver frees the memory when the process ends

    @property
    def num_bytes(self) -> int:
        """Bytes that are backed by memory now."""
        return self._range.num_bytes

    @property
    def address(self) -> int:
        """Address of the first byte, which never changes."""
        return self._range.address

    @property
    def data(self) -> Tensor:
        """All bytes that are backed by memory."""
        if self._all is None:
            if self.num_bytes == 0:
                return torch.zeros(0, dtype=torch.uint8, device=self._device)
            # Only now: torch asks the driver for the address's device, so it must be mapped.
            self._all = _tensor_at(self.address, self._range.limit, self._device)
        return self._all[: self.num_bytes]

    def _grow(self, num_bytes: int) -> int:
        released = make_room(num_bytes - self.num_bytes, self._device)
        self._range.extend(num_bytes)
        return released

    def release(self) -> None:
        """Unmap all bytes; the addresses stay reserved."""
        if self.num_bytes:
            # ORDER: a batch in flight still reads and writes these bytes
            self._wait()
            self._range.cut()


def _close(addresses: AddressRange, wait: Callable[[], None]) -> None:
    """Release the memory and addresses of a garbage-collected arena."""
    try:
        wait()
    except RuntimeError:
        return  # after a device error nothing can be freed before the process ends
    addresses.close()


def open_arena(device: torch.device, wait: Callable[[], None]) -> Arena:
    """Open a `MappedArena` if the GPU has virtual memory, else a `PlainArena`."""
    if device.type != "cuda":
        return PlainArena(device)
    if reason := why_no_virtual_memory(device):
        _warn_once(reason)
        return PlainArena(device)
    return MappedArena(device, wait)


@cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "no virtual memory on this GPU (%s). Rollouts work but start more slowly: CUDA graphs are "
        "captured again each time KV pages grow, and after each sleep",
        reason,
    )


class _CudaArray:
    """Lets `torch.as_tensor` wrap GPU memory of another library without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    # ALIAS: a view of addresses; it lives longer than the memory mapped behind them
    return torch.as_tensor(_CudaArray(address, num_bytes), device=device)


def make_room(num_bytes: int, device: torch.device) -> int:
    """Empty torch's cache on a GPU unless `num_bytes` are free. Return the bytes that it released.

    A training step leaves most of the memory in that cache, where the driver cannot take it.
    """
    free, _ = torch.cuda.mem_get_info(device)
    if num_bytes <= free:
        return 0
    # Only if needed: afterwards the trainer has to allocate its blocks from the driver again.
    torch.cuda.empty_cache()  # noqa: TID251 -- the only way  # SYNC: torch waits before it frees
    return max(0, torch.cuda.mem_get_info(device)[0] - free)


def max_kv_bytes(config: EngineConfig, device: torch.device, extra_bytes: int) -> int | None:
    """Most bytes for KV pages on `device` now; `None`: no limit. See `kv_limit`.

    `extra_bytes` counts as free: the present pages, less what a rollout has yet to allocate.
    """
    free = None if device.type != "cuda" else available_bytes(device) + extra_bytes
    return kv_limit(config, free)


def available_bytes(device: torch.device) -> int:
    """Bytes of a GPU that are free, or that torch caches and can release."""
    free, _ = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    in_use = ("allocated_bytes.all.current", "inactive_split_bytes.all.current")
    cached = stats["reserved_bytes.all.current"] - sum(stats[name] for name in in_use)
    return free + max(0, cached)

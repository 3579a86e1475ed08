"""Memory that is taken and given back: arenas, and what torch caches beside them.

On a GPU an arena is a range of addresses that stay, while the memory behind them comes and goes: a
graph captured over it can be replayed after it has grown, and after it was gone for a while. On a
CPU a plain tensor plays the arena.
"""

import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from rollout.config import EngineConfig
from rollout.memory.plan import kv_limit
from rollout.memory.virtual_memory import AddressRange, why_no_virtual_memory

logger = logging.getLogger(__name__)


class Arena(ABC):
    """Bytes that grow in number and can be given back."""

    def __init__(self) -> None:
        self._costs = (0, 0.0)

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that there are now."""

    @property
    @abstractmethod
    def data(self) -> Tensor:
        """All of them, uint8, `(num_bytes,)`; a view is good again when they are there again."""

    @property
    @abstractmethod
    def address(self) -> int:
        """Where they lie: what a captured graph relies on."""

    def grow(self, num_bytes: int) -> None:
        """Have at least `num_bytes`; those that there are keep their content, new ones hold any.

        Raises:
            torch.OutOfMemoryError: There is not so much memory. Nothing has changed then.
        """
        if num_bytes > self.num_bytes:
            began = time.perf_counter()
            released = self._grow(num_bytes)
            before, seconds = self._costs
            self._costs = before + released, seconds + time.perf_counter() - began

    def take_costs(self) -> tuple[int, float]:
        """What growing has cost since last asked: bytes that torch gave back, and seconds."""
        costs, self._costs = self._costs, (0, 0.0)
        return costs

    @abstractmethod
    def _grow(self, num_bytes: int) -> int:
        """Have `num_bytes`, more than now; returns the bytes that torch gave back for it."""

    @abstractmethod
    def release(self) -> None:
        """Give all of them back, once the engine's streams have done with them."""


class PlainArena(Arena):
    """Memory of torch's that moves when it grows: on a CPU, and on a GPU without virtual memory.

    Args:
        device: Where it lives.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        # Resized in place, so that views outlast a release, as they do where addresses stay.
        self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()

    @property
    def num_bytes(self) -> int:
        """Bytes that there are now."""
        return self._storage.nbytes()

    @property
    def address(self) -> int:
        """Where they lie until they grow or are released."""
        return self._storage.data_ptr()

    @property
    def data(self) -> Tensor:
        """All of them."""
        empty = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
        return empty.set_(self._storage, 0, (self.num_bytes,), (1,))

    def _grow(self, num_bytes: int) -> int:
        self._storage.resize_(num_bytes)  # for a moment the old bytes are there as well
        return 0  # torch makes room by itself

    def release(self) -> None:
        """Give all of them back."""
        self._storage.resize_(0)


class MappedArena(Arena):
    """Addresses on a GPU that stay, whatever memory is behind them.

    Args:
        device: The GPU.
        wait: Waits until nothing that the engine has launched is running.
    """

    def __init__(self, device: torch.device, wait: Callable[[], None]) -> None:
        super().__init__()
        total = torch.cuda.get_device_properties(device).total_memory
        self._range = AddressRange(total, device)
        self._device = device
        self._wait = wait
        self._all: Tensor | None = None
        closing = weakref.finalize(self, _let_go, self._range, wait)
        closing.atexit = False  # a process that ends has nothing to give back

    @property
    def num_bytes(self) -> int:
        """Bytes that are backed by memory now."""
        return self._range.num_bytes

    @property
    def address(self) -> int:
        """Where they lie, for good."""
        return self._range.address

    @property
    def data(self) -> Tensor:
        """All bytes that are backed by memory."""
        if self._all is None:
            if self.num_bytes == 0:
                return torch.zeros(0, dtype=torch.uint8, device=self._device)
            # Only now: torch asks the driver whose address it is, which is known once it is mapped.
            self._all = _tensor_at(self.address, self._range.limit, self._device)
        return self._all[: self.num_bytes]

    def _grow(self, num_bytes: int) -> int:
        released = make_room(num_bytes - self.num_bytes, self._device)
        self._range.extend(num_bytes)
        return released

    def release(self) -> None:
        """Unmap all of it; the addresses stay."""
        if self.num_bytes:
            # ORDER: a batch in flight reads and writes it
            self._wait()
            self._range.cut()


def _let_go(addresses: AddressRange, wait: Callable[[], None]) -> None:
    """Give back what an arena that nobody holds any more has mapped."""
    try:
        wait()
    except RuntimeError:
        return  # the device has failed, and gives nothing back before the process ends
    addresses.close()


def open_arena(device: torch.device, wait: Callable[[], None]) -> Arena:
    """An arena on `device`, of the best kind that there is.

    Args:
        device: Where it lives.
        wait: Waits until nothing that the engine has launched is running.
    """
    if device.type != "cuda":
        return PlainArena(device)
    if reason := why_no_virtual_memory(device):
        _announce(reason)
        return PlainArena(device)
    return MappedArena(device, wait)


@cache
def _announce(reason: str) -> None:
    """Say once why there is no virtual memory, and what follows."""
    logger.warning(
        "no virtual memory (%s): KV pages move when they grow and after each sleep, so that graphs "
        "are captured again",
        reason,
    )


class _CudaArray:
    """What torch takes for a tensor of another library."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    # ALIAS: a view of the range, which outlives what is mapped behind it
    return torch.as_tensor(_CudaArray(address, num_bytes), device=device)


def make_room(num_bytes: int, device: torch.device) -> int:
    """Let torch give back the blocks that it caches, if `num_bytes` are not free otherwise.

    The trainer's step leaves most of the memory in that cache, where no driver finds it.

    Args:
        num_bytes: Bytes that are about to be mapped.
        device: A GPU.

    Returns:
        Bytes given back.
    """
    free, _ = torch.cuda.mem_get_info(device)
    if num_bytes <= free:
        return 0
    # Only if it must be: the trainer then has to ask the driver for its blocks again.
    torch.cuda.empty_cache()  # noqa: TID251 -- no other call gives them back  # SYNC: torch does
    return max(0, torch.cuda.mem_get_info(device)[0] - free)


def max_kv_bytes(config: EngineConfig, device: torch.device, besides: int) -> int | None:
    """Bytes that KV pages may take on `device` now.

    Args:
        config: Knobs; see `kv_limit`.
        device: Where the pages live.
        besides: Bytes that they have beside free ones: held already, less promised to others.

    Returns:
        Bytes, or `None` for no limit.
    """
    free = None if device.type != "cuda" else available_bytes(device) + besides
    return kv_limit(config, free)


def available_bytes(device: torch.device) -> int:
    """Bytes of a GPU that are free, or that torch caches and could give back."""
    free, _ = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    held = ("allocated_bytes.all.current", "inactive_split_bytes.all.current")
    cached = stats["reserved_bytes.all.current"] - sum(stats[name] for name in held)
    return free + max(0, cached)

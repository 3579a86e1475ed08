"""A GPU's virtual memory: reserve addresses once, map memory behind them on demand."""

from functools import cache
from typing import Any

import torch

_CHUNK_BYTES = 2**28  # per call; the last chunk of a growth may be smaller


def bindings() -> Any:
    """Import the CUDA driver's functions. Raises ImportError without `cuda-bindings`."""
    from cuda.bindings import driver

    return driver


@cache
def why_no_virtual_memory(device: torch.device) -> str:
    """Why a GPU cannot map memory; empty if it can. `device` must have an index."""
    try:
        cuda = bindings()
    except ImportError as error:
        return f"{error}; pip install cuda-bindings"
    try:
        _call(cuda, "cuInit", 0)
        attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        supported = _call(cuda, "cuDeviceGetAttribute", attribute, device.index)
    except RuntimeError as error:
        return str(error)
    return "" if supported else "the GPU or its driver has no virtual memory management"


class AddressRange:
    """Reserved addresses on one GPU. Memory backs the first `num_bytes` of them.

    Args:
        limit: Bytes to reserve, rounded up. Memory can never back more.
        device: A CUDA device with an index, on which something has been allocated.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self._cuda = cuda = bindings()
        self._properties = cuda.CUmemAllocationProp()
        self._properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device.index
        self._access = cuda.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        flags = cuda.CUmemAllocationGranularity_flags
        option = flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        granularity = self._call("cuMemGetAllocationGranularity", self._properties, option)
        self._granularity = int(granularity)
        self.limit = self._round_up(limit)
        self.num_bytes = 0
        self.address = int(self._call("cuMemAddressReserve", self.limit, 0, 0, 0))

    def extend(self, num_bytes: int) -> None:
        """Map memory behind at least the first `num_bytes` bytes. Bytes mapped before keep values.

        Raises:
            torch.OutOfMemoryError: Nothing has changed then.
        """
        before, wanted = self.num_bytes, self._round_up(num_bytes)
        if wanted > self.limit:
            raise torch.OutOfMemoryError(f"out of memory: {wanted} bytes > {self.limit} reserved")
        try:
            while self.num_bytes < wanted:
                self._map(min(_CHUNK_BYTES, wanted - self.num_bytes))
            if wanted > before:
                new = (self.address + before, wanted - before)
                self._call("cuMemSetAccess", *new, [self._access], 1)
        except BaseException:
            self.cut(before)
            raise

    def cut(self, num_bytes: int = 0) -> None:
        """Release the memory behind all but the first `num_bytes` bytes. The addresses stay.

        No kernel may still use that memory. `num_bytes` is 0 or an earlier `self.num_bytes`.
        """
        if num_bytes < self.num_bytes:
            self._call("cuMemUnmap", self.address + num_bytes, self.num_bytes - num_bytes)
            self.num_bytes = num_bytes

    def close(self) -> None:
        """Release memory and addresses."""
        self.cut()
        self._call("cuMemAddressFree", self.address, self.limit)

    def _map(self, num_bytes: int) -> None:
        handle = self._call("cuMemCreate", num_bytes, self._properties, 0)
        try:
            self._call("cuMemMap", self.address + self.num_bytes, num_bytes, 0, handle, 0)
        finally:
            # The mapping keeps the memory alive until it is unmapped.
            self._call("cuMemRelease", handle)
        self.num_bytes += num_bytes

    def _round_up(self, num_bytes: int) -> int:
        return -(-num_bytes // self._granularity) * self._granularity

    def _call(self, name: str, *args: Any) -> Any:
        return _call(self._cuda, name, *args)


def _call(cuda: Any, name: str, *args: Any) -> Any:
    """Call a driver function. Return its result, or raise its error."""
    error, *values = getattr(cuda, name)(*args)
    if error == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: out of memory")
    if error != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name}: {error.name}")
    return values[0] if values else None

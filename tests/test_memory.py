"""Arenas keep their content when they grow, and release all memory."""

import ctypes
import gc
from types import SimpleNamespace

import pytest
import torch

import rollout.memory.arena
import rollout.memory.virtual_memory
from rollout import EngineConfig
from rollout.memory.arena import MappedArena, PlainArena, make_room, max_kv_bytes, open_arena
from rollout.memory.kv_cache import KVCache, KVLayout
from rollout.memory.virtual_memory import AddressRange, why_no_virtual_memory

GRANULE, CHUNK, TOTAL = 64, 256, 2048
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
FAKE = torch.device("cpu", 0)  # where `Driver` maps memory


class Driver:
    """The used part of `cuda.bindings.driver`, over host memory; it checks the driver's rules."""

    CUresult = SimpleNamespace(
        CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"),
        CUDA_ERROR_OUT_OF_MEMORY=SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY"),
        CUDA_ERROR_INVALID_VALUE=SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"),
    )
    CUmemAccessDesc = SimpleNamespace
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102
    )

    def __init__(self, free=TOTAL, supported=1):
        self.free, self.supported = free, supported
        self.failing = None
        self.handles, self.mapped, self.readable = {}, {}, set()
        self.reserved, self.mapped_handles = {}, set()

    def _result(self, *values, error="CUDA_SUCCESS"):
        return (getattr(self.CUresult, error), *values)

    def CUmemAllocationProp(self):
        return SimpleNamespace(location=SimpleNamespace())

    def cuInit(self, flags):
        return self._result()

    def cuDeviceGetAttribute(self, attribute, device):
        return self._result(self.supported if (attribute, device) == (102, 0) else None)

    def cuMemGetAllocationGranularity(self, place, option):
        return self._result(GRANULE)

    def cuMemAddressReserve(self, size, alignment, address, flags):
        memory = ctypes.create_string_buffer(size)
        self.reserved[ctypes.addressof(memory)] = memory
        return self._result(ctypes.addressof(memory))

    def cuMemAddressFree(self, address, size):
        assert not self.mapped, "freed while mapped"
        assert len(self.reserved.pop(address)) == size
        return self._result()

    def cuMemCreate(self, size, place, flags):
        assert size % GRANULE == 0
        assert (place.type, place.location.type, place.location.id) == (1, 1, 0)
        if size > self.free:
            return self._result(None, error="CUDA_ERROR_OUT_OF_MEMORY")
        self.free -= size
        self.handles[len(self.handles)] = size
        return self._result(len(self.handles) - 1)

    def cuMemMap(self, address, size, offset, handle, flags):
        assert address not in self.mapped, "mapped twice"
        if self.failing == "cuMemMap":
            return self._result(error="CUDA_ERROR_INVALID_VALUE")
        self.mapped[address] = size
        self.mapped_handles.add(handle)
        return self._result()

    def cuMemRelease(self, handle):
        if handle not in self.mapped_handles:
            self.free += self.handles[handle]
        self.handles[handle] = None
        return self._result()

    def cuMemSetAccess(self, address, size, access, count):
        assert access[0].flags == 3
        assert count == len(access) == 1
        if self.failing == "cuMemSetAccess":
            return self._result(error="CUDA_ERROR_INVALID_VALUE")
        chunks = self._chunks(address, size)
        assert self.readable.isdisjoint(chunks), "access set where it was"
        self.readable.update(chunks)
        return self._result()

    def cuMemUnmap(self, address, size):
        for chunk in self._chunks(address, size):
            assert all(handle is None for handle in self.handles.values()), "a handle is left"
            self.free += self.mapped.pop(chunk)
            self.readable.discard(chunk)
        return self._result()

    def _chunks(self, address, size):
        """Starts of the chunks in a range, which must be whole chunks."""
        inside = [start for start in sorted(self.mapped) if address <= start < address + size]
        assert sum(self.mapped[start] for start in inside) == size, "part of a chunk, or a hole"
        return inside


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(rollout.memory.virtual_memory, "bindings", lambda: driver)
    monkeypatch.setattr(rollout.memory.virtual_memory, "_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (driver.free, TOTAL))
    properties = SimpleNamespace(total_memory=TOTAL - 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def as_tensor(array, device):
        address, _ = array.__cuda_array_interface__["data"]
        assert address in driver.mapped, "torch does not know an address that is not mapped"
        return torch.frombuffer(driver.reserved[address], dtype=torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    why_no_virtual_memory.cache_clear()
    yield driver
    why_no_virtual_memory.cache_clear()


@pytest.fixture(params=["plain", "mapped"])
def arena(request):
    if request.param == "plain":
        return PlainArena(CPU)
    request.getfixturevalue("driver")
    return MappedArena(FAKE, wait=lambda: None)


def test_growth_keeps_content_and_views_outlive_a_release(arena):
    assert (arena.num_bytes, arena.data.shape) == (0, (0,))
    arena.grow(128)
    cost = arena.take_costs()
    assert (cost.released_bytes, cost.seconds > 0) == (0, True)
    arena.data[:128] = torch.arange(128, dtype=torch.uint8)
    arena.grow(700)
    assert arena.num_bytes >= 700
    assert arena.data.shape == (arena.num_bytes,)
    assert arena.data[:128].tolist() == list(range(128))
    arena.take_costs()
    arena.grow(300)
    assert arena.num_bytes >= 700
    assert arena.take_costs() == (0, 0.0)
    view = arena.data[64:128].view(torch.float32)
    for _ in range(2):
        arena.release()
        assert (arena.num_bytes, arena.data.shape) == (0, (0,))
    arena.grow(256)
    view.fill_(3.0)
    assert arena.data[64:128].view(torch.float32).tolist() == [3.0] * 16


def test_pages_keep_what_they_hold_and_their_views_follow(arena):
    layout = KVLayout(num_layers=2, page_tokens=4, num_kv_heads=1, head_dim=2, dtype=torch.bfloat16)
    cache = KVCache(layout, CPU, arena)
    assert (cache.num_pages, cache.num_bytes) == (0, 0)
    cache.grow(3)
    cache.layer(1)[0][2] = 5.0
    cache.grow(9)
    assert cache.num_bytes >= 9 * layout.page_bytes
    keys, values = cache.layer(1)
    assert keys.shape == values.shape == (9, 4, 1, 2)
    assert keys[2].eq(5.0).all()
    assert cache.address == arena.address == keys.data_ptr() - keys.storage_offset() * 2
    cache.release()
    assert (cache.num_pages, cache.num_bytes) == (0, 0)


# --- mapped memory


def test_addresses_stay_and_memory_comes_in_chunks_and_goes_back_whole(driver):
    arena = MappedArena(FAKE, wait=lambda: None)
    address = arena.address
    arena.grow(10)
    assert (arena.num_bytes, list(driver.mapped.values())) == (GRANULE, [GRANULE])
    arena.grow(GRANULE)
    arena.grow(700)
    assert list(driver.mapped.values()) == [GRANULE, CHUNK, CHUNK, 704 - GRANULE - 2 * CHUNK]
    assert driver.readable == set(driver.mapped)
    assert driver.free == TOTAL - 704
    arena.release()
    assert driver.free == TOTAL
    arena.grow(300)
    assert arena.address == address == min(driver.mapped)


def test_the_engine_is_waited_for_before_memory_goes(driver):
    waits = []
    arena = MappedArena(FAKE, wait=lambda: waits.append(len(driver.mapped)))
    arena.release()
    assert waits == []  # nothing to give back
    arena.grow(300)
    arena.release()
    assert waits == [2]
    arena.grow(300)
    del arena
    gc.collect()
    assert waits == [2, 2]
    assert (driver.mapped, driver.reserved, driver.free) == ({}, {}, TOTAL)


def test_a_failed_device_is_left_alone(driver):
    def failing():
        raise RuntimeError("an illegal memory access was encountered")

    arena = MappedArena(FAKE, wait=failing)
    arena.grow(300)
    del arena
    gc.collect()
    assert driver.mapped


@pytest.mark.parametrize("where", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_failed_growth_changes_nothing(driver, monkeypatch, where):
    arena = MappedArena(FAKE, wait=lambda: None)
    arena.grow(300)
    arena.data[:] = 7
    before = dict(driver.mapped), driver.free
    driver.failing, error = where, RuntimeError
    if where == "cuMemCreate":
        # Another user takes the memory that was free a moment ago.
        monkeypatch.setattr(rollout.memory.arena, "make_room", lambda *_: 0)
        before, driver.free, error = (before[0], 500), 500, torch.OutOfMemoryError
    with pytest.raises(error, match=where):
        arena.grow(1500)
    assert (driver.mapped, driver.free) == before
    assert arena.num_bytes == 320
    assert arena.data.eq(7).all()


def test_more_than_there_are_addresses_is_out_of_memory(driver):
    addresses = AddressRange(100, FAKE)
    assert addresses.limit == 128
    with pytest.raises(torch.OutOfMemoryError, match="192 bytes > 128 reserved"):
        addresses.extend(129)
    addresses.close()
    assert not driver.reserved


# --- torch's cache


def test_torch_gives_its_cache_back_only_where_free_memory_does_not_do(driver, monkeypatch):
    emptied = []

    def empty_cache():
        emptied.append(driver.free)
        driver.free += 500

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    driver.free = 400
    assert make_room(400, GPU) == 0
    assert emptied == []
    assert make_room(401, GPU) == 500
    assert emptied == [400]
    arena = MappedArena(FAKE, wait=lambda: None)
    arena.grow(1200)
    assert arena.take_costs()[0] == 500
    assert driver.free == 900 + 500 - 1216


def test_pages_may_take_a_share_of_what_is_free_cached_or_theirs(driver, monkeypatch):
    stats = {
        "reserved_bytes.all.current": 700,
        "allocated_bytes.all.current": 300,
        "inactive_split_bytes.all.current": 100,  # in use in part: cannot be freed
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    driver.free = 200
    assert max_kv_bytes(EngineConfig(kv_fraction=0.5), GPU, extra_bytes=100) == 300
    assert max_kv_bytes(EngineConfig(kv_bytes=9), GPU, extra_bytes=100) == 9
    assert max_kv_bytes(EngineConfig(), CPU, extra_bytes=100) is None


# --- choice of an arena


def test_the_best_arena_that_there_is(driver, monkeypatch, caplog):
    assert isinstance(open_arena(CPU, lambda: None), PlainArena)
    assert isinstance(open_arena(GPU, lambda: None), MappedArena)
    why_no_virtual_memory.cache_clear()
    driver.supported = 0
    monkeypatch.setattr(rollout.memory.arena, "PlainArena", lambda device: ("plain", device))
    for _ in range(2):
        assert open_arena(GPU, lambda: None) == ("plain", GPU)
    (record,) = caplog.records
    assert "has no virtual memory management" in record.getMessage()
    assert "captured again" in record.getMessage()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("No module 'cuda'"), "No module 'cuda'; pip install cuda-bindings"),
        (RuntimeError("cuda was not found"), "cuda was not found"),
    ],
)
def test_a_missing_package_and_a_missing_driver_are_named(driver, monkeypatch, error, reason):
    def failing(*_):
        raise error

    if isinstance(error, ImportError):
        monkeypatch.setattr(rollout.memory.virtual_memory, "bindings", failing)
    driver.cuInit = failing
    assert why_no_virtual_memory(GPU) == reason

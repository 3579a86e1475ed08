"""How busy the driver says that a GPU was during a rollout.

Hopper and newer have counters for each unit (GPM). The difference of two readings is a mean, and
costs two calls a rollout. On other GPUs a thread reads NVML's utilisation, the share of time in
which any kernel ran. That is near 1 even on a badly fed GPU.
"""

import threading
from abc import ABC, abstractmethod
from typing import Any

_PERIOD_S = 0.5

GPM_SHARES = {
    "gpu_sm_active": "NVML_GPM_METRIC_SM_UTIL",
    "gpu_tensor_active": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "gpu_dram_active": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
NVML_SHARE = "gpu_nvml_utilization"


class DeviceMeter(ABC):
    """Mean shares, 0 to 1, between `begin` and `end`; `reads` describes the source."""

    reads: str

    @abstractmethod
    def begin(self) -> None:
        """Start to measure."""

    @abstractmethod
    def end(self) -> dict[str, float]:
        """Shares since `begin`, by name; empty without `begin` or without a reading."""


class NoMeter(DeviceMeter):
    """For a CPU, or if NVML is unavailable: a driver without it, MIG, a container."""

    reads = "nothing: NVML is not available"

    def begin(self) -> None:
        """Do nothing."""

    def end(self) -> dict[str, float]:
        """Return no shares."""
        return {}


class GpmMeter(DeviceMeter):
    """Reads a GPU's counters twice; `nvml` is NVIDIA's module, initialised."""

    reads = "GPM: SMs, tensor cores and DRAM"

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._first: Any = None

    def begin(self) -> None:
        """Read the counters."""
        self._release()
        self._first = self._read()

    def end(self) -> dict[str, float]:
        """Read the counters again."""
        if self._first is None:
            return {}
        second = self._read()
        try:
            return {} if second is None else self._shares(second)
        finally:
            self._free(second)
            self._release()

    def _read(self) -> Any:
        sample = None
        try:
            sample = self._nvml.nvmlGpmSampleAlloc()
            return self._nvml.nvmlGpmSampleGet(self._handle, sample)
        except self._nvml.NVMLError:
            self._free(sample)
            return None

    def _shares(self, second: Any) -> dict[str, float]:
        nvml, asked = self._nvml, self._nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(GPM_SHARES)
        asked.sample1, asked.sample2 = self._first, second
        for metric, name in zip(asked.metrics, GPM_SHARES.values(), strict=False):
            metric.metricId = getattr(nvml, name)
        try:
            answer = nvml.nvmlGpmMetricsGet(asked)
        except nvml.NVMLError:
            return {}
        read = zip(GPM_SHARES, answer.metrics, strict=False)
        return {name: metric.value / 100 for name, metric in read if metric.nvmlReturn == 0}

    def _release(self) -> None:
        self._free(self._first)
        self._first = None

    def _free(self, sample: Any) -> None:
        if sample is not None:
            self._nvml.nvmlGpmSampleFree(sample)


class UtilisationMeter(DeviceMeter):
    """Samples NVML's utilisation every `period_s` seconds in a daemon thread."""

    reads = "NVML's utilisation only: this GPU or driver has no GPM counters"

    def __init__(self, nvml: Any, handle: Any, period_s: float = _PERIOD_S) -> None:
        self._nvml, self._handle, self._period_s = nvml, handle, period_s
        self._stop = threading.Event()
        self._samples: list[float] = []
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread."""
        self.end()
        self._stop, self._samples = threading.Event(), []
        self._thread = threading.Thread(target=self._sample, name="twinslot-nvml", daemon=True)
        self._thread.start()

    def end(self) -> dict[str, float]:
        """Stop the thread, without waiting for it."""
        self._stop.set()
        running, self._thread = self._thread is not None, None
        samples = self._samples[1:] or self._samples[:]  # the first covers time before `begin`
        return {NVML_SHARE: sum(samples) / len(samples)} if running and samples else {}

    def _sample(self) -> None:
        stop, samples = self._stop, self._samples
        while True:
            try:
                rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
            except self._nvml.NVMLError:
                return
            samples.append(rates.gpu / 100)
            if stop.wait(self._period_s):
                return


def open_meter(uuid: str | None) -> DeviceMeter:
    """The best meter available for the GPU with this NVML UUID, `GPU-...`; `None`: no GPU."""
    if uuid is None:
        return NoMeter()
    try:
        import pynvml  # needs the driver's library
    except ImportError:
        return NoMeter()
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return NoMeter()
    try:
        if pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            return GpmMeter(pynvml, handle)
    except pynvml.NVMLError:
        pass  # an older driver
    return UtilisationMeter(pynvml, handle)

"""GPU metrics from NVML, with a stand-in for NVIDIA's module."""

import sys
import threading
import time
from types import SimpleNamespace

import pynvml
import pytest
import tiny

from rollout import EngineConfig, RolloutEngine, SamplingParams
from rollout import engine as engine_module
from rollout.telemetry.gpu_counters import (
    GPM_SHARES,
    NVML_SHARE,
    DeviceMeter,
    GpmMeter,
    NoMeter,
    UtilisationMeter,
    open_meter,
)


class FakeError(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """One GPU that counts the calls."""

    NVMLError = FakeError
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_ANY_TENSOR_UTIL = 2, 5
    NVML_GPM_METRIC_DRAM_BW_UTIL = 10

    def __init__(self, gpm=True, broken=()):
        super().__init__()
        self.gpm, self.broken, self.time, self.held = gpm, set(broken), 0, 0
        self.missing = None  # a metric that the GPU lacks

    def _check(self, name):
        if name in self.broken:
            raise FakeError(name)

    def nvmlInit(self):
        self._check("init")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self._check("handle")
        return uuid

    def nvmlGpmQueryDeviceSupport(self, handle):
        self._check("support")
        return SimpleNamespace(isSupportedDevice=int(self.gpm))

    def nvmlGpmSampleAlloc(self):
        self.held += 1
        return SimpleNamespace(time=None)

    def nvmlGpmSampleFree(self, sample):
        self.held -= 1

    def nvmlGpmSampleGet(self, handle, sample):
        self._check("sample")
        self.time += 1
        sample.time = self.time
        return sample

    def c_nvmlGpmMetricsGet_t(self):
        metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(9)]
        return SimpleNamespace(metrics=metrics)

    def nvmlGpmMetricsGet(self, asked):
        self._check("metrics")
        assert asked.sample1.time < asked.sample2.time
        for metric in asked.metrics[: asked.numMetrics]:
            metric.value = 10.0 * metric.metricId
            metric.nvmlReturn = 3 if metric.metricId == self.missing else 0
        return asked

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._check("rates")
        self.time += 1
        return SimpleNamespace(gpu=90 if self.time == 1 else 40)


def test_shares_are_means_between_two_readings_and_nothing_leaks():
    nvml = FakeNvml()
    meter = GpmMeter(nvml, "GPU-1")
    assert meter.end() == {}
    for _ in range(3):
        meter.begin()
        shares = {"gpu_sm_active": 0.2, "gpu_tensor_active": 0.5, "gpu_dram_active": 1.0}
        assert meter.end() == shares
    nvml.missing = nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL
    meter.begin()
    assert meter.end() == {"gpu_sm_active": 0.2, "gpu_dram_active": 1.0}
    meter.begin()
    meter.begin()
    meter.end()
    assert nvml.held == 0


def test_counters_have_the_names_and_numbers_that_nvidia_gives_them():
    assert set(GPM_SHARES.values()) <= set(vars(pynvml))
    for name in GPM_SHARES.values():
        assert getattr(FakeNvml, name) == getattr(pynvml, name)


@pytest.mark.parametrize("broken", ["sample", "metrics"])
def test_a_driver_that_fails_leaves_out_the_shares(broken):
    nvml = FakeNvml()
    meter = GpmMeter(nvml, "GPU-1")
    for fails_at_once in (True, False):
        nvml.broken = {broken} if fails_at_once else set()
        meter.begin()
        nvml.broken = {broken}
        assert meter.end() == {}
    assert nvml.held == 0


def test_the_thread_samples_until_the_end_and_keeps_no_process_alive():
    meter = UtilisationMeter(FakeNvml(), "GPU-1", period_s=0.001)
    assert meter.end() == {}
    meter.begin()
    (thread,) = (t for t in threading.enumerate() if t.name == "twinslot-nvml")
    assert thread.daemon
    time.sleep(0.05)
    assert meter.end()[NVML_SHARE] == pytest.approx(0.4)  # without the first sample
    thread.join(5)
    assert not thread.is_alive()
    assert meter.end() == {}


def test_the_best_meter_is_taken(monkeypatch):
    for nvml, wanted in [
        (FakeNvml(), GpmMeter),
        (FakeNvml(gpm=False), UtilisationMeter),
        (FakeNvml(broken=["support"]), UtilisationMeter),
        (FakeNvml(broken=["handle"]), NoMeter),
        (FakeNvml(broken=["init"]), NoMeter),
        (None, NoMeter),  # not installed
    ]:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        assert type(open_meter("GPU-1")) is wanted
        assert open_meter("GPU-1").reads.startswith(("GPM", "NVML's utilisation", "nothing"))
    assert type(open_meter(None)) is NoMeter


def test_a_machine_without_that_gpu_is_measured_by_nobody():
    """With NVIDIA's own module, with or without a driver."""
    assert type(open_meter("GPU-00000000-0000-0000-0000-000000000000")) is NoMeter


def test_a_rollout_is_measured_from_its_first_row_to_its_last(monkeypatch):
    calls = []

    class Counting(DeviceMeter):
        def begin(self):
            calls.append("begin")

        def end(self):
            calls.append("end")
            return {"gpu_sm_active": 0.5}

    monkeypatch.setattr(engine_module, "open_meter", lambda uuid: Counting())
    with RolloutEngine(tiny.build(), EngineConfig(max_rows=2, page_tokens=4)) as engine:
        for _ in range(2):
            engine.generate(tiny.prompts(5), SamplingParams(max_new_tokens=3))
            assert calls == ["begin", "end"]
            assert engine.stats.device == {"gpu_sm_active": 0.5}
            calls.clear()
        engine.submit([9, 10], SamplingParams(max_new_tokens=3))
        engine.step()
    assert calls == ["begin", "end"]  # closed before it was done


def test_a_rollout_that_leaves_no_row_is_measured_no_further(monkeypatch):
    """Otherwise the reading thread would go on."""
    meter = UtilisationMeter(FakeNvml(), "GPU-1", period_s=0.001)
    monkeypatch.setattr(engine_module, "open_meter", lambda uuid: meter)
    config = EngineConfig(max_rows=2, page_tokens=4, num_slots=1)
    with RolloutEngine(tiny.build(), config) as engine:
        row = engine.submit([9, 10], SamplingParams(max_new_tokens=3))
        engine.step()
        assert meter._thread is not None
        engine.abort([row])
        assert meter._thread is None
        assert engine.generate([], SamplingParams(max_new_tokens=3)) == []
        assert meter._thread is None

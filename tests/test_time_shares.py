"""Where a rollout's time goes: each part by hand, the device's clock, whole rollouts."""

import time

import fakes
import numpy as np
import pytest
import tiny

from rollout import EngineConfig, RolloutEngine, SamplingParams
from rollout.sampling_params import Draw
from rollout.scheduler.batch import Plan, Segment
from rollout.telemetry import device_time
from rollout.telemetry.device_time import BatchClock, Stamps
from rollout.telemetry.time_shares import PARTS, BatchTimes, TimeShares

SMALL = {"max_rows": 4, "page_tokens": 4, "prefill_tokens": 9}
ROWS_OF = {"compute", "prefill", "tail"}


def batch(num_rows=0, num_prefilled=0):
    plan, rows = Plan(), np.arange(num_rows)
    if num_prefilled:
        plan.segments.append(Segment(0, 0, np.zeros(num_prefilled, np.int64)))
    return plan.batch(rows, rows, 9, Draw.PLAIN, 1)


def split(*steps, whole_s=100.0, sleep_s=0.0):
    """Seconds of each nonzero part, for steps of (batch, waiting rows, times)."""
    parts = TimeShares()
    for launched, num_waiting, _ in steps:
        parts.launched(launched, num_waiting)
    for *_, times in steps:
        parts.ran(BatchTimes(*times))
    shares = parts.shares(whole_s, sleep_s)
    assert list(shares) == list(PARTS)
    assert sum(shares.values()) == pytest.approx(1)
    return {part: pytest.approx(share * whole_s) for part, share in shares.items() if share}


FULL, NO_TIME = (batch(8), 3, (0, 0, 10)), (0, 0, 0)


@pytest.mark.parametrize(
    ("steps", "parts"),
    [
        ([], {"idle": 100}),
        ([(batch(2), 1, (5, 0, 10))], {"compute": 10, "idle": 90}),
        # Six of eight lanes run: first while rows wait, then without waiting rows.
        ([FULL, (batch(6), 1, (0, 0, 8))], {"compute": 18, "idle": 82}),
        ([FULL, (batch(6), 0, (0, 0, 8))], {"compute": 16, "tail": 2, "idle": 82}),
        # Lanes that never ran together count as full.
        ([(batch(3), 0, (0, 0, 10))] * 2, {"compute": 20, "idle": 80}),
        # A prefill ends when its batch starts to decode. Without rows to decode, all is prefill.
        ([(batch(4, 9), 0, (3, 7, 2))], {"compute": 2, "prefill": 7, "idle": 91}),
        ([(batch(0, 9), 0, (0, 7, 1))], {"prefill": 8, "idle": 92}),
    ],
)
def test_time_is_split_by_what_ran_and_the_rest_is_idle(steps, parts):
    assert split(*steps) == parts


def test_memory_is_sleep_and_nothing_is_nothing():
    assert TimeShares().shares(0.0, 0.0) == {}
    assert split(sleep_s=30) == {"idle": 70, "sleep": 30}
    assert split(sleep_s=130) == {"sleep": 100}


def test_time_in_which_the_trainer_had_the_device_is_sleep():
    parts = TimeShares()
    parts.launched(batch(1), 0)
    parts.paused()
    parts.launched(batch(1), 0)
    for _ in range(2):
        parts.ran(BatchTimes(20, 3, 10))
    shares = parts.shares(100, 1)
    assert (shares["sleep"], shares["idle"]) == pytest.approx((0.21, 0.53))
    assert parts.busy_s == 2 * 13


# --- the clock


class Stamp:
    """A CUDA event with CUDA's rules, reached as soon as it is recorded."""

    now = 0.0  # ms

    def __init__(self):
        self.at = None

    def record(self, stream):
        self.at = Stamp.now

    def elapsed_time(self, later):
        assert self.at is not None, "never recorded"
        assert later.at is not None, "never recorded"
        return later.at - self.at


class Stream:
    def __init__(self, is_done):
        self.query = lambda: is_done


@pytest.fixture
def stamps(monkeypatch):
    monkeypatch.setattr(device_time, "make_stamp", lambda device: Stamp())
    Stamp.now = 0.0
    return lambda: Stamps(device_time.torch.device("cuda"))


def at(stamps, **times):
    for name, Stamp.now in times.items():
        getattr(stamps, name).record(None)


def test_gaps_prefills_and_decodes_are_told_apart(stamps):
    clock, first, second = BatchClock(), stamps(), stamps()
    at(first, started=2, ended=10)
    at(second, started=15, prefilled=18, ended=25)
    assert clock.read(first, prefills=False) == BatchTimes(0, 0, pytest.approx(0.008))
    times = clock.read(second, prefills=True)
    assert (times.gap_s, times.prefill_s, times.decode_s) == pytest.approx((0.005, 0.003, 0.007))
    clock.begin()
    assert clock.read(second, prefills=True).gap_s == 0


@pytest.mark.parametrize(("is_done", "gap_s"), [(True, 0.009), (False, 0.005)])
def test_a_graph_that_is_launched_late_leaves_the_device_idle(stamps, monkeypatch, is_done, gap_s):
    """After `started`, the device waits for the launch with all earlier work done."""
    now = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock, first, second = BatchClock(), stamps(), stamps()
    at(first, started=2, ended=10)
    clock.read(first, prefills=False)
    second.launching(Stream(is_done))
    now[0] += 0.004
    second.graph_launched()
    at(second, started=15, ended=25)
    times = clock.read(second, prefills=False)
    assert (times.gap_s, times.gap_s + times.decode_s) == pytest.approx((gap_s, 0.015))
    second.launching(Stream(False))
    assert second.late_s == 0


# --- whole rollouts


def check(stats):
    shares = stats.time_shares
    assert sum(shares.values()) == pytest.approx(1, abs=0.01)
    assert min(shares.values()) >= 0
    return shares


EITHER_DEVICE = pytest.mark.parametrize(
    "wrap", [lambda engine: engine, fakes.with_lagging_device], ids=["prompt", "lagging"]
)


@pytest.mark.parametrize("num_slots", [1, 2])
@EITHER_DEVICE
def test_shares_of_any_rollout_add_up_to_1(wrap, num_slots):
    config = EngineConfig(**SMALL, num_slots=num_slots)
    lengths = [4, 5, 6, 7, 8, 9, 40]  # in any order, the longest row ends alone
    sampling = [SamplingParams(max_new_tokens=length) for length in lengths]
    with wrap(RolloutEngine(tiny.build(), config)) as engine:
        for _ in range(2):
            engine.generate(tiny.prompts(7), sampling)
            shares = check(engine.stats)
            assert min(shares[part] for part in ROWS_OF) > 0
            assert sorted(engine.stats.lengths) == lengths
            assert engine.stats.num_stopped == 0


@pytest.mark.parametrize("num_slots", [1, 2])
@EITHER_DEVICE
def test_batches_and_the_time_between_them_leave_nothing_out(monkeypatch, wrap, num_slots):
    """Each stamp is one tick of a clock, so reading one early, late or twice shows."""
    num_ticks, times = [0], []

    class Tick(device_time.HostStamp):
        def record(self, stream=None):
            num_ticks[0] += 1
            self._at_s = num_ticks[0]

    class Clock(BatchClock):
        def read(self, stamps, *, prefills):
            times.append(super().read(stamps, prefills=prefills))
            return times[-1]

    monkeypatch.setattr(device_time, "HostStamp", Tick)
    monkeypatch.setattr("rollout.telemetry.recorder.BatchClock", Clock)
    with wrap(RolloutEngine(tiny.build(), EngineConfig(**SMALL, num_slots=num_slots))) as engine:
        engine.generate(tiny.prompts(9), SamplingParams(max_new_tokens=7))
    assert len(times) == engine.stats.engine_steps
    # Two upload stamps precede the first start; one download stamp follows the last end.
    inside = sum(t.gap_s + t.prefill_s + t.decode_s for t in times)
    assert inside == pytest.approx(num_ticks[0] - 4)
    assert {t.gap_s for t in times[1:]} == {4}


def test_what_is_measured_is_what_the_test_measures():
    """Against the time of the steps, taken from outside."""
    spent = [0.0]
    with RolloutEngine(tiny.build(), EngineConfig(**SMALL)) as engine:
        run = engine.worker.graphs.run

        def timed(slot):
            began = time.perf_counter()
            run(slot)
            spent[0] += time.perf_counter() - began

        engine.worker.graphs.run = timed
        began = time.perf_counter()
        engine.generate(tiny.prompts(6), SamplingParams(max_new_tokens=30))
        whole_s = time.perf_counter() - began
    shares = check(engine.stats)
    inside = sum(shares[part] for part in ROWS_OF)
    assert inside * engine.stats.whole_s == pytest.approx(spent[0], rel=0.05)
    assert engine.stats.whole_s == pytest.approx(whole_s, rel=0.05)


def test_a_pause_and_giving_memory_back_are_sleep():
    with RolloutEngine(tiny.build(), EngineConfig(**SMALL)) as engine:
        engine.submit([9, 10], SamplingParams(max_new_tokens=6))
        for _ in range(3):
            engine.step()
        with engine.paused():
            time.sleep(0.1)
        while engine.busy:
            engine.step()
        paused_s = check(engine.stats)["sleep"] * engine.stats.whole_s
        assert 0.1 < paused_s < 0.1 + engine.stats.duration_s / 2
        engine.sleep()
        slept_s = check(engine.stats)["sleep"] * engine.stats.whole_s
        assert slept_s == pytest.approx(paused_s + engine.stats.sleep_s)


def test_memory_for_rows_that_have_no_token_is_all_that_there_was():
    with RolloutEngine(tiny.build(), EngineConfig(**SMALL)) as engine:
        engine.abort([engine.submit([9, 10], SamplingParams(max_new_tokens=6))])
        engine.sleep()
        assert check(engine.stats)["sleep"] == pytest.approx(1)


def test_memory_that_grows_within_a_pause_is_not_counted_twice(monkeypatch):
    with RolloutEngine(tiny.build(), EngineConfig(**SMALL)) as engine:
        grow = engine.worker.kv_cache._arena._grow

        def slow(num_bytes):
            time.sleep(0.2)
            return grow(num_bytes)

        engine.submit([9, 10], SamplingParams(max_new_tokens=6))
        engine.step()
        monkeypatch.setattr(engine.worker.kv_cache._arena, "_grow", slow)
        with engine.paused():
            pass
        engine.submit([9, 10], SamplingParams(max_new_tokens=60))
        while engine.busy:
            engine.step()
        check(engine.stats)

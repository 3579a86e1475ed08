"""Where a rollout's time went: each part by hand, and of whole rollouts."""

import time

import fakes
import numpy as np
import pytest
import tiny

from rollout import RolloutConfig, RolloutEngine, SamplingParams
from rollout.scheduler.batch import ADMITTED_ROW, Batch, Segment
from rollout.telemetry import device_time as stamps
from rollout.telemetry.device_time import BatchClock, Stamps
from rollout.telemetry.time_shares import PARTS, Attribution, BatchTimes

SMALL = {"max_rows": 4, "page_tokens": 4, "prefill_tokens": 9}
NOTHING = np.empty((0, 2), np.int64)


def batch(num_rows=0, prefills=()):
    """A batch of so many decoding rows; `prefills` are lanes and their numbers of tokens."""
    return Batch(
        rows=np.arange(num_rows),
        lanes=np.arange(num_rows),
        policy_version=1,
        max_context=9,
        admitted=np.empty(0, ADMITTED_ROW),
        flags=[],
        segments=[Segment(lane, 0, np.zeros(count, np.int64)) for lane, count in prefills],
        new_pages=NOTHING,
        copies=NOTHING,
        offloads=NOTHING,
        restores=NOTHING,
        num_shared=0,
        num_preempted=0,
    )


def split(*steps, whole_s=100.0, sleep_s=0.0):
    """Seconds of each part that has any, of `(batch, padded rows, waiting rows, times)`."""
    attribution = Attribution()
    for launched, num_padded, num_waiting, _ in steps:
        attribution.launched(launched, num_padded, num_waiting)
    for *_, times in steps:
        attribution.ran(BatchTimes(*times))
    shares = attribution.shares(whole_s, sleep_s)
    assert list(shares) == list(PARTS)
    assert sum(shares.values()) == pytest.approx(1)
    return {part: pytest.approx(share * whole_s) for part, share in shares.items() if share}


def test_the_device_is_busy_inside_batches_alone():
    attribution = Attribution()
    for times in (BatchTimes(5, 2, 3, 10), BatchTimes(1, 0, 0, 4)):
        attribution.launched(batch(2), 2, 0)
        attribution.ran(times)
    assert attribution.busy_s == 3 + 10 + 4


def test_the_rest_is_the_hosts_and_nothing_is_nothing():
    assert Attribution().shares(0.0, 0.0) == {}
    assert split() == {"host_bound": 100}
    assert split(sleep_s=30) == {"host_bound": 70, "sleep": 30}
    assert split(sleep_s=130) == {"sleep": 100}
    assert split((batch(2), 2, 1, (5, 2, 0, 10))) == {
        "compute": 10,
        "h2d_wait": 2,
        "host_bound": 88,
    }


def test_a_step_is_split_by_the_rows_that_it_runs():
    full = (batch(8), 8, 3, (0, 0, 0, 10))
    # Six rows padded to seven, first while rows wait, then with no one left for two lanes.
    assert split(full, (batch(6), 8, 1, (0, 0, 0, 10))) == {
        "compute": 17.5,
        "padding": 2.5,
        "host_bound": 80,
    }
    assert split(full, (batch(4), 5, 0, (0, 0, 0, 16))) == {
        "compute": 10 + 8,
        "padding": 2,
        "tail": 6,
        "host_bound": 74,
    }


def test_rows_that_never_ran_together_leave_no_lane_idle():
    step = (batch(3), 3, 0, (0, 0, 0, 10))
    assert split(step, step) == {"compute": 20, "host_bound": 80}


def test_prefill_ends_where_its_batch_begins_to_decode():
    prefill = (batch(4, [(0, 9)]), 4, 0, (3, 0, 7, 2))
    assert split(prefill) == {"prefill": 7, "compute": 2, "host_bound": 91}
    alone = (batch(0, [(0, 9)]), 0, 0, (0, 0, 7, 1))
    assert split(alone) == {"prefill": 8, "host_bound": 92}


def test_time_in_which_the_trainer_had_the_device_is_sleep():
    attribution = Attribution()
    attribution.launched(batch(1), 1, 0)
    attribution.paused()
    attribution.launched(batch(1), 1, 0)
    for _ in range(2):
        attribution.ran(BatchTimes(20, 5, 0, 10))
    shares = attribution.shares(100, 1)
    assert (shares["sleep"], shares["h2d_wait"], shares["host_bound"]) == (0.21, 0.05, 0.54)


# --- the clock


class Stamp:
    """A CUDA event as strict as CUDA's, that is reached as soon as it is recorded."""

    now = 0.0  # ms

    def __init__(self):
        self.at = None

    def record(self, stream):
        self.at = Stamp.now

    def elapsed_time(self, later):
        assert self.at is not None, "never recorded"
        assert later.at is not None, "never recorded"
        return later.at - self.at


@pytest.fixture
def ticking(monkeypatch):
    monkeypatch.setattr(stamps, "make_stamp", lambda device: Stamp())
    Stamp.now = 0.0


def at(taken, **times):
    for name, now in times.items():
        Stamp.now = now
        getattr(taken, name).record(None)


@pytest.mark.parametrize(
    ("upload", "upload_s"),
    [((5, 8), 0.0), ((11, 13), 2.0), ((6, 12), 2.0), ((12, 20), 3.0), ((16, 17), 0.0)],
)
def test_an_upload_counts_while_the_device_has_nothing_to_do(ticking, upload, upload_s):
    clock = BatchClock(None)
    first, second = Stamps(None), Stamps(None)
    at(first, uploading=0, uploaded=1, started=2, ended=10)
    at(second, uploading=upload[0], uploaded=upload[1], started=15, prefilled=18, ended=25)
    assert clock.read(first, prefills=False)[0] == pytest.approx((0, 0, 0, 0.008))
    times, _ = clock.read(second, prefills=True)
    assert times == pytest.approx((0.005, upload_s / 1e3, 0.003, 0.007))


def test_a_graph_that_is_launched_late_leaves_the_device_idle(ticking, monkeypatch):
    """It had done all before: from `started` on it waits until the graph has been launched."""
    now = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    found = []
    for is_starved in (True, False):
        clock, first, second = BatchClock(None), Stamps(None), Stamps(None)
        at(first, uploading=0, uploaded=1, started=2, ended=10)
        clock.read(first, prefills=False)
        at(second, uploading=10, uploaded=11, started=15, ended=25)
        second.start(None, is_starved=is_starved)
        now[0] += 0.004
        second.replayed()
        at(second, started=15)
        found.append(clock.read(second, prefills=False)[0])
        second.start(None, is_starved=False)
        assert second.late_s == 0
    assert found[0] == pytest.approx((0.009, 0.001, 0, 0.006))
    assert found[1] == pytest.approx((0.005, 0.001, 0, 0.010))


def test_no_stamp_is_recorded_again_before_it_was_read(ticking):
    """As the engine does: batch 2 is launched in the slot of batch 0 before batch 1 is read."""
    clock, slots = BatchClock(None), [Stamps(None), Stamps(None)]
    for index in range(9):
        at(slots[index % 2], uploading=10 * index, uploaded=10 * index, started=10 * index + 3)
        at(slots[index % 2], ended=10 * index + 10)
        if index:
            times, slots[index % 2 - 1] = clock.read(slots[index % 2 - 1], prefills=False)
            gap_s = 0 if index == 1 else 0.003
            assert times == pytest.approx((gap_s, 0, 0, 0.007))
    clock.begin()
    times, _ = clock.read(slots[0], prefills=False)
    assert times.gap_s == 0


# --- whole rollouts


def check(stats):
    shares = stats.time_shares
    assert sum(shares.values()) == pytest.approx(1, abs=0.01)
    assert min(shares.values()) >= 0
    return shares


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("wrap", [lambda engine: engine, fakes.with_lagging_device])
def test_shares_of_any_rollout_add_up_to_1(wrap, num_slots):
    config = RolloutConfig(**SMALL, num_slots=num_slots)
    lengths = [4, 5, 6, 7, 8, 9, 40]  # in whatever order, the last one ends alone
    sampling = [SamplingParams(max_new_tokens=length) for length in lengths]
    with wrap(RolloutEngine(tiny.build(), config)) as engine:
        for _ in range(2):
            engine.generate(tiny.prompts(7), sampling)
            shares = check(engine.stats)
            for part in ("compute", "tail", "prefill"):
                assert shares[part] > 0
            assert shares["padding"] == 0
            assert sorted(engine.stats.lengths) == lengths
            assert engine.stats.num_stopped == 0


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("wrap", [lambda engine: engine, fakes.with_lagging_device])
def test_batches_and_the_time_between_them_leave_nothing_out(monkeypatch, wrap, num_slots):
    """Each stamp is one tick of a clock, so that one read too early or too late shows."""
    ticks, times = [0], []

    class Tick(stamps.HostStamp):
        def record(self, stream):
            ticks[0] += 1
            self._at_s = ticks[0]

    read = BatchClock.read

    def reading(clock, *args, **kwargs):
        found = read(clock, *args, **kwargs)
        times.append(found[0])
        return found

    monkeypatch.setattr(stamps, "HostStamp", Tick)
    monkeypatch.setattr(BatchClock, "read", reading)
    with wrap(RolloutEngine(tiny.build(), RolloutConfig(**SMALL, num_slots=num_slots))) as engine:
        engine.generate(tiny.prompts(9), SamplingParams(max_new_tokens=7))
    assert len(times) == engine.stats.engine_steps
    # The first two of all stamps are those of the first upload, and the third is its start.
    inside = sum(t.gap_s + t.prefill_s + t.decode_s for t in times)
    assert inside == pytest.approx(ticks[0] - 3)
    assert {t.gap_s for t in times[1:]} == {3}
    assert {t.upload_s for t in times[1:]} == {1}


def test_what_is_measured_is_what_the_test_measures():
    """The time of the steps' batches, taken from outside."""
    spent = [0.0]
    with RolloutEngine(tiny.build(), RolloutConfig(**SMALL)) as engine:
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
    inside = sum(shares[part] for part in ("compute", "tail", "prefill", "padding"))
    assert inside * engine.stats.whole_s == pytest.approx(spent[0], rel=0.05)
    assert engine.stats.whole_s == pytest.approx(whole_s, rel=0.05)


def test_a_pause_and_giving_memory_back_are_sleep():
    with RolloutEngine(tiny.build(), RolloutConfig(**SMALL)) as engine:
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
    with RolloutEngine(tiny.build(), RolloutConfig(**SMALL)) as engine:
        engine.abort([engine.submit([9, 10], SamplingParams(max_new_tokens=6))])
        engine.sleep()
        assert check(engine.stats)["sleep"] == pytest.approx(1)


def test_memory_that_grows_within_a_pause_is_not_counted_twice(monkeypatch):
    with RolloutEngine(tiny.build(), RolloutConfig(**SMALL)) as engine:
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

"""The ordering rules: which stream runs what, what waits for what, what the host may touch.

Nothing overlaps on a CPU. So one test uses a device that lags as far behind the host as it may. The
others record every stream and event.
"""

import contextlib

import fakes
import pytest
import tiny
import torch

import rollout.runner.slots
import rollout.runner.streams
from rollout import EngineConfig, RolloutEngine, SamplingParams
from rollout.memory.kv_cache import KVCache
from rollout.model.twin import Twin
from rollout.runner.forward import Forward, Lanes
from rollout.scheduler.pages import TRASH_PAGE

STREAMS = ["h2d", "compute", "d2h", "swap"]
SMALL = {"max_rows": 3, "page_tokens": 4, "prefill_tokens": 9, "num_slots": 2}


def work(count=17):
    prompts = tiny.prompts(count, seed=5)
    sampling = [
        SamplingParams(max_new_tokens=1 + i % 11, eos_token_ids=(i % 7 + 20,)) for i in range(count)
    ]
    return prompts, sampling, list(range(count))


def generated(wrap, **changes):
    with wrap(RolloutEngine(tiny.build(), EngineConfig(**{**SMALL, **changes}))) as engine:
        completions = engine.generate(*work())
        assert engine.stats.overrun_tokens > 0 or changes.get("num_slots") == 1
        return [(c.token_ids, c.logprobs) for c in completions]


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("max_rows", [1, 3, 17])
def test_a_device_that_lags_behind_the_host_gives_the_same_rows(num_slots, max_rows):
    """Rules 1 and 3: lanes and pages freed during an overrun are refilled safely."""
    settings = {"num_slots": num_slots, "max_rows": max_rows}
    prompt = generated(fakes.with_history_model, **settings)
    lagging = generated(
        lambda engine: fakes.with_lagging_device(fakes.with_history_model(engine)), **settings
    )
    assert lagging == prompt


class Recorder:
    """torch's device module as the slots see it; records every call."""

    def __init__(self):
        self.log: list[tuple] = []
        self.names = list(STREAMS)
        self.running = self.trainer = self.make_stream("trainer")

    def make_stream(self, name):
        recorder = self

        class Stream:
            def __repr__(self):
                return name

            def record_event(self):
                event = recorder.Event()
                event.record(self)
                return event

            def wait_event(self, event):
                event.wait(self)

        return Stream()

    def Stream(self):
        return self.make_stream(self.names.pop(0))

    def Event(self):
        recorder = self

        class Event:
            def record(self, stream):
                recorder.log.append(("record", self, repr(stream)))

            def wait(self, stream):
                recorder.log.append(("wait", self, repr(stream)))

            def synchronize(self):
                recorder.log.append(("host", self))

        return Event()

    def current_stream(self, device):
        return self.trainer

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.running = self.running, stream
        yield
        self.running = before


@pytest.fixture
def recorded(monkeypatch):
    """A two-slot engine and its recorder, which logs copies and kernels with their streams."""
    recorder = Recorder()
    monkeypatch.setattr(torch, "get_device_module", lambda device: recorder)
    monkeypatch.setattr(
        rollout.runner.streams, "_streams", rollout.runner.streams._streams.__wrapped__
    )

    def logged(owner, name, what):
        call = getattr(owner, name)

        def wrapper(*args, **kwargs):
            recorder.log.append((what, repr(recorder.running)))
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    logged(rollout.runner.slots.Staged, "upload", "copy in")
    logged(KVCache, "grow", "KV")
    logged(KVCache, "page", "page")
    logged(Twin, "refresh", "weights")
    logged(Lanes, "admit", "lane state")
    logged(Forward, "prefill", "KV")
    logged(Forward, "decode", "KV")
    engine = RolloutEngine(tiny.build(), EngineConfig(**SMALL))
    recorder.log.clear()
    return engine, recorder


def test_lanes_and_kv_are_touched_on_the_compute_stream_alone(recorded):
    engine, recorder = recorded
    engine.generate(*work())
    streams = {}
    for what, stream in (entry for entry in recorder.log if len(entry) == 2 and entry[0] != "host"):
        streams.setdefault(what, set()).add(stream)
    assert streams == {
        "copy in": {"h2d"},
        "lane state": {"compute"},
        "KV": {"compute"},
        "weights": {"compute"},
    }


def test_every_batch_waits_for_its_upload_and_its_download_for_the_batch(recorded):
    engine, recorder = recorded
    engine.generate(*work())
    slots = engine.slots.slots
    for slot in slots:
        edges = [
            entry
            for entry in recorder.log
            if entry[0] in ("record", "wait")
            and entry[1] in (slot.uploaded, slot.computed, slot.downloaded)
        ]
        batch = [
            ("record", slot.uploaded, "h2d"),
            ("wait", slot.uploaded, "compute"),
            ("record", slot.computed, "compute"),
            ("wait", slot.computed, "d2h"),
            ("record", slot.downloaded, "d2h"),
        ]
        assert len(edges) >= 5 * 4
        assert edges == batch * (len(edges) // 5)


def test_the_host_waits_once_a_step_and_only_for_the_batch_before(recorded):
    engine, recorder = recorded
    engine.generate(*work())
    events = [slot.downloaded for slot in engine.slots.slots]
    launched = [entry[1] for entry in recorder.log if entry[0] == "record" and entry[1] in events]
    waited = [entry[1] for entry in recorder.log if entry[0] == "host"]
    # Only downloads, once each, in launch order.
    assert waited == launched
    order = [entry for entry in recorder.log if entry[1] in events and entry[0] != "wait"]
    for step, entry in enumerate(order[2:-1], start=2):
        # A launch, then the wait for the other slot.
        if entry[0] == "host":
            assert order[step - 1][0] == "record"
            assert order[step - 1][1] is not entry[1]


def test_a_rollout_follows_the_trainer_and_the_trainer_follows_it(recorded):
    engine, recorder = recorded
    engine.generate(*work())
    log = recorder.log
    # First, compute waits for an event on the trainer's stream.
    assert (log[0][0], log[0][2]) == ("record", "trainer")
    assert log[1:5] == [("wait", log[0][1], stream) for stream in STREAMS]
    # Last, the trainer waits for an event behind the last batch on compute.
    assert (log[-2][0], log[-2][2]) == ("record", "compute")
    assert log[-1] == ("wait", log[-2][1], "trainer")
    last_batch = max(i for i, entry in enumerate(log) if entry[0] == "KV")
    assert last_batch < len(log) - 2
    assert not engine.slots.in_flight


@pytest.mark.parametrize("failing", ["prefill", "decode"])
def test_after_a_failure_the_host_waits_for_every_stream_before_the_trainer_goes_on(
    recorded, failing
):
    engine, recorder = recorded
    setattr(engine.worker.graphs.forward, failing, None)
    with pytest.raises(TypeError):
        engine.generate(*work())
    *end, copied, joined, record, wait = recorder.log[-12:]
    drained = [(entry[0], entry[-1]) for entry in end if entry[0] == "record"]
    assert drained == [("record", stream) for stream in STREAMS]
    assert [entry[1] for entry in end[::2]] == [entry[1] for entry in end[1::2]]
    assert {entry[0] for entry in end[1::2]} == {"host"}
    assert (copied[0], copied[2], joined[0], joined[2]) == ("record", "swap", "wait", "compute")
    assert (record[0], record[2], wait[0], wait[2]) == ("record", "compute", "wait", "trainer")


def test_in_a_pause_the_streams_change_places_and_back(recorded):
    engine, recorder = recorded
    engine.submit([9, 10], SamplingParams(max_new_tokens=6))
    engine.step()
    recorder.log.clear()
    with engine.paused():
        (copied, joined, record, wait), recorder.log[:] = recorder.log[:], []
        assert (copied[0], copied[2]) == ("record", "swap")
        assert joined == ("wait", copied[1], "compute")
        assert (record[0], record[2]) == ("record", "compute")
        assert wait == ("wait", record[1], "trainer")
    log = recorder.log
    assert (log[0][0], log[0][2]) == ("record", "trainer")
    assert log[1:5] == [("wait", log[0][1], stream) for stream in STREAMS]
    assert log[5] == ("weights", "compute")


def test_a_pause_of_an_idle_engine_leaves_nothing_behind_the_trainers_back(recorded):
    engine, recorder = recorded
    with engine.paused():
        recorder.log.clear()
    assert (recorder.log[-2][0], recorder.log[-2][2]) == ("record", "compute")
    assert recorder.log[-1] == ("wait", recorder.log[-2][1], "trainer")


def test_pages_move_behind_the_last_batch_and_before_whoever_needs_them(recorded):
    """Rule 2."""
    engine, recorder = recorded
    recorder.names = list(STREAMS)
    page_bytes = engine.worker.kv_cache.layout.page_bytes
    config = EngineConfig(max_rows=6, page_tokens=4, kv_bytes=21 * page_bytes, offload_bytes=2**30)
    engine = RolloutEngine(tiny.build(), config)
    log, move, leaving, back, num_waits = recorder.log, engine.worker.swap.move, {}, [], 0

    def checked(batch):
        nonlocal num_waits
        start = len(log)
        move(batch)
        entries, came_back = log[start:], back[:]
        copies = len(batch.offloads) + len(batch.restores)
        if copies:
            first = entries.index(("page", "swap"))
            (record, wait) = entries[first - 2 : first]
            assert (record[0], record[2]) == ("record", "compute")
            assert wait == ("wait", record[1], "swap")
            assert entries.count(("page", "swap")) == copies
        recorded = [entry[1] for entry in entries if entry[0] == "record" and entry[2] == "swap"]
        leaving.update(zip(batch.offloads[:, 0].tolist(), recorded, strict=False))
        back[:] = recorded[-1:] if len(batch.restores) else []
        awaited = [entry[1] for entry in entries if entry[0] == "wait" and entry[2] == "compute"]
        handed_on = [
            leaving.pop(page) for page in batch.new_pages[:, 2].tolist() if page in leaving
        ]
        assert set(awaited) == {*came_back, *handed_on}
        num_waits += len(awaited)

    engine.worker.swap.move = checked
    prompts = tiny.prompts(8, seed=3)
    engine.generate(prompts, [SamplingParams(max_new_tokens=20 + i) for i in range(8)])
    assert engine.stats.preemptions > 3
    assert num_waits > 20
    assert ("page", "compute") not in log


def test_a_padding_row_runs_in_the_trash_lane_and_moves_nothing():
    """Rule 7."""
    engine = RolloutEngine(tiny.build(), EngineConfig(**SMALL))
    engine.submit([9, 10, 11], SamplingParams(max_new_tokens=4))
    engine.step()
    forward, cache = engine.worker.graphs.forward, engine.worker.kv_cache
    lanes, pages = forward.lanes, [cache.page(index) for index in range(cache.num_pages)]
    pages[TRASH_PAGE].fill_(7.0)
    before = [state.clone() for state in (lanes.positions_L, lanes.page_table_LP, *pages)]
    with torch.no_grad():
        forward.decode(torch.tensor([lanes.trash_lane] * 2), max_context=1)
    after = [lanes.positions_L, lanes.page_table_LP, *pages]
    same = [torch.equal(*states) for states in zip(before, after, strict=True)]
    assert [index for index, is_same in enumerate(same) if not is_same] == [2 + TRASH_PAGE]

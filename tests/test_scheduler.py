"""The scheduler, driven as `RolloutEngine.step` drives it, against a device that keeps stamps."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from simulation import Device, Rollout, assert_comes_by, depths, many, step
from workloads import EOS_SETS, VOCAB, Workload, make_request, text_of, workloads

from rollout.config import EngineConfig
from rollout.errors import RolloutError
from rollout.request import Request
from rollout.sampling_params import Draw, SamplingParams
from rollout.scheduler.batch import Batch
from rollout.scheduler.scheduler import Scheduler
from rollout.scheduler.waiting import digest
from rollout.stop_strings import StopStrings

# --- rows, by the ordering rules of the design


@many
@given(workloads(), depths)
def test_every_row_comes_back_once_as_if_alone(work, depth):
    """By rules 1, 3, 4 and 9: `Rollout` and `Device` look at every step."""
    Rollout(work, depth).run()


def test_rule_3_an_overrun_does_not_touch_the_lanes_next_row():
    scheduler = Scheduler(EngineConfig(max_rows=1, page_tokens=2), 4)
    scheduler.pages.grow(5)
    first = scheduler.add([make_request(0, 1, 8, eos_token_ids=(3,))])
    second = scheduler.add([make_request(1, 1, 2, eos_token_ids=(3,))])
    launched = scheduler.schedule(1)
    overrun = scheduler.schedule(1)
    (completion,) = scheduler.settle(launched, np.array([3]), np.zeros((1, 1), np.float32))
    assert [completion.row] == first
    reuse = scheduler.schedule(1)
    assert reuse.lanes == overrun.lanes
    assert reuse.rows.tolist() == second
    # An EOS and a NaN: neither is the second row's.
    assert scheduler.settle(overrun, np.array([3]), np.full((1, 1), np.nan, np.float32)) == []
    assert scheduler.settle(reuse, np.array([5]), np.zeros((1, 1), np.float32)) == []
    last = scheduler.schedule(1)
    (completion,) = scheduler.settle(last, np.array([4]), np.zeros((1, 1), np.float32))
    assert ([completion.row], completion.token_ids) == (second, [5, 4])
    scheduler.check()


def test_rule_5_not_finished_while_a_batch_is_in_flight():
    work = Workload(EngineConfig(), [make_request(0, 1, 9, eos_token_ids=EOS_SETS[-1])])
    rollout = Rollout(work, depth=2)
    rollout.add(work.requests[0])
    rollout.step()
    rollout.step()
    assert rollout.completions
    assert rollout.scheduler.num_live == rollout.scheduler.num_waiting == 0
    assert rollout.busy
    rollout.step()
    assert not rollout.busy
    assert rollout.scheduler.schedule(1) is None
    rollout.check()


# --- pages


class PagesWanted(Rollout):
    """Has as many pages as the scheduler wants, as `RolloutEngine` without `kv_bytes`."""

    policy_version = 1

    def grow(self, spare_pages: int) -> None:
        pass

    def add(self, request: Request) -> None:
        super().add(request)
        self.scheduler.pages.grow(self.scheduler.pages_wanted())

    def launch(self, batch: Batch) -> None:
        super().launch(batch)
        num_lanes = self.work.config.max_rows
        assert not self.queue or self.scheduler.num_live == num_lanes, "a row waits for pages"
        assert not self.preempted

    def check(self) -> None:
        super().check()
        rows = [self.scheduler.row_pages(self.requests[row]) for row in (*self.pages, *self.queue)]
        assert self.scheduler.pages_wanted() <= 1 + sum(rows), "more than every row can fill"


@given(workloads(), depths)
def test_with_the_pages_wanted_no_row_waits_for_pages(work, depth):
    PagesWanted(work, depth).run()


def test_growing_keeps_rows_going():
    scheduler = Scheduler(EngineConfig(max_rows=2, page_tokens=1), 20)
    scheduler.pages.grow(1 + 3)
    first, second = scheduler.add([make_request(seed, 1, 20) for seed in range(2)])
    # Each takes one page, and is expected to come to hold two.
    assert scheduler.schedule(1).rows.tolist() == [first]
    scheduler.pages.grow(1 + 5)
    assert scheduler.schedule(1).rows.tolist() == [first, second]
    scheduler.check()


def test_a_row_that_was_overtaken_is_looked_at_when_one_lane_is_free_as_before():
    scheduler = Scheduler(EngineConfig(max_rows=3, page_tokens=1), 32)
    scheduler.pages.grow(1 + 20)

    def add(*prompts):
        seed = scheduler.num_live + 10 * scheduler.num_waiting
        requests = [make_request(seed + n, size, 16, eos_token_ids=(3,)) for n, size in prompts]
        return scheduler.add(requests)

    known = make_request(99, 12, 16, eos_token_ids=(3,))
    scheduler.lengths.note(digest(known.prompt), 1)
    long, large = add((1, 1), (2, 10))
    assert step(scheduler).rows.tolist() == [long, large]
    (waiting,) = scheduler.add([known])
    # Then one lane is free, and too few pages.
    assert step(scheduler, large).rows.tolist() == [long, large]
    # Nothing is known of these, so they go first, and take all lanes.
    short, other = add((3, 1), (4, 1))
    assert sorted(step(scheduler, short).rows) == [long, short, other]
    assert sorted(step(scheduler).rows) == [long, waiting, other]


def test_a_row_is_looked_at_when_its_beginning_has_become_known():
    scheduler = Scheduler(EngineConfig(max_rows=3, page_tokens=1, prefill_tokens=4), 32)
    scheduler.pages.grow(1 + 16)
    first = make_request(0, 9, 9)
    second = replace(make_request(1, 1, 9), prompt=np.append(first.prompt, 7))
    rows = scheduler.add([first, second])
    assert [step(scheduler).rows.tolist() for _ in range(3)] == [[], rows[:1], rows]


@pytest.mark.parametrize(
    ("budget", "wanted"),
    [
        (9, [[4, 4], [4]]),  # the third would be cut, and more than half is used
        (7, [[4], [4], [4]]),
        (9 + 3, [[4, 4, 4]]),
        (3, [[3], [1, 2], [2], [3], [1]]),  # none fits into a step; 1 of 3 is less than half
    ],
)
def test_a_prompt_stays_whole_once_half_of_a_step_is_used(budget, wanted):
    scheduler = Scheduler(EngineConfig(max_rows=3, prefill_tokens=budget), 1)
    scheduler.pages.grow(4)
    scheduler.add([make_request(seed, 5, 1) for seed in range(3)])
    steps = []
    while scheduler.num_live or scheduler.num_waiting:
        batch = step(scheduler)
        steps.append([len(segment.tokens) for segment in batch.segments])
    assert [sizes for sizes in steps if sizes] == wanted


def test_a_batch_draws_as_the_most_demanding_of_its_rows():
    scheduler = Scheduler(EngineConfig(max_rows=2), 1)
    scheduler.pages.grow(3)
    asked = {"suppress_tokens": (9,)}, {"top_k": 3}, {}
    prompt, draws = np.array([9]), []
    for max_new, knobs in zip((2, 4, 7), asked, strict=True):
        scheduler.add([Request(prompt, SamplingParams(max_new_tokens=max_new, **knobs))])
    while scheduler.num_live or scheduler.num_waiting:
        batch = scheduler.schedule(1)
        draws.append(batch.draw)
        scheduler.settle(batch, batch.rows, np.zeros((len(batch.rows), 1), np.float32))
    assert draws == [Draw.PENALISED] * 2 + [Draw.FILTERED] * 2 + [Draw.PLAIN] * 5


# --- failure


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_logprob_that_is_not_finite_is_an_error_and_reset_mends_it(value):
    scheduler = Scheduler(EngineConfig(max_rows=2, page_tokens=1), 4)
    scheduler.pages.grow(9)
    lost = scheduler.add([make_request(seed, 2, 3) for seed in range(3)])
    batch = scheduler.schedule(1)
    in_flight = scheduler.schedule(1)
    with pytest.raises(RolloutError, match=f"log-probability {value} .* not finite"):
        scheduler.settle(batch, np.array([1, 2]), np.array([[-1.0], [value]], np.float32))

    scheduler.reset(scheduler.pages.num_pages)
    assert scheduler.num_live == scheduler.num_waiting == scheduler.pages.num_used == 0
    assert scheduler.pages.num_free == 8
    assert scheduler.schedule(1) is None
    scheduler.check()

    (row,) = scheduler.add([make_request(3, 1, 1)])
    assert row not in lost
    batch = scheduler.schedule(2)
    # What was in flight at the failure is nobody's now.
    assert scheduler.settle(in_flight, np.array([1, 2]), np.zeros((2, 1), np.float32)) == []
    (completion,) = scheduler.settle(batch, np.array([5]), np.zeros((1, 1), np.float32))
    assert (completion.row, completion.token_ids, completion.policy_versions) == (
        row,
        [5],
        [(2, 1)],
    )


# --- are the tests above hard enough?


@pytest.mark.parametrize(
    "place",
    [
        "overrun",
        "lane given on during an overrun",
        "prompt in several segments",
        "prefill without decode",
        "a page with two rows",
        "a page copied for a fork",
        "a beginning found",
        "reset with a batch in flight",
        "a row is preempted",
    ],
)
def test_workloads_come_by_the_hard_places(place):
    assert_comes_by(workloads(), place)


def test_the_device_sees_a_page_with_two_rows():
    scheduler = Scheduler(EngineConfig(max_rows=2, page_tokens=4), 2)
    scheduler.pages.grow(5)
    for seed in range(2):
        scheduler.add([make_request(seed, 2, 3)])
    batch = scheduler.schedule(1)
    batch.new_pages[:, 2] = 1
    device = Device(EngineConfig(max_rows=2, page_tokens=4), 2)
    with pytest.raises(AssertionError, match="row 0 reads another row's KV"):
        device.run(batch)


# --- speed

# Token 2 can be its last, and so is drawn by 25 of 256 rows.
NEVER = StopStrings(["a" * 20 + "c"], text_of, VOCAB)


@pytest.mark.parametrize(
    ("max_new", "stop"),
    [((16_384, 16_384), None), ((1, 100), None), ((16_384, 16_384), NEVER)],
    ids=["long", "refills", "stop strings"],
)
def test_256_rows_cost_little_a_step(max_new, stop):
    num_steps, random = 200, np.random.default_rng(0)
    scheduler = Scheduler(EngineConfig(max_rows=256, page_tokens=16), 1100)
    for seed, limit in enumerate(random.integers(*max_new, 2000, endpoint=True).tolist()):
        scheduler.add([make_request(seed, 20, limit, eos_token_ids=(0, 1), stop_strings=stop)])
    scheduler.pages.grow(scheduler.pages_wanted())
    tokens, logprobs = random.integers(2, VOCAB, 256), np.zeros((256, 1), np.float32)
    first = scheduler.schedule(1)
    scheduler.settle(first, tokens, logprobs)

    spent = []
    for _ in range(8):
        began = time.process_time()  # this process's own: others may be busy
        for _ in range(num_steps // 8):
            batch = scheduler.schedule(1)
            scheduler.settle(batch, tokens, logprobs)
        spent.append(time.process_time() - began)
    # The least: others slow memory down as well, and never make it faster.
    step_ms = 8000 * min(spent) / num_steps
    assert len(batch.rows) == 256
    print(f"{step_ms:.3f} ms to schedule and settle 256 rows")  # noqa: T201
    assert step_ms < 2


# --- recurrent states


def long_prompts(keeps_state, prefill_tokens, *sizes):
    config = EngineConfig(max_rows=len(sizes), page_tokens=2, prefill_tokens=prefill_tokens)
    scheduler = Scheduler(config, 300, keeps_state=keeps_state)
    scheduler.pages.grow(1 + 300 * len(sizes))
    rows = scheduler.add([make_request(n, size, 8, group=size) for n, size in enumerate(sizes)])
    return scheduler, rows


@pytest.mark.parametrize(("keeps_state", "start"), [(True, 0), (False, 64)])
def test_the_heir_of_a_left_prefill_has_its_pages_but_not_its_state(keeps_state, start):
    scheduler, rows = long_prompts(keeps_state, 64, 200, 200)
    (segment,) = scheduler.schedule(1).segments
    assert (segment.lane, segment.start, len(segment.tokens)) == (0, 0, 64)
    scheduler.abort(rows[:1])
    (segment,) = scheduler.schedule(1).segments
    assert (segment.lane, segment.start) == (1, start)


@pytest.mark.parametrize(
    ("keeps_state", "prefill_tokens", "parts"),
    [
        (False, 200, [(0, 200), (200, 299)]),
        (True, 200, [(0, 192), (192, 299)]),
        (True, 63, [(0, 63), (63, 64), (64, 127), (127, 128), (128, 191), (191, 192)]),
    ],
)
def test_parts_of_a_prompt_end_with_a_chunk_of_the_state(keeps_state, prefill_tokens, parts):
    scheduler, _ = long_prompts(keeps_state, prefill_tokens, 300)
    found = []
    while len(found) < len(parts):
        for segment in scheduler.schedule(1).segments:
            found.append((segment.start, segment.start + len(segment.tokens)))
    assert found == parts


def test_a_part_waits_rather_than_end_within_a_chunk():
    scheduler, _ = long_prompts(True, 100, 41, 300)
    sizes = [[len(segment.tokens) for segment in scheduler.schedule(1).segments] for _ in range(2)]
    assert sizes == [[40], [64]]

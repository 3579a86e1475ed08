"""Which row gets a lane next, and what the order gains."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from workloads import make_request

from rollout.config import EngineConfig
from rollout.scheduler import lanes as lane_table
from rollout.scheduler.lanes import UNKNOWN_PART
from rollout.scheduler.row import Row
from rollout.scheduler.scheduler import Scheduler
from rollout.scheduler.waiting import Lengths, WaitingQueue


def rows_of(*groups, first=0):
    return [
        Row(first + index, make_request(first + index, 4, 9, group))
        for index, group in enumerate(groups)
    ]


def order_of(queue):
    return [queue.pop().id for _ in range(len(queue))]


def queue_of(lengths, *groups):
    """A queue of these rows, after a rollout in which groups had the given lengths."""
    before = WaitingQueue(remembered := Lengths())
    before.add(rows_of(*lengths))
    for length in lengths.values():
        before.forget(before.pop(), length)
    queue = WaitingQueue(remembered)
    queue.add(rows_of(*groups))
    return queue


def test_nothing_known_is_first_come_first_served_and_groups_stay_together():
    queue = queue_of({}, 7, 8, 7, 9, 8, 7)
    queue.add(rows_of(7, 9, first=6))
    assert order_of(queue) == [0, 2, 5, 1, 4, 3, 6, 7]


def test_the_longest_known_go_first_behind_those_of_which_nothing_is_known():
    queue = queue_of({1: 10, 2: 300, 3: 20}, 1, 2, 4, 3, 2, 5)
    assert [queue.expected_new(row) for row in sorted(queue, key=lambda row: row.id)] == [
        10,
        300,
        0,
        20,
        300,
        0,
    ]
    assert order_of(queue) == [2, 5, 1, 4, 3, 0]


def test_a_finished_sibling_tells_of_the_rest_of_its_group():
    queue = queue_of({2: 50, 3: 40}, 1, 1, 1, 2, 3)
    queue.forget(queue.pop(), 45)
    assert order_of(queue) == [3, 1, 2, 4]


def test_a_preempted_row_goes_before_all_others_behind_older_ones():
    queue = queue_of({}, 1, 2, 3, 4)
    first, second = queue.pop(), queue.pop()
    queue.put_back(second)
    queue.put_back(first)
    assert queue.preempted(second.id) is second
    assert order_of(queue) == [0, 1, 2, 3]
    assert (first.age, second.age) == (0, 1)


def test_rows_that_are_removed_leave_their_groups():
    queue = queue_of({}, 1, 1, 2, 3)
    queue.put_back(queue.pop())
    assert {row.id for row in queue.remove({0, 1, 2, 99})} == {0, 1, 2}
    assert len(queue) == 1
    assert order_of(queue) == [3]


def test_prompts_seen_last_are_remembered():
    lengths = Lengths(capacity=2)
    for name in (b"a", b"b", b"a", b"c"):
        lengths.note(name, 10)
    assert [lengths.expected(name) for name in (b"a", b"b", b"c")] == [10.0, None, 10.0]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40))
def test_a_mean_lies_among_the_lengths_and_follows_them(seen):
    lengths = Lengths()
    for length in seen:
        lengths.note(b"prompt", length)
    assert min(seen) - 1e-6 <= lengths.expected(b"prompt") <= max(seen) + 1e-6
    for _ in range(200):
        lengths.note(b"prompt", 7)
    assert lengths.expected(b"prompt") == pytest.approx(7, abs=0.1)


# --- gains


def makespan(scheduler, groups, lengths, policy_version, longest=6000, num_pages=None):
    """Steps until rows of these lengths end; each step decodes one token per row."""
    requests = [
        make_request(row, 4, longest, int(group), eos_token_ids=(1,))
        for row, group in enumerate(groups)
    ]
    ids = scheduler.add(requests)
    length_of = dict(zip(ids, lengths, strict=True))
    scheduler.pages.grow(num_pages or scheduler.pages_wanted())
    num_done = dict.fromkeys(ids, 0)
    steps = 0
    while scheduler.num_live or scheduler.num_waiting:
        batch = scheduler.schedule(policy_version)
        rows = batch.rows.tolist()
        for row in rows:
            num_done[row] += 1
        tokens = np.array([1 if num_done[row] == length_of[row] else 5 for row in rows], np.int64)
        scheduler.settle(batch, tokens, np.zeros((len(rows), 1), np.float32))
        steps += 1
    return steps


def test_expected_longest_first_shortens_a_rollout_of_heavy_tailed_lengths():
    """256 rows on 64 lanes; lengths vary between the 32 prompts and within each."""
    gains, idle = [], []
    for seed in range(4):
        random = np.random.default_rng(seed)
        means = np.repeat(random.lognormal(5, 1.0, 32), 8)
        groups = np.repeat(np.arange(32), 8)
        epochs = [
            np.clip(means * random.lognormal(0, 0.3, 256), 1, 6000).astype(int) for _ in range(2)
        ]
        config = EngineConfig(max_rows=64, page_tokens=64)
        known, fresh = (Scheduler(config, 100) for _ in range(2))
        makespan(known, groups, epochs[0], 1)
        longest_first = makespan(known, groups, epochs[1], 2)
        as_submitted = makespan(fresh, groups, epochs[1], 1)
        least = max(epochs[1].max(), epochs[1].sum() / 64)
        gains.append(1 - longest_first / as_submitted)
        idle.append(longest_first / least - 1)
    print(f"makespan shorter by {np.mean(gains):.0%}, {np.mean(idle):.0%} above the least")  # noqa: T201
    assert np.mean(gains) > 0.1
    assert np.mean(idle) < 0.15


@pytest.mark.parametrize("host_pages", [0, 10**6], ids=["recompute", "host"])
@pytest.mark.parametrize(
    ("mean", "share"), [(256, 0.6), (10**6, 0.85)], ids=["log-normal", "all to the end"]
)
def test_rows_of_unknown_length_are_let_in_on_little(monkeypatch, mean, share, host_pages):
    """256 rows in memory for 40 full-length rows, against admission at half the length."""
    lengths = np.random.default_rng(1).lognormal(np.log(mean), 0.8, 256)
    rows = np.clip(lengths, 1, 1024).astype(int)
    steps = {}
    for part in (2, UNKNOWN_PART):
        monkeypatch.setattr(lane_table, "UNKNOWN_PART", part)
        scheduler = Scheduler(EngineConfig(max_rows=256, page_tokens=16), 65, host_pages)
        steps[part] = makespan(scheduler, range(256), rows, 1, longest=1024, num_pages=40 * 65)
    print("steps by the part that is counted on:", steps)  # noqa: T201
    assert steps[UNKNOWN_PART] < share * steps[2]

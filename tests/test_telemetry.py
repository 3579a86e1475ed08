"""Counts of one rollout."""

import time

import pytest

from rollout.telemetry.stats import RolloutStats


@pytest.fixture
def clock(monkeypatch):
    """Seconds that `perf_counter` shows from now on, in a list of one."""
    now = [time.perf_counter()]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_nothing_has_happened_yet():
    stats = RolloutStats(policy_version=3)
    assert stats.policy_version == 3
    assert (stats.generated_tokens, stats.engine_steps, stats.peak_pages) == (0, 0, 0)
    assert (stats.duration_s, stats.tokens_per_s, stats.rows_live) == (0.0, 0.0, 0.0)
    assert stats.overrun_tokens == 0


def test_launches_add_up_and_pages_peak():
    stats = RolloutStats()
    for num_rows, num_pages, num_bytes in [(4, 10, 64), (3, 12, 32), (2, 5, 16)]:
        stats.launched(num_rows, num_pages, num_bytes)
    assert (stats.engine_steps, stats.decoded_rows, stats.peak_pages) == (3, 9, 12)
    assert (stats.rows_live, stats.h2d_bytes) == (3.0, 112)


def test_the_tightest_moment_of_memory_is_kept_and_preemptions_add_up():
    stats = RolloutStats()
    assert stats.least_free_pages is None
    for num_shared, num_free in [(3, 9), (5, 0), (2, 7)]:
        stats.paged(num_shared, num_free)
    for num_rows, num_bytes in [(0, 0), (2, 512), (1, 0)]:
        stats.preempted(num_rows, num_bytes)
    assert (stats.peak_shared_pages, stats.least_free_pages) == (5, 0)
    assert (stats.preemptions, stats.offloaded_bytes) == (3, 512)


def test_most_memory_is_kept_and_what_taking_it_cost_adds_up():
    stats = RolloutStats()
    for num_bytes, num_released, seconds in [(512, 64, 0.5), (1024, 0, 0.25), (256, 32, 0.0)]:
        stats.mapped(num_bytes, num_released, seconds)
    assert (stats.mapped_bytes, stats.released_bytes, stats.wake_s) == (1024, 96, 0.75)


def test_prompt_tokens_add_up():
    stats = RolloutStats()
    assert stats.prefix_hit_rate == 0
    for num_tokens, num_attended, num_shared in [(6, 21, 0), (3, 6, 27)]:
        stats.prefilled(num_tokens, num_attended, num_shared)
    assert (stats.prefilled_tokens, stats.attended_tokens, stats.shared_tokens) == (9, 27, 27)
    assert stats.prefix_hit_rate == 0.75


def test_casts_of_one_rollout_add_up():
    stats = RolloutStats()
    for num_bytes, seconds in [(1024, 0.5), (0, 0.0), (1024, 0.25)]:
        stats.cast(num_bytes, seconds)
    assert (stats.cast_bytes, stats.cast_s) == (2048, 0.75)


def test_duration_runs_to_the_last_settled_step(clock):
    stats = RolloutStats(_began=clock[0])
    clock[0] += 2.0
    stats.settled(6)
    assert (stats.duration_s, stats.tokens_per_s) == pytest.approx((2.0, 3.0))
    clock[0] += 2.0
    assert stats.duration_s == pytest.approx(
        2.0
    )  # idle time after the last step is not the rollout's
    stats.settled(0)
    assert (stats.duration_s, stats.tokens_per_s) == pytest.approx((4.0, 1.5))
    assert stats.generated_tokens == 6


def test_lengths_are_kept_and_what_follows_the_last_token_belongs_to_the_whole(clock):
    stats = RolloutStats(_began=clock[0])
    stats.warmed_up(3, 0.5)
    stats.ended([4, 2], 1)
    stats.ended([], 0)
    stats.ended([9], 1)
    clock[0] += 6.0
    stats.settled(15)
    stats.wake_s, stats.sleep_s = 1.0, 2.0
    assert (stats.lengths, stats.num_stopped, stats.captured_graphs) == ([4, 2, 9], 2, 3)
    assert stats.whole_s == pytest.approx(8.0)
    shares = stats.time_shares
    assert (shares["sleep"], shares["host_bound"]) == pytest.approx((3 / 8, 5 / 8))


def test_no_time_is_no_division(clock):
    stats = RolloutStats(_began=clock[0])
    stats.settled(5)
    assert stats.tokens_per_s == 0.0


def test_an_overrun_is_a_decoded_row_that_no_completion_has():
    stats = RolloutStats()
    # Two rows: one ends by EOS with its second token while its third is in flight.
    for num_rows in (2, 2, 2, 1):
        stats.launched(num_rows, 1, 0)
    stats.settled(2)
    stats.settled(4)
    assert (stats.generated_tokens, stats.overrun_tokens) == (6, 1)


def test_each_rollout_has_its_own_beginning():
    first = RolloutStats()
    time.sleep(0.01)
    second = RolloutStats()
    for stats in (second, first):
        stats.settled(1)
    assert first.duration_s - second.duration_s >= 0.01
    assert "_began" not in repr(second)

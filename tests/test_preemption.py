"""Rows that lose their lane, are computed again, or are dropped: the others never notice."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import Rollout, assert_comes_by, depths, expect_short, many, step
from workloads import Workload, make_request, tight_workloads

from rollout.config import EngineConfig
from rollout.scheduler.lanes import expected_growth
from rollout.scheduler.pages import pages_for
from rollout.scheduler.scheduler import Scheduler


@many
@given(tight_workloads(), depths)
def test_every_row_comes_back_once_whatever_room_there_is_and_befalls_it(work, depth):
    """Rows are dropped, or all computed again, before some of the steps."""
    Rollout(work, depth).run()


@given(tight_workloads(), depths)
def test_with_room_for_all_none_is_preempted(work, depth):
    rows = [pages_for(r.max_kv_tokens, work.config.page_tokens) for r in work.requests]
    work = replace(work, spare_pages=sum(rows), renewals=frozenset())
    assert not Rollout(work, depth).run().preempted


class Optimistic(Rollout):
    def add(self, request):
        expect_short(self.scheduler, [request])
        super().add(request)


def short_rows(number: int) -> Workload:
    """Rows that end a few steps apart, on pages that hold a token or two and come one by one.

    By plain random numbers: Hypothesis prefers rows that are alike, and those give way together.
    """
    random = Random(number)
    config = EngineConfig(
        max_rows=random.randint(3, 4), page_tokens=random.randint(1, 2), prefill_tokens=20
    )
    requests, longest = [], random.randint(4, 12)
    for index in range(random.randint(3, 5)):
        group, max_new = random.randint(0, index), longest + random.randint(-2, 2)
        eos = random.choice([(3,), (1, 3), (0, 1, 3)])
        seed, group = 100 * number + index, 100 * number + group
        num_prompt = 1 + group % 3
        requests.append(make_request(seed, num_prompt, max_new, group, eos_token_ids=eos))
    growths = {random.randrange(24): spare for spare in range(1, random.choice([1, 2, 4, 9]))}
    return Workload(config, requests, growths=growths, num_host_pages=99, version_steps=1000)


@pytest.mark.parametrize("depth", [1, 2])
def test_short_rows_come_back_whatever_ends_in_that_step(depth):
    for number in range(300):
        Optimistic(short_rows(number), depth).run()


def tokens_of(batch, token):
    return np.full(len(batch.rows), token), np.zeros((len(batch.rows), 1), np.float32)


@pytest.mark.parametrize("num_host_pages", [0, 9])
@pytest.mark.parametrize("last", ["eos", "length"])
def test_a_row_whose_last_token_is_in_flight_ends_after_it_was_preempted(num_host_pages, last):
    scheduler = Scheduler(EngineConfig(max_rows=2, page_tokens=2), 8, num_host_pages)
    scheduler.pages.grow(1 + 8)
    limits = (15, 15 if last == "eos" else 8)
    old, young = scheduler.add(
        [make_request(seed, 1, limit, eos_token_ids=(3,)) for seed, limit in enumerate(limits)]
    )
    in_flight, batch, done = None, scheduler.schedule(1), []
    while batch.num_preempted == 0:
        in_flight, before = batch, in_flight
        if before is not None:
            assert scheduler.settle(before, *tokens_of(before, 5)) == []
        batch = scheduler.schedule(1)
    assert batch.rows == [old]
    assert in_flight.rows.tolist() == [old, young]
    tokens, scores = tokens_of(in_flight, 5)
    if last == "eos":
        tokens[1] = 3
    (done,) = scheduler.settle(in_flight, tokens, scores)
    assert (done.row, len(done.token_ids)) == (young, 8)
    assert done.policy_versions == [(1, 8)]
    scheduler.check()
    assert (scheduler.num_live, scheduler.num_waiting) == (1, 0)


def test_a_group_that_gives_way_is_copied_once_and_brought_back_once():
    """Three rows share two full pages of their prompt."""
    scheduler = Scheduler(EngineConfig(max_rows=4, page_tokens=4), 20, 99)
    scheduler.pages.grow(1 + 8)
    group = [make_request(seed, 9, 30, group=1) for seed in (1, 2, 3)]
    rows = scheduler.add(expect_short(scheduler, [make_request(0, 1, 77), *group]))
    assert step(scheduler).rows.tolist() == rows
    offloads = [pair for _ in range(12) for pair in step(scheduler).offloads.tolist()]
    assert (scheduler.num_live, scheduler.num_waiting) == (1, 3)
    assert len(offloads) == 2 + (1 + 2 + 3)  # shared pages, and those of each row alone
    scheduler.pages.grow(1 + 60)
    restores = step(scheduler).restores.tolist()
    assert 0 < len(restores) < len(offloads)  # some were still there
    assert {host for host, _ in restores} <= {host for _, host in offloads}
    assert len({host for host, _ in restores}) == len(restores)
    assert step(scheduler).rows.tolist() == rows


def test_a_row_whose_pages_are_all_still_there_is_admitted_though_nothing_else_runs():
    """It came back on a page's edge and gave way before it ran, so none of its pages is open."""
    scheduler = Scheduler(EngineConfig(max_rows=2, page_tokens=2), 8, 9)
    scheduler.pages.grow(1 + 2)
    old, young = scheduler.add([make_request(seed, 1, 15, eos_token_ids=(3,)) for seed in (0, 1)])

    ran = [step(scheduler).rows.tolist() for _ in range(3)]
    assert ran == [[old, young], [old, young], [old]]
    scheduler.pages.grow(1 + 4)
    assert len(step(scheduler).restores) == 1
    gave_way = step(scheduler, old)
    assert (gave_way.rows.tolist(), gave_way.num_preempted) == ([old], 1)
    back = step(scheduler)
    assert (len(back.rows), len(back.restores), back.admitted["lane"].tolist()) == (0, 0, [0])
    assert back.new_pages[:, :2].tolist() == [[0, 0], [0, 1]]
    assert step(scheduler).rows.tolist() == [young]


def test_a_row_dropped_while_its_kv_comes_back_leaves_its_lane_as_if_it_had_never_been_there():
    """The next row there has to wait for its own."""
    scheduler = Scheduler(EngineConfig(max_rows=3, page_tokens=2), 8, 9)
    scheduler.pages.grow(1 + 6)
    requests = [make_request(seed, 1, 15) for seed in range(3)]
    old, dropped, young = scheduler.add(expect_short(scheduler, requests))
    for _ in range(7):
        step(scheduler)
    assert (scheduler.num_live, scheduler.num_waiting) == (1, 2)
    scheduler.pages.grow(1 + 9)
    (lane,) = step(scheduler).admitted["lane"]
    scheduler.abort([dropped])
    back = step(scheduler)
    assert back.admitted["lane"] == [lane]
    assert len(back.restores)
    assert back.rows.tolist() == [old]
    assert step(scheduler).rows.tolist() == [old, young]


def test_who_waits_for_an_aborted_prefill_takes_it_over():
    """The prompt's 10 tokens fill two pages of 4, and half of one that each row has alone."""
    scheduler = Scheduler(EngineConfig(max_rows=3, page_tokens=4, prefill_tokens=7), 8)
    scheduler.pages.grow(30)
    rows = scheduler.add([make_request(seed, 11, 2, group=1) for seed in range(3)])
    batch = scheduler.schedule(1)
    assert [(s.lane, s.start, len(s.tokens)) for s in batch.segments] == [(0, 0, 7)]
    last_pages = [page for lane, index, page in batch.new_pages.tolist() if lane and index == 2]
    scheduler.abort([rows[0]])
    scheduler.check()
    batch = scheduler.schedule(1)
    assert [(s.lane, s.start, len(s.tokens)) for s in batch.segments] == [(1, 7, 3)]
    assert batch.rows.tolist() == rows[1:]
    assert batch.copies.tolist() == [last_pages]


def test_what_lay_in_the_last_page_of_an_aborted_prefill_is_computed_again():
    scheduler = Scheduler(EngineConfig(max_rows=2, page_tokens=4, prefill_tokens=9), 8)
    scheduler.pages.grow(30)
    rows = scheduler.add([make_request(seed, 11, 2, group=1) for seed in range(2)])
    scheduler.schedule(1)
    scheduler.abort([rows[0]])
    (segment,) = scheduler.schedule(1).segments
    assert (segment.lane, segment.start, len(segment.tokens)) == (1, 8, 2)


numbers = st.integers(0, 40)


@given(numbers, numbers, st.integers(1, 40), numbers, numbers, st.integers(1, 9))
def test_no_growth_is_expected_beyond_the_longest_row(prompt, launched, left, known, pages, page):
    position, max_new = prompt + launched, launched + left
    row = position, launched, max_new, min(known, max_new), pages
    growth = expected_growth(*row, page)
    assert 0 <= growth <= max(pages_for(prompt + max_new, page) - pages, 0)
    assert expected_growth(*(np.array([number]) for number in row), page) == [growth]
    if known > launched:
        end = prompt + min(known, max_new)
        assert growth == max(pages_for(end, page) - pages, 0)


# --- are the tests above hard enough?


@pytest.mark.parametrize(
    "place",
    [
        "a row is preempted",
        "a row waits for a page in its lane",
        "a row ends after it was preempted",
        "offloaded",
        "restored",
        "no host page is left",
        "a beginning found",
        "lane given on during an overrun",
    ],
)
def test_tight_workloads_come_by_the_hard_places(place):
    assert_comes_by(tight_workloads(), place)

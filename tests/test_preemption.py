"""Rows that lose their lane, are computed again, or are dropped: the others never notice."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from simulation import (
    EOS_SETS,
    Rollout,
    Workload,
    by_seed,
    depths,
    expected,
    make_request,
    many,
    outcome,
    version_steps,
)

import rollout.scheduler.admission
from rollout.config import EngineConfig
from rollout.scheduler.lanes import LaneTable, expected_growth
from rollout.scheduler.pages import pages_for
from rollout.scheduler.scheduler import Scheduler


@st.composite
def tight(draw) -> Workload:
    """Groups of long rows on many lanes, with little more memory than the longest of them needs."""
    config = EngineConfig(
        max_rows=draw(st.integers(2, 6)),
        page_tokens=draw(st.integers(1, 4)),
        prefill_tokens=draw(st.integers(2, 20)),
    )
    group = st.tuples(
        st.integers(1, 10),  # prompt
        st.integers(1, 4),  # rows
        st.integers(1, 30),  # max_new_tokens
        st.sampled_from(EOS_SETS[:4]),
    )
    requests = []
    for index, (num_prompt, num_rows, max_new, eos) in enumerate(
        draw(st.lists(group, min_size=1, max_size=5))
    ):
        for _ in range(num_rows):
            seed = len(requests)
            requests.append(make_request(seed, num_prompt, max_new, 50 + index, eos_token_ids=eos))
    return Workload(
        config,
        requests,
        [0] * len(requests),
        spare_pages=draw(st.integers(0, 8)),
        # Pages that come while rows are parked: such a row may come back, and give way again.
        growths=draw(st.dictionaries(st.integers(0, 30), st.integers(1, 12), max_size=3)),
        reset_step=None,
        num_host_pages=draw(st.sampled_from([0, 1, 4, 9, 500])),
        version_steps=draw(version_steps),
    )


class Disturbed(Rollout):
    """Rows are dropped, or all computed again, before some of the steps."""

    def __init__(
        self,
        work: Workload,
        depth: int,
        aborts: dict[int, set[int]] | None = None,
        renewals: set[int] = frozenset(),
    ) -> None:
        super().__init__(work, depth)
        self.aborts, self.renewals = aborts or {}, renewals
        self.aborted: set[int] = set()

    def step(self) -> None:
        self.abort(self.aborts.get(self.num_steps, set()) & self.requests.keys())
        if self.num_steps in self.renewals:
            self.renew()
        super().step()

    def abort(self, rows: set[int]) -> None:
        self.scheduler.abort(rows)
        rows = rows - self.completions.keys() - self.aborted
        for lane in [lane for lane, row in self.row_in.items() if row in rows]:
            del self.pages[self.row_in.pop(lane)]
        self.queue = [row for row in self.queue if row not in rows]
        self.aborted |= rows
        self.check()

    def renew(self) -> None:
        self.scheduler.recompute()
        self.device.renewed |= {self.requests[row].seed for row in self.admitted}
        self.preempted.update(self.row_in.values())
        self.queue += self.row_in.values()
        self.row_in, self.pages = {}, {}
        self.check()

    def launch(self, batch) -> None:
        super().launch(batch)
        if self.row_in and not batch.segments:
            oldest = min(self.row_in.values(), key=self.admitted.index)
            lane = next(lane for lane, row in self.row_in.items() if row == oldest)
            limit = self.requests[oldest].sampling.max_new_tokens
            waits = lane in self.scheduler._lanes.restoring or self.num_launched[oldest] == limit
            assert oldest in batch.rows or waits, "the oldest row stands still"


def most_steps(work: Workload) -> int:
    """Steps in which nothing but the oldest row gets on, and all others are prefilled each time."""
    config, total = work.config, 20
    longest = max(request.max_tokens for request in work.requests)
    a_prefill = pages_for(longest, config.prefill_tokens) + 3
    for request in work.requests:
        total += request.sampling.max_new_tokens * config.max_rows * a_prefill
    return total


@many
@given(tight(), depths)
def test_every_row_comes_back_once_whatever_room_there_is(work, depth):
    rollout = Disturbed(work, depth).run()
    done = by_seed(rollout)
    assert len(rollout.completions) == len(work.requests)
    for request in work.requests:
        assert outcome(done[request.seed]) == expected(request)
    assert rollout.num_steps <= most_steps(work)
    assert rollout.scheduler.pages.num_used == rollout.scheduler._host_pages.num_used == 0
    # A token is launched once, but for the one that an EOS overruns.
    for row, completion in rollout.completions.items():
        assert rollout.num_launched[row] - len(completion.token_ids) in (0, 1)


def few_rows(number: int) -> Workload:
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
    return Workload(config, requests, [0] * len(requests), 0, growths, None, 99, 1000)


@pytest.mark.parametrize("depth", [1, 2])
def test_few_rows_come_back_whatever_ends_in_that_step(monkeypatch, depth):
    """They are let in as if none were to grow."""
    monkeypatch.setattr(rollout.scheduler.admission, "expected_growth", lambda *_: 0)
    monkeypatch.setattr(LaneTable, "growth", lambda _: 0)
    for number in range(300):
        work = few_rows(number)
        done = by_seed(Disturbed(work, depth).run())
        assert [outcome(done[r.seed]) for r in work.requests] == list(map(expected, work.requests))


steps = st.integers(0, 40)


@many
@given(
    tight(),
    depths,
    st.dictionaries(steps, st.sets(st.integers(0, 12), max_size=3), max_size=6),
    st.sets(steps, max_size=3),
)
def test_rows_may_be_dropped_and_computed_again_at_any_step(work, depth, aborts, renewals):
    """`Device` sees KV that is older than a row's last renewal."""
    rollout = Disturbed(work, depth, aborts, renewals).run()
    assert rollout.completions.keys() | rollout.aborted == set(range(len(work.requests)))
    assert not rollout.completions.keys() & rollout.aborted
    for row, completion in rollout.completions.items():
        assert outcome(completion) == expected(rollout.requests[row])
    assert rollout.scheduler.pages.num_used == rollout.scheduler._host_pages.num_used == 0


@many
@given(tight(), depths)
def test_with_room_for_all_none_is_preempted_and_none_waits(work, depth):
    rows = [pages_for(r.max_kv_tokens, work.config.page_tokens) for r in work.requests]
    rollout = Disturbed(replace(work, spare_pages=sum(rows)), depth).run()
    assert not rollout.preempted


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
    assert scheduler._host_pages.num_used == 0
    assert (scheduler.num_live, scheduler.num_waiting) == (1, 0)


def test_a_group_that_gives_way_is_copied_once_and_brought_back_once():
    """Three rows share two full pages of their prompt."""
    scheduler = Scheduler(EngineConfig(max_rows=4, page_tokens=4), 20, 99)
    scheduler.pages.grow(1 + 40)
    group = [make_request(seed, 9, 30, group=1) for seed in (1, 2, 3)]
    (old,), young = scheduler.add([make_request(0, 1, 77)]), scheduler.add(group)
    copies = {"offloads": [], "restores": []}

    def step():
        batch = scheduler.schedule(1)
        scheduler.settle(batch, *tokens_of(batch, 5))
        scheduler.check()
        for name, pages in copies.items():
            pages += getattr(batch, name).tolist()
        return batch.rows.tolist()

    assert step() == [old, *young]
    hoard = scheduler.pages.allocate(scheduler.pages.num_free)
    while scheduler.num_live > 1:
        scheduler.pages.check = lambda held: None  # the hoard is nobody's
        hoard = np.append(hoard, scheduler.pages.allocate(scheduler.pages.num_free))
        step()
    # Two rows had a page of their own each when they gave way, the third two.
    assert len(copies["offloads"]) == scheduler._host_pages.num_used == 2 + 4
    scheduler.pages.free(hoard)
    del scheduler.pages.check
    while set(young) - set(step()):
        pass
    restored = [host_page for host_page, _ in copies["restores"]]
    assert len(restored) == len(set(restored))
    assert scheduler._host_pages.num_used == 0


def test_a_row_whose_pages_are_all_still_there_is_admitted_though_nothing_else_runs():
    """It came back on a page's edge and gave way before it ran, so none of its pages is open."""
    scheduler = Scheduler(EngineConfig(max_rows=2, page_tokens=2), 8, 9)
    scheduler.pages.grow(1 + 2)
    old, young = scheduler.add([make_request(seed, 1, 15, eos_token_ids=(3,)) for seed in (0, 1)])

    def step(token=5):
        batch = scheduler.schedule(1)
        scheduler.settle(batch, *tokens_of(batch, token))
        scheduler.check()
        return batch

    assert [step().rows.tolist() for _ in range(3)] == [[old, young], [old, young], [old]]
    scheduler.pages.grow(1 + 4)
    assert len(step().restores) == 1
    gave_way = step(token=3)
    assert (gave_way.rows.tolist(), gave_way.num_preempted) == ([old], 1)
    back = step()
    assert (len(back.rows), len(back.restores), back.admitted["lane"].tolist()) == (0, 0, [0])
    assert back.new_pages[:, :2].tolist() == [[0, 0], [0, 1]]
    assert step().rows.tolist() == [young]


def test_a_row_dropped_while_its_kv_comes_back_leaves_its_lane_as_if_it_had_never_been_there():
    scheduler = Scheduler(EngineConfig(max_rows=2, page_tokens=2, prefill_tokens=1), 8, 9)
    scheduler.pages.grow(1 + 8)
    _, young = scheduler.add([make_request(seed, 1, limit) for seed, limit in enumerate((9, 15))])
    while scheduler.num_waiting or not scheduler._lanes.restoring:
        batch = scheduler.schedule(1)
        scheduler.settle(batch, *tokens_of(batch, 5))
    assert len(batch.restores)
    scheduler.abort([young])
    scheduler.check()
    (new,) = scheduler.add([make_request(2, 4, 9)])
    for _ in range(2):
        assert len(scheduler.schedule(1).rows) == 0
    assert scheduler.schedule(1).rows.tolist() == [new]


def test_who_waits_for_an_aborted_prefill_takes_it_over():
    """The prompt's 10 tokens fill two pages of 4, and half of one that each row has alone."""
    scheduler = Scheduler(EngineConfig(max_rows=3, page_tokens=4, prefill_tokens=7), 8)
    scheduler.pages.grow(30)
    rows = scheduler.add([make_request(seed, 11, 2, group=1) for seed in range(3)])
    batch = scheduler.schedule(1)
    assert [(s.lane, s.start, len(s.tokens)) for s in batch.segments] == [(0, 0, 7)]
    scheduler.abort([rows[0]])
    scheduler.check()
    batch = scheduler.schedule(1)
    assert [(s.lane, s.start, len(s.tokens)) for s in batch.segments] == [(1, 7, 3)]
    assert batch.rows.tolist() == rows[1:]
    last_pages = [scheduler._lanes.page_table[lane, 2] for lane in (1, 2)]
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
def test_no_growth_is_expected_beyond_the_longest_row(prompt, launched, left, known, held, page):
    position, max_new = prompt + launched, launched + left
    row = position, launched, max_new, min(known, max_new), held
    growth = expected_growth(*row, page)
    assert 0 <= growth <= max(pages_for(prompt + max_new, page) - held, 0)
    assert expected_growth(*(np.array([number]) for number in row), page) == [growth]
    if known > launched:
        end = prompt + min(known, max_new)
        assert growth == max(pages_for(end, page) - held, 0)


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
    once = settings(max_examples=5000, phases=[Phase.generate], database=None)
    find(tight(), lambda work: place in Disturbed(work, 2).run().seen, settings=once)

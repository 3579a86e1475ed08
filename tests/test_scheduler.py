"""The scheduler, driven as `RolloutEngine.step` drives it, against a device that keeps stamps.

Random workloads run on `Device`, which stamps every KV entry with whose it is, so that a page
handed to two rows, or reused too early, is seen by the first row that reads it.
"""

import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from rollout.config import RolloutConfig
from rollout.errors import RolloutError
from rollout.pages import TRASH_PAGE, pages_for
from rollout.request import Batch, Completion, FinishReason, Request, SamplingParams
from rollout.scheduler import Scheduler
from rollout.telemetry import RolloutStats

VOCAB = 12
EOS_SETS = [(), (VOCAB,), (3,), (0, 5, 8, 9), tuple(range(VOCAB))]  # never ... at once
MAX_PAGES = 300  # more than any workload below can take

# Each property sees this many workloads; they add up to thousands.
many = settings(max_examples=3 * settings.default.max_examples)
depths = st.sampled_from([1, 2])


# --- the model, and what it makes of a row


def next_token(seed: int, position: int, token: int) -> int:
    """The model: one row's next token, from nothing but that row."""
    return hash((seed, position, token)) % VOCAB


def logprob(seed: int, position: int, temperature: float) -> float:
    return -(hash((seed, position)) % 97) / 8 - temperature  # exact in float32


def expected(request: Request) -> tuple[list[int], list[float], FinishReason]:
    """Tokens, log-probabilities and finish reason of a row generated on its own."""
    seed, sampling = request.seed, request.sampling
    tokens, logprobs, token = [], [], int(request.prompt[-1])
    for position in range(len(request.prompt), request.max_tokens):
        token = next_token(seed, position, token)
        tokens.append(token)
        logprobs.append(logprob(seed, position, sampling.temperature))
        if token in sampling.eos_token_ids:
            return tokens, logprobs, FinishReason.STOP
    return tokens, logprobs, FinishReason.LENGTH


def outcome(completion: Completion) -> tuple[list[int], list[float], FinishReason]:
    return completion.token_ids, completion.logprobs, completion.finish_reason


# --- the device


class Device:
    """Runs whole batches in launch order and knows only what they told it, like the real one.

    It tells rows apart by their seed, and refuses to attend to an entry that the row did not
    write itself.
    """

    def __init__(
        self, config: RolloutConfig, max_row_pages: int, requests: list[Request] | None = None
    ) -> None:
        num_lanes, self.page_tokens = config.max_rows, config.page_tokens
        self.prompts = {r.seed: r.prompt[:-1].tolist() for r in requests or []}
        self.tokens, self.positions, self.seeds = np.full((3, num_lanes), -1)
        self.temperatures = np.full(num_lanes, np.nan)
        self.block_table = np.full((num_lanes, max_row_pages), TRASH_PAGE)
        # Seed, position, token, policy version.
        self.stamps = np.full((MAX_PAGES, self.page_tokens, 4), -1)
        self.versions: dict[int, int] = {}  # seed -> policy version at admission
        self.written: dict[int, list[int]] = {}  # seed -> tokens that have KV, in order

    def run(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        self.version = batch.policy_version
        self.admit(batch)
        for segment in batch.segments:
            stop = segment.start + len(segment.tokens)
            for position, token in zip(range(segment.start, stop), segment.tokens, strict=True):
                self.write(segment.lane, position, int(token))
            self.attend(segment.lane, stop)
        for source, target in batch.copies:
            assert TRASH_PAGE not in (source, target)
            self.stamps[target] = self.stamps[source]
        return self.decode(batch)

    def admit(self, batch: Batch) -> None:
        admission = batch.admission
        self.tokens[admission.lanes] = admission.tokens
        self.positions[admission.lanes] = admission.positions
        self.seeds[admission.lanes] = admission.seeds
        self.temperatures[admission.lanes] = admission.temperatures
        self.written.update((seed, []) for seed in admission.seeds)
        self.versions.update((seed, batch.policy_version) for seed in admission.seeds)
        self.block_table[admission.lanes] = TRASH_PAGE  # so that a missing page is noticed
        lanes, index, pages = batch.new_pages.T
        self.block_table[lanes, index] = pages

    def decode(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        contexts = [int(self.positions[lane]) + 1 for lane in batch.lanes]
        assert not contexts or max(contexts) == batch.max_context
        for lane in batch.lanes:  # every row writes before any row reads, as in a layer
            self.write(lane, int(self.positions[lane]), int(self.tokens[lane]))
        for lane, context in zip(batch.lanes, contexts, strict=True):
            self.attend(lane, context)
        self.positions[batch.lanes] += 1
        sampled = [self.sample(lane) for lane in batch.lanes]
        tokens = np.array([token for token, _ in sampled], np.int64)
        self.tokens[batch.lanes] = tokens  # the carry-over: the host has not seen them yet
        return tokens, np.array([logprob for _, logprob in sampled], np.float32)[:, None]

    def sample(self, lane: int) -> tuple[int, float]:
        seed, position = int(self.seeds[lane]), int(self.positions[lane])
        token = next_token(seed, position, int(self.tokens[lane]))
        return token, logprob(seed, position, float(self.temperatures[lane]))

    def write(self, lane: int, position: int, token: int) -> None:
        page = self.block_table[lane, position // self.page_tokens]
        assert page != TRASH_PAGE, "a running row writes to the trash page"
        seed = int(self.seeds[lane])
        if not self.written[seed] and position:  # what comes before is another row's
            self.written[seed] += self.prompts.get(seed, [])[:position]
        assert position == len(self.written[seed]), "a position was skipped or written twice"
        self.written[seed].append(token)
        self.stamps[page, position % self.page_tokens] = seed, position, token, self.version

    def attend(self, lane: int, context: int) -> None:
        positions, seed = np.arange(context), int(self.seeds[lane])
        pages = self.block_table[lane, positions // self.page_tokens]
        stamps = self.stamps[pages, positions % self.page_tokens]
        # A prompt's KV may be another row's of the same prompt: the tokens tell prompts apart.
        num_prompt = len(self.prompts.get(seed, ()))
        assert (stamps[:num_prompt, 3] >= self.versions[seed]).all(), "KV of old weights is shared"
        own = stamps[num_prompt:, 0]
        assert (own == seed).all(), f"row {seed} reads another row's KV: {stamps[:, 0]}"
        assert (stamps[:, 1] == positions).all()
        assert stamps[:, 2].tolist() == self.written[seed]


# --- workloads, and the loop that runs them


@dataclass(frozen=True)
class Workload:
    """Rows with the step each arrives at, and how much room they get.

    `spare_pages` are on top of what the longest row needs, at the start and after each of
    `growths`; steps count from 0.
    """

    config: RolloutConfig
    requests: list[Request]
    arrivals: list[int]
    spare_pages: int
    growths: dict[int, int]
    reset_step: int | None

    @property
    def max_row_pages(self) -> int:
        longest = max(request.max_tokens for request in self.requests)
        return pages_for(longest - 1, self.config.page_tokens)


def make_request(
    seed: int, num_prompt: int, max_new: int, group: int | None = None, **sampling
) -> Request:
    # No two prompt tokens are alike, but for rows of one group.
    prompt = 1000 * ((seed if group is None else group) + 1) + np.arange(num_prompt)
    return Request(prompt, SamplingParams(max_new_tokens=max_new, **sampling), seed)


@st.composite
def workloads(draw, *, resets=False, max_spare_pages=12) -> Workload:
    """Up to 14 rows that arrive while others run, on 1 to 5 lanes."""
    config = RolloutConfig(
        max_rows=draw(st.integers(1, 5)),
        page_tokens=draw(st.integers(1, 6)),
        prefill_tokens=draw(st.integers(1, 20)),
    )
    rows = st.tuples(
        st.integers(1, 14),  # prompt
        st.integers(1, 14),  # max_new_tokens
        st.sampled_from(EOS_SETS),
        st.sampled_from([0.0, 0.5, 1.0]),  # temperature
        st.sampled_from([0, 0, 0, 0, 1, 3, 9]),  # steps after the row before
        st.sampled_from([None, None, 20, 20, 21]),  # group
        st.sampled_from([None, None, 0, 3, 5]),  # the row whose next turn it is
    )
    requests, arrivals = [], []
    for seed, (num_prompt, max_new, eos, temperature, gap, group, turn_of) in enumerate(
        draw(st.lists(rows, min_size=1, max_size=14))
    ):
        sampling = {"eos_token_ids": eos, "temperature": temperature}
        num_prompt = num_prompt if group is None else 5 + 4 * (group - 20)
        requests.append(make_request(seed, num_prompt, max_new, group, **sampling))
        if turn_of is not None and turn_of < seed:
            before = requests[turn_of]
            turn = [*before.prompt, *expected(before)[0], 7_000_000 + seed]
            requests[-1] = replace(requests[-1], prompt=np.array(turn[-40:]))
        arrivals.append(arrivals[-1] + gap if arrivals else 0)
    return Workload(
        config,
        requests,
        arrivals,
        spare_pages=draw(st.integers(0, max_spare_pages)),
        growths=draw(st.dictionaries(st.integers(0, 20), st.integers(1, 30), max_size=2)),
        reset_step=draw(st.integers(0, 15)) if resets else None,
    )


class Rollout:
    """`RolloutEngine.step` without torch, and the books that another accountant would keep."""

    def __init__(self, work: Workload, depth: int) -> None:
        self.work = work
        self.scheduler = Scheduler(work.config, work.max_row_pages)
        self.grow(work.spare_pages)
        self.device = Device(work.config, work.max_row_pages, work.requests)
        self.slots: list[Batch | None] = [None] * depth
        self.turn = self.num_steps = 0
        self.stats = RolloutStats()
        self.requests: dict[int, Request] = {}  # by row, as everything below
        self.queue: deque[int] = deque()
        self.row_in: dict[int, int] = {}  # lane -> row
        self.pages: dict[int, list[int]] = {}
        self.admitted: list[int] = []
        self.num_launched: Counter[int] = Counter()
        self.prefills: defaultdict[int, list[int]] = defaultdict(list)
        self.batches: list[Batch] = []
        self.completions: dict[int, Completion] = {}
        self.settled_under_decode: set[int] = set()  # ended while a batch that decodes is in flight
        self.seen: set[str] = set()

    def run(self) -> "Rollout":
        arrivals = deque(zip(self.work.arrivals, self.work.requests, strict=True))
        while arrivals or self.busy:
            while arrivals and arrivals[0][0] <= self.num_steps:
                self.add(arrivals.popleft()[1])
            self.grow(self.work.growths.get(self.num_steps, 0))
            if self.num_steps == self.work.reset_step:
                self.reset()
            self.step()
            self.check()
            self.num_steps += 1
        return self

    @property
    def policy_version(self) -> int:
        return self.num_steps // 6

    @property
    def busy(self) -> bool:
        rows = self.scheduler.num_live + self.scheduler.num_waiting
        return rows > 0 or any(batch is not None for batch in self.slots)

    def grow(self, spare_pages: int) -> None:
        self.scheduler.pages.grow(1 + self.work.max_row_pages + spare_pages)

    def add(self, request: Request) -> None:
        row = self.scheduler.add(request)
        assert row not in self.requests
        self.requests[row] = request
        self.queue.append(row)

    def step(self) -> None:
        """Launch a batch, then settle the one before; with one slot that is the same batch."""
        self.turn = (self.turn + 1) % len(self.slots)
        batch = self.scheduler.schedule(self.policy_version)
        if batch is not None:
            self.launch(batch)
            self.slots[self.turn] = batch
        self.check_waiting()
        previous, self.slots[self.turn - 1] = self.slots[self.turn - 1], None
        assert batch or previous or not self.busy, "rows wait, and nothing will free a page"
        if previous is not None:
            self.settle(previous)

    def launch(self, batch: Batch) -> None:
        self.batches.append(batch)
        assert batch.policy_version == self.policy_version
        self.book_admission(batch)
        self.book_pages(batch)
        for segment in batch.segments:
            self.prefills[self.row_in[segment.lane]] += segment.tokens.tolist()
        lanes = batch.lanes.tolist()
        assert len(set(lanes)) == len(lanes)
        assert batch.rows.tolist() == [self.row_in[lane] for lane in lanes]
        self.num_launched.update(batch.rows.tolist())
        self.stats.launched(len(lanes), self.scheduler.pages.num_used, 0)

    def book_admission(self, batch: Batch) -> None:
        admission = batch.admission
        for values in zip(*vars(admission).values(), strict=True):
            lane, token, position, seed, temperature = values
            row = self.queue.popleft()  # first come, first served
            request = self.requests[row]
            assert (token, position) == (request.prompt[-1], len(request.prompt) - 1)
            assert (seed, temperature) == (request.seed, request.sampling.temperature)
            assert lane not in self.row_in, "a lane with a row was given to another"
            self.row_in[lane] = row
            self.pages[row] = []
            self.admitted.append(row)

    def book_pages(self, batch: Batch) -> None:
        taken = {page for pages in self.pages.values() for page in pages}
        for lane, index, page in batch.new_pages.tolist():
            row = self.row_in[lane]
            if page in taken:
                self.book_shared(row, index, page)
            assert 0 < page < self.scheduler.pages.num_pages
            assert index == len(self.pages[row]), "a table has a hole"
            taken.add(page)
            self.pages[row].append(page)
            assert len(self.pages[row]) <= self.scheduler.row_pages(self.requests[row])

    def book_shared(self, row: int, index: int, page: int) -> None:
        """Only a page full of a prompt's tokens may have two rows, of that prompt and version."""
        holders = [other for other, pages in self.pages.items() if page in pages]
        for other in holders:
            assert self.pages[other][index] == page, "a page has two rows at different places"
        num_tokens = (index + 1) * self.work.config.page_tokens
        assert num_tokens <= len(self.requests[row].prompt) - 1, "a page has two rows"
        self.seen.add("a page with two rows")

    def settle(self, batch: Batch) -> None:
        """The device may run as late as here: a batch is complete in itself."""
        tokens, logprobs = self.device.run(batch)
        stale = set(batch.rows.tolist()) - set(self.row_in.values())
        finished = self.scheduler.commit(batch, tokens, logprobs)
        tokens[:], logprobs[:] = -7, np.nan  # they are the slot's, which is staged again
        for completion in finished:
            assert completion.row not in self.completions, "a row was returned twice"
            assert completion.policy_version == batch.policy_version
            self.completions[completion.row] = completion
            in_flight = self.slots[self.turn]
            if in_flight is not None and len(in_flight.rows):
                self.settled_under_decode.add(completion.row)
            lane = next(lane for lane, row in self.row_in.items() if row == completion.row)
            del self.row_in[lane], self.pages[completion.row]
        self.stats.settled(sum(len(completion.token_ids) for completion in finished))
        self.note(batch, stale)

    def check(self) -> None:
        self.scheduler.check()
        pages = self.scheduler.pages
        assert self.scheduler.num_live == len(self.row_in)
        assert self.scheduler.num_waiting == len(self.queue)
        used = {page for held in self.pages.values() for page in held}
        assert pages.num_used == len(used)
        promised = sum(
            self.scheduler.row_pages(self.requests[row]) - len(held)
            for row, held in self.pages.items()
        )
        assert pages.num_unreserved == pages.num_pages - 1 - len(used) - promised

    def check_waiting(self) -> None:
        """A row waits for a lane, or for pages; and then every row waits that came later."""
        if self.queue and self.scheduler.num_live < self.work.config.max_rows:
            wanted = self.scheduler.row_pages(self.requests[self.queue[0]])
            assert wanted > self.scheduler.pages.num_unreserved
            self.seen.add("a lane is free, and rows wait for pages")

    def reset(self) -> None:
        """Give every row up as `RolloutEngine` does on a failure, and ask for them again."""
        self.scheduler.reset(self.scheduler.pages.num_pages)
        self.seen.add("reset")
        for batch in filter(None, self.slots):
            assert self.scheduler.commit(batch, *self.device.run(batch)) == []
            self.seen.add("reset with a batch in flight")
        self.slots = [None] * len(self.slots)
        unfinished = sorted({*self.row_in.values(), *self.queue})
        self.row_in, self.pages, self.queue = {}, {}, deque()
        assert not self.busy
        self.check()
        for row in unfinished:
            self.add(self.requests[row])

    def note(self, batch: Batch, stale: set[int]) -> None:
        """Which of the hard places this step came by."""
        lanes_of_stale = set(batch.lanes[np.isin(batch.rows, list(stale))].tolist())
        places = {
            "overrun": stale,
            "lane given on during an overrun": lanes_of_stale & set(self.row_in),
            "prompt in several segments": [s for s in batch.segments if s.start > 0],
            "prefill without decode": len(batch.rows) == 0,
            "a page copied for a fork": len(batch.copies) > 0,
            "a beginning found": batch.num_shared > 0 and len(batch.copies) == 0,
        }
        self.seen |= {name for name, here in places.items() if here}


def by_seed(rollout: Rollout) -> dict[int, Completion]:
    return {rollout.requests[row].seed: done for row, done in rollout.completions.items()}


# --- rows


@many
@given(workloads(resets=True), depths)
def test_every_row_comes_back_once_as_if_alone(work, depth):
    rollout = Rollout(work, depth).run()
    assert len(rollout.completions) == len(work.requests)
    done = by_seed(rollout)
    for request in work.requests:
        assert outcome(done[request.seed]) == expected(request)
    assert rollout.scheduler.pages.num_used == 0
    assert rollout.scheduler.pages.num_unreserved == rollout.scheduler.pages.num_pages - 1


@many
@given(workloads())
def test_one_slot_and_two_give_the_same_rows(work):
    one, two = (by_seed(Rollout(work, depth).run()) for depth in (1, 2))
    assert {seed: outcome(row) for seed, row in one.items()} == {
        seed: outcome(row) for seed, row in two.items()
    }


# --- ordering rules of the design


# Rows of many lengths on few pages: what one row frees, another is given in the next batch.
@many
@given(workloads(resets=True, max_spare_pages=2), depths)
def test_rules_1_and_3_a_row_reads_only_its_own_kv(work, depth):
    rollout = Rollout(work, depth).run()  # `Device.attend` looks at every entry that is read
    for row, completion in rollout.completions.items():
        request = rollout.requests[row]
        context = request.prompt.tolist() + completion.token_ids
        assert rollout.device.written[request.seed][: len(context) - 1] == context[:-1]


def test_rule_3_an_overrun_does_not_touch_the_lanes_next_row():
    scheduler = Scheduler(RolloutConfig(max_rows=1, page_tokens=2), 4)
    scheduler.pages.grow(5)
    first = scheduler.add(make_request(0, 1, 8, eos_token_ids=(3,)))
    second = scheduler.add(make_request(1, 1, 2, eos_token_ids=(3,)))
    launched = scheduler.schedule(1)
    overrun = scheduler.schedule(1)
    (completion,) = scheduler.commit(launched, np.array([3]), np.zeros((1, 1), np.float32))
    assert completion.row == first
    reuse = scheduler.schedule(1)
    assert reuse.lanes == overrun.lanes
    assert reuse.rows == [second]
    # An EOS and a NaN: neither is the second row's.
    assert scheduler.commit(overrun, np.array([3]), np.full((1, 1), np.nan, np.float32)) == []
    assert scheduler.commit(reuse, np.array([5]), np.zeros((1, 1), np.float32)) == []
    last = scheduler.schedule(1)
    (completion,) = scheduler.commit(last, np.array([4]), np.zeros((1, 1), np.float32))
    assert (completion.row, completion.token_ids) == (second, [5, 4])
    scheduler.check()


@many
@given(workloads(resets=True), depths)
def test_rule_4_only_an_eos_overruns_and_by_one_token(work, depth):
    rollout = Rollout(work, depth).run()
    for row, num_launched in rollout.num_launched.items():
        assert num_launched <= rollout.requests[row].sampling.max_new_tokens
    num_overruns = 0
    for row, completion in rollout.completions.items():
        num_tokens = len(completion.token_ids)
        at_limit = num_tokens == rollout.requests[row].sampling.max_new_tokens
        # A step that leaves prompts to prefill decodes nothing, so that an EOS overruns none.
        overruns = row in rollout.settled_under_decode and not at_limit
        assert rollout.num_launched[row] == num_tokens + overruns
        num_overruns += overruns
    if "reset" not in rollout.seen:  # else rows that were given up count, too
        assert rollout.stats.overrun_tokens == num_overruns


def test_rule_5_not_finished_while_a_batch_is_in_flight():
    work = Workload(
        RolloutConfig(), [make_request(0, 1, 9, eos_token_ids=EOS_SETS[-1])], [0], 0, {}, None
    )
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


@many
@given(workloads(resets=True), depths)
def test_rule_9_prefill_is_all_but_the_last_prompt_token_once(work, depth):
    rollout = Rollout(work, depth).run()  # `Device.write` takes positions in order only
    for row in rollout.completions:
        wanted = rollout.requests[row].prompt[:-1].tolist()
        found = rollout.prefills[row]  # or the end, where another row has the beginning
        assert wanted[len(wanted) - len(found) :] == found
        assert not found or (len(wanted) - len(found)) % work.config.page_tokens == 0
    for batch in rollout.batches:
        num_tokens = [len(segment.tokens) for segment in batch.segments]
        assert sum(num_tokens) <= work.config.prefill_tokens
        assert 0 not in num_tokens
        assert batch.segments or len(batch.rows)


# --- pages


@many
@given(workloads(max_spare_pages=0), depths)
def test_pages_of_one_longest_row_serve_all_in_order(work, depth):
    work = replace(work, growths={})
    rollout = Rollout(work, depth).run()
    assert sorted(rollout.completions) == rollout.admitted == list(range(len(work.requests)))


class PagesWanted(Rollout):
    """Has as many pages as the scheduler wants, as `RolloutEngine` without `kv_bytes`."""

    policy_version = 1

    def grow(self, spare_pages: int) -> None:
        pass

    def add(self, request: Request) -> None:
        super().add(request)
        self.scheduler.pages.grow(self.scheduler.pages_wanted())

    def check_waiting(self) -> None:
        num_lanes = self.work.config.max_rows
        assert not self.queue or self.scheduler.num_live == num_lanes, "a row waits for pages"

    def check(self) -> None:
        super().check()
        rows = [self.scheduler.row_pages(self.requests[row]) for row in (*self.pages, *self.queue)]
        assert self.scheduler.pages_wanted() <= 1 + sum(rows), "more than every row can fill"


@many
@given(workloads(resets=True), depths)
def test_with_the_pages_wanted_no_row_waits_for_pages(work, depth):
    PagesWanted(work, depth).run()


def test_growing_keeps_rows_going():
    scheduler = Scheduler(RolloutConfig(max_rows=2, page_tokens=1), 4)
    scheduler.pages.grow(3)
    first, second = (scheduler.add(make_request(seed, 1, 2)) for seed in range(2))
    assert scheduler.schedule(1).rows == [first]
    scheduler.pages.grow(5)
    assert scheduler.schedule(1).rows.tolist() == [first, second]
    scheduler.check()


# --- failure


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_logprob_that_is_not_finite_is_an_error_and_reset_mends_it(value):
    scheduler = Scheduler(RolloutConfig(max_rows=2, page_tokens=1), 4)
    scheduler.pages.grow(9)
    lost = [scheduler.add(make_request(seed, 2, 3)) for seed in range(3)]
    batch = scheduler.schedule(1)
    in_flight = scheduler.schedule(1)
    with pytest.raises(RolloutError, match=f"log-probability {value} .* not finite"):
        scheduler.commit(batch, np.array([1, 2]), np.array([[-1.0], [value]], np.float32))

    scheduler.reset(scheduler.pages.num_pages)
    assert scheduler.num_live == scheduler.num_waiting == scheduler.pages.num_used == 0
    assert scheduler.pages.num_unreserved == 8
    assert scheduler.schedule(1) is None
    scheduler.check()

    row = scheduler.add(make_request(3, 1, 1))
    assert row not in lost
    batch = scheduler.schedule(2)
    # What was in flight at the failure is nobody's now.
    assert scheduler.commit(in_flight, np.array([1, 2]), np.zeros((2, 1), np.float32)) == []
    (completion,) = scheduler.commit(batch, np.array([5]), np.zeros((1, 1), np.float32))
    assert (completion.row, completion.token_ids, completion.policy_version) == (row, [5], 2)


# --- are the tests above hard enough?


@pytest.mark.parametrize(
    "place",
    [
        "overrun",
        "lane given on during an overrun",
        "a lane is free, and rows wait for pages",
        "prompt in several segments",
        "prefill without decode",
        "a page with two rows",
        "a page copied for a fork",
        "a beginning found",
        "reset with a batch in flight",
    ],
)
def test_workloads_come_by_the_hard_places(place):
    once = settings(max_examples=300, phases=[Phase.generate], database=None)
    find(workloads(resets=True), lambda work: place in Rollout(work, 2).run().seen, settings=once)


def test_the_device_sees_a_page_with_two_rows():
    scheduler = Scheduler(RolloutConfig(max_rows=2, page_tokens=4), 2)
    scheduler.pages.grow(5)
    for seed in range(2):
        scheduler.add(make_request(seed, 2, 3))
    batch = scheduler.schedule(1)
    batch.new_pages[:, 2] = 1
    device = Device(RolloutConfig(max_rows=2, page_tokens=4), 2)
    with pytest.raises(AssertionError, match="row 0 reads another row's KV"):
        device.run(batch)


# --- speed


@pytest.mark.parametrize("max_new", [(16_384, 16_384), (1, 100)], ids=["long", "refills"])
def test_256_rows_cost_little_a_step(max_new):
    num_steps, random = 200, np.random.default_rng(0)
    scheduler = Scheduler(RolloutConfig(max_rows=256, page_tokens=16), 1100)
    for seed, limit in enumerate(random.integers(*max_new, 2000, endpoint=True).tolist()):
        scheduler.add(make_request(seed, 20, limit, eos_token_ids=(0, 1)))
    scheduler.pages.grow(scheduler.pages_wanted())
    tokens, logprobs = random.integers(2, VOCAB, 256), np.zeros((256, 1), np.float32)
    first = scheduler.schedule(1)
    scheduler.commit(first, tokens, logprobs)

    began = time.process_time()  # this process's own: others may be busy
    for _ in range(num_steps):
        batch = scheduler.schedule(1)
        scheduler.commit(batch, tokens, logprobs)
    step_ms = 1000 * (time.process_time() - began) / num_steps
    assert len(batch.rows) == 256
    print(f"{step_ms:.3f} ms to schedule and commit 256 rows")  # noqa: T201
    assert step_ms < 2

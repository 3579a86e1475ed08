"""A device that keeps stamps, and the loop of `RolloutEngine.step` without torch.

The device stamps every KV entry with whose it is, so that a page handed to two rows, or reused too
early, is seen by the first row that reads it.
"""

from collections import Counter, defaultdict, deque

import numpy as np
from hypothesis import Phase, find, settings
from hypothesis import strategies as st
from workloads import Workload, expected, logprob, next_token

from rollout.config import EngineConfig
from rollout.request import Completion, Request
from rollout.scheduler.batch import Batch
from rollout.scheduler.pages import TRASH_PAGE, pages_for
from rollout.scheduler.scheduler import Scheduler
from rollout.scheduler.waiting import digest
from rollout.telemetry.stats import RolloutStats

MAX_PAGES, MAX_STEPS = 1000, 20_000  # more than any workload of any test can take

many = settings(max_examples=4 * settings.default.max_examples)
depths = st.sampled_from([1, 2])

# --- the device


class Device:
    """Runs whole batches in launch order and knows only what they told it, like the real one.

    It tells rows apart by their seed, and refuses to attend to an entry that the row did not
    write itself.
    """

    def __init__(
        self, config: EngineConfig, max_row_pages: int, requests: list[Request] | None = None
    ) -> None:
        num_lanes, self.page_tokens = config.max_rows, config.page_tokens
        self.prompts = {r.seed: r.prompt[:-1].tolist() for r in requests or []}
        self.rows = {r.seed: r.prompt.tolist() + expected(r)[0] for r in requests or []}
        self.tokens, self.positions, self.seeds = np.full((3, num_lanes), -1)
        self.temperatures = np.full(num_lanes, np.nan)
        self.page_table = np.full((num_lanes, max_row_pages), TRASH_PAGE)
        # Seed, position, token, policy version.
        self.stamps = np.full((MAX_PAGES, self.page_tokens, 4), -1)
        self.host: dict[int, np.ndarray] = {}  # host page -> stamps
        self.versions: dict[int, int] = {}  # seed -> policy version that its KV is no older than
        self.written: dict[int, int | None] = {}  # seed -> next position to write
        self.leaving: list[list[int]] = []  # page, host page: copies that are still to run
        self.resumed: set[int] = set()
        self.renewed: set[int] = set()  # seeds whose KV is to be computed again

    def run(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        self.version = batch.policy_version
        self.leaving += batch.offloads.tolist()
        self.let_leave(batch.new_pages[:, 2])
        early = batch.max_context % 2  # they run beside the batch
        if early:
            self.restore(batch)
        self.admit(batch)
        for segment in batch.segments:
            stop = segment.start + len(segment.tokens)
            for position, token in zip(range(segment.start, stop), segment.tokens, strict=True):
                self.write(segment.lane, position, int(token))
            self.attend(segment.lane, stop)
        for source, target in batch.copies:
            assert TRASH_PAGE not in (source, target)
            self.stamps[target] = self.stamps[source]
        self.copy_states(batch)
        result = self.decode(batch)
        if not early:
            self.restore(batch)
        return result

    def let_leave(self, pages: np.ndarray) -> None:
        """Run copies to the host in order, as late as `pages`, or all, allow."""
        while any(page in pages for page, _ in self.leaving):
            page, host_page = self.leaving.pop(0)
            self.host[host_page] = self.stamps[page].copy()

    def restore(self, batch: Batch) -> None:
        if len(batch.restores):
            self.let_leave(np.array([page for page, _ in self.leaving]))
        for host_page, page in batch.restores.tolist():
            self.stamps[page] = self.host[host_page]

    def admit(self, batch: Batch) -> None:
        admitted, lanes = batch.admitted, batch.admitted["lane"]
        self.tokens[lanes] = admitted["token"]
        self.positions[lanes] = admitted["position"]
        self.seeds[lanes] = admitted["seed"]
        self.temperatures[lanes] = admitted["temperature"]
        seeds = admitted["seed"].tolist()
        self.resumed |= self.written.keys() & set(seeds)
        self.written.update((seed, None) for seed in seeds)
        for seed in seeds:
            if seed in self.renewed or seed not in self.versions:
                self.versions[seed] = batch.policy_version
        self.renewed -= set(seeds)
        self.page_table[lanes] = TRASH_PAGE  # so that a missing page is noticed
        lanes, index, pages = batch.new_pages.T
        self.page_table[lanes, index] = pages

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
        page = self.page_table[lane, position // self.page_tokens]
        assert page != TRASH_PAGE, "a running row writes to the trash page"
        seed = int(self.seeds[lane])
        if self.written[seed] is None:  # what comes before is another row's, or was there before
            self.written[seed] = position
        assert position == self.written[seed], "a position was skipped or written twice"
        self.written[seed] += 1
        self.stamps[page, position % self.page_tokens] = seed, position, token, self.version

    def attend(self, lane: int, context: int) -> None:
        positions, seed = np.arange(context), int(self.seeds[lane])
        pages = self.page_table[lane, positions // self.page_tokens]
        stamps = self.stamps[pages, positions % self.page_tokens]
        assert (stamps[:, 3] >= self.versions.get(seed, -1)).all(), "KV of old weights is shared"
        # A prompt's KV may be another row's of the same prompt: the tokens tell prompts apart.
        own = stamps[len(self.prompts.get(seed, ())) :, 0]
        if seed not in self.resumed:
            assert (own == seed).all(), f"row {seed} reads another row's KV: {stamps[:, 0]}"
        assert (stamps[:, 1] == positions).all()
        wanted = self.rows.get(seed, [])[:context]  # an overrun goes on past the end
        assert stamps[: len(wanted), 2].tolist() == wanted

    def copy_states(self, batch: Batch) -> None:
        assert not len(batch.state_copies)


class StatefulDevice(Device):
    """Also keeps a recurrent state in each lane: the tokens that it was fed, of any row."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.states: dict[int, list[int]] = {}

    def write(self, lane: int, position: int, token: int) -> None:
        super().write(lane, position, token)
        state = self.states.get(lane, []) if position else []  # nothing is ever cleared
        assert len(state) == position, "a state was fed a token twice, or not at all"
        wanted = self.rows.get(int(self.seeds[lane]), [])
        assert state[: len(wanted)] == wanted[:position], "a lane has another row's state"
        self.states[lane] = [*state, token]

    def copy_states(self, batch: Batch) -> None:
        for source, target in batch.state_copies.tolist():
            assert source != target
            self.states[target] = self.states[source]


# --- the loop that runs them


class Rollout:
    """`RolloutEngine.step` without torch, and the books that another accountant would keep."""

    def __init__(self, work: Workload, depth: int) -> None:
        self.work = work
        sizes = work.max_row_pages, work.num_host_pages
        self.scheduler = Scheduler(work.config, *sizes, keeps_state=work.keeps_state)
        self.grow(work.spare_pages)
        kind = StatefulDevice if work.keeps_state else Device
        self.device = kind(work.config, work.max_row_pages, work.requests)
        self.slots: list[Batch | None] = [None] * depth
        self.turn = self.num_steps = 0
        self.stats = RolloutStats()
        self.requests: dict[int, Request] = {}  # by row, as everything below
        self.queue: list[int] = []
        self.row_of: dict[int, int] = {}  # seed -> row
        self.row_in: dict[int, int] = {}  # lane -> row
        self.pages: dict[int, list[int]] = {}
        self.admitted: list[int] = []
        self.preempted: set[int] = set()
        self.dropped: set[int] = set()  # aborted, or given up in a reset
        self.num_launched: Counter[int] = Counter()
        self.prefills: defaultdict[int, list[int]] = defaultdict(list)
        self.completions: dict[int, Completion] = {}
        self.settled_under_decode: set[int] = set()  # ended while a batch that decodes is in flight
        self.seen: set[str] = set()

    def run(self) -> "Rollout":
        arrivals = self.work.arrivals or [0] * len(self.work.requests)
        due = deque(zip(arrivals, self.work.requests, strict=True))
        while due or self.busy:
            while due and due[0][0] <= self.num_steps:
                self.add(due.popleft()[1])
            self.grow(self.work.growths.get(self.num_steps, 0))
            if self.num_steps == self.work.reset_step:
                self.reset()
            self.abort(self.work.aborts.get(self.num_steps, set()) & self.requests.keys())
            if self.num_steps in self.work.renewals:
                self.renew()
            self.step()
            self.check()
            self.num_steps += 1
            assert self.num_steps < MAX_STEPS, "rows give way to each other for ever"
        self.check_end()
        return self

    @property
    def policy_version(self) -> int:
        return self.num_steps // self.work.version_steps

    @property
    def busy(self) -> bool:
        rows = self.scheduler.num_live + self.scheduler.num_waiting
        return rows > 0 or any(batch is not None for batch in self.slots)

    def grow(self, spare_pages: int) -> None:
        self.scheduler.pages.grow(1 + self.work.max_row_pages + spare_pages)

    def add(self, request: Request) -> None:
        (row,) = self.scheduler.add([request])
        assert row not in self.requests
        self.requests[row] = request
        self.row_of[request.seed] = row
        self.queue.append(row)

    def step(self) -> None:
        """Launch a batch, then settle the one before; with one slot that is the same batch."""
        self.turn = (self.turn + 1) % len(self.slots)
        batch = self.scheduler.schedule(self.policy_version)
        if batch is not None:
            self.launch(batch)
            self.slots[self.turn] = batch
        previous, self.slots[self.turn - 1] = self.slots[self.turn - 1], None
        assert batch or previous or not self.busy, "rows wait, and nothing will free a page"
        if previous is not None:
            self.settle(previous)

    def launch(self, batch: Batch) -> None:
        assert batch.policy_version == self.policy_version
        self.check_prefill(batch)
        self.book_preemption(batch)
        self.book_admission(batch)
        self.book_pages(batch)
        for segment in batch.segments:
            self.prefills[self.row_in[segment.lane]] += segment.tokens.tolist()
        lanes = batch.lanes.tolist()
        assert len(set(lanes)) == len(lanes)
        assert batch.rows.tolist() == [self.row_in[lane] for lane in lanes]
        self.check_idle_lanes(batch)
        self.check_waiting(batch)
        self.num_launched.update(batch.rows.tolist())
        self.stats.decoded_rows += len(lanes)

    def check_prefill(self, batch: Batch) -> None:
        """Rule 9."""
        num_tokens = [len(segment.tokens) for segment in batch.segments]
        assert sum(num_tokens) <= self.work.config.prefill_tokens
        assert 0 not in num_tokens
        assert batch.segments or len(batch.rows) or len(batch.restores) or len(batch.admitted)

    def check_idle_lanes(self, batch: Batch) -> None:
        """The oldest row decodes; others may have to wait for a page."""
        if batch.segments:
            return
        ready = self.row_in.keys() - batch.admitted["lane"].tolist()  # those may be restored first
        idle = [
            row
            for lane, row in self.row_in.items()
            if lane in ready - set(batch.lanes.tolist())
            and self.num_launched[row] < self.requests[row].sampling.max_new_tokens
        ]
        self.seen |= {"a row waits for a page in its lane"} if idle else set()
        assert not idle or min(self.row_in.values(), key=self.admitted.index) not in idle

    def check_waiting(self, batch: Batch) -> None:
        """No row waits though it fits whatever becomes of the others."""
        is_full = len(self.row_in) == self.work.config.max_rows
        in_flight = [row for other in self.slots if other for row in other.rows.tolist()]
        if is_full or batch.num_preempted or not self.queue or set(in_flight) & set(self.queue):
            return
        most = {row: self.most_pages(row) for row in (*self.queue, *self.pages)}
        growth = sum(most[row] - len(pages) for row, pages in self.pages.items())
        wanted = growth + max(most[row] for row in self.queue)
        assert wanted > self.scheduler.pages.num_free, "a row waits, and would fit"

    def most_pages(self, row: int) -> int:
        return pages_for(self.requests[row].max_tokens, self.work.config.page_tokens)

    def book_preemption(self, batch: Batch) -> None:
        """The youngest rows lose their lanes, and never the oldest."""
        by_age = sorted(self.row_in, key=lambda lane: self.admitted.index(self.row_in[lane]))
        gone = by_age[len(by_age) - batch.num_preempted :]
        assert not gone or len(gone) < len(by_age), "the oldest row is preempted"
        for lane in gone:
            row = self.row_in.pop(lane)
            del self.pages[row]
            self.preempted.add(row)
            self.queue.append(row)
            self.seen.add("a row is preempted")
        self.seen |= {"offloaded"} if len(batch.offloads) else set()
        self.seen |= {"restored"} if len(batch.restores) else set()
        if gone and self.work.num_host_pages and not len(batch.offloads):
            self.seen.add("no host page is left")

    def book_admission(self, batch: Batch) -> None:
        assert not (batch.num_preempted and len(batch.admitted)), "a row comes as another gives way"
        assert not batch.flags
        for token, position, seed, asked, lane, temperature in batch.admitted.tolist():
            row = self.row_of[seed]
            self.queue.remove(row)
            request, known = self.requests[row], self.device.rows[seed]
            assert token == known[position]
            assert position >= len(request.prompt) - 1
            assert temperature == request.sampling.temperature
            assert tuple(asked) == request.settings
            assert lane not in self.row_in, "a lane with a row was given to another"
            self.row_in[lane] = row
            self.pages[row] = []
            if row not in self.admitted:
                self.admitted.append(row)
                assert position == len(request.prompt) - 1

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
        for pages in self.pages.values():
            assert page not in pages or pages[index] == page, "a page is at two places"
        num_tokens = (index + 1) * self.work.config.page_tokens
        num_known = len(self.requests[row].prompt) - 1
        assert num_tokens <= num_known or row in self.preempted, "a page has two rows"
        self.seen.add("a page with two rows")

    def settle(self, batch: Batch) -> None:
        """The device may run as late as here: a batch is complete in itself."""
        tokens, logprobs = self.device.run(batch)
        stale = set(batch.rows.tolist()) - set(self.row_in.values())
        finished = self.scheduler.settle(batch, tokens, logprobs)
        tokens[:], logprobs[:] = -7, np.nan  # they are the slot's, which is staged again
        in_flight = self.slots[self.turn]
        for completion in finished:
            row = completion.row
            assert row not in self.completions, "a row was returned twice"
            versions, counts = zip(*completion.policy_versions, strict=True)
            assert versions[-1] == batch.policy_version
            assert (list(versions), sum(counts)) == (sorted(versions), len(completion.token_ids))
            self.completions[row] = completion
            if in_flight is not None and row in in_flight.rows:
                self.settled_under_decode.add(row)
            if row in self.queue:
                self.queue.remove(row)
                self.seen.add("a row ends after it was preempted")
            else:
                self.leave({row})
        self.stats.generated_tokens += sum(len(completion.token_ids) for completion in finished)
        self.note(batch, stale)

    def leave(self, rows: set[int]) -> None:
        for lane in [lane for lane, row in self.row_in.items() if row in rows]:
            del self.pages[self.row_in.pop(lane)]

    def check(self) -> None:
        self.scheduler.check()
        pages = self.scheduler.pages
        assert self.scheduler.num_live == len(self.row_in)
        assert self.scheduler.num_waiting == len(self.queue)
        used = {page for own in self.pages.values() for page in own}
        assert pages.num_used == len(used)
        assert pages.num_free == pages.num_pages - 1 - len(used)

    def check_end(self) -> None:
        """Every row came back once, as if alone, and within its own limits."""
        assert self.scheduler.pages.num_used == 0
        assert self.completions.keys() | self.dropped == self.requests.keys()
        assert not self.completions.keys() & self.dropped
        for row, num_launched in self.num_launched.items():
            assert num_launched <= self.requests[row].sampling.max_new_tokens  # rule 4
        for row, completion in self.completions.items():
            self.check_row(self.requests[row], completion)
        if not self.dropped:
            num_tokens = sum(len(done.token_ids) for done in self.completions.values())
            assert self.stats.overrun_tokens == self.num_launched.total() - num_tokens

    def check_row(self, request: Request, completion: Completion) -> None:
        row, num_tokens = completion.row, len(completion.token_ids)
        outcome = completion.token_ids, completion.logprobs, completion.finish_reason
        assert outcome == expected(request)
        # Rule 4: only a stop overruns, and by one token. A step that leaves prompts to prefill
        # decodes nothing, so that a stop overruns none.
        at_limit = num_tokens == request.sampling.max_new_tokens
        overruns = row in self.settled_under_decode and not at_limit
        assert self.num_launched[row] == num_tokens + overruns
        num_written = self.device.written[request.seed] - len(request.prompt)
        assert num_written in (num_tokens - 1, num_tokens)
        if row not in self.preempted:  # rule 9: all but the last token, or but what is known
            wanted, computed = request.prompt[:-1].tolist(), self.prefills[row]
            num_known = len(wanted) - len(computed)
            assert wanted[num_known:] == computed
            # The heir of a dropped row goes on with its prefill, in the middle of a page.
            gone = [self.requests[other].prompt.tolist() for other in self.dropped]
            page_tokens, is_heir = self.work.config.page_tokens, request.prompt.tolist() in gone
            assert not computed or is_heir or num_known % page_tokens == 0

    def reset(self) -> None:
        """Give every row up as `RolloutEngine` does on a failure, and ask for them again."""
        self.scheduler.reset(self.scheduler.pages.num_pages)
        self.seen.add("reset")
        for batch in filter(None, self.slots):
            assert self.scheduler.settle(batch, *self.device.run(batch)) == []
            self.seen.add("reset with a batch in flight")
        self.slots = [None] * len(self.slots)
        unfinished = sorted({*self.row_in.values(), *self.queue})
        self.row_in, self.pages, self.queue = {}, {}, []
        for row in unfinished:
            self.device.written.pop(self.requests[row].seed, None)
            self.device.versions.pop(self.requests[row].seed, None)
        assert not self.busy
        self.check()
        self.dropped |= set(unfinished)
        for row in unfinished:
            self.add(self.requests[row])

    def abort(self, rows: set[int]) -> None:
        self.scheduler.abort(rows)
        rows = rows - self.completions.keys()
        self.leave(rows)
        self.queue = [row for row in self.queue if row not in rows]
        self.dropped |= rows
        self.check()

    def renew(self) -> None:
        """Let the KV of all rows be computed again; `Device` sees KV that is older."""
        self.scheduler.recompute()
        self.device.renewed |= {self.requests[row].seed for row in self.admitted}
        self.preempted.update(self.row_in.values())
        self.queue += self.row_in.values()
        self.row_in, self.pages = {}, {}
        self.check()

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


def step(scheduler: Scheduler, *ending: int) -> Batch:
    """Schedule and settle a batch: the next token of these rows is 3, of all others 5."""
    batch = scheduler.schedule(1)
    tokens = np.where(np.isin(batch.rows, ending), 3, 5)
    scheduler.settle(batch, tokens, np.zeros((len(tokens), 1), np.float32))
    scheduler.check()
    return batch


def expect_short(scheduler: Scheduler, requests: list[Request]) -> list[Request]:
    """Let rows of these prompts be admitted as if they were not to grow."""
    for request in requests:
        for _ in range(16):
            scheduler.lengths.note(digest(request.prompt), 1)
    return requests


def assert_comes_by(strategy: st.SearchStrategy[Workload], place: str) -> None:
    """Whether a property over these workloads is hard enough."""
    once = settings(max_examples=5000, phases=[Phase.generate], database=None)
    find(strategy, lambda work: place in Rollout(work, 2).run().seen, settings=once)

"""Admission: gives waiting rows a lane and pages while the expected growth of all rows fits."""

from dataclasses import dataclass

import numpy as np

from rollout.request import Ints
from rollout.scheduler.batch import Plan
from rollout.scheduler.host_pages import NO_PAGE, HostPages
from rollout.scheduler.lanes import LaneTable, expected_growth
from rollout.scheduler.pages import page_keys, pages_for
from rollout.scheduler.prefill import Fork, Prefill, PromptKey
from rollout.scheduler.row import Row
from rollout.scheduler.waiting import WaitingQueue


@dataclass(frozen=True, eq=False)
class _Claim:
    """What it takes to admit a row.

    Attributes:
        key: Names the prompt. Later rows with this key can fork from the row; `None`: none can.
        source_lane: A lane with the same prompt, from which the row forks.
        pages: The row's pages, in order. `NO_PAGE`: allocate a free page.
        num_pages: Free pages that the row takes now or is expected to take later.
    """

    row: Row
    key: PromptKey | None
    source_lane: int | None
    pages: Ints
    num_pages: int


class Admitter:
    """Admits rows in the order of the queue, up to the first row that does not fit.

    A row fits if the free pages cover its present tokens, its expected growth, and the expected
    growth of every row in a lane. A single row always fits.
    """

    def __init__(
        self, lanes: LaneTable, waiting: WaitingQueue, host_pages: HostPages, page_tokens: int
    ) -> None:
        self._lanes, self._waiting, self._host_pages = lanes, waiting, host_pages
        self._page_tokens = page_tokens
        self._refused: Row | None = None
        self._refused_state: tuple[int, ...] = ()

    def admit(self, policy_version: int, plan: Plan) -> None:
        """Admit as many rows as fit, into `plan`."""
        if not (self._lanes.free and len(self._waiting)):
            return
        if self._waiting.first() is self._refused and self._state() == self._refused_state:
            return
        num_free = self._lanes.pages.num_free - self._lanes.growth()
        while self._lanes.free and len(self._waiting):
            row = self._waiting.first()
            if row.in_flight:  # its newest token is not settled yet, and decoding starts from it
                break
            claim = self._claim(row, policy_version)
            if claim.num_pages > num_free:
                self._refused, self._refused_state = row, self._state()
                break
            num_free -= claim.num_pages
            self._waiting.pop()
            self._enter(claim, policy_version, plan)

    def _state(self) -> tuple[int, ...]:
        """Counters: while none of them rises, a refused row still does not fit.

        Rows in lanes only grow. A refused row can fit only after a row left, pages were added or a
        prefix was cached. The number of free lanes says too little: a row that overtook the
        refused one may already have the lane of a row that left.
        """
        pages = self._lanes.pages
        return self._lanes.num_left, pages.num_pages, pages.prefixes.num_entered

    def _claim(self, row: Row, policy_version: int) -> _Claim:
        key = source_lane = None
        if row.host_pages:
            known = self._host_pages.originals(row.host_pages)
        else:
            if len(row.tokens) == 0 and len(row.request.prompt) > 1:
                key = (policy_version, row.request.prompt[:-1].tobytes())
                # Once a row has decoded, its lane's state is no longer that of the prompt.
                unfinished = self._lanes.keeps_state
                source_lane = self._lanes.prefill_queue.lane_with(key, unfinished=unfinished)
            known = self._known_pages(row, source_lane)
        num_pages = pages_for(row.num_tokens, self._page_tokens)
        pages = np.full(num_pages, NO_PAGE, np.int64)
        pages[: len(known)] = known
        shared = pages[pages != NO_PAGE]
        # A cached page that no row uses counts as free until this row takes it.
        num_taken = num_pages - len(shared) + self._lanes.pages.num_idle(shared)
        num_claimed = num_taken + self._growth(row, num_pages)
        return _Claim(row, key, source_lane, pages, num_claimed)

    def _known_pages(self, row: Row, source_lane: int | None) -> Ints:
        """Pages that already hold the row's prefix: from a lane with its prompt, or cached."""
        if source_lane is not None:
            return self._lanes.page_table[source_lane, : self._num_full(row)]
        keys = page_keys(row.context[:-1], self._page_tokens)
        return np.array(self._lanes.pages.prefixes.match(keys), np.int64)

    def _num_full(self, row: Row) -> int:
        """Full pages of the prompt without its last token. Rows of one prompt share them."""
        return (len(row.request.prompt) - 1) // self._page_tokens

    def _growth(self, row: Row, num_pages: int) -> int:
        """Pages that a row is expected to need beyond the `num_pages` that it starts with."""
        max_new = row.request.sampling.max_new_tokens
        row.expected_new = min(self._waiting.expected_new(row), max_new)
        state = row.num_tokens - 1, len(row.tokens), max_new, row.expected_new
        return expected_growth(*state, num_pages, self._page_tokens)

    def _enter(self, claim: _Claim, policy_version: int, plan: Plan) -> None:
        row, pages = claim.row, claim.pages
        is_new = pages == NO_PAGE
        self._lanes.pages.share(pages[~is_new])
        pages[is_new] = self._lanes.pages.allocate(int(is_new.sum()))
        lane = self._lanes.enter(row)
        plan.new_pages.append(self._lanes.take_pages(lane, pages))
        plan.admit(lane, row)
        if row.host_pages:
            self._restore(lane, row, pages, is_new, plan)
            return
        row.policy_version = policy_version
        if claim.source_lane is not None:
            self._fork(lane, claim.source_lane, row, plan)
        else:
            num_known = int((~is_new).sum()) * self._page_tokens
            self._prefill(lane, row, num_known, plan)
        if claim.key is not None:
            self._lanes.prefill_queue.enter(lane, claim.key)

    def _restore(self, lane: int, row: Row, pages: Ints, is_new: Ints, plan: Plan) -> None:
        """Copy a row's KV back from the host. The row decodes from the next batch on."""
        host_pages, row.host_pages = row.host_pages, []
        pairs = zip(host_pages, pages.tolist(), is_new.tolist(), strict=False)
        plan.restores += [(host_page, page) for host_page, page, is_copied in pairs if is_copied]
        self._host_pages.restored(host_pages, pages[: len(host_pages)])
        self._lanes.restoring.add(lane)

    def _prefill(self, lane: int, row: Row, num_known: int, plan: Plan) -> None:
        """Queue the tokens that need KV, after the first `num_known`, which already have it.

        The last token is left to the first decode step, so prefill needs no logits, no sampling
        and no download.
        """
        plan.num_shared += num_known
        if num_known == row.num_tokens - 1:
            self._lanes.ready[lane] = True
            return
        # A fork that takes over has the pages, but not the state at their end.
        num_shared = 0 if self._lanes.keeps_state else self._num_full(row) * self._page_tokens
        prefill = Prefill(lane, row.context[:-1], num_known, num_shared)
        self._lanes.prefill_queue.add(prefill)

    def _fork(self, lane: int, source_lane: int, row: Row, plan: Plan) -> None:
        """Start a row on the KV of a lane with the same prompt, now or when its prefill is done."""
        plan.num_shared += row.num_tokens - 1
        num_full, copies = self._num_full(row), list[tuple[int, int]]()
        if (row.num_tokens - 1) % self._page_tokens:
            source, target = self._lanes.page_table[[source_lane, lane], num_full].tolist()
            copies.append((source, target))
        if self._lanes.prefill_queue.is_ready(source_lane):
            plan.copies += copies
            self._lanes.ready[lane] = True
        else:
            self._lanes.prefill_queue.add_fork(source_lane, Fork(lane, copies))

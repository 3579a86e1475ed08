"""Gives waiting rows lanes and pages, as long as all rows together are likely to find room."""

from dataclasses import dataclass

import numpy as np

from rollout.request import Ints
from rollout.scheduler.batch import Plan
from rollout.scheduler.host_pages import NO_PAGE, HostPages
from rollout.scheduler.lanes import LaneTable, expected_growth
from rollout.scheduler.pages import page_keys, pages_for
from rollout.scheduler.prefill import Prompt
from rollout.scheduler.row import Row
from rollout.scheduler.waiting import WaitingLine


@dataclass(frozen=True, eq=False)
class _Claim:
    """What a row would take.

    Attributes:
        row: The row.
        prompt: What rows are forked by, where the row is new.
        like: A lane with the same prompt.
        pages: Pages that it would hold, in order; `NO_PAGE` where a free one has to be taken.
        room: Pages that then are no longer free, or are likely to be wanted later.
    """

    row: Row
    prompt: Prompt | None
    like: int | None
    pages: Ints
    room: int


class Admitter:
    """Lets rows in, in the order of their line, and none before one that does not fit.

    A row fits when free pages are left for it as it is, and for the growth that is expected of it
    and of every row in a lane. Alone it always fits.

    Args:
        lanes: Where rows go.
        line: Where they come from.
        host_pages: Where the KV of preempted ones lies.
        page_tokens: Tokens in a page.
    """

    def __init__(
        self, lanes: LaneTable, line: WaitingLine, host_pages: HostPages, page_tokens: int
    ) -> None:
        self._lanes, self._line, self._host_pages = lanes, line, host_pages
        self._page_tokens = page_tokens
        self._refused: Row | None = None
        self._refused_with: tuple[int, ...] = ()

    def admit(self, policy_version: int, plan: Plan) -> None:
        """Let in as many rows as fit."""
        if not (self._lanes.free and len(self._line)) or self._is_refused_still():
            return
        room = self._lanes.pages.num_free - self._lanes.growth()
        while self._lanes.free and len(self._line):
            row = self._line.first()
            if row.in_flight:  # the token it goes on from is not known yet
                break
            claim = self._claim(row, policy_version)
            if claim.room > room:
                self._refused, self._refused_with = row, self._chances()
                break
            room -= claim.room
            self._line.pop()
            self._let_in(claim, policy_version, plan)

    def _is_refused_still(self) -> bool:
        """Whether the first in line did not fit, and nothing has changed for the better since."""
        return self._line.first() is self._refused and self._chances() == self._refused_with

    def _chances(self) -> tuple[int, ...]:
        """Counts, one of which rises whenever a row may fit that did not.

        Rows in lanes only come to need more, so it takes one that leaves, pages that are added,
        or the beginning of a row that has become known. Free lanes are no such count: rows that
        have overtaken the first in line may have taken those of rows that left.
        """
        pages = self._lanes.pages
        return self._lanes.num_left, pages.num_pages, pages.prefixes.num_entered

    def _claim(self, row: Row, policy_version: int) -> _Claim:
        prompt = like = None
        if row.host_pages:
            found = self._host_pages.originals(row.host_pages)
        else:
            if len(row.tokens) == 0 and len(row.request.prompt) > 1:
                prompt = (policy_version, row.request.prompt[:-1].tobytes())
                like = self._lanes.prompts.like(prompt)
            found = self._beginning(row, like)
        num_pages = pages_for(row.num_tokens, self._page_tokens)
        pages = np.full(num_pages, NO_PAGE, np.int64)
        pages[: len(found)] = found
        kept = pages[pages != NO_PAGE]
        # A page that no row holds is free as long as this one does not.
        num_taken = num_pages - len(kept) + self._lanes.pages.num_idle(kept)
        return _Claim(row, prompt, like, pages, num_taken + self._growth(row, num_pages))

    def _beginning(self, row: Row, like: int | None) -> Ints:
        """Pages that hold the beginning of a row: a lane's with that prompt, or known ones."""
        if like is not None:
            return self._lanes.page_table[like, : self._num_full(row)]
        keys = page_keys(row.context[:-1], self._page_tokens)
        return np.array(self._lanes.pages.prefixes.match(keys), np.int64)

    def _num_full(self, row: Row) -> int:
        """Pages filled by a prompt without its last token: rows of that prompt share them."""
        return (len(row.request.prompt) - 1) // self._page_tokens

    def _growth(self, row: Row, num_pages: int) -> int:
        """Pages that a row is expected to need besides the `num_pages` that it begins with."""
        most = row.request.sampling.max_new_tokens
        row.expected_new = min(self._line.expected_new(row), most)
        done, page = len(row.tokens), self._page_tokens
        return expected_growth(row.num_tokens - 1, done, most, row.expected_new, num_pages, page)

    def _let_in(self, claim: _Claim, policy_version: int, plan: Plan) -> None:
        row, pages = claim.row, claim.pages
        taken = pages == NO_PAGE
        self._lanes.pages.share(pages[~taken])
        pages[taken] = self._lanes.pages.allocate(int(taken.sum()))
        lane = self._lanes.enter(row)
        plan.new_pages.append(self._lanes.take_pages(lane, pages))
        plan.admit(lane, row)
        if row.host_pages:
            self._bring_back(lane, row, pages, taken, plan)
            return
        row.policy_version = policy_version
        if claim.like is not None:
            self._fork(lane, claim.like, row, plan)
        else:
            num_known = int((~taken).sum()) * self._page_tokens
            self._prefill(lane, row, num_known, plan)
        if claim.prompt is not None:
            self._lanes.prompts.enter(lane, claim.prompt)

    def _bring_back(self, lane: int, row: Row, pages: Ints, taken: Ints, plan: Plan) -> None:
        """Copy a row's KV back from the host; the row goes on in the batch after."""
        held, row.host_pages = row.host_pages, []
        plan.restores += [
            (host, page)
            for host, page, copied in zip(held, pages.tolist(), taken.tolist(), strict=False)
            if copied
        ]
        self._host_pages.restored(held, pages[: len(held)])
        self._lanes.arriving.add(lane)

    def _prefill(self, lane: int, row: Row, num_known: int, plan: Plan) -> None:
        """Compute the KV of all but a row's last token, which its first decode step feeds.

        So prefill needs no logits, no sampling and no download. The first `num_known` have theirs.
        """
        plan.num_shared += num_known
        if num_known == row.num_tokens - 1:
            self._lanes.ready[lane] = True
            return
        num_shared = self._num_full(row) * self._page_tokens
        self._lanes.prompts.prefill(lane, row.context[:-1], num_known, num_shared)

    def _fork(self, lane: int, like: int, row: Row, plan: Plan) -> None:
        """Let a row begin with the KV that a lane with its prompt has, or will have."""
        plan.num_shared += row.num_tokens - 1
        num_full, copies = self._num_full(row), list[tuple[int, int]]()
        if (row.num_tokens - 1) % self._page_tokens:
            source, target = self._lanes.page_table[[like, lane], num_full].tolist()
            copies.append((source, target))
        if self._lanes.prompts.is_ready(like):
            plan.copies += copies
            self._lanes.ready[lane] = True
        else:
            self._lanes.prompts.wait_for(like, lane, copies)

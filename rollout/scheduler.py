"""Chooses the next batch before the last one's tokens are known, and settles each after.

State is kept in arrays by lane and updated for all rows at once: 256 rows cost microseconds.
No tensor is read here, so a plan never waits for the device.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rollout.config import RolloutConfig
from rollout.errors import RolloutError
from rollout.pages import PageAllocator, pages_for
from rollout.prefixes import page_keys
from rollout.request import (
    Admission,
    Batch,
    Completion,
    FinishReason,
    Floats,
    Ints,
    Request,
    Segment,
)
from rollout.token_log import TokenLog, extend

NO_ROW = NO_TOKEN = -1
_NO_PAGES = np.empty((0, 3), np.int64)
_NO_COPIES = np.empty((0, 2), np.int64)


_Prompt = tuple[int, bytes]  # policy version, and the prompt without its last token


@dataclass
class _Prefill:
    """A lane whose prompt is not yet wholly in the KV cache: the next token is at `start`.

    `forks` wait for it: lanes with the same prompt, and what is to be copied for each.
    """

    lane: int
    prompt: Ints
    start: int
    forks: list[tuple[int, list[tuple[int, int]]]] = field(default_factory=list)


class Scheduler:
    """Rows waiting, rows in lanes, and the pages they hold.

    Args:
        config: `max_rows` lanes, `page_tokens`, `prefill_tokens` a step.
        max_row_pages: Pages of the longest row: the width of a block table.
    """

    def __init__(self, config: RolloutConfig, max_row_pages: int) -> None:
        self._config = config
        self._max_row_pages = max_row_pages
        self._next_row = 0
        self.reset(num_pages=1)

    def reset(self, num_pages: int) -> None:
        """Drop every row and begin anew with `num_pages` free pages. Row ids go on counting."""
        num_lanes = self._config.max_rows
        self.pages = PageAllocator()
        self.pages.grow(num_pages)
        self._waiting: deque[tuple[int, Request]] = deque()
        self._prefilling: deque[_Prefill] = deque()
        self._copies: list[tuple[int, int]] = []
        self._lanes_of: dict[_Prompt, list[int]] = {}
        self._prompt_of: dict[int, _Prompt] = {}
        self._request_of: dict[int, Request] = {}
        self._free_lanes = list(range(num_lanes - 1, -1, -1))
        self._row = np.full(num_lanes, NO_ROW, np.int64)
        self._ready = np.zeros(num_lanes, bool)
        self._position = np.zeros(num_lanes, np.int64)
        self._num_launched = np.zeros(num_lanes, np.int64)
        self._num_settled = np.zeros(num_lanes, np.int64)
        self._max_new = np.zeros(num_lanes, np.int64)
        self._eos = np.full((num_lanes, 1), NO_TOKEN, np.int64)
        self._num_pages = np.zeros(num_lanes, np.int64)
        self._num_promised = np.zeros(num_lanes, np.int64)
        self._version_of = np.zeros(num_lanes, np.int64)
        self._version = -1
        self._block_table = np.zeros((num_lanes, self._max_row_pages), np.int64)
        self._log = TokenLog(num_lanes, self._config.num_scores)

    @property
    def num_live(self) -> int:
        """Rows in a lane."""
        return self._config.max_rows - len(self._free_lanes)

    @property
    def num_waiting(self) -> int:
        """Rows that have no lane yet."""
        return len(self._waiting)

    def knows_prefixes(self, policy_version: int) -> bool:
        """Whether pages that no row holds could serve one under this version."""
        return policy_version == self._version and self.pages.num_cached > 0

    def row_pages(self, request: Request) -> int:
        """Pages that a request can come to hold."""
        return pages_for(request.max_kv_tokens, self._config.page_tokens)

    def pages_wanted(self) -> int:
        """Pages with which no row would wait for memory under one policy version.

        The trash page, and as many rows as there are lanes, at their longest, of which those with
        the same prompt share pages.
        """
        own: list[int] = []
        shared: dict[tuple[int | None, bytes], int] = {}
        live = [(r, self._prompt_of.get(lane)) for lane, r in self._request_of.items()]
        for request, prompt in [*live, *((request, None) for _, request in self._waiting)]:
            num_full = self._num_full(request)
            own.append(self.row_pages(request) - num_full)
            # Rows of another policy version share with no row that is still to come.
            shared[prompt or (None, request.prompt[:-1].tobytes())] = num_full
        most = self._config.max_rows
        return 1 + sum(sorted(own)[-most:]) + sum(sorted(shared.values())[-most:])

    def largest_batch(self) -> tuple[int, int]:
        """Most rows that can decode together, and their longest context, from now on."""
        waiting = [request.max_tokens for _, request in self._waiting]
        live = (self._position + 1 + self._max_new - self._num_launched)[self._row != NO_ROW]
        longest = max([*waiting, *live.tolist()], default=0)
        return min(self.num_live + self.num_waiting, self._config.max_rows), longest

    def add(self, request: Request) -> int:
        """Queue a request, first come first served. Returns its row id."""
        row, self._next_row = self._next_row, self._next_row + 1
        self._waiting.append((row, request))
        return row

    def schedule(self, policy_version: int) -> Batch | None:
        """The next batch, from what is known now; `None` when there is nothing to launch.

        A row whose token in flight is its last is left out; one whose token in flight may turn
        out to be an EOS is not, and is then an overrun.
        """
        self._open_version(policy_version)
        admission, new_pages, num_shared = self._admit()
        segments = self._take_segments()
        # ORDER: a row with `max_new_tokens` launched is not launched again; only EOS overruns
        (lanes,) = (self._ready & (self._num_launched < self._max_new)).nonzero()
        if self._prefilling:
            lanes = lanes[:0]  # a step reads every weight, however few rows are ready yet
        if not segments and len(lanes) == 0:
            assert self.num_live or not self._waiting, "rows wait for pages that nobody gives back"
            return None
        grown = self._extend_tables(lanes)
        max_context = int(self._position[lanes].max(initial=0)) + 1
        self._position[lanes] += 1
        self._num_launched[lanes] += 1
        return Batch(
            rows=self._row[lanes],
            lanes=lanes,
            policy_version=policy_version,
            max_context=max_context,
            admission=admission,
            segments=segments,
            new_pages=np.concatenate([*new_pages, grown]) if new_pages else grown,
            copies=self._take_copies(),
            num_shared=num_shared,
        )

    def commit(self, batch: Batch, tokens: Ints, scores: Floats) -> list[Completion]:
        """Settle a finished batch: record each row's token, and end the rows that are done.

        Args:
            batch: The batch as it was launched.
            tokens: Sampled token of each of `batch.rows`, `(rows,)`.
            scores: Its log-probability, and the entropy if asked for, `(rows, 1 or 2)`.

        Raises:
            RolloutError: A log-probability is not finite.
        """
        # ORDER: the batch says whose token this is; a lane that has since been freed or given
        # to another row shows an overrun, whose token is dropped
        lanes = batch.lanes
        alive = self._row[lanes] == batch.rows
        if not alive.all():
            lanes, tokens, scores = lanes[alive], tokens[alive], scores[alive]
        if not np.isfinite(scores).all():
            raise RolloutError(
                f"log-probability {scores[~np.isfinite(scores)][0]} of a sampled token: the "
                "model's logits are not finite; look at the loss and the gradient norm"
            )
        settled = self._num_settled[lanes]
        self._log.record(lanes, settled, tokens, scores)
        self._num_settled[lanes] = settled + 1
        stop = (self._eos[lanes] == tokens[:, None]).any(axis=1)
        done = stop | (settled + 1 == self._max_new[lanes])
        return [
            self._finish(lane, FinishReason.STOP if by_eos else FinishReason.LENGTH, batch)
            for lane, by_eos in zip(lanes[done], stop[done], strict=True)
        ]

    def check(self) -> None:
        """Assert what always holds between steps: every page and every lane has one owner."""
        used = [self._block_table[lane, :count] for lane, count in enumerate(self._num_pages)]
        self.pages.check(np.concatenate(used))
        assert sorted(self._free_lanes) == list(np.flatnonzero(self._row == NO_ROW))

    def _open_version(self, policy_version: int) -> None:
        if policy_version != self._version:
            self._version = policy_version
            self.pages.forget_prefixes()

    def _admit(self) -> tuple[Admission, list[Ints], int]:
        """Give waiting rows the free lanes, as long as their pages can be promised."""
        admission, new_pages, num_shared = Admission(), list[Ints](), 0
        while self._waiting and self._free_lanes:
            row, request = self._waiting[0]
            prompt = (self._version, request.prompt[:-1].tobytes())
            like = next(iter(self._lanes_of.get(prompt, ())), None)
            shared = self._shared_pages(request, like)
            num_promised = self.row_pages(request) - len(shared)
            if num_promised + self.pages.num_idle(shared) > self.pages.num_unreserved:
                break
            self.pages.reserve(num_promised)
            self._waiting.popleft()
            lane = self._free_lanes.pop()
            self._occupy(lane, row, request, num_promised)
            new_pages.append(self._open_table(lane, request, shared))
            if len(request.prompt) > 1:
                num_shared += self._begin(lane, request, like, len(shared))
                self._lanes_of.setdefault(prompt, []).append(lane)
                self._prompt_of[lane] = prompt
            admission.lanes.append(lane)
            admission.tokens.append(int(request.prompt[-1]))
            admission.positions.append(len(request.prompt) - 1)
            admission.seeds.append(request.seed)
            admission.temperatures.append(request.sampling.temperature)
        return admission, new_pages, num_shared

    def _shared_pages(self, request: Request, like: int | None) -> Ints:
        """Pages that hold the beginning of a prompt: a lane's with that prompt, or known ones."""
        if like is not None:
            return self._block_table[like, : self._num_full(request)]
        keys = page_keys(request.prompt[:-1], self._config.page_tokens)
        return np.array(self.pages.prefixes.match(keys), np.int64)

    def _num_full(self, request: Request) -> int:
        """Pages filled by a prompt without its last token: rows of that prompt share them."""
        return (len(request.prompt) - 1) // self._config.page_tokens

    def _occupy(self, lane: int, row: int, request: Request, num_promised: int) -> None:
        sampling = request.sampling
        self._row[lane] = row
        self._request_of[lane] = request
        self._position[lane] = len(request.prompt) - 1
        self._num_launched[lane] = self._num_settled[lane] = 0
        self._max_new[lane] = sampling.max_new_tokens
        self._num_promised[lane] = num_promised
        self._version_of[lane] = self._version
        self._eos = extend(self._eos.T, len(sampling.eos_token_ids), NO_TOKEN).T
        self._eos[lane] = NO_TOKEN
        self._eos[lane, : len(sampling.eos_token_ids)] = sampling.eos_token_ids
        self._log.make_room(sampling.max_new_tokens)
        # Prefill covers all but the last prompt token, which the first decode step feeds. So
        # prefill needs no logits, no sampling and no download.
        self._ready[lane] = len(request.prompt) == 1

    def _begin(self, lane: int, request: Request, like: int | None, num_full: int) -> int:
        """Prefill a row's prompt, or fork it from a lane that has, or will have, the same.

        Returns the prompt tokens that need no prefill.
        """
        if like is None:
            start = num_full * self._config.page_tokens
            self._ready[lane] = start == len(request.prompt) - 1
            if not self._ready[lane]:
                self._prefilling.append(_Prefill(lane, request.prompt[:-1], start))
            return start
        copies = []
        if (len(request.prompt) - 1) % self._config.page_tokens:
            source, target = self._block_table[[like, lane], num_full]
            copies.append((int(source), int(target)))
        if self._ready[like]:
            self._copies += copies
            self._ready[lane] = True
        else:
            prefill = next(prefill for prefill in self._prefilling if prefill.lane == like)
            prefill.forks.append((lane, copies))
        return len(request.prompt) - 1

    def _take_segments(self) -> list[Segment]:
        """Prompt tokens to run now, `prefill_tokens` at most, oldest row first."""
        segments: list[Segment] = []
        budget = self._config.prefill_tokens
        while self._prefilling and budget > 0:
            head = self._prefilling[0]
            tokens = head.prompt[head.start : head.start + budget]
            segments.append(Segment(head.lane, head.start, tokens))
            head.start += len(tokens)
            budget -= len(tokens)
            if head.start == len(head.prompt):
                # Its last token decodes in this same batch: prefill is launched before decode.
                self._ready[head.lane] = True
                for lane, copies in head.forks:
                    self._ready[lane] = True
                    self._copies += copies
                self._enter_prefixes(head.lane, head.prompt)
                self._prefilling.popleft()
        return segments

    def _take_copies(self) -> Ints:
        """Pages to copy in this batch: the partly filled ones of prompts that are forked."""
        if not self._copies:
            return _NO_COPIES
        copies, self._copies = np.array(self._copies, np.int64), []
        return copies

    def _extend_tables(self, lanes: Ints) -> Ints:
        """Give a page to each lane whose next token starts one. Returns `(pages, 3)`."""
        wanted = self._position[lanes] // self._config.page_tokens
        growing = lanes[wanted >= self._num_pages[lanes]]
        if not len(growing):
            return _NO_PAGES
        pages = self.pages.allocate(len(growing))
        index = self._num_pages[growing]
        self._block_table[growing, index] = pages
        self._num_pages[growing] += 1
        self._num_promised[growing] -= 1
        return np.stack([growing, index, pages], axis=1)

    def _enter_prefixes(self, lane: int, tokens: Ints) -> None:
        """Let later rows find the pages that `tokens`, whose KV is written, fill wholly."""
        if self._version_of[lane] == self._version:
            keys = page_keys(tokens, self._config.page_tokens)
            self.pages.prefixes.add(keys, self._block_table[lane].tolist())

    def _open_table(self, lane: int, request: Request, shared: Ints) -> Ints:
        """Give a lane the pages of its prompt, shared ones first. Returns `(pages, 3)`."""
        num_own = pages_for(len(request.prompt), self._config.page_tokens) - len(shared)
        self.pages.share(shared)
        pages = np.concatenate([shared, self.pages.allocate(num_own)])
        index = np.arange(len(pages))
        self._block_table[lane, index] = pages
        self._num_pages[lane] = len(pages)
        self._num_promised[lane] -= num_own
        return np.stack([np.full(len(pages), lane), index, pages], axis=1)

    def _finish(self, lane: int, reason: FinishReason, batch: Batch) -> Completion:
        """Take a row out of its lane, and give its lane and pages to whoever comes next.

        An overrun of this row may be on the device now and write into those pages.
        """
        count = self._num_settled[lane]
        tokens, scores = self._log.tokens(lane, count), self._log.scores(lane, count)
        completion = Completion(
            row=int(self._row[lane]),
            token_ids=tokens.tolist(),
            logprobs=scores[0],
            finish_reason=reason,
            policy_version=batch.policy_version,
            entropies=scores[1] if self._config.entropies else None,
        )
        # ORDER: lanes and pages are touched on the compute stream alone, so whatever reuses
        # them is launched behind the overrun
        # ORDER: a page is entered only with tokens whose KV is written; that of the last sampled
        # token is not
        prompt = self._request_of[int(lane)].prompt
        self._enter_prefixes(lane, np.concatenate([prompt, tokens[:-1]]))
        held = self._block_table[lane, : self._num_pages[lane]]
        self.pages.free(held, int(self._num_promised[lane]))
        self._forget_prompt(int(lane))
        self._free_lanes.append(int(lane))
        self._row[lane] = NO_ROW
        self._ready[lane] = False
        self._num_pages[lane] = self._num_promised[lane] = 0
        return completion

    def _forget_prompt(self, lane: int) -> None:
        """No row is forked from this lane any more."""
        del self._request_of[lane]
        prompt = self._prompt_of.pop(lane, None)
        if prompt is not None:
            lanes = self._lanes_of[prompt]
            lanes.remove(lane)
            if not lanes:
                del self._lanes_of[prompt]

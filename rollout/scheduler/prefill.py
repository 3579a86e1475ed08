"""The prefill queue: lanes with prompt tokens to prefill, and the forks that wait for them."""

from collections import deque
from dataclasses import dataclass, field

from rollout.request import Ints
from rollout.scheduler.batch import Segment

PromptKey = tuple[int, bytes]
"""Policy version and prompt without its last token. Rows with the same key share KV."""


@dataclass(eq=False)
class Fork:
    """A lane that waits for the prefill of another lane with the same prompt.

    `copies` are the pages to copy when that prefill is done: `(source, target)`.
    """

    lane: int
    copies: list[tuple[int, int]]


@dataclass(eq=False)
class Prefill:
    """Tokens of one lane that need KV.

    Attributes:
        tokens: All tokens of the row except the last, which the first decode step computes.
        start: Position of the next token to compute.
        num_shared: Tokens in the full pages that forks share.
    """

    lane: int
    tokens: Ints
    start: int
    num_shared: int
    forks: list[Fork] = field(default_factory=list)


class PrefillQueue:
    """The prompts of the rows in lanes and the state of their prefill.

    Args:
        part_tokens: Part of a prompt, if the rest waits for the next step, ends at a multiple of
            this many tokens.
    """

    def __init__(self, part_tokens: int = 1) -> None:
        self._part_tokens = part_tokens
        self._queue: deque[Prefill] = deque()
        self._prefill_of: dict[int, Prefill] = {}  # lane -> the prefill that it waits for
        self._lanes_of: dict[PromptKey, list[int]] = {}
        self._key_of: dict[int, PromptKey] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def lane_with(self, key: PromptKey, *, unfinished: bool = False) -> int | None:
        """A lane with this prompt, if there is one; if `unfinished`, one that waits for prefill."""
        lanes = self._lanes_of.get(key, ())
        return next((lane for lane in lanes if not (unfinished and self.is_ready(lane))), None)

    def key_of(self, lane: int) -> PromptKey | None:
        """The prompt key of a lane that later rows can fork from."""
        return self._key_of.get(lane)

    def is_ready(self, lane: int) -> bool:
        """Whether the KV of a lane's prompt is written or queued."""
        return lane not in self._prefill_of

    def enter(self, lane: int, key: PromptKey) -> None:
        """Let later rows fork from a lane."""
        self._lanes_of.setdefault(key, []).append(lane)
        self._key_of[lane] = key

    def add(self, prefill: Prefill) -> None:
        """Queue a prefill."""
        self._queue.append(prefill)
        self._prefill_of[prefill.lane] = prefill

    def add_fork(self, source_lane: int, fork: Fork) -> None:
        """Let the fork's lane wait for the same prefill as `source_lane`."""
        prefill = self._prefill_of[fork.lane] = self._prefill_of[source_lane]
        prefill.forks.append(fork)

    def leave(self, lane: int) -> None:
        """Forget a lane that its row has left. A fork takes over its unfinished prefill."""
        key = self._key_of.pop(lane, None)
        if key is not None:
            self._lanes_of[key].remove(lane)
            if not self._lanes_of[key]:
                del self._lanes_of[key]
        prefill = self._prefill_of.pop(lane, None)
        if prefill is None:
            return
        if prefill.lane != lane:
            prefill.forks = [fork for fork in prefill.forks if fork.lane != lane]
        elif prefill.forks:
            self._hand_to_fork(prefill)
        else:
            self._queue.remove(prefill)

    def take(self, budget: int) -> tuple[list[Segment], list[Prefill]]:
        """Take up to `budget` tokens, first come first served, and the prefills that they end.

        A prompt that does not fit waits for the next step if at least half of the budget is used:
        attention over whole prompts runs in faster kernels than attention over parts.
        """
        segments, ended = list[Segment](), list[Prefill]()
        most = budget
        while self._queue:
            head = self._queue[0]
            start, end = head.start, self._end(head, budget, most)
            if end == start:
                break
            segments.append(Segment(head.lane, start, head.tokens[start:end]))
            head.start = end
            budget -= end - start
            if end == len(head.tokens):
                ended.append(self._queue.popleft())
                for lane in (head.lane, *(fork.lane for fork in head.forks)):
                    del self._prefill_of[lane]
        return segments, ended

    def _end(self, prefill: Prefill, budget: int, most: int) -> int:
        """Where the next tokens of a prefill end, with `budget` of `most` tokens left."""
        end = prefill.start + budget
        if end >= len(prefill.tokens):
            return len(prefill.tokens)
        if budget <= most // 2:
            return prefill.start
        last = end - end % self._part_tokens
        if last <= prefill.start:  # it would end within a chunk: wait, unless a step is that short
            return end if budget == most else prefill.start
        return last

    def _hand_to_fork(self, prefill: Prefill) -> None:
        first, *forks = prefill.forks
        prefill.lane = first.lane
        # The full pages are shared. The tokens in the old lane's last page are computed again.
        prefill.start = min(prefill.start, prefill.num_shared)
        for fork in forks:
            pairs = zip(first.copies, fork.copies, strict=True)
            fork.copies = [(source, target) for (_, source), (_, target) in pairs]
        prefill.forks = forks

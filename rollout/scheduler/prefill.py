"""Which lanes have prompt tokens to prefill, in order, and which wait to be forked from them."""

from collections import deque
from dataclasses import dataclass, field

from rollout.request import Ints
from rollout.scheduler.batch import Segment

PromptKey = tuple[int, bytes]
"""Policy version, and the prompt without its last token: rows with the same key share KV."""


@dataclass(eq=False)
class Fork:
    """A lane that waits for the prefill of another lane with the same prompt.

    Attributes:
        lane: The lane that waits.
        copies: Pages to copy when the prefill is done: `(source, target)`.
    """

    lane: int
    copies: list[tuple[int, int]]


@dataclass(eq=False)
class Prefill:
    """Tokens of one lane whose KV is still to be computed.

    Attributes:
        lane: The lane.
        tokens: All its tokens but the last, which its first decode step feeds.
        start: Position of the next token to compute.
        num_shared: Forks share the pages that hold so many tokens.
        forks: Lanes that wait for it.
    """

    lane: int
    tokens: Ints
    start: int
    num_shared: int
    forks: list[Fork] = field(default_factory=list)


class PrefillQueue:
    """Prompts of the rows in lanes, and how far the KV of each is computed."""

    def __init__(self) -> None:
        self._queue: deque[Prefill] = deque()
        self._prefill_of: dict[int, Prefill] = {}  # by lane: the prefill that makes it ready
        self._lanes_of: dict[PromptKey, list[int]] = {}
        self._key_of: dict[int, PromptKey] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def lane_with(self, key: PromptKey) -> int | None:
        """A lane with that prompt."""
        return next(iter(self._lanes_of.get(key, ())), None)

    def key_of(self, lane: int) -> PromptKey | None:
        """The prompt by which later rows may fork from a lane."""
        return self._key_of.get(lane)

    def is_ready(self, lane: int) -> bool:
        """Whether the KV of a lane's prompt is written, or queued to be."""
        return lane not in self._prefill_of

    def enter(self, lane: int, key: PromptKey) -> None:
        """Let later rows fork from a lane."""
        self._lanes_of.setdefault(key, []).append(lane)
        self._key_of[lane] = key

    def add(self, prefill: Prefill) -> None:
        """Queue a lane's tokens."""
        self._queue.append(prefill)
        self._prefill_of[prefill.lane] = prefill

    def add_fork(self, source_lane: int, fork: Fork) -> None:
        """Let a lane wait for the same prefill as `source_lane`."""
        prefill = self._prefill_of[fork.lane] = self._prefill_of[source_lane]
        prefill.forks.append(fork)

    def leave(self, lane: int) -> None:
        """A row has left its lane: it is forked no more, and waits for no prefill."""
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
            self._hand_on(prefill)
        else:
            self._queue.remove(prefill)

    def take(self, budget: int) -> tuple[list[Segment], list[Prefill]]:
        """Take `budget` tokens at most, the oldest row's first.

        Returns:
            The tokens to run now, and the prefills that end with them.
        """
        segments, ended = list[Segment](), list[Prefill]()
        while self._queue and budget > 0:
            head = self._queue[0]
            tokens = head.tokens[head.start : head.start + budget]
            segments.append(Segment(head.lane, head.start, tokens))
            head.start += len(tokens)
            budget -= len(tokens)
            if head.start == len(head.tokens):
                ended.append(self._queue.popleft())
                for lane in (head.lane, *(fork.lane for fork in head.forks)):
                    del self._prefill_of[lane]
        return segments, ended

    def _hand_on(self, prefill: Prefill) -> None:
        """Let the first fork go on with a prefill whose lane was given up.

        What is in shared pages is there; what lay in the lane's last page is computed again.
        """
        first, *forks = prefill.forks
        prefill.lane = first.lane
        prefill.start = min(prefill.start, prefill.num_shared)
        for fork in forks:
            pairs = zip(first.copies, fork.copies, strict=True)
            fork.copies = [(source, target) for (_, source), (_, target) in pairs]
        prefill.forks = forks

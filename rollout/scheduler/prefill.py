"""Prompts of the rows in lanes: what is still to be prefilled, and which rows wait for it."""

from collections import deque
from dataclasses import dataclass, field

from rollout.request import Ints
from rollout.scheduler.batch import Segment

Prompt = tuple[int, bytes]
"""Policy version, and the prompt without its last token."""

Copies = list[tuple[int, int]]
"""Pages to copy, and where to."""


@dataclass(eq=False)
class _Prefill:
    """A lane whose tokens are not yet wholly in the KV cache: the next is at `start`.

    `forks` wait for it: lanes with the same prompt, and what is to be copied for each. They share
    the pages that hold its first `num_shared` tokens.
    """

    lane: int
    tokens: Ints
    start: int
    num_shared: int
    forks: list[tuple[int, Copies]] = field(default_factory=list)


class Prompts:
    """Which lanes have which prompt, and how far each is."""

    def __init__(self) -> None:
        self._prefills: deque[_Prefill] = deque()
        self._waiting: dict[int, _Prefill] = {}  # lane -> whose end makes it ready
        self._lanes_of: dict[Prompt, list[int]] = {}
        self._prompt_of: dict[int, Prompt] = {}

    @property
    def is_prefilling(self) -> bool:
        """Whether there is something to prefill."""
        return bool(self._prefills)

    def like(self, prompt: Prompt) -> int | None:
        """A lane with that prompt."""
        return next(iter(self._lanes_of.get(prompt, ())), None)

    def of(self, lane: int) -> Prompt | None:
        """The prompt that rows to come may fork from this lane."""
        return self._prompt_of.get(lane)

    def is_ready(self, lane: int) -> bool:
        """Whether the KV of a lane's prompt is written, or queued to be."""
        return lane not in self._waiting

    def enter(self, lane: int, prompt: Prompt) -> None:
        """Let rows to come be forked from a lane."""
        self._lanes_of.setdefault(prompt, []).append(lane)
        self._prompt_of[lane] = prompt

    def prefill(self, lane: int, tokens: Ints, start: int, num_shared: int) -> None:
        """Compute the KV of `tokens` from `start` on; forks share the first `num_shared`."""
        prefill = _Prefill(lane, tokens, start, num_shared)
        self._prefills.append(prefill)
        self._waiting[lane] = prefill

    def wait_for(self, like: int, lane: int, copies: Copies) -> None:
        """Make a lane ready when another is, by `copies`."""
        prefill = self._waiting[lane] = self._waiting[like]
        prefill.forks.append((lane, copies))

    def leave(self, lane: int) -> None:
        """A row has left its lane: none is forked from it, and none waits for it any more."""
        prompt = self._prompt_of.pop(lane, None)
        if prompt is not None:
            self._lanes_of[prompt].remove(lane)
            if not self._lanes_of[prompt]:
                del self._lanes_of[prompt]
        prefill = self._waiting.pop(lane, None)
        if prefill is None:
            return
        if prefill.lane != lane:
            prefill.forks = [fork for fork in prefill.forks if fork[0] != lane]
        elif prefill.forks:
            self._hand_on(prefill)
        else:
            self._prefills.remove(prefill)

    def take(self, budget: int) -> tuple[list[Segment], list[_Prefill]]:
        """Tokens to run now, `budget` at most, oldest row first; and what that ends."""
        segments, ended = list[Segment](), list[_Prefill]()
        while self._prefills and budget > 0:
            head = self._prefills[0]
            tokens = head.tokens[head.start : head.start + budget]
            segments.append(Segment(head.lane, head.start, tokens))
            head.start += len(tokens)
            budget -= len(tokens)
            if head.start == len(head.tokens):
                ended.append(self._prefills.popleft())
                for lane in (head.lane, *(lane for lane, _ in head.forks)):
                    del self._waiting[lane]
        return segments, ended

    def _hand_on(self, prefill: _Prefill) -> None:
        """Let the first fork go on with a prefill whose lane was given up.

        What is in shared pages is there; what lay in the lane's last page is computed again.
        """
        (prefill.lane, copies), *forks = prefill.forks
        prefill.start = min(prefill.start, prefill.num_shared)
        source = [target for _, target in copies]
        prefill.forks = [
            (lane, [(page, target) for page, (_, target) in zip(source, theirs, strict=True)])
            for lane, theirs in forks
        ]

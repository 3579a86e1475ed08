"""What the ranks of a trainer tell each other about a rollout."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object

from rollout.engine import RolloutEngine
from rollout.errors import RolloutError
from rollout.request import Completion
from rollout.scheduler.waiting import Lengths, digest


def agree(accelerator: Any, failure: Exception | None, num_tokens: int) -> int:
    """Raise on every rank if any has failed, so that none waits for another for ever.

    Args:
        accelerator: The trainer's.
        failure: Of this rank.
        num_tokens: That this rank has generated.

    Returns:
        The tokens of all ranks.

    Raises:
        RolloutError: Another rank has failed. `failure` itself, where there is one.
    """
    num_failed = int(failure is not None)
    if accelerator.num_processes > 1:
        try:
            own = torch.tensor([num_failed, num_tokens], device=accelerator.device)
            num_failed, num_tokens = accelerator.reduce(own, reduction="sum").tolist()
        except Exception:
            if failure is None:  # else that says more: a broken device can tell nobody
                raise
    if failure is not None:
        raise failure
    if num_failed:
        raise RolloutError(f"the rollout failed on {num_failed} other rank(s); see their errors")
    return num_tokens


class Group(NamedTuple):
    """Rows of one prompt that stay together, because they share its KV.

    Attributes:
        owner: Rank that asked for them.
        first: The first of them among the owner's rows.
        prompt: Token ids.
        seeds: One a row.
        expected: Tokens that a completion is expected to have, where that is known.
    """

    owner: int
    first: int
    prompt: list[int]
    seeds: list[int]
    expected: float | None


class RowBalance:
    """Lets each rank generate about as many tokens, whoever asked for them.

    Every rank has to make the same calls. A row's random numbers come with it, so that it is the
    same row wherever it is generated, but for rounding.

    Args:
        rank: This process.
        num_ranks: All of them.
        lengths: What this rank knows of prompts.

    Attributes:
        num_exchanges: How often ranks have met: twice for each rollout.
    """

    def __init__(self, rank: int, num_ranks: int, lengths: Lengths) -> None:
        self._rank, self._num_ranks, self._lengths = rank, num_ranks, lengths
        self.num_exchanges = 0
        self._mine: list[Group] = []

    def give_out(
        self, prompts: Sequence[list[int]], seeds: Sequence[int]
    ) -> tuple[list[list[int]], list[int]]:
        """The prompts and seeds of the rows that this rank is to generate.

        Args:
            prompts: Of the rows that this rank asks for.
            seeds: Theirs.
        """
        own = self._groups(prompts, seeds)
        self._mine = deal(self._exchange(own), self._num_ranks)[self._rank]
        rows = [(group.prompt, seed) for group in self._mine for seed in group.seeds]
        return [prompt for prompt, _ in rows], [seed for _, seed in rows]

    def take_back(self, completions: Sequence[Completion]) -> list[Completion]:
        """The completions of the rows that this rank has asked for, in its order.

        Args:
            completions: Of the rows of `give_out`; none where this rank has failed, whose rows
                then are missing on the ranks that have asked for them.
        """
        rows = [(group, index) for group in self._mine for index in range(len(group.seeds))]
        places = [
            (group.owner, group.first + index, group.prompt, completion)
            for (group, index), completion in zip(rows, completions, strict=False)
        ]
        found: dict[int, Completion] = {}
        mine = {(owner, index) for owner, index, *_ in places}
        for owner, index, prompt, completion in self._exchange(places):
            if (owner, index) not in mine:  # the engine here knows of its own
                self._lengths.note(digest(prompt), len(completion.token_ids))
            if owner == self._rank:
                found[index] = completion
        return [found[index] for index in sorted(found)]

    def _exchange(self, own: list[Any]) -> list[Any]:
        """What all ranks say, in their order."""
        self.num_exchanges += 1
        said: list[Any] = gather_object(own)
        return said

    def _groups(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> list[Group]:
        groups = list[Group]()
        for prompt, rows in groupby(range(len(prompts)), key=lambda row: prompts[row]):
            own = list(rows)
            expected = self._lengths.expected(digest(prompt))
            groups.append(Group(self._rank, own[0], prompt, [seeds[row] for row in own], expected))
        return groups


class Meeting:
    """One rollout's way past the places where ranks wait for each other.

    Rows are shared out, parameters gathered, completions brought back, and each rank tells how it
    ended. Whoever fails on the way goes on to the places that are left, with empty hands.

    Args:
        accelerator: The trainer's.
        engine: The engine of this rank.
        balance: What shares rows out, if anything does.

    Attributes:
        is_over: Whether this rank has told how it ended.
    """

    def __init__(self, accelerator: Any, engine: RolloutEngine, balance: RowBalance | None) -> None:
        self._accelerator, self._engine, self._balance = accelerator, engine, balance
        self._num_exchanges = balance.num_exchanges if balance else 0
        self._num_gathered = engine.num_gathered
        self.is_over = False

    def end(self, failure: Exception | None, num_tokens: int) -> int:
        """Tell the others, and hear of them; arguments and errors are those of `agree`."""
        self.is_over = True
        if failure is not None and self._accelerator.num_processes > 1:
            self._catch_up()
        return agree(self._accelerator, failure, num_tokens)

    def _catch_up(self) -> None:
        """Take part in what others wait for; the first error says more than one of these."""
        num_left = 2
        if self._balance:
            num_left -= self._balance.num_exchanges - self._num_exchanges
        if self._balance and num_left == 2:
            with suppress(Exception):
                self._balance.give_out([], [])
        with suppress(Exception):
            num_done = self._engine.num_gathered - self._num_gathered
            self._engine.worker.twin.join_gathers(num_done)
        if self._balance and num_left > 0:
            with suppress(Exception):
                self._balance.take_back([])


def deal(groups: Sequence[Group], num_ranks: int) -> list[list[Group]]:
    """Groups for each rank: the longest first, to the rank that has least.

    Args:
        groups: Of all ranks, in the same order everywhere.
        num_ranks: Ranks.

    Returns:
        A list a rank; where nothing is known of any length, each rank's own.
    """
    known = [group.expected for group in groups if group.expected is not None]
    dealt: list[list[Group]] = [[] for _ in range(num_ranks)]
    if not known:
        for group in groups:
            dealt[group.owner].append(group)
        return dealt
    usual, loads = sum(known) / len(known), [0.0] * num_ranks
    sized = [(len(g.seeds) * (usual if g.expected is None else g.expected), g) for g in groups]
    for size, group in sorted(sized, key=lambda each: -each[0]):
        rank = min(range(num_ranks), key=lambda rank: (loads[rank], rank != group.owner))
        dealt[rank].append(group)
        loads[rank] += size
    return dealt

"""What the ranks of a trainer tell each other about a rollout."""

from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, auto
from itertools import groupby
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object

from rollout.engine import RolloutEngine
from rollout.errors import RolloutError
from rollout.request import Completion
from rollout.scheduler.waiting import digest


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
        first: Index of the first of them among the owner's rows.
        prompt: Token ids.
        seeds: One a row.
        expected: Tokens that a completion is expected to have; `None` where nothing is known.
    """

    owner: int
    first: int
    prompt: list[int]
    seeds: list[int]
    expected: float | None


class Returned(NamedTuple):
    """A completion on its way back to the rank that asked for it as its row `row`."""

    owner: int
    row: int
    prompt: list[int]
    completion: Completion


class Phase(Enum):
    """How far a rank has come in a rollout; a collective moves it on as the rank joins it."""

    HANDING_OUT = auto()
    """Rows are yet to be handed out."""
    GENERATING = auto()
    """The rank gathers sharded parameters and generates; completions are yet to be brought back."""
    REPORTING = auto()
    """Each rank is yet to say how its rollout went."""
    DONE = auto()
    """No rank waits for this one."""


class Meeting:
    """Takes one rank through one rollout's collectives, which all ranks join in the same order.

    Rows are handed out, parameters gathered, completions brought back, and each rank says how it
    went. A rank that fails still joins those that are left, with empty data.

    Args:
        accelerator: The trainer's.
        engine: The engine of this rank.
        balance: Hand rows out by expected length. Otherwise each rank generates its own, and rows
            and completions are not exchanged.
    """

    def __init__(self, accelerator: Any, engine: RolloutEngine, *, balance: bool) -> None:
        self._accelerator, self._engine = accelerator, engine
        self._rank, self._num_ranks = accelerator.process_index, accelerator.num_processes
        self._balance = balance and self._num_ranks > 1
        self._num_gathered = engine.num_gathered
        self._mine: list[Group] = []
        self.phase = Phase.HANDING_OUT

    def hand_out(
        self, prompts: Sequence[list[int]], seeds: Sequence[int]
    ) -> tuple[Sequence[list[int]], Sequence[int]]:
        """The prompts and seeds of the rows that this rank is to generate.

        Args:
            prompts: Of the rows that this rank asks for.
            seeds: One a row; a row draws the same numbers on whatever rank it is generated.
        """
        if not self._balance:
            self.phase = Phase.GENERATING
            return prompts, seeds
        groups = self._exchange(self._groups(prompts, seeds), Phase.GENERATING)
        self._mine = deal(groups, self._num_ranks)[self._rank]
        rows = [(group.prompt, seed) for group in self._mine for seed in group.seeds]
        return [prompt for prompt, _ in rows], [seed for _, seed in rows]

    def bring_back(self, completions: Sequence[Completion]) -> Sequence[Completion]:
        """The completions of the rows that this rank has asked for, in its order.

        Args:
            completions: Of the rows of `hand_out`. A rank that has failed has none; then they are
                missing on the ranks that asked for them.
        """
        if not self._balance:
            self.phase = Phase.REPORTING
            return completions
        rows = [
            (group.owner, group.first + place, group.prompt)
            for group in self._mine
            for place in range(len(group.seeds))
        ]
        generated = [Returned(*row, c) for row, c in zip(rows, completions, strict=False)]
        here = {(each.owner, each.row) for each in generated}
        wanted: dict[int, Completion] = {}
        for each in self._exchange(generated, Phase.REPORTING):
            if (each.owner, each.row) not in here:  # the engine has noted its own
                num_tokens = len(each.completion.token_ids)
                self._engine.expected_lengths.note(digest(each.prompt), num_tokens)
            if each.owner == self._rank:
                wanted[each.row] = each.completion
        return [wanted[row] for row in sorted(wanted)]

    def end(self, failure: Exception | None, num_tokens: int) -> int:
        """Say how it went, and hear of the others; arguments and errors are those of `agree`."""
        if failure is not None and self._num_ranks > 1:
            self._catch_up()
        self.phase = Phase.DONE
        return agree(self._accelerator, failure, num_tokens)

    def _catch_up(self) -> None:
        """Join what the other ranks wait for. The first error says more than one of these would."""
        if self.phase is Phase.HANDING_OUT:
            with suppress(Exception):
                self.hand_out([], [])
        with suppress(Exception):
            self._engine.join_gathers(self._engine.num_gathered - self._num_gathered)
        if self.phase is Phase.GENERATING:
            with suppress(Exception):
                self.bring_back([])

    def _exchange(self, own: list[Any], phase: Phase) -> list[Any]:
        """What all ranks send, in the order of ranks; on the way, this rank enters `phase`."""
        self.phase = phase
        received: list[Any] = gather_object(own)
        return received

    def _groups(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> list[Group]:
        groups = list[Group]()
        for prompt, rows in groupby(range(len(prompts)), key=lambda row: prompts[row]):
            own = list(rows)
            expected = self._engine.expected_lengths.expected(digest(prompt))
            groups.append(Group(self._rank, own[0], prompt, [seeds[row] for row in own], expected))
        return groups


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

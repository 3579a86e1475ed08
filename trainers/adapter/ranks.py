"""Collectives of a rollout: ranks exchange rows, completions and failures."""

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
    """Return the sum of `num_tokens` over all ranks, or raise on every rank if any rank failed.

    A rank that failed raises its own `failure`. The others raise RolloutError, so that none of them
    waits in a later collective forever.
    """
    num_failed = int(failure is not None)
    if accelerator.num_processes > 1:
        try:
            own = torch.tensor([num_failed, num_tokens], device=accelerator.device)
            num_failed, num_tokens = accelerator.reduce(own, reduction="sum").tolist()
        except Exception:
            if failure is None:  # else `failure` is the cause: a broken device cannot reduce
                raise
    if failure is not None:
        raise failure
    if num_failed:
        raise RolloutError(f"the rollout failed on {num_failed} other rank(s); see their errors")
    return num_tokens


class Group(NamedTuple):
    """Rows of one prompt, which stay on one rank because they share the prompt's KV."""

    owner: int  # rank that submitted the rows
    first: int  # index of the first row among the owner's rows
    prompt: list[int]
    seeds: list[int]  # one per row
    expected: float | None  # tokens of one completion; `None`: no earlier completion is known


class Returned(NamedTuple):
    """A completion that another rank may have generated for row `row` of rank `owner`."""

    owner: int
    row: int
    prompt: list[int]
    completion: Completion


class Phase(Enum):
    """The next collective that a rank joins in a rollout."""

    DISTRIBUTING = auto()  # exchange of rows
    GENERATING = auto()  # gathers of sharded parameters, then the exchange of completions
    REPORTING = auto()  # sum of failures and tokens
    DONE = auto()  # none


class RolloutCollectives:
    """The collectives of one rollout. All ranks join them in the same order.

    The order: exchange rows, gather parameters, exchange completions, report failures. A failing
    rank still joins the remaining collectives, with empty data.

    Args:
        balance: Exchange rows by expected length. Otherwise each rank generates its own rows, and
            rows and completions are not exchanged.
    """

    def __init__(self, accelerator: Any, engine: RolloutEngine, *, balance: bool) -> None:
        self._accelerator, self._engine = accelerator, engine
        self._rank, self._num_ranks = accelerator.process_index, accelerator.num_processes
        self._balance = balance and self._num_ranks > 1
        self._num_gathered = engine.num_gathered
        self._mine: list[Group] = []
        self.phase = Phase.DISTRIBUTING

    def distribute(
        self, prompts: Sequence[list[int]], seeds: Sequence[int]
    ) -> tuple[Sequence[list[int]], Sequence[int]]:
        """Exchange rows; return the prompts and seeds of the rows that this rank generates.

        A row keeps its seed, so it draws the same random numbers on any rank.
        """
        if not self._balance:
            self.phase = Phase.GENERATING
            return prompts, seeds
        groups = self._exchange(self._groups(prompts, seeds), Phase.GENERATING)
        self._mine = deal(groups, self._num_ranks)[self._rank]
        rows = [(group.prompt, seed) for group in self._mine for seed in group.seeds]
        return [prompt for prompt, _ in rows], [seed for _, seed in rows]

    def collect(self, completions: Sequence[Completion]) -> Sequence[Completion]:
        """Exchange completions; return those of this rank's own rows, in the rows' order.

        Args:
            completions: One for each row from `distribute`. Empty if this rank failed: the owners
                of these rows then receive fewer completions than rows.
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
            if (each.owner, each.row) not in here:  # the engine noted the lengths of its own rows
                num_tokens = len(each.completion.token_ids)
                self._engine.expected_lengths.note(digest(each.prompt), num_tokens)
            if each.owner == self._rank:
                wanted[each.row] = each.completion
        return [wanted[row] for row in sorted(wanted)]

    def end(self, failure: Exception | None, num_tokens: int) -> int:
        """Report this rank's failure or tokens, as `agree` does, after the collectives before."""
        if failure is not None and self._num_ranks > 1:
            self._catch_up()
        self.phase = Phase.DONE
        return agree(self._accelerator, failure, num_tokens)

    def _catch_up(self) -> None:
        """Join the remaining collectives with empty data; the first error is the one to report."""
        if self.phase is Phase.DISTRIBUTING:
            with suppress(Exception):
                self.distribute([], [])
        with suppress(Exception):
            self._engine.join_gathers(self._engine.num_gathered - self._num_gathered)
        if self.phase is Phase.GENERATING:
            with suppress(Exception):
                self.collect([])

    def _exchange(self, own: list[Any], phase: Phase) -> list[Any]:
        """Enter `phase`, gather the lists of all ranks and return them joined in rank order."""
        self.phase = phase  # first: a failing gather must not be joined again
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
    """Assign each group to the least loaded rank, longest group first (LPT scheduling).

    `groups` must have the same order on every rank. If no length is known, each rank keeps its own
    groups. Returns one list of groups per rank.
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

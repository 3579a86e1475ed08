"""What the device does in one step: exactly what a graph captures.

Shape letters: T packed tokens, R decoding rows, L lanes, P pages of a row, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollout.attention import PagedAttention, Run
from rollout.kv_cache import KVCache
from rollout.pages import TRASH_PAGE
from rollout.request import Segment
from rollout.sampling import sample
from rollout.slots import IOSlot


class LanguageModel(Protocol):
    """What a step needs of a model."""

    def logits(
        self, tokens_T: Tensor, positions_T: Tensor, rows: Tensor, paged: PagedAttention
    ) -> Tensor:
        """Run packed tokens; logits `(rows, V)` of those that `rows` picks by index."""
        ...


@dataclass
class Lanes:
    """Device state of the running rows, advanced on the compute stream alone.

    The last lane is the trash lane: padding rows run there, and it never advances.

    Attributes:
        tokens_L: Newest token, whose KV is not written yet, int64.
        positions_L: Its position, int64.
        seeds_L: Key of the row's random numbers, int64.
        temperatures_L: Divides the row's logits, float32.
        block_table_LP: Page ids in token order, int64.
    """

    tokens_L: Tensor
    positions_L: Tensor
    seeds_L: Tensor
    temperatures_L: Tensor
    block_table_LP: Tensor

    @classmethod
    def empty(cls, max_rows: int, max_row_pages: int, device: torch.device) -> "Lanes":
        """State of `max_rows` lanes and the trash lane."""
        num_lanes = max_rows + 1
        tokens, positions, seeds = torch.zeros((3, num_lanes), dtype=torch.int64, device=device)
        temperatures = torch.zeros(num_lanes, device=device)
        block_table = torch.full((num_lanes, max_row_pages), TRASH_PAGE, device=device)
        return cls(tokens, positions, seeds, temperatures, block_table)

    def admit(self, slot: IOSlot) -> None:
        """Apply a batch's admissions and new pages."""
        lanes, tokens, positions, seeds = slot.admitted.value.unbind(1)
        self.tokens_L[lanes] = tokens
        self.positions_L[lanes] = positions
        self.seeds_L[lanes] = seeds
        self.temperatures_L[lanes] = slot.temperatures.value
        lanes, index, pages = slot.new_pages.value.unbind(1)
        self.block_table_LP[lanes, index] = pages


class Forward:
    """One step on the device: admit, prefill, decode.

    Args:
        model: The twin.
        kv_cache: Pages that the model's attention reads and writes.
        lanes: State of the running rows.
    """

    def __init__(self, model: LanguageModel, kv_cache: KVCache, lanes: Lanes) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._lanes = lanes

    @torch.no_grad()
    def run(self, slot: IOSlot) -> None:
        """Queue a slot's batch on the compute stream."""
        batch = slot.batch
        assert batch is not None
        with slot.computing():
            self._lanes.admit(slot)
            if batch.segments:
                self._prefill(slot, list(batch.segments))
            if len(batch.rows):
                self._decode(slot, batch.max_context)

    def _prefill(self, slot: IOSlot, segments: list[Segment]) -> None:
        """Write the KV of prompt tokens. Nothing is sampled, so no row's logits are computed."""
        lanes_T, positions_T, tokens_T = slot.prefill.value.unbind(1)
        runs, start = [], 0
        for segment in segments:
            stop = start + len(segment.tokens)
            runs.append(Run(segment.lane, start, stop, segment.start + len(segment.tokens)))
            start = stop
        paged = self._paged(lanes_T, positions_T, max(run.context for run in runs), runs)
        self._model.logits(tokens_T, positions_T, tokens_T[:0], paged)

    def _decode(self, slot: IOSlot, max_context: int) -> None:
        """Draw the next token of each row of the batch."""
        state, lanes_R = self._lanes, slot.lanes.value
        # The carry-over: the newest token of a row that ran in the batch before is read here,
        # on the device, before the host has seen it.
        tokens_R, positions_R = state.tokens_L[lanes_R], state.positions_L[lanes_R]
        paged = self._paged(lanes_R, positions_R, max_context, None)
        rows = torch.arange(len(lanes_R), device=lanes_R.device)
        logits_RV = self._model.logits(tokens_R, positions_R, rows, paged)
        temperatures_R, seeds_R = state.temperatures_L[lanes_R], state.seeds_L[lanes_R]
        sampled_R, logprobs_R = sample(logits_RV, temperatures_R, seeds_R, positions_R + 1)
        state.tokens_L[lanes_R] = sampled_R
        # ORDER: the trash lane's position stays 0, so padding writes to the trash page alone
        trash_lane = len(state.positions_L) - 1
        state.positions_L[lanes_R] = positions_R + (lanes_R != trash_lane)
        slot.tokens[: len(lanes_R)] = sampled_R
        slot.logprobs[: len(lanes_R)] = logprobs_R

    def _paged(
        self, lanes_T: Tensor, positions_T: Tensor, max_context: int, runs: list[Run] | None
    ) -> PagedAttention:
        block_table = self._lanes.block_table_LP
        return PagedAttention(self._kv_cache, block_table, lanes_T, positions_T, max_context, runs)

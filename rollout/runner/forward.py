"""One step on the device: admit, prefill, decode. CUDA graphs capture only the decode.

Shape letters: T packed tokens, R decoding rows, L lanes, P pages of a row, V vocabulary.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout.memory.kv_cache import KVCache
from rollout.memory.states import States
from rollout.model.attention import PagedAttention, Prefilled
from rollout.runner.sampling import Filters, kept_mass, sample, sample_among
from rollout.runner.slots import IOSlot
from rollout.sampling_params import Draw
from rollout.scheduler.batch import Batch, Segment
from rollout.scheduler.pages import TRASH_PAGE

# torch.compile merges dimensions of equal size; no model dimension is 13.
_WARM_UP_ROWS = 13


class LanguageModel(Protocol):
    """The method of a model that a step calls."""

    def logits(
        self, tokens_T: Tensor, positions_T: Tensor, rows: Tensor, paged: PagedAttention
    ) -> Tensor:
        """Run packed tokens. Return logits, `(rows, V)`, of the tokens at indices `rows`."""


@dataclass
class Lanes:
    """Device state of the running rows. Only the compute stream changes it.

    The last lane is the trash lane: padding rows run there, and its position stays 0.

    Attributes:
        tokens_L: Newest token, int64. Its KV is not written yet.
        positions_L: Position of that token, int64.
        seeds_L: Key of the row's random numbers, int64.
        temperatures_L: float32; 0 is greedy.
        page_table_LP: Page ids in token order, int64.
        filters: `None` until a row needs sampling settings or token flags.
    """

    tokens_L: Tensor
    positions_L: Tensor
    seeds_L: Tensor
    temperatures_L: Tensor
    page_table_LP: Tensor
    filters: Filters | None = None

    @classmethod
    def empty(cls, max_rows: int, max_row_pages: int, device: torch.device) -> "Lanes":
        """Allocate `max_rows` lanes and the trash lane."""
        num_lanes = max_rows + 1
        tokens, positions, seeds = torch.zeros((3, num_lanes), dtype=torch.int64, device=device)
        temperatures = torch.zeros(num_lanes, dtype=torch.float32, device=device)
        page_table = torch.full((num_lanes, max_row_pages), TRASH_PAGE, device=device)
        return cls(tokens, positions, seeds, temperatures, page_table)

    @property
    def num_bytes(self) -> int:
        """Bytes of all state."""
        return sum(state.nbytes for state in vars(self).values() if state is not None)

    @property
    def trash_lane(self) -> int:
        """The lane of padding rows."""
        return len(self.positions_L) - 1

    def open_filters(self, draws: Collection[Draw], vocab_size: int) -> None:
        """Allocate the state that these draws read, unless it exists."""
        if self.filters is None and max(draws, default=Draw.PLAIN) > Draw.PLAIN:
            self.filters = Filters(len(self.positions_L), self.positions_L.device)
        if self.filters is not None and Draw.PENALISED in draws:
            self.filters.open_flags(vocab_size)

    def admit(self, slot: IOSlot) -> None:
        """Write a batch's admissions and new pages into the lanes."""
        if slot.admitted.length:
            field = slot.admitted.field
            lanes = field("lane").long()
            self.tokens_L[lanes] = field("token")
            self.positions_L[lanes] = field("position")
            self.seeds_L[lanes] = field("seed")
            self.temperatures_L[lanes] = field("temperature")
            if self.filters is not None:
                self.filters.admit(lanes, field("settings"), slot.flags.value)
        if slot.new_pages.length:
            lanes, index, pages = slot.new_pages.value.unbind(1)
            self.page_table_LP[lanes, index] = pages


class Forward:
    """Runs the parts of a step on the current stream.

    Args:
        entropies: Also score each token by the entropy of its distribution.
        kept_mass: Also score it by the probability of all tokens that the filters keep.
        states: Recurrent states of the lanes, if the model has any.
        exact: Attend as the trainer does in exact mode.
        least_rows: On a GPU, shorter prefills are padded to this many tokens.
    """

    def __init__(
        self,
        model: LanguageModel,
        kv_cache: KVCache,
        lanes: Lanes,
        *,
        states: States | None = None,
        entropies: bool = False,
        kept_mass: bool = False,
        exact: bool = False,
        least_rows: int = 1,
    ) -> None:
        self.lanes = lanes
        self._states = states
        self.num_scores = 1 + entropies + kept_mass
        self.least_rows = least_rows
        self._exact = exact
        self._kept_mass = kept_mass
        self._model = model
        self._kv_cache = kv_cache

    @torch.no_grad()
    def warm_up(self) -> None:
        """Decode padding rows, so that compilation happens now."""
        positions = self.lanes.positions_L
        self.decode(positions.new_full((_WARM_UP_ROWS,), self.lanes.trash_lane), 1)

    def prefill(self, slot: IOSlot, segments: Sequence[Segment]) -> None:
        """Write the KV of prompt tokens. No logits are computed, since nothing is sampled."""
        # Copies, as in decode: torch.compile treats views of one tensor as another case.
        lanes_T, positions_T, tokens_T = (x.contiguous() for x in slot.prefill.value.unbind(1))
        if lanes_T.is_cuda and len(lanes_T) < self.least_rows:
            missing = (0, self.least_rows - len(lanes_T))
            lanes_T = pad(lanes_T, missing, value=self.lanes.trash_lane)
            positions_T, tokens_T = pad(positions_T, missing), pad(tokens_T, missing)
        paged = PagedAttention(
            kv_cache=self._kv_cache,
            page_table_LP=self.lanes.page_table_LP,
            lanes_T=lanes_T,
            positions_T=positions_T,
            segments=segments,
            runs_N4=slot.runs.value,
            exact=self._exact,
            states=self._states,
        )
        with suppress(Prefilled):  # raised once the last layer's KV is written
            self._model.logits(tokens_T, positions_T, tokens_T[:0], paged)

    def fork(self, batch: Batch) -> None:
        """Copy what rows of a shared prompt cannot share: partly filled pages, recurrent states."""
        for source, target in batch.copies:
            self._kv_cache.copy_page(int(source), int(target))
        for source, target in batch.state_copies:
            assert self._states is not None
            self._states.copy(int(source), int(target))

    def decode(
        self, lanes_R: Tensor, max_context: int, draw: Draw = Draw.PLAIN
    ) -> tuple[Tensor, Tensor]:
        """Draw the next token of the row in each lane, and advance the lanes.

        Args:
            lanes_R: int64; the trash lane for padding rows.
            max_context: Upper bound of the contexts in tokens, the new token included.

        Returns:
            Token ids, int64, `(R,)`, and scores, float32, `(R, num_scores)`.
        """
        state = self.lanes
        # The tokens of the batch before are read on the device: the host has not seen them yet.
        tokens_R, positions_R = state.tokens_L[lanes_R], state.positions_L[lanes_R]
        paged = PagedAttention(
            kv_cache=self._kv_cache,
            page_table_LP=state.page_table_LP,
            lanes_T=lanes_R,
            positions_T=positions_R,
            max_context=max_context,
            states=self._states,
        )
        rows = torch.arange(len(lanes_R), device=lanes_R.device)
        logits_RV = self._model.logits(tokens_R, positions_R, rows, paged)
        sampled_R, scores_RS = self._draw(logits_RV, lanes_R, positions_R + 1, draw)
        state.tokens_L[lanes_R] = sampled_R
        # ORDER: the trash lane's position stays 0, so padding writes only to the trash page
        state.positions_L[lanes_R] = positions_R + (lanes_R != state.trash_lane)
        return sampled_R, scores_RS

    def _draw(
        self, logits_RV: Tensor, lanes_R: Tensor, positions_R: Tensor, draw: Draw
    ) -> tuple[Tensor, Tensor]:
        state, num_scores = self.lanes, self.num_scores - self._kept_mass
        temperatures_R, seeds_R = state.temperatures_L[lanes_R], state.seeds_L[lanes_R]
        row_state = temperatures_R, seeds_R, positions_R
        if draw == Draw.PLAIN:
            sampled_R, scores_RS = sample(logits_RV, *row_state, num_scores)
            return sampled_R, pad(scores_RS, (0, 1), value=1.0) if self._kept_mass else scores_RS
        assert state.filters is not None
        among_RV = state.filters.limit(logits_RV, lanes_R, temperatures_R, positions_R, draw)
        sampled_R, scores_RS = sample_among(logits_RV, among_RV, *row_state, num_scores)
        state.filters.drawn(lanes_R, sampled_R, draw)
        if self._kept_mass:
            mass_R = kept_mass(logits_RV, among_RV, temperatures_R)
            scores_RS = torch.cat([scores_RS, mass_R[:, None]], dim=1)
        return sampled_R, scores_RS

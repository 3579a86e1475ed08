"""A batch in the making: what is put together until it is launched."""

from dataclasses import dataclass, field

import numpy as np

from rollout.marks import marks_of
from rollout.request import Admission, Batch, Ints, Segment
from rollout.row import Row
from rollout.sampling_params import Draw
from rollout.words import lines_of

_NO_PAGES, _NO_PAIRS = np.empty((0, 3), np.int64), np.empty((0, 2), np.int64)


@dataclass(eq=False)
class Plan:
    """What the next batch is to do; the fields are those of `Batch`."""

    admission: Admission = field(default_factory=Admission)
    new_pages: list[Ints] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    offloads: list[tuple[int, int]] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    num_shared: int = 0
    num_preempted: int = 0
    num_parked: int = 0
    lost: dict[int, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether the device has nothing to do or to be told, should no row decode.

        A row that comes back may find all its pages still there, and need no copy.
        """
        return not (self.segments or self.restores or self.offloads or self.admission.lanes)

    def admit(self, lane: int, row: Row) -> None:
        """A row enters a lane: its last token is the input of its first decode step there."""
        tokens = row.tokens if len(row.tokens) else row.request.prompt
        draw = row.request.sampling.draw
        self.admission.lanes.append(lane)
        self.admission.tokens.append(int(tokens[-1]))
        self.admission.positions.append(row.num_tokens - 1)
        self.admission.seeds.append(row.request.seed)
        self.admission.temperatures.append(row.request.sampling.temperature)
        self.admission.settings.append(row.request.settings)
        if row.num_lost:
            self.lost[lane] = row.num_lost
        if draw >= Draw.MARKED:
            self.admission.marks.append(marks_of(lane, row.request, row.tokens))
        if draw == Draw.WORDS:
            self.admission.words.append(lines_of(lane, row.request, row.tokens))

    def batch(
        self, rows: Ints, lanes: Ints, max_context: int, draw: Draw, policy_version: int
    ) -> Batch:
        """The batch, with the rows that decode."""
        return Batch(
            rows=rows,
            lanes=lanes,
            policy_version=policy_version,
            max_context=max_context,
            admission=self.admission,
            segments=self.segments,
            new_pages=np.concatenate(self.new_pages) if self.new_pages else _NO_PAGES,
            copies=_pairs(self.copies),
            offloads=_pairs(self.offloads),
            restores=_pairs(self.restores),
            num_shared=self.num_shared,
            num_preempted=self.num_preempted,
            num_parked=self.num_parked,
            lost=self.lost,
            draw=draw,
        )


def _pairs(pages: list[tuple[int, int]]) -> Ints:
    return np.array(pages, np.int64) if pages else _NO_PAIRS

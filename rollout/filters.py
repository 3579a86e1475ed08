"""What the device keeps of rows whose draws look at more than the logits, and what it does then.

Shape letters: R decoding rows, L lanes, V vocabulary, S settings.
"""

import torch
from torch import Tensor

from rollout.kernels.penalties import penalise
from rollout.kernels.sample import scale
from rollout.marks import HELD, ONCE
from rollout.request import SETTINGS, Draw
from rollout.sampling import keep
from rollout.slots import IOSlot


class Filters:
    """Settings and marks by lane, written when a row is admitted; made when a row first needs them.

    Args:
        num_lanes: Lanes, the trash lane included.
        device: Where the model lives.

    Attributes:
        settings_LS: In the order of `SETTINGS`, float64, in which whole numbers are exact.
        marks_LV: As `rollout.marks` has them, int32; `None` until a row needs them.
    """

    def __init__(self, num_lanes: int, device: torch.device) -> None:
        neutral = torch.tensor(list(SETTINGS.values()), dtype=torch.float64, device=device)
        # ALIAS: graphs read and write both, so they stay as long as the engine lives
        self.settings_LS = neutral.repeat(num_lanes, 1)
        self.marks_LV: Tensor | None = None

    def open_marks(self, vocab_size: int) -> None:
        """Have marks of every lane, none of which says anything yet."""
        if self.marks_LV is None:
            shape = (len(self.settings_LS), vocab_size)
            self.marks_LV = self.settings_LS.new_zeros(shape, dtype=torch.int32)

    @property
    def nbytes(self) -> int:
        """Bytes that all of it takes."""
        return self.settings_LS.nbytes + (0 if self.marks_LV is None else self.marks_LV.nbytes)

    def admit(self, slot: IOSlot) -> None:
        """Apply a batch's admissions, of which there are some."""
        lanes = slot.admitted.value[:, 0]
        self.settings_LS[lanes] = slot.settings.value
        if self.marks_LV is not None:
            # Also of rows without marks: the last row of their lane may have left some.
            self.marks_LV.index_fill_(0, lanes, 0)
            if slot.marks.length:
                lanes, tokens, marks = slot.marks.value.unbind(1)
                self.marks_LV[lanes, tokens] = marks.to(torch.int32)

    def limit(
        self,
        logits_RV: Tensor,
        lanes_R: Tensor,
        temperature_R: Tensor,
        positions_R: Tensor,
        draw: Draw,
    ) -> Tensor:
        """The logits to draw from, before the temperature, with `-inf` for tokens to leave out.

        Args:
            logits_RV: As the model gives them.
            lanes_R: Lane of each row.
            temperature_R: Divides the logits.
            positions_R: Position of the token to draw.
            draw: What the rows need.

        Returns:
            float32, `(R, V)`.
        """
        settings_RS, logits_RV = self.settings_LS[lanes_R], logits_RV.float()
        top_k_R, top_p_R, min_p_R, *penalties, first_stop_R = settings_RS.unbind(1)
        if draw == Draw.MARKED:
            assert self.marks_LV is not None
            penalties_R3 = torch.stack(penalties, dim=1).float()
            early_R = positions_R < first_stop_R
            logits_RV = penalise(logits_RV, self.marks_LV[lanes_R], penalties_R3, early_R)
        scaled_RV = scale(logits_RV, temperature_R)
        kept_RV = keep(scaled_RV, top_k_R.long(), top_p_R.float(), min_p_R.float())
        return logits_RV.masked_fill(~kept_RV, -torch.inf)

    def drawn(self, lanes_R: Tensor, tokens_R: Tensor) -> None:
        """Mark the token that each row has drawn."""
        assert self.marks_LV is not None
        where = (lanes_R, tokens_R)
        self.marks_LV[where] = (self.marks_LV[where] | HELD) + ONCE

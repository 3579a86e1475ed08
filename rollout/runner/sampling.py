"""Logits to token ids and log-probabilities: Triton on a GPU, plain torch on a CPU."""

import torch
from torch import Tensor

from rollout.kernels import sample as reference
from rollout.kernels import sample_cpu
from rollout.kernels import top_k_top_p as top_k_top_p_reference
from rollout.kernels.penalties import penalise
from rollout.kernels.sample import scale
from rollout.sampling_params import SETTINGS, Draw
from rollout.scheduler.token_flags import COUNT_UNIT, SEEN

# With fewer tokens, a call for each row costs more than the definition's int64 products.
_LARGE_VOCABULARY = 2048


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    num_scores: int = 1,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row, as `rollout.kernels.sample` does, on any device."""
    if logits_RV.is_cuda:
        from rollout.kernels import sample_triton as kernel  # a CPU machine may lack Triton

        return kernel.sample(logits_RV, temperature_R, seeds_R, positions_R, num_scores)
    few = logits_RV.shape[1] < _LARGE_VOCABULARY
    on_cpu = reference.sample if few else sample_cpu.sample
    return on_cpu(logits_RV, temperature_R, seeds_R, positions_R, num_scores)


def top_k_top_p(scaled_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Mask of the tokens that top-k, top-p and min-p keep, bool, `(R, V)`."""
    if scaled_RV.is_cuda:
        from rollout.kernels import top_k_top_p_triton as kernel  # see `sample`

        return kernel.top_k_top_p(scaled_RV, top_k_R, top_p_R, min_p_R)
    if not top_k_R.any() and bool((top_p_R >= 1).all()):
        # Only min-p or nothing: then the bound needs no sorted vocabulary.
        return scaled_RV >= scaled_RV.amax(dim=1, keepdim=True) + min_p_R[:, None].log()
    return top_k_top_p_reference.top_k_top_p(scaled_RV, top_k_R, top_p_R, min_p_R)


def sample_among(
    logits_RV: Tensor,
    among_RV: Tensor,
    temperature_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    num_scores: int = 1,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row from `among_RV`, and score it by the model's `logits_RV`.

    `among_RV` is `-inf` for tokens that are not kept. Everything else is as in `sample`. If both
    logits are equal, so are the results of `sample` and this function, to the last bit.
    """
    if not logits_RV.is_cuda:
        drawn_R, _ = sample(among_RV, temperature_R, seeds_R, positions_R)
        scaled_RV = scale(logits_RV, temperature_R)
        return drawn_R, reference.scores_of(scaled_RV, drawn_R, num_scores)
    tokens_R, scores_RS = sample(logits_RV, temperature_R, seeds_R, positions_R, num_scores)
    drawn_R, _ = sample(among_RV, temperature_R, seeds_R, positions_R)
    both_R2 = logits_RV.gather(1, torch.stack([tokens_R, drawn_R], dim=1))
    scaled_R2 = reference.scale(both_R2, temperature_R)
    # Two log-probabilities of one distribution differ exactly as their logits do.
    scores_RS[:, 0] += scaled_R2[:, 1] - scaled_R2[:, 0]
    return drawn_R, scores_RS


def kept_mass(logits_RV: Tensor, among_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """Probability of all tokens that are kept, at the temperature, float32, `(R,)`."""
    kept_RV = among_RV > -torch.inf
    shares_RV = reference.scale(logits_RV, temperature_R).softmax(dim=1)
    mass_R = shares_RV.masked_fill(~kept_RV, 0.0).sum(dim=1).clamp(max=1.0)
    return mass_R.masked_fill(kept_RV.all(dim=1), 1.0)


class Filters:
    """Sampling settings and token flags by lane, written on admission.

    Attributes:
        settings_LS: In the order of `SETTINGS`, float64, which holds integers exactly.
        flags_LV: See `scheduler.token_flags`, int32; `None` until a row needs them.
    """

    def __init__(self, num_lanes: int, device: torch.device) -> None:
        neutral = torch.tensor(list(SETTINGS.values()), dtype=torch.float64, device=device)
        # ALIAS: graphs read and write settings and flags, so they live as long as the engine
        self.settings_LS = neutral.repeat(num_lanes, 1)
        self.flags_LV: Tensor | None = None

    def open_flags(self, vocab_size: int) -> None:
        """Allocate flags for every lane, all 0, unless they exist."""
        shape = (len(self.settings_LS), vocab_size)
        # If the vocabulary changes, the twin is rebuilt and all graphs are captured again.
        if self.flags_LV is None or self.flags_LV.shape != shape:
            self.flags_LV = self.settings_LS.new_zeros(shape, dtype=torch.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of settings and flags."""
        flags = 0 if self.flags_LV is None else self.flags_LV.nbytes
        return self.settings_LS.nbytes + flags

    def admit(self, lanes: Tensor, settings: Tensor, flags: Tensor) -> None:
        """Write the settings and flags of new rows into their lanes.

        `settings` are float64, `(rows, settings)`; `flags` are int64, `(entries, 3)`: lane, token
        id, flags. Only penalised rows have flags.
        """
        self.settings_LS[lanes] = settings
        # Also for rows without flags: the lane's last row may have left some.
        if self.flags_LV is not None:
            self.flags_LV.index_fill_(0, lanes, 0)
        if len(flags):
            assert self.flags_LV is not None
            flag_lanes, tokens, values = flags.unbind(1)
            self.flags_LV[flag_lanes, tokens] = values.to(torch.int32)

    def limit(
        self,
        logits_RV: Tensor,
        lanes_R: Tensor,
        temperature_R: Tensor,
        positions_R: Tensor,
        draw: Draw,
    ) -> Tensor:
        """Penalised logits before temperature, `-inf` for tokens not kept, float32, `(R, V)`."""
        settings_RS, logits_RV = self.settings_LS[lanes_R], logits_RV.float()
        top_k_R, top_p_R, min_p_R, *penalties, first_stop_R = settings_RS.unbind(1)
        if draw >= Draw.PENALISED:
            assert self.flags_LV is not None
            penalties_R3 = torch.stack(penalties, dim=1).float()
            early_R = positions_R < first_stop_R
            logits_RV = penalise(logits_RV, self.flags_LV[lanes_R], penalties_R3, early_R)
        scaled_RV = scale(logits_RV, temperature_R)
        kept_RV = top_k_top_p(scaled_RV, top_k_R.long(), top_p_R.float(), min_p_R.float())
        return logits_RV.masked_fill(~kept_RV, -torch.inf)

    def drawn(self, lanes_R: Tensor, tokens_R: Tensor, draw: Draw) -> None:
        """Add the drawn tokens to the rows' flags and counts."""
        if draw >= Draw.PENALISED:
            assert self.flags_LV is not None
            index = (lanes_R, tokens_R)
            self.flags_LV[index] = (self.flags_LV[index] | SEEN) + COUNT_UNIT

"""Causal convolution over a few tokens, over slots of last inputs, in plain torch.

Shape letters: S slots, T packed tokens, R rows of one token, C channels, K taps.

A slot keeps a row's last K - 1 inputs. A row at position 0 begins from zeros, whatever its slot
holds.
"""

import torch
from torch import Tensor
from torch.nn.functional import conv1d

from rollout.kernels.recurrent.runs import Runs, begun, first_state


def decode(
    x_RC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    inputs_SCI: Tensor,
    slots_R: Tensor,
    positions_R: Tensor,
) -> Tensor:
    """Convolve one token of each row, `(R, C)`, and put it into its slot.

    Args:
        inputs_SCI: The K - 1 last inputs of each slot, written in place.
        slots_R: Slot of each row, int64.
        positions_R: Position of each token in its row, int64.
    """
    window_RCK = torch.cat([begun(inputs_SCI[slots_R], positions_R), x_RC[..., None]], dim=-1)
    inputs_SCI[slots_R] = window_RCK[..., 1:]
    return conv1d(window_RCK, weight_CK[:, None], bias_C, groups=len(weight_CK))[..., 0]


def prefill(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, inputs_SCI: Tensor, runs: Runs
) -> Tensor:
    """Convolve the packed tokens of `runs`, `(T, C)`, and keep the last inputs of each."""
    outputs, end = [], 0
    for slot, start, count in runs:
        begin, end = end, end + count
        before = first_state(inputs_SCI, slot, start)
        window_1CT = torch.cat([before, x_TC[begin:end].T[None]], dim=-1)
        inputs_SCI[slot] = window_1CT[0, :, count:]
        outputs.append(conv1d(window_1CT, weight_CK[:, None], bias_C, groups=len(weight_CK))[0].T)
    return torch.cat(outputs)

"""Recurrent states of the rows in lanes, and the layout of a lane's states.

A lane's states of all layers are one piece of memory, so a fork is one copy and the pool grows at
its end.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.memory.arena import Arena, PlainArena

_ALIGN = 256


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Shapes of one lane's states.

    Attributes:
        num_layers: Layers with a state.
        conv_shape: `(channels, taps - 1)`: the last inputs of a short convolution.
        conv_dtype: The dtype in which the model computes.
        state_shape: `(heads, values, keys)`, float32; `None`: the convolution is all.
    """

    num_layers: int
    conv_shape: tuple[int, int]
    conv_dtype: torch.dtype
    state_shape: tuple[int, int, int] | None = None

    @property
    def num_parts(self) -> int:
        """Pieces that a lane's states consist of: one or two a layer."""
        return self.num_layers * (1 if self.state_shape is None else 2)

    @property
    def conv_bytes(self) -> int:
        """Bytes of a lane's convolution inputs, aligned."""
        numbers = self.num_layers * math.prod(self.conv_shape)
        return _aligned(numbers * self.conv_dtype.itemsize)

    @property
    def lane_bytes(self) -> int:
        """Bytes of a lane's states."""
        numbers = 0 if self.state_shape is None else self.num_layers * math.prod(self.state_shape)
        return self.conv_bytes + _aligned(numbers * torch.float32.itemsize)


class States:
    """The states of every lane, in slots. Slot 0 is the trash lane's; lane `i` has slot `i + 1`.

    New slots hold arbitrary numbers, even NaN. No result depends on them: a row's first token
    begins from zeros.

    Args:
        max_lanes: Lanes of the engine. The trash lane comes after the last of them.
    """

    def __init__(
        self, layout: StateLayout, max_lanes: int, device: torch.device, arena: Arena | None = None
    ) -> None:
        self.layout = layout
        self._max_lanes = max_lanes
        self._arena = arena or PlainArena(device)
        self.num_lanes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self._arena.num_bytes

    @property
    def address(self) -> int:
        """Address of the first slot. Captured graphs contain it."""
        return self._arena.address

    def bytes_for(self, num_lanes: int) -> int:
        """Bytes that so many lanes take."""
        return (num_lanes + 1) * self.layout.lane_bytes

    def grow(self, num_lanes: int) -> None:
        """Allocate at least so many lanes, and the trash lane. Old lanes keep their states.

        Raises:
            torch.OutOfMemoryError: Nothing has changed then.
        """
        if num_lanes > self.num_lanes:
            self._arena.grow(self.bytes_for(num_lanes))
            self.num_lanes = num_lanes

    def release(self) -> None:
        """Release all lanes, once the engine's streams no longer use them."""
        self.num_lanes = 0
        self._arena.release()

    def slots(self, lanes: Tensor) -> Tensor:
        """Slots of lanes, int64."""
        return (lanes + 1) % (self._max_lanes + 1)

    def slot(self, lane: int) -> int:
        """The slot of one lane."""
        return (lane + 1) % (self._max_lanes + 1)

    def copy(self, source: int, target: int) -> None:
        """Copy a lane's states to another lane."""
        slots = self._slots()
        slots[self.slot(target)].copy_(slots[self.slot(source)])

    def conv(self, layer: int) -> Tensor:
        """Last inputs of a layer's convolution, a view `(slot, channel, taps - 1)`."""
        layout = self.layout
        numbers = self._slots()[:, : layout.conv_bytes].view(layout.conv_dtype)
        return _layer(numbers, layer, layout.conv_shape)

    def state(self, layer: int) -> Tensor:
        """States of a layer, a view `(slot, head, value, key)`, float32."""
        assert self.layout.state_shape is not None
        numbers = self._slots()[:, self.layout.conv_bytes :].view(torch.float32)
        return _layer(numbers, layer, self.layout.state_shape)

    def _slots(self) -> Tensor:
        return self._arena.data[: self.bytes_for(self.num_lanes)].view(-1, self.layout.lane_bytes)


def _layer(numbers: Tensor, layer: int, shape: tuple[int, ...]) -> Tensor:
    size = math.prod(shape)
    return numbers[:, layer * size : (layer + 1) * size].unflatten(1, shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN

"""Weights that the engine holds a second time: cast ones, and sharded ones, gathered whole."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from rollout.fused import lay_together
from rollout.held import Held
from rollout.memory import Arena
from rollout.sharded import is_part, shape_of, whole

_ALIGN = 512  # bytes; where torch would let a tensor begin


class Shadow:
    """Places in an arena for the parameters that the twin holds itself.

    Args:
        arena: Memory for them, which may be given back and taken again.

    Attributes:
        num_gathered: How often a parameter was gathered from all ranks.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.num_gathered = 0
        self.clear()

    def clear(self) -> None:
        """Hold nothing: another tree is to come."""
        self._weights: dict[tuple[str, str], nn.Parameter] = {}
        self._end = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of what is held."""
        return sum(weight.nbytes for weight in set(self._weights.values()))

    @property
    def num_weights(self) -> int:
        """Parameters that are held."""
        return len(self._weights)

    @property
    def missing_bytes(self) -> int:
        """Bytes that were given back, and that `fill` takes again."""
        return max(0, self._end - self.arena.num_bytes)

    def fill(self, held: Sequence[Held]) -> None:
        """Give the twin's modules their parameters, with what the trainer's hold now.

        Where a source is sharded this is a collective of all ranks that share it.

        Args:
            held: What has its place.
        """
        self.arena.grow(self._end)
        filled = set()
        for name, module, key, source, dtype in held:
            weight = self._weights[name, key]
            module._parameters[key] = weight
            if weight not in filled:
                with whole(source, dtype) as numbers:
                    self.num_gathered += is_part(source)
                    weight.copy_(numbers)
                filled.add(weight)

    def place(self, held: Sequence[Held], base: nn.Module) -> None:
        """Give each parameter its place, once; those of a group lie together, tied ones are one.

        Args:
            held: The same ones each time until `clear`.
            base: The twin's tree, for which layers lie together.
        """
        if self._weights:
            return
        tied: dict[tuple[int, torch.dtype], nn.Parameter] = {}
        for _, module, key, source, dtype in held:
            there = torch.empty(shape_of(source), dtype=dtype, device="meta")
            blank = tied.setdefault((id(source), dtype), nn.Parameter(there, requires_grad=False))
            module._parameters[key] = blank
        linears = (module for _, module, key, *_ in held if key == "weight")
        lay_together(base, among=[each for each in linears if isinstance(each, nn.Linear)])
        # Only now: what lies together has new parameters.
        blanks = {(name, key): getattr(module, key) for name, module, key, *_ in held}
        begins = self._begins(blanks.values())
        self.arena.grow(self._end)
        made = {blank: self._view(blank, begins) for blank in set(blanks.values())}
        # All or none, should an interrupt come.
        self._weights = {place: made[blank] for place, blank in blanks.items()}

    def _begins(self, blanks: Iterable[Tensor]) -> dict[int, int]:
        """Where each storage begins in the arena."""
        self._end, begins = 0, dict[int, int]()
        for storage in (blank.untyped_storage() for blank in blanks):
            if storage._cdata not in begins:
                begins[storage._cdata] = self._end
                self._end += -(-int(storage.nbytes()) // _ALIGN) * _ALIGN
        return begins

    def _view(self, blank: Tensor, begins: dict[int, int]) -> nn.Parameter:
        begin = begins[blank.untyped_storage()._cdata] + blank.storage_offset() * blank.itemsize
        place = self.arena.data[begin : begin + blank.nbytes]
        return nn.Parameter(place.view(blank.dtype).view(blank.shape), requires_grad=False)

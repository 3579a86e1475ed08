"""The KV cache and the layout of its pages.

The layout is page-major: `(page, layer, key/value, token, kv_head, head_dim)`. The cache grows by
appending pages. A page is contiguous and copied as one block. A layer's cache is a strided view.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.memory.arena import Arena, PlainArena


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Shape of one page. `num_layers` counts only layers with attention."""

    num_layers: int
    page_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """`(layer, key/value, token, kv_head, head_dim)`."""
        return (self.num_layers, 2, self.page_tokens, self.num_kv_heads, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return torch.Size(self.page_shape).numel() * self.dtype.itemsize


class KVCache:
    """Keys and values of every running row, in pages.

    New pages hold arbitrary numbers, even NaN: zeroing 80 GiB takes longer than waking up.
    No result depends on these numbers:
    - A row reads only tokens whose KV has been written.
    - The kernels and plain torch mask keys and values past a row's end.
    - A padding row writes the first token of the trash page, then reads it.
    - A fork also copies unwritten tokens, but no row reads them.
    """

    def __init__(self, layout: KVLayout, device: torch.device, arena: Arena | None = None) -> None:
        self.layout = layout
        self._arena = arena or PlainArena(device)
        self._data = self._pages(0)

    @property
    def num_pages(self) -> int:
        """Allocated pages, the trash page included."""
        return self._data.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for pages, rounded up to the mapping granularity."""
        return self._arena.num_bytes

    @property
    def address(self) -> int:
        """Address of the first page. Captured graphs contain it."""
        return self._arena.address

    def grow(self, num_pages: int) -> None:
        """Allocate at least `num_pages` in total, the trash page included. Old pages keep their KV.

        Raises:
            torch.OutOfMemoryError: Nothing has changed then.
        """
        if num_pages > self.num_pages:
            self._arena.grow(num_pages * self.layout.page_bytes)
            self._data = self._pages(num_pages)

    def release(self) -> None:
        """Release all pages, once the engine's streams no longer use them."""
        self._data = self._pages(0)
        self._arena.release()

    def page(self, index: int) -> Tensor:
        """One page, `layout.page_shape`, contiguous."""
        return self._data[index]

    def copy_page(self, source: int, target: int) -> None:
        """Copy the KV of one page in all layers."""
        self._data[target].copy_(self._data[source])

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each a view `(page, token, kv_head, head_dim)`."""
        keys, values = self._data[:, index].unbind(1)
        return keys, values

    def _pages(self, num_pages: int) -> Tensor:
        used = self._arena.data[: num_pages * self.layout.page_bytes]
        return used.view(self.layout.dtype).view(num_pages, *self.layout.page_shape)

"""The KV cache and the layout of its pages.

It is page-major, `(page, layer, key/value, token, kv_head, head_dim)`: it grows by appending pages,
a page is contiguous and copied as one block, and each layer's cache is a strided view.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.memory.arena import Arena, PlainArena


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Shape of one page.

    Attributes:
        num_layers: Layers with attention.
        page_tokens: Tokens a page.
        num_kv_heads: Key/value heads a layer.
        head_dim: Numbers in a head's key or value.
        dtype: Of keys and values.
    """

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

    New pages hold arbitrary numbers, even NaN. Nothing clears them: zeroing 80 GiB would take
    longer than waking up. No result depends on them:
    - A row reads only its own tokens, which it has written before.
    - Keys and values past a row's end are masked, in the kernels and in plain torch.
    - A padding row reads the first token of the trash page right after writing it.
    - A fork also copies unwritten tokens, which nobody reads.

    Args:
        layout: Shape of one page.
        device: Where the pages are.
        arena: Their memory. `None`: a plain tensor.
    """

    def __init__(self, layout: KVLayout, device: torch.device, arena: Arena | None = None) -> None:
        self.layout = layout
        self._arena = arena or PlainArena(device)
        self._data = self._pages(0)

    @property
    def num_pages(self) -> int:
        """Pages allocated, the trash page included."""
        return self._data.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for them, rounded up to what can be mapped."""
        return self._arena.num_bytes

    @property
    def address(self) -> int:
        """Address of the first page, which captured graphs rely on."""
        return self._arena.address

    def grow(self, num_pages: int) -> None:
        """Allocate at least `num_pages` in all, the trash page included; old ones keep content.

        Raises:
            torch.OutOfMemoryError: There is not enough memory. Nothing has changed then.
        """
        if num_pages > self.num_pages:
            self._arena.grow(num_pages * self.layout.page_bytes)
            self._data = self._pages(num_pages)

    def release(self) -> None:
        """Release all pages, after the engine's streams have finished with them."""
        self._data = self._pages(0)
        self._arena.release()

    def page(self, index: int) -> Tensor:
        """One page, `layout.page_shape`, contiguous."""
        return self._data[index]

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page, in every layer."""
        self._data[target].copy_(self._data[source])

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each a view `(page, token, kv_head, head_dim)`."""
        keys, values = self._data[:, index].unbind(1)
        return keys, values

    def _pages(self, num_pages: int) -> Tensor:
        """The arena's first bytes as `(page, layer, key/value, token, kv_head, head_dim)`."""
        used = self._arena.data[: num_pages * self.layout.page_bytes]
        return used.view(self.layout.dtype).view(num_pages, *self.layout.page_shape)

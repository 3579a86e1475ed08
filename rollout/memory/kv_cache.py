"""The KV tensors, their layout and bytes per page.

Page-major, `[page, layer, key/value, token, kv_head, head_dim]`: the pool grows and shrinks by
appending pages, a page is one contiguous copy, and each layer's cache is a strided view.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.memory.arena import Arena, PlainArena


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Shape of one page.

    Attributes:
        num_layers: Layers that keep keys and values.
        page_tokens: Tokens a page holds.
        num_kv_heads: Key/value heads of a layer.
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

    Args:
        layout: Shape of one page.
        device: Where the pages live.
        arena: Their memory. `None`: a plain tensor.

    New pages hold anything, even NaN, and nothing clears them: zeros for 80 GiB would take longer
    than all of a wake. A row reads its own tokens alone, whose KV it has written before. Both the
    kernels' blocks past a row's end and what plain torch gathers there are masked, values too, as
    are pages that a short row's table does not have. A padding row reads the first place of the
    trash page, right after it has written it; a fork copies what nobody reads along.
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
        """Bytes that they take, rounded up to what can be mapped."""
        return self._arena.num_bytes

    @property
    def address(self) -> int:
        """Where the first page lies: what a captured graph relies on."""
        return self._arena.address

    def grow(self, num_pages: int) -> None:
        """Have at least `num_pages` pages. Those that there are keep what they hold.

        Args:
            num_pages: The trash page included.

        Raises:
            torch.OutOfMemoryError: There is not so much memory. Nothing has changed then.
        """
        if num_pages > self.num_pages:
            self._arena.grow(num_pages * self.layout.page_bytes)
            self._data = self._pages(num_pages)

    def release(self) -> None:
        """Give all pages back, once the engine's streams have done with them."""
        self._data = self._pages(0)
        self._arena.release()

    def page(self, index: int) -> Tensor:
        """All that a page holds, `layout.page_shape`, in one piece of memory."""
        return self._data[index]

    def copy_page(self, source: int, target: int) -> None:
        """Copy all that a page holds, in every layer."""
        self._data[target].copy_(self._data[source])

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each a view `(page, token, kv_head, head_dim)`."""
        keys, values = self._data[:, index].unbind(1)
        return keys, values

    def _pages(self, num_pages: int) -> Tensor:
        """The arena's first bytes as `(page, layer, key/value, token, kv_head, head_dim)`."""
        used = self._arena.data[: num_pages * self.layout.page_bytes]
        return used.view(self.layout.dtype).view(num_pages, *self.layout.page_shape)

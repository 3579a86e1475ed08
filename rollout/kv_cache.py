"""The KV tensors, their layout and bytes per page.

Page-major, `[page, layer, key/value, token, kv_head, head_dim]`: the pool grows and shrinks by
appending pages, a page is one contiguous copy, and each layer's cache is a strided view.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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
    """

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        self.layout = layout
        self._data = torch.zeros((0, *layout.page_shape), dtype=layout.dtype, device=device)

    @property
    def num_pages(self) -> int:
        """Pages allocated, the trash page included."""
        return self._data.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes that they take."""
        return self._data.nbytes

    @property
    def address(self) -> int:
        """Where the first page lies: what a captured graph relies on."""
        return self._data.data_ptr()

    def grow(self, num_pages: int, *, keep: bool = True) -> None:
        """Have at least `num_pages` pages.

        Args:
            num_pages: The trash page included.
            keep: Whether the present pages hold anything that is still needed. If not, they are
                given up before the new ones are asked for.
        """
        if num_pages <= self.num_pages:
            return
        kept = self._data if keep else self._data[:0].clone()
        self._data = kept
        data = kept.new_zeros((num_pages, *self.layout.page_shape))
        data[: len(kept)].copy_(kept)
        self._data = data

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

"""The device half: twin, pages and graphs, made ready for the rows at hand."""

import torch
from torch import nn

from rollout.config import RolloutConfig
from rollout.errors import UnsupportedModel
from rollout.exact import make_exact
from rollout.forward import Forward, Lanes
from rollout.fused import lay_together
from rollout.graphs import GraphCache
from rollout.kv_cache import KVCache
from rollout.memory import max_kv_bytes
from rollout.pages import TRASH_PAGE, pages_for
from rollout.slots import SlotPair, Streams
from rollout.support import base_of, check_model, check_placed
from rollout.swap import Swap
from rollout.twin import Twin


class Worker:
    """Everything that an engine has on its device.

    Args:
        model: As the engine takes it.
        config: Knobs.
        autocast_dtype: Dtype of the autocast that the trainer's forward runs under.

    Raises:
        UnsupportedModel: The model cannot run on the engine; the message says why.
    """

    def __init__(
        self, model: nn.Module, config: RolloutConfig, autocast_dtype: torch.dtype | None
    ) -> None:
        check_model(model)
        check_placed(model)
        if config.fuse_projections:
            lay_together(base_of(model))
        on_gpu = next(model.parameters()).device.type == "cuda"
        compiled = on_gpu if config.compile_layers is None else config.compile_layers
        self.config = config
        self.twin = Twin(model, autocast_dtype, compiled=compiled, exact=config.exact)
        self.max_row_tokens = config.max_row_tokens or self.twin.max_positions
        self.max_row_pages = pages_for(self.max_row_tokens, config.page_tokens)
        self.device = device = self.twin.device
        self.kv_cache = KVCache(self.twin.kv_layout(config.page_tokens), device)
        self.streams = Streams(device)
        self.swap = Swap(config, self.kv_cache, self.streams, device)
        self.slots = SlotPair(
            config.num_slots,
            self.streams,
            max_rows=config.max_rows,
            max_row_pages=self.max_row_pages,
            prefill_tokens=config.prefill_tokens,
            num_scores=config.num_scores,
            device=device,
        )
        self.lanes = Lanes.empty(config.max_rows, self.max_row_pages, device)
        forward = Forward(
            self.twin,
            self.kv_cache,
            self.lanes,
            config.num_scores,
            exact=config.exact,
            least_rows=make_exact(self.twin) if config.exact and on_gpu else 1,
        )
        self.graphs = GraphCache(forward, self.streams, config.max_rows, device)
        self._compiled_builds = 0

    def refresh(self) -> None:
        """Follow the trainer's weights as they are now.

        Raises:
            UnsupportedModel: The model was moved or cast since the engine was made.
        """
        with self.streams.module.stream(self.streams.compute):
            self.twin.refresh()
        self._check_unmoved()

    def prepare(self, num_rows: int, longest: int) -> None:
        """Have a graph for whatever rows can need, over memory as it lies now.

        Args:
            num_rows: Most rows that decode together.
            longest: Longest context, in tokens.
        """
        self._compile()
        addresses = (self.kv_cache.address, self.twin.addresses, self.twin.num_builds)
        self.graphs.prepare(num_rows, longest, addresses)

    def max_pages(self) -> int | None:
        """KV pages that there is memory for now, the trash page included; `None`: no limit."""
        kv_bytes = max_kv_bytes(self.config, self.device, self.kv_cache.num_bytes)
        if kv_bytes is None:
            return None
        return max(kv_bytes // self.kv_cache.layout.page_bytes, self.kv_cache.num_pages)

    def grow(self, num_pages: int, *, keep: bool) -> None:
        """Have `num_pages` KV pages.

        Args:
            num_pages: The trash page included. Never fewer than now.
            keep: Whether present pages hold anything that is still needed.
        """
        self.swap.join()
        with self.streams.module.stream(self.streams.compute):
            if num_pages > self.kv_cache.num_pages and not keep:
                # No entry may go on pointing at a page that is given up.
                self.lanes.block_table_LP.fill_(TRASH_PAGE)
            self.kv_cache.grow(num_pages, keep=keep)

    def _compile(self) -> None:
        """Compile the twin's layers before a row is served, or run them as they are."""
        if not self.twin.compiled or self._compiled_builds == self.twin.num_builds:
            return
        try:
            with self.streams.module.stream(self.streams.compute):
                self.graphs.forward.warm_up()
        except Exception as error:  # a compiler fails in many ways
            if is_out_of_memory(error):
                raise
            self.twin.stop_compiling(error)
        self._compiled_builds = self.twin.num_builds

    def _check_unmoved(self) -> None:
        """The buffers were made for the device and dtype that the model had."""
        device, layout = self.twin.device, self.twin.kv_layout(self.config.page_tokens)
        if (device, layout) != (self.device, self.kv_cache.layout):
            raise UnsupportedModel(
                f"the model was moved or cast after the engine was made: {layout.dtype} on "
                f"{device} now, {self.kv_cache.layout.dtype} on {self.device} before; make a new "
                "engine"
            )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a library of CUDA's means a lack of memory, by whatever class it says so."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "ALLOC_FAILED" in text)
    )

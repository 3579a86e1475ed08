"""The device half: twin, pages and graphs, made ready for the rows at hand."""

from dataclasses import replace

import torch
from torch import nn

from rollout.config import EngineConfig
from rollout.errors import UnsupportedModel
from rollout.exact.linear import InvariantShapes
from rollout.exact.setup import LEAST_ROWS, batch_invariant_shapes
from rollout.memory.arena import available_bytes, max_kv_bytes, open_arena
from rollout.memory.kv_cache import KVCache
from rollout.memory.plan import MemoryPlan
from rollout.model.projections import groups_of, lay_together
from rollout.model.twin import Twin
from rollout.model.weights import is_sharded
from rollout.runner.forward import Forward, Lanes
from rollout.runner.graphs import GraphCache
from rollout.runner.offload import Swap
from rollout.runner.slots import SlotPair
from rollout.runner.streams import Streams
from rollout.scheduler.batch import Demand
from rollout.scheduler.pages import TRASH_PAGE, pages_for
from rollout.support import base_of, check_model, check_placed
from rollout.telemetry.roofline import Cost


class Worker:
    """Everything that an engine has on its device.

    Args:
        model: As the engine takes it.
        config: Knobs.
        autocast_dtype: Dtype of the autocast that the trainer's forward runs under.
        float32_head: Whether its head computes in float32, outside autocast.
        param_dtype: Dtype that FSDP or DeepSpeed casts parameters to for the trainer's forward, if
            any.

    Raises:
        UnsupportedModel: The model cannot run on the engine; the message says why.
    """

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig,
        autocast_dtype: torch.dtype | None,
        *,
        float32_head: bool = False,
        param_dtype: torch.dtype | None = None,
    ) -> None:
        check_model(model)
        check_placed(model)
        if config.fuse_projections and not is_sharded(model):
            lay_together(groups_of(base_of(model)))
        self.device = device = next(model.parameters()).device
        on_gpu = device.type == "cuda"
        compiled = on_gpu if config.compile_layers is None else config.compile_layers
        self.config = config
        self.streams = Streams(device)
        self._arenas = [open_arena(device, self.streams.wait_for_all) for _ in range(2)]
        weights, pages = self._arenas
        self.twin = Twin(
            model,
            autocast_dtype,
            compiled=compiled,
            exact=config.exact,
            arena=weights,
            float32_head=float32_head,
            param_dtype=param_dtype,
        )
        self.max_row_tokens = config.max_row_tokens or self.twin.max_positions
        self.max_row_pages = pages_for(self.max_row_tokens, config.page_tokens)
        layout = self.twin.kv_layout(config.page_tokens)
        if autocast_dtype is None and param_dtype is not None:
            layout = replace(layout, dtype=param_dtype)  # the trainer is going to cast them
        self.kv_cache = KVCache(layout, device, pages)
        self.pages_before_sleep = 0
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
        # Shapes of linear layers whose products are ours, on the trainer's side too.
        self.invariant_shapes: InvariantShapes = {}
        if config.exact and on_gpu:
            with self.twin.autocast():
                self.invariant_shapes = batch_invariant_shapes(self.twin.base)
            self.twin.use_invariant_shapes(self.invariant_shapes)
        self._exact_vocab = self.twin.vocab_size
        forward = Forward(
            self.twin,
            self.kv_cache,
            self.lanes,
            entropies=config.entropies,
            kept_mass=config.kept_mass,
            exact=config.exact,
            least_rows=LEAST_ROWS if config.exact and on_gpu else 1,
        )
        self.graphs = GraphCache(
            forward,
            self.streams,
            config.max_rows,
            device,
            enforce_eager=config.enforce_eager,
        )
        self._compiled_builds = 0

    def refresh(self) -> None:
        """Follow the trainer's weights as they are now.

        Raises:
            UnsupportedModel: The model was moved or cast since the engine was made.
        """
        with self.streams.module.stream(self.streams.compute):
            self.twin.refresh()
        self._check_unmoved()

    def prepare(self, demand: Demand) -> None:
        """Have a graph for whatever the rows at hand can need, over memory as it lies now."""
        self._compile()
        with self.streams.module.stream(self.streams.compute):
            self.lanes.open_filters(demand.draws, self.twin.vocab_size)
        addresses = (self.kv_cache.address, self.twin.addresses, self.twin.num_builds)
        self.graphs.prepare(demand, addresses)

    @property
    def device_uuid(self) -> str | None:
        """NVML's name of the GPU; `None` on a CPU."""
        if self.device.type != "cuda":
            return None
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    def cost(self) -> Cost:
        """What tokens cost at least here, with the weights that rollouts read."""
        return Cost.of(self.twin.base, self.twin.kv_layout(page_tokens=1).page_bytes)

    def max_pages(self) -> int | None:
        """KV pages that there is memory for now, the trash page included; `None`: no limit."""
        kv_bytes = max_kv_bytes(self.config, self.device, self._bytes_for_pages)
        if kv_bytes is None:
            return None
        return max(kv_bytes // self.kv_cache.layout.page_bytes, self.kv_cache.num_pages)

    @property
    def _bytes_for_pages(self) -> int:
        """Bytes that pages have beside free ones: their own, less what else a rollout will take."""
        return self.kv_cache.num_bytes - self.twin.missing_bytes - self._workspace_bytes

    @property
    def _workspace_bytes(self) -> int:
        """Inputs and outputs of every product in a layer, as if none were freed in a prefill."""
        return self.config.prefill_tokens * self.twin.layer_bytes

    def grow(self, num_pages: int) -> None:
        """Have `num_pages` KV pages, the trash page included; those that there are keep theirs."""
        self.swap.join()
        with self.streams.module.stream(self.streams.compute):
            self.kv_cache.grow(num_pages)

    def take_costs(self) -> tuple[int, float]:
        """What growing has cost since last asked: bytes that torch gave back, and seconds."""
        released, seconds = zip(*(arena.take_costs() for arena in self._arenas), strict=True)
        return sum(released), sum(seconds)

    @property
    def asleep(self) -> bool:
        """Whether there is nothing that could be given back."""
        return all(arena.num_bytes == 0 for arena in self._arenas)

    def sleep(self) -> None:
        """Give the memory of KV pages and of cast weights back. No row may be live."""
        self.pages_before_sleep = self.kv_cache.num_pages
        with self.streams.module.stream(self.streams.compute):
            # No entry may go on pointing at a page that is given up.
            self.lanes.page_table_LP.fill_(TRASH_PAGE)
        self.kv_cache.release()
        self.twin.release()

    def plan(self) -> MemoryPlan:
        """What is held now, and what KV pages may take."""
        on_gpu = self.device.type == "cuda"
        return MemoryPlan(
            device=torch.cuda.get_device_name(self.device) if on_gpu else "CPU",
            weights=self.twin.weight_bytes,
            cast_weights=self.twin.shadow_bytes,
            graphs=self.graphs.pool_bytes,
            buffers=self.lanes.num_bytes + sum(slot.num_bytes for slot in self.slots.slots),
            workspaces=self._workspace_bytes,
            kv_pages=self.kv_cache.num_bytes,
            num_pages=self.kv_cache.num_pages,
            kv_limit=max_kv_bytes(self.config, self.device, self._bytes_for_pages),
            page=self.kv_cache.layout.page_bytes,
            free=available_bytes(self.device) + self._bytes_for_pages if on_gpu else None,
            config=self.config,
        )

    def _compile(self) -> None:
        """Compile the twin's layers before a row is served, or run them as they are."""
        if not self.twin.compiled or self._compiled_builds == self.twin.num_builds:
            return
        with self.streams.module.stream(self.streams.compute):
            try:
                self.graphs.forward.warm_up()
            except Exception as error:  # a compiler fails in many ways
                if is_out_of_memory(error):
                    raise
                self.twin.stop_compiling(error)
        self._compiled_builds = self.twin.num_builds

    def _check_unmoved(self) -> None:
        """The buffers were made for the layers, device and dtype that the model had."""
        device, layout = self.twin.device, self.twin.kv_layout(self.config.page_tokens)
        before = self.kv_cache.layout
        if layout.num_layers != before.num_layers:
            raise UnsupportedModel(
                f"the engine was made for {before.num_layers} layers, and the model has "
                f"{layout.num_layers}; make a new engine"
            )
        if self.config.exact and self.twin.vocab_size != self._exact_vocab:
            raise UnsupportedModel(
                f"the engine was made exact for {self._exact_vocab} token ids, and the model's "
                f"embeddings were resized to {self.twin.vocab_size}; make a new engine"
            )
        if (device, layout) != (self.device, before):
            raise UnsupportedModel(
                f"the engine was made for weights that are {before.dtype} on {self.device}, and "
                f"they are {layout.dtype} on {device}: they were moved or cast meanwhile, or "
                "`train()` has yet to cast them; make a new engine, or generate later"
            )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a library of CUDA's means a lack of memory, by whatever class it says so."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "ALLOC_FAILED" in text)
    )

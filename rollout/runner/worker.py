"""The part of the engine on the device: twin, KV pages, slots and graphs."""

from contextlib import nullcontext
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
from rollout.memory.states import States
from rollout.model.projections import groups_of, lay_together
from rollout.model.self_check import check_twin, is_runnable, run_model
from rollout.model.twin import Twin
from rollout.model.weights import is_sharded
from rollout.runner.forward import Forward, Lanes
from rollout.runner.graphs import GraphCache
from rollout.runner.offload import Swap
from rollout.runner.slots import SlotPair
from rollout.runner.streams import Streams
from rollout.scheduler.batch import Demand
from rollout.scheduler.pages import TRASH_PAGE, pages_for
from rollout.support import base_of, check_length, check_model, check_placed
from rollout.telemetry.roofline import Cost


class Worker:
    """Everything that an engine has on its device.

    Args:
        autocast_dtype: Dtype of the autocast around the trainer's forward.
        float32_head: The trainer's head computes in float32, outside autocast.
        param_dtype: Dtype to which FSDP or DeepSpeed casts parameters for the trainer's forward.

    Raises:
        UnsupportedModel: The engine cannot run the model; the message says why.
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
        self.device = device = next(model.parameters()).device
        on_gpu = device.type == "cuda"
        fuse = config.fuse_projections
        if fuse is None:
            fuse = on_gpu and param_dtype is None
        if fuse and not is_sharded(model):
            lay_together(groups_of(base_of(model)))
        compiled = on_gpu if config.compile_layers is None else config.compile_layers
        self.config = config
        self.streams = Streams(device)
        self._arenas = [open_arena(device, self.streams.wait_for_all) for _ in range(3)]
        weights, pages, lane_states = self._arenas
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
        check_length(model, self.max_row_tokens)
        self.max_row_pages = pages_for(self.max_row_tokens, config.page_tokens)
        layout = self.twin.kv_layout(config.page_tokens)
        if autocast_dtype is None and param_dtype is not None:
            layout = replace(layout, dtype=param_dtype)  # the trainer casts the weights later
        self.kv_cache = KVCache(layout, device, pages)
        self.states: States | None = None
        if (state_layout := self.twin.state_layout()) is not None:
            _refuse_exact(config)
            state_layout = replace(state_layout, conv_dtype=layout.dtype)
            self.states = States(state_layout, config.max_rows, device, lane_states)
        self.before_sleep = (0, 0)  # pages, lanes with states
        self.swap = Swap(config, self.kv_cache, self.streams, device)
        self.slots = SlotPair(
            config.num_slots or (2 if on_gpu else 1),
            self.streams,
            max_rows=config.max_rows,
            max_row_pages=self.max_row_pages,
            prefill_tokens=config.prefill_tokens,
            num_scores=config.num_scores,
            device=device,
        )
        self.lanes = Lanes.empty(config.max_rows, self.max_row_pages, device)
        # Shapes of the layers that use our batch-invariant GEMM, in the trainer's model too.
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
            states=self.states,
            entropies=config.entropies,
            kept_mass=config.kept_mass,
            exact=config.exact,
            least_rows=LEAST_ROWS if config.exact and on_gpu else 1,
        )
        self.graphs = GraphCache(
            forward, self.streams, config.max_rows, device, enforce_eager=config.enforce_eager
        )
        self._compiled_builds = 0
        self._model = model
        self._checked = (0, 0)  # builds of the twin: all, compiled ones

    def refresh(self) -> None:
        """Make the twin read the trainer's current weights.

        Raises:
            UnsupportedModel: The model was moved, cast or resized since the engine was made.
        """
        with self.streams.module.stream(self.streams.compute):
            self.twin.refresh()
        self._check_unmoved()

    def prepare(self, demand: Demand) -> None:
        """Compile layers, allocate filters and capture graphs that the rows can need."""
        self._compile()
        self.check()
        with self.streams.module.stream(self.streams.compute):
            self.lanes.open_filters(demand.draws, self.twin.vocab_size)
        states = None if self.states is None else self.states.address
        addresses = (self.kv_cache.address, states, self.twin.addresses, self.twin.num_builds)
        self.graphs.prepare(demand, addresses)

    def check(self) -> None:
        """Compare the twin with the model, once for each tree and again once it is compiled.

        Sharded models: a collective.

        Raises:
            UnsupportedModel: They differ.
        """
        builds = self.twin.num_builds, self._compiled_builds
        if not self.config.self_check or self._checked == builds or not is_runnable(self._model):
            return
        compiled = self.twin.compiled and builds[0] == builds[1]
        with (
            self.streams.module.stream(self.streams.compute),
            nullcontext() if compiled else torch.compiler.set_stance("force_eager"),
        ):
            options = {"exact": self.config.exact, "within_layers": not compiled}
            check_twin(self._model, self.twin, self.config.page_tokens, **options)
        self._checked = builds

    def join_check(self) -> None:
        """Join the model's forward in the check that other ranks are about to run, if any."""
        builds = self.twin.num_builds, self._compiled_builds
        if self.twin.compiled:
            builds = builds[0], builds[0]  # they check once they have compiled
        runs = self.config.self_check and self._checked != builds and is_runnable(self._model)
        if runs and self.twin.is_sharded:
            run_model(self._model, self.twin)
            self._checked = builds

    @property
    def device_uuid(self) -> str | None:
        """The GPU's id in NVML; `None` on a CPU."""
        if self.device.type != "cuda":
            return None
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    def cost(self) -> Cost:
        """Least bytes and operations of a token, with the weights that rollouts read."""
        lane_bytes = 0 if self.states is None else self.states.layout.lane_bytes
        return Cost.of(self.twin.base, self.twin.kv_layout(page_tokens=1).page_bytes, lane_bytes)

    def max_pages(self, num_lanes: int = 1) -> int | None:
        """Most KV pages that fit in memory now, the trash page included; `None`: no limit.

        The states of `num_lanes` lanes are allocated before them.
        """
        num_bytes = max_kv_bytes(self.config, self.device, self._bytes_for_rows)
        if num_bytes is None:
            return None
        if self.states is not None:
            num_bytes -= self.states.bytes_for(max(num_lanes, self.states.num_lanes))
        return max(num_bytes // self.kv_cache.layout.page_bytes, self.kv_cache.num_pages)

    def lanes_that_fit(self, wanted: int, row_pages: int) -> int:
        """How many of the lanes leave room for one row of `row_pages` pages.

        At least 1, and all that have states by now.
        """
        assert self.states is not None
        num_bytes = max_kv_bytes(self.config, self.device, self._bytes_for_rows)
        if num_bytes is not None:
            num_bytes -= (1 + row_pages) * self.kv_cache.layout.page_bytes
            wanted = min(wanted, num_bytes // self.states.layout.lane_bytes - 1)
        return max(wanted, self.states.num_lanes, 1)

    @property
    def _bytes_for_rows(self) -> int:
        """Counts as free for pages and states: those present, less what is yet to be allocated."""
        present = self.kv_cache.num_bytes + (0 if self.states is None else self.states.num_bytes)
        return present - self.twin.missing_bytes - self._workspace_bytes

    @property
    def _workspace_bytes(self) -> int:
        """Upper bound of a prefill's activations: none in a layer is freed before its end."""
        return self.config.prefill_tokens * self.twin.layer_bytes

    def grow(self, num_pages: int, num_lanes: int) -> None:
        """Allocate `num_pages` KV pages, the trash page included, and states of `num_lanes`.

        Old pages and lanes keep what they hold.
        """
        self.swap.join()
        with self.streams.module.stream(self.streams.compute):
            if self.states is not None:
                self.states.grow(num_lanes)
            self.kv_cache.grow(num_pages)

    def take_costs(self) -> tuple[int, float]:
        """Growth since the last call: bytes that torch's cache gave back, and seconds."""
        released, seconds = zip(*(arena.take_costs() for arena in self._arenas), strict=True)
        return sum(released), sum(seconds)

    @property
    def asleep(self) -> bool:
        """Whether there is no memory to release."""
        return all(arena.num_bytes == 0 for arena in self._arenas)

    def sleep(self) -> None:
        """Release the memory of KV pages, states and cast weights. No row may be running."""
        num_lanes = 0 if self.states is None else self.states.num_lanes
        self.before_sleep = self.kv_cache.num_pages, num_lanes
        with self.streams.module.stream(self.streams.compute):
            # No page table may point to a released page.
            self.lanes.page_table_LP.fill_(TRASH_PAGE)
        self.kv_cache.release()
        if self.states is not None:
            self.states.release()
        self.twin.release()

    def plan(self) -> MemoryPlan:
        """Memory that the engine takes now, and the limit of its KV pages."""
        on_gpu = self.device.type == "cuda"
        return MemoryPlan(
            device=torch.cuda.get_device_name(self.device) if on_gpu else "CPU",
            weights=self.twin.weight_bytes,
            cast_weights=self.twin.shadow_bytes,
            graphs=self.graphs.pool_bytes,
            buffers=self.lanes.num_bytes + sum(slot.num_bytes for slot in self.slots.slots),
            workspaces=self._workspace_bytes,
            states=0 if self.states is None else self.states.num_bytes,
            num_lanes=0 if self.states is None else self.states.num_lanes,
            kv_pages=self.kv_cache.num_bytes,
            num_pages=self.kv_cache.num_pages,
            kv_limit=max_kv_bytes(self.config, self.device, self._bytes_for_rows),
            page=self.kv_cache.layout.page_bytes,
            free=available_bytes(self.device) + self._bytes_for_rows if on_gpu else None,
            config=self.config,
        )

    def _compile(self) -> None:
        """Compile the twin's layers before the first row. If that fails, run them uncompiled."""
        if not self.twin.compiled or self._compiled_builds == self.twin.num_builds:
            return
        with self.streams.module.stream(self.streams.compute):
            try:
                self.graphs.forward.warm_up()
            except Exception as error:  # torch.compile raises many types
                if is_out_of_memory(error):
                    raise
                self.twin.stop_compiling(error)
        self._compiled_builds = self.twin.num_builds

    def _check_unmoved(self) -> None:
        """Refuse a model that no longer fits the engine's buffers."""
        device, layout = self.twin.device, self.twin.kv_layout(self.config.page_tokens)
        before = self.kv_cache.layout
        if layout.num_layers != before.num_layers:
            raise UnsupportedModel(
                f"the model has {layout.num_layers} layers, but the engine was made for "
                f"{before.num_layers}; make a new engine"
            )
        if self.config.exact and self.twin.vocab_size != self._exact_vocab:
            raise UnsupportedModel(
                f"the model's vocabulary was resized to {self.twin.vocab_size} tokens, but the "
                f"exact engine was made for {self._exact_vocab}; make a new engine"
            )
        if (device, layout) != (self.device, before):
            raise UnsupportedModel(
                f"the weights are {layout.dtype} on {device}, but the engine was made for "
                f"{before.dtype} on {self.device}. If you moved or cast them, make a new engine; "
                "if `train()` has not cast them yet, generate after it has"
            )


def _refuse_exact(config: EngineConfig) -> None:
    if config.exact:
        raise UnsupportedModel(
            "on_policy='exact': its recurrent layers train in chunks and decode token by token, "
            "whose last bits differ; on_policy='close' runs it"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a CUDA library ran out of memory. Libraries raise different types for it."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "ALLOC_FAILED" in text)
    )

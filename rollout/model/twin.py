"""The twin: a second module tree over the trainer's storage.

The engine never runs the trainer's modules. It copies their tree and shares their tensors. So
train/eval mode, hooks, attention flags, patched forwards and checkpointing of the two never meet.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rollout.exact.linear import InvariantShapes
from rollout.memory.arena import Arena, PlainArena
from rollout.memory.kv_cache import KVLayout
from rollout.memory.states import StateLayout
from rollout.model.attention import PAGED_ATTENTION, PagedAttention, number_layers
from rollout.model.clone import Fingerprint, bind, clone, fingerprint, first_change
from rollout.model.compile import compile_layers, decoder_layers, run_uncompiled
from rollout.model.mixers import state_layout, use_lanes
from rollout.model.patches import check_patches
from rollout.model.replace import replace_modules
from rollout.model.weights import (
    Shadow,
    ShadowWeight,
    find_shadowed,
    is_part,
    is_sharded,
    local_bytes,
    reshard,
    whole,
)
from rollout.support import (
    adapters_of,
    attending_layers,
    base_of,
    check_placed,
    configs_of,
    text_config_of,
)
from rollout.telemetry.device_time import Stopwatch

logger = logging.getLogger(__name__)


class Twin:
    """The model that the engine runs.

    Args:
        model: The trainer's model, perhaps with PEFT adapters. `check_model` must have accepted it.
            The twin never runs or changes it.
        autocast_dtype: Dtype of the trainer's autocast, if any. The twin uses the same, so that
            both round alike.
        compiled: Compile decoder layers, in their first forward.
        exact: Exact mode: compiled layers have the same bits as eager ones.
        arena: Memory for shadow weights. `None`: a plain tensor.
        float32_head: The head computes in float32, outside autocast.
        param_dtype: Dtype of parameters in the trainer's forward, if FSDP or DeepSpeed casts them.

    Attributes:
        num_builds: How often the tree was copied: once, and again when the trainer's tree changed.
        num_fused: Number of `ProjectionGroup`s that one product computes.
        casts: Bytes and time of casting and gathering weights.
    """

    def __init__(
        self,
        model: nn.Module,
        autocast_dtype: torch.dtype | None = None,
        *,
        compiled: bool = False,
        exact: bool = False,
        arena: Arena | None = None,
        float32_head: bool = False,
        param_dtype: torch.dtype | None = None,
    ) -> None:
        self._live = model
        self._autocast_dtype = autocast_dtype
        self.compiled = compiled
        self._exact = exact
        self._float32_head = float32_head
        self._param_dtype = param_dtype
        device = next(model.parameters()).device
        self._shadow = Shadow(arena or PlainArena(device))
        self.casts = Stopwatch(device)
        self._shapes: InvariantShapes | None = {} if exact else None
        self._announced: bool | None = None
        self.num_builds = 0
        self._rebuild()
        self.refresh()

    @property
    def base(self) -> nn.Module:
        """The copied tree."""
        return self._base

    @property
    def device(self) -> torch.device:
        """Device of the trainer's parameters."""
        return next(base_of(self._live).parameters()).device

    @property
    def is_sharded(self) -> bool:
        """Whether the trainer's weights are sharded over ranks."""
        return is_sharded(self._live)

    @property
    def vocab_size(self) -> int:
        """Number of token ids. It changes if the trainer resizes the embeddings."""
        return int(text_config_of(base_of(self._live)).vocab_size)

    @property
    def max_positions(self) -> int:
        """Length of the longest sequence that the model supports, in tokens."""
        return int(text_config_of(self._base).max_position_embeddings)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of all parameters and buffers. Captured CUDA graphs rely on them."""
        tensors = (*self._base.parameters(), *self._base.buffers())
        return tuple(tensor.data_ptr() for tensor in tensors)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the trainer's weights on this rank."""
        return local_bytes(base_of(self._live).parameters())

    @property
    def shadow_bytes(self) -> int:
        """Bytes of the shadow weights: cast and gathered copies."""
        return self._shadow.num_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one token in a decoder layer: inputs and outputs of all its linear layers."""
        layer = next(decoder_layers(self._base), self._base)
        linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        numbers = sum(linear.in_features + linear.out_features for linear in linears)
        return numbers * self.kv_layout(1).dtype.itemsize

    @property
    def num_gathered(self) -> int:
        """Number of gathers of a parameter from all ranks, so far."""
        return self._shadow.num_gathered

    @property
    def missing_bytes(self) -> int:
        """Bytes of shadow weights that were released. `refresh` allocates them again."""
        return self._shadow.missing_bytes

    def release(self) -> None:
        """Release the memory of shadow weights until `refresh`."""
        self._shadow.arena.release()

    def kv_layout(self, page_tokens: int) -> KVLayout:
        """Shape and dtype of a KV page."""
        config = text_config_of(self._base)
        heads = config.num_attention_heads
        weights = [p for p in self._base.parameters() if p.dtype.is_floating_point]
        if self._float32_head:  # an embedding may share its weight
            base: Any = self._base
            head = base.get_output_embeddings().weight
            weights = [p for p in weights if p.data_ptr() != head.data_ptr()]
        return KVLayout(
            num_layers=len(attending_layers(self._base)),
            page_tokens=page_tokens,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=self._autocast_dtype or weights[0].dtype,
        )

    def state_layout(self) -> StateLayout | None:
        """Shapes of a lane's recurrent states; `None`: the model has none."""
        return state_layout(self._base, self.kv_layout(1).dtype)

    def refresh(self) -> None:
        """Take the trainer's current weights and adapters: a new policy version.

        If weights are sharded, this is a collective: every rank must call it.

        Raises:
            UnsupportedModel: The parameters are no longer on one device.
        """
        check_placed(self._live)
        self._rebuild_if_changed()
        bind(self._base, base_of(self._live))
        self._fill_shadow()
        self.num_fused = self._replaced.refresh()

    @torch.no_grad()
    def join_gathers(self, num_done: int) -> None:
        """Join the gathers in other ranks' `refresh`, and drop the results.

        This rank joined `num_done` of these gathers before it failed.
        """
        self._rebuild_if_changed()
        # `refresh` gathers tied parameters once, too.
        parts = {(id(e.source), e.dtype): e for e in self._find_shadowed() if is_part(e.source)}
        for each in list(parts.values())[num_done:]:
            with whole(each.source, each.dtype):
                pass

    def use_invariant_shapes(self, shapes: InvariantShapes) -> None:
        """Compute layers of these shapes by `batch_invariant_linear` from now on."""
        self._shapes = shapes
        if shapes:
            self._rebuild()
            self.refresh()

    def stop_compiling(self, reason: Exception) -> None:
        """Run decoder layers eagerly from now on, and log a warning."""
        text = "decoder layers cannot be compiled, so they run eagerly (correct, but slower): %s"
        logger.warning(text, str(reason).strip().partition("\n")[0])
        self.compiled = False
        if self._exact:  # norms and activations were replaced as well
            self._rebuild()
            self.refresh()
        else:
            # No `refresh`: it may gather weights, and other ranks may not take part.
            run_uncompiled(self._base)

    def logits(
        self, tokens_T: Tensor, positions_T: Tensor, rows: Tensor, paged: PagedAttention
    ) -> Tensor:
        """Run packed tokens; return the logits of some of them, `(rows, vocab)`.

        Args:
            tokens_T: Token ids, int64.
            positions_T: Position of each token in its row, int64.
            rows: Packed indices of the tokens that need logits, int64.
        """
        with self.autocast(), paged.active():
            output = self._base(
                input_ids=tokens_T[None],
                position_ids=positions_T[None],
                use_cache=False,
                logits_to_keep=rows,
            )
        return output.logits[0]

    def autocast(self) -> torch.autocast:
        """The trainer's autocast, as a context manager."""
        dtype = self._autocast_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _rebuild_if_changed(self) -> None:
        reshard(self._live)
        current = fingerprint(base_of(self._live))
        if current != self._fingerprint:
            changed = first_change(self._fingerprint, current)
            logger.info("the engine copies the module tree again, which has changed: %s", changed)
            self._rebuild()

    def _rebuild(self) -> None:
        live = base_of(self._live)
        check_patches(self._live)
        self.num_builds += 1
        self._fingerprint: Fingerprint = {}  # after an interrupt, copy again
        self._shadow.clear()
        self._base = base = clone(live)
        _configure(base, on_gpu=self.device.type == "cuda")
        number_layers(base)
        use_lanes(base)
        options = {"float32_head": self._float32_head, "compiled": self.compiled}
        self._replaced = replace_modules(base, self._shapes, **options)
        if self.compiled:
            compile_layers(base, exact=self._exact)
        self._fingerprint = fingerprint(live)

    @torch.no_grad()
    def _fill_shadow(self) -> None:
        """Copy weights that are sharded or that autocast would cast; all others stay aliased."""
        if weights := list(self._find_shadowed()):
            self._shadow.place(weights, self._replaced.groups)
            with self.casts.running(self.shadow_bytes):
                self._shadow.fill(weights)
            self._announce(any(not weight.source.requires_grad for weight in weights))

    def _find_shadowed(self) -> Iterator[ShadowWeight]:
        live = base_of(self._live)
        return find_shadowed(live, self._base, self._autocast_dtype, self._param_dtype)

    def _announce(self, casts_frozen: bool) -> None:
        if self._announced == (sharded := self.is_sharded):
            return
        if self._param_dtype is not None and not sharded:
            return  # the trainer will shard them before the first rollout
        self._announced = sharded
        size = self.shadow_bytes / 2**30
        if sharded:
            logger.info(
                "The trainer's weights are sharded. During a rollout each rank holds a whole copy "
                "(%.3f GiB), which is gathered once for each policy version",
                size,
            )
            return
        if adapters_of(self._live) and not casts_frozen:
            return  # the adapters' own weights, which train in float32
        dtype = str(self._autocast_dtype).removeprefix("torch.")
        text = (
            "The trainer computes in %s, but its weights have another dtype. During a rollout "
            "%d linear layers have a second, cast copy of their weights (%.3f GiB). Keep it to "
            "train the whole model: 16-bit weights lose small updates. If you train only adapters, "
            'avoid it: load the model with GRPOConfig(model_init_kwargs={"dtype": "%s"})'
        )
        logger.warning(text, dtype, self._shadow.num_weights, size, dtype)


def _configure(base: nn.Module, *, on_gpu: bool) -> None:
    """Let the tree attend over pages, and return logits without recording other outputs."""
    in_bf16 = text_config_of(base).dtype == torch.bfloat16
    for config in configs_of(base):
        config._attn_implementation = PAGED_ATTENTION
        if on_gpu and in_bf16:
            # The only Mixture of Experts code without a wait on the host.
            config._experts_implementation = "grouped_mm"
        config.return_dict = True
        config.output_hidden_states = config.output_attentions = False
        if hasattr(config, "output_router_logits"):
            config.output_router_logits = False

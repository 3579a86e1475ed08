"""A second module tree over the trainer's storage: shadow weights, policy version.

The engine never runs the trainer's modules. It copies their tree and shares their tensors, so
that modes, hooks, attention flags, patched forwards and checkpointing of the two never meet.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rollout.exact.linear import InvariantShapes
from rollout.memory.arena import Arena, PlainArena
from rollout.memory.kv_cache import KVLayout
from rollout.model.attention import PAGED_ATTENTION, PagedAttention, number_layers
from rollout.model.clone import bind, clone, fingerprint
from rollout.model.compile import compile_layers, decoder_layers, run_uncompiled
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
from rollout.support import base_of, check_placed, configs_of
from rollout.telemetry.device_time import Stopwatch

logger = logging.getLogger(__name__)


class Twin:
    """The model that the engine runs.

    Args:
        model: The trainer's model, perhaps with PEFT adapters, that `support` has found fit; never
            run, never changed.
        autocast_dtype: The dtype of the autocast that the trainer's forward runs under, or
            `None`. The twin runs under the same, so that it rounds alike.
        compiled: Compile decoder layers, on first use.
        exact: Such that they round as they are, to the last bit.
        arena: Memory of weights that are held a second time. `None`: a plain tensor.
        float32_head: The head computes in float32, outside autocast.
        param_dtype: Dtype that FSDP or DeepSpeed casts parameters to for the trainer's forward, if
            any.

    Attributes:
        compiled: Whether decoder layers are.
        num_builds: How often the tree was copied: once, and after each change of adapters.
        num_fused: Groups of layers that one product computes; see `ProjectionGroup`.
        casts: Bytes and time of weights that were cast or gathered.
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
        """Where its tensors live."""
        return next(base_of(self._live).parameters()).device

    @property
    def vocab_size(self) -> int:
        """Token ids that the trainer's model can take, whose embeddings may have been resized."""
        config: Any = base_of(self._live).config
        return int(config.vocab_size)

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence that the model was made for."""
        config: Any = self._base.config
        return int(config.max_position_embeddings)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where its tensors lie: what a captured graph relies on."""
        tensors = (*self._base.parameters(), *self._base.buffers())
        return tuple(tensor.data_ptr() for tensor in tensors)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the trainer's weights on this rank."""
        return local_bytes(base_of(self._live).parameters())

    @property
    def shadow_bytes(self) -> int:
        """Bytes of weights held a second time."""
        return self._shadow.num_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes that one token has in a decoder layer: inputs and outputs of its products."""
        layer = next(decoder_layers(self._base), self._base)
        linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        numbers = sum(linear.in_features + linear.out_features for linear in linears)
        return numbers * self.kv_layout(1).dtype.itemsize

    @property
    def num_gathered(self) -> int:
        """How often a parameter was gathered from all ranks."""
        return self._shadow.num_gathered

    @property
    def missing_bytes(self) -> int:
        """Bytes of held weights that were given back: before it can run, `refresh` takes them."""
        return self._shadow.missing_bytes

    def release(self) -> None:
        """Give back the memory of weights that are held a second time, until `refresh`."""
        self._shadow.arena.release()

    def kv_layout(self, page_tokens: int) -> KVLayout:
        """Shape and dtype of a KV page of this model."""
        config: Any = self._base.config
        heads = config.num_attention_heads
        weights = (p.dtype for p in self._base.parameters() if p.dtype.is_floating_point)
        return KVLayout(
            num_layers=config.num_hidden_layers,
            page_tokens=page_tokens,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=self._autocast_dtype or next(weights),
        )

    def refresh(self) -> None:
        """Take over the trainer's present weights, adapters included: a new policy version.

        Where they are sharded this is a collective: every rank is to call it.

        Raises:
            UnsupportedModel: The parameters have been moved apart meanwhile.
        """
        check_placed(self._live)
        self._follow_tree()
        bind(self._base, base_of(self._live))
        self._fill_shadow()
        self.num_fused = self._replaced.refresh()

    @torch.no_grad()
    def join_gathers(self, num_done: int) -> None:
        """Take part in what other ranks gather in their `refresh`, and keep nothing of it.

        Args:
            num_done: Parameters that this rank has gathered with the others before it failed.
        """
        self._follow_tree()
        # Tied ones are gathered once there, too.
        parts = {(id(e.source), e.dtype): e for e in self._find_shadowed() if is_part(e.source)}
        for each in list(parts.values())[num_done:]:
            with whole(each.source, each.dtype):
                pass

    def use_invariant_shapes(self, shapes: InvariantShapes) -> None:
        """From now on compute layers of these shapes, of exact mode, by our own product."""
        self._shapes = shapes
        if shapes:
            self._rebuild()
            self.refresh()

    def stop_compiling(self, reason: Exception) -> None:
        """Run the layers as they are from now on, and say so."""
        text = "decoder layers cannot be compiled and run as they are, more slowly: %s"
        logger.warning(text, str(reason).strip().partition("\n")[0])
        self.compiled = False
        if self._exact:  # whose layers had more changed
            self._rebuild()
            self.refresh()
        else:
            # Not by gathering weights anew: other ranks may have compiled their layers.
            run_uncompiled(self._base)

    def logits(
        self, tokens_T: Tensor, positions_T: Tensor, rows: Tensor, paged: PagedAttention
    ) -> Tensor:
        """Run packed tokens; logits of those that `rows` picks by index.

        Args:
            tokens_T: Token ids, int64, `(T,)`.
            positions_T: Position of each in its row, int64, `(T,)`.
            rows: Indices of the tokens that need logits, int64, `(rows,)`.
            paged: KV pages and page tables.

        Returns:
            `(rows, vocab)`.
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
        """The trainer's autocast setting."""
        dtype = self._autocast_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _follow_tree(self) -> None:
        """Copy the trainer's tree anew where it is no longer what was copied."""
        reshard(self._live)
        if fingerprint(base_of(self._live)) != self._fingerprint:
            self._rebuild()

    def _rebuild(self) -> None:
        """Copy the trainer's tree anew."""
        live = base_of(self._live)
        self.num_builds += 1
        self._fingerprint: tuple[Any, ...] = ()  # an interrupt leaves a tree to be copied anew
        self._shadow.clear()
        self._base = base = clone(live)
        _configure(base, on_gpu=self.device.type == "cuda")
        number_layers(base)
        options = {"float32_head": self._float32_head, "compiled": self.compiled}
        self._replaced = replace_modules(base, self._shapes, **options)
        if self.compiled:
            compile_layers(base, exact=self._exact)
        self._fingerprint = fingerprint(live)

    @torch.no_grad()
    def _fill_shadow(self) -> None:
        """Hold weights whole that are sharded, and in autocast's dtype what autocast would cast.

        Everything else stays aliased, which gives exactly the trainer's numbers.
        """
        if weights := list(self._find_shadowed()):
            self._shadow.place(weights, self._replaced.groups)
            with self.casts.running(self.shadow_bytes):
                self._shadow.fill(weights)
            self._announce()

    def _find_shadowed(self) -> Iterator[ShadowWeight]:
        live = base_of(self._live)
        return find_shadowed(live, self._base, self._autocast_dtype, self._param_dtype)

    def _announce(self) -> None:
        if self._announced == (sharded := is_sharded(self._live)):
            return
        if self._param_dtype is not None and not sharded:
            return  # the trainer is going to shard them before the first rollout
        self._announced = sharded
        size = self.shadow_bytes / 2**30
        if sharded:
            logger.info(
                "The trainer's weights are sharded: each rank holds them whole during a rollout "
                "(%.3f GiB), gathered once for each policy version",
                size,
            )
            return
        dtype = str(self._autocast_dtype).removeprefix("torch.")
        logger.warning(
            "The trainer computes in %s from weights of another dtype: rollouts use a second, "
            "cast copy of %d linear layers' weights (%.3f GiB). Where adapters alone are trained, "
            'avoid it by loading the model in that dtype: GRPOConfig(model_init_kwargs={"dtype": '
            '"%s"}). To train all of a model keep it: small steps are lost in 16-bit weights',
            dtype,
            self._shadow.num_weights,
            size,
            dtype,
        )


def _configure(base: nn.Module, *, on_gpu: bool) -> None:
    """Attend over pages; give logits in a named output, and record nothing on the way."""
    config: Any = base.config
    for each in configs_of(base):
        each._attn_implementation = PAGED_ATTENTION
        if on_gpu and config.dtype == torch.bfloat16:
            # The one way through a Mixture of Experts that waits for nothing on the host.
            each._experts_implementation = "grouped_mm"
    config.return_dict = True
    config.output_hidden_states = config.output_attentions = False
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False

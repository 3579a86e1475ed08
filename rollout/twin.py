"""A second module tree over the trainer's storage: shadow weights, policy version.

The engine never runs the trainer's modules. It copies their tree and shares their tensors, so
that modes, hooks, attention flags, patched forwards and checkpointing of the two never meet.
"""

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rollout.attention import PAGED_ATTENTION, PagedAttention, number_layers
from rollout.compiled import compile_layers, decoder_layers
from rollout.fused import fuse, lay_together
from rollout.head import Float32Head, use_float32_head
from rollout.kv_cache import KVLayout
from rollout.memory import Arena, PlainArena
from rollout.narrow import Narrow, NarrowLinear, make_narrow, make_plain
from rollout.stopwatch import Stopwatch
from rollout.support import base_of, check_placed

logger = logging.getLogger(__name__)

_ALIGN = 512  # bytes; where torch would let a tensor begin


class Twin:
    """The model that the engine runs.

    Args:
        model: The trainer's model, perhaps with PEFT adapters, that `support` has found fit; never
            run, never changed.
        autocast_dtype: The dtype of the autocast that the trainer's forward runs under, or
            `None`. The twin runs under the same, so that it rounds alike.
        compiled: Compile decoder layers, on first use.
        exact: Such that they round as they are, to the last bit.
        arena: Memory of cast weights. `None`: a plain tensor.
        float32_head: The head computes in float32, outside autocast.

    Attributes:
        compiled: Whether decoder layers are.
        num_builds: How often the tree was copied: once, and after each change of adapters.
        num_fused: Groups of layers that one product computes; see `fused`.
        casts: Bytes and time of weights that were cast.
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
    ) -> None:
        self._live = model
        self._autocast_dtype = autocast_dtype
        self.compiled = compiled
        self._exact = exact
        self._float32_head = float32_head
        device = next(model.parameters()).device
        self._arena = arena or PlainArena(device)
        self.casts = Stopwatch(device)
        self._narrow: Narrow = {}
        self._announced = False
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
        return next(self._base.parameters()).device

    @property
    def vocab_size(self) -> int:
        """Token ids that the model can take."""
        config: Any = self._base.config
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
        """Bytes of the trainer's weights."""
        return sum(parameter.nbytes for parameter in base_of(self._live).parameters())

    @property
    def shadow_bytes(self) -> int:
        """Bytes of weights held a second time."""
        return sum(weight.nbytes for weight in self._shadow.values())

    @property
    def layer_bytes(self) -> int:
        """Bytes that one token has in a decoder layer: inputs and outputs of its products."""
        layer = next(decoder_layers(self._base), self._base)
        linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        numbers = sum(linear.in_features + linear.out_features for linear in linears)
        return numbers * self.kv_layout(1).dtype.itemsize

    @property
    def missing_bytes(self) -> int:
        """Bytes of cast weights that were given back: before it can run, `refresh` takes them."""
        return max(0, self._shadow_end - self._arena.num_bytes)

    def release(self) -> None:
        """Give back the memory of cast weights, until `refresh`."""
        self._arena.release()

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

        Raises:
            UnsupportedModel: The parameters have been sharded or moved apart meanwhile.
        """
        check_placed(self._live)
        if _fingerprint(base_of(self._live)) != self._fingerprint:
            self._rebuild()
        self._bind()
        self._cast()
        self.num_fused = fuse(self._base, self._narrow)
        make_narrow(self._base, self._narrow)

    def use_narrow(self, narrow: Narrow) -> None:
        """From now on compute layers of these shapes by our own product.

        Args:
            narrow: Shapes; see `narrow`.
        """
        self._narrow = narrow
        self._rebuild()
        self.refresh()

    def stop_compiling(self, reason: Exception) -> None:
        """Run the layers as they are from now on, and say so."""
        text = "decoder layers cannot be compiled and run as they are, more slowly: %s"
        logger.warning(text, str(reason).strip().partition("\n")[0])
        self.compiled = False
        self._rebuild()
        self.refresh()

    def logits(
        self, tokens_T: Tensor, positions_T: Tensor, rows: Tensor, paged: PagedAttention
    ) -> Tensor:
        """Run packed tokens; logits of those that `rows` picks by index.

        Args:
            tokens_T: Token ids, int64, `(T,)`.
            positions_T: Position of each in its row, int64, `(T,)`.
            rows: Indices of the tokens that need logits, int64, `(rows,)`.
            paged: KV pages and block tables.

        Returns:
            `(rows, vocab)`.
        """
        with self.autocast(), paged.active():
            # Through the class: a forward set on the instance belongs to the trainer.
            output = type(self._base).forward(
                self._base,
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

    def _rebuild(self) -> None:
        """Copy the trainer's tree anew."""
        live = base_of(self._live)
        self.num_builds += 1
        self._fingerprint: tuple[Any, ...] = ()  # an interrupt leaves a tree to be copied anew
        self._shadow: dict[str, nn.Parameter] = {}
        self._shadow_end = 0
        memo: dict[int, Any] = {id(p): _alias(p) for p in live.parameters()}
        self._base = copy.deepcopy(live, memo).eval()
        make_plain(self._base)
        for module in self._base.modules():
            _forget_trainer(module)
        config: Any = self._base.config
        config._attn_implementation = PAGED_ATTENTION
        # A step wants logits in a named output, and nothing recorded on the way.
        config.return_dict = True
        config.output_hidden_states = config.output_attentions = False
        if hasattr(config, "output_router_logits"):
            config.output_router_logits = False
        if self.device.type == "cuda" and config.dtype == torch.bfloat16:
            # The one way through a Mixture of Experts that waits for nothing on the host.
            config._experts_implementation = "grouped_mm"
        number_layers(self._base)
        if self._float32_head:
            use_float32_head(self._base)
        if self.compiled:
            compile_layers(self._base, exact=self._exact)
        self._fingerprint = _fingerprint(live)

    @torch.no_grad()
    def _bind(self) -> None:
        """Point every parameter and persistent buffer at the trainer's storage, by name."""
        live = dict(base_of(self._live).named_modules())
        for name, module in self._base.named_modules():
            for key, parameter in live[name]._parameters.items():
                # ALIAS: the twin reads what the optimizer writes
                module._parameters[key] = None if parameter is None else _alias(parameter)
            for key, buffer in live[name]._buffers.items():
                if buffer is None or key not in live[name]._non_persistent_buffers_set:
                    # ALIAS: as above
                    module._buffers[key] = buffer
                elif (mine := module._buffers[key]) is not None and mine.device == buffer.device:
                    mine.copy_(buffer)
                else:
                    module._buffers[key] = buffer.detach().clone()

    @torch.no_grad()
    def _cast(self) -> None:
        """Hold in the autocast dtype what autocast would cast: the weights of `nn.Linear`.

        Everything else stays aliased, which gives exactly the trainer's numbers.
        """
        linears = [(name, module, module.weight) for name, module in self._to_shadow()]
        if not self._shadow:
            self._place({name: module for name, module, _ in linears})
        self._arena.grow(self._shadow_end)
        if linears:
            with self.casts.running(self.shadow_bytes):
                for name, module, weight in linears:
                    module.weight = self._shadow[name]
                    self._shadow[name].copy_(weight)
            self._announce()

    def _place(self, linears: dict[str, nn.Linear]) -> None:
        """Give the cast weight of each layer its place in the arena; groups lie together."""
        for module in linears.values():
            cast = torch.empty(module.weight.shape, dtype=self._autocast_dtype, device="meta")
            module.weight = nn.Parameter(cast, requires_grad=False)
        lay_together(self._base, among=linears.values())
        self._shadow_end, begins = 0, dict[int, int]()
        for module in linears.values():
            storage = module.weight.untyped_storage()
            if storage._cdata not in begins:
                begins[storage._cdata] = self._shadow_end
                self._shadow_end += -(-storage.nbytes() // _ALIGN) * _ALIGN
        self._arena.grow(self._shadow_end)
        shadow = {}
        for name, module in linears.items():
            cast = module.weight
            offset = cast.storage_offset() * cast.itemsize
            begin = begins[cast.untyped_storage()._cdata] + offset
            place = self._arena.data[begin : begin + cast.nbytes]
            view = place.view(cast.dtype).view(cast.shape)
            shadow[name] = nn.Parameter(view, requires_grad=False)
        self._shadow = shadow  # all or none, should an interrupt come

    def _to_shadow(self) -> Iterator[tuple[str, nn.Linear]]:
        if self._autocast_dtype is None:
            return
        # DoRA reads the weights themselves, before autocast could cast them.
        dora = tuple(
            f"{name}." for name, module in self._base.named_modules() if _uses_dora(module)
        )
        for name, module in self._base.named_modules():
            is_linear = isinstance(module, nn.Linear) and not isinstance(module, Float32Head)
            if is_linear and not name.startswith(dora):
                dtype = module.weight.dtype
                if dtype.is_floating_point and dtype != self._autocast_dtype:
                    yield name, module

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            dtype = str(self._autocast_dtype).removeprefix("torch.")
            logger.warning(
                "The trainer computes in %s from weights of another dtype: rollouts use a second, "
                "cast copy of %d linear layers' weights (%.3f GiB). To avoid it, load the model "
                'in that dtype: GRPOConfig(model_init_kwargs={"dtype": "%s"})',
                dtype,
                len(self._shadow),
                self.shadow_bytes / 2**30,
                dtype,
            )


def _uses_dora(module: nn.Module) -> bool:
    uses = getattr(module, "use_dora", None)
    return isinstance(uses, dict) and any(uses.values())


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """The same storage, class and attributes, without gradient."""
    twin = torch.Tensor._make_subclass(type(parameter), parameter.data, False)
    twin.__dict__.update(parameter.__dict__)
    return twin


def _forget_trainer(module: nn.Module) -> None:
    """Take away what was set on the trainer's instance: patched forwards and hooks.

    They close over the trainer's own modules and would run those.
    """
    module.__dict__.pop("forward", None)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(module, name).clear()


def _fingerprint(base: nn.Module) -> tuple[Any, ...]:
    """What the twin has copied and storage does not show: modules and adapter settings."""
    return tuple(
        (name, _plain_type(module), *_adapter_settings(module))
        for name, module in base.named_modules()
    )


def _plain_type(module: nn.Module) -> type[nn.Module]:
    """Its class, where exact mode has changed it the one before."""
    return nn.Linear if isinstance(module, NarrowLinear) else type(module)


def _adapter_settings(module: nn.Module) -> tuple[Any, ...]:
    """Names, active, disabled, merged and scaling of a PEFT layer, known by its attributes."""
    # On a transformers model these names are methods; on an adapter layer they are values.
    if not isinstance(getattr(module, "disable_adapters", None), bool):
        return ()
    return (
        tuple(module.active_adapters),  # type: ignore[arg-type]
        module.disable_adapters,
        tuple(getattr(module, "merged_adapters", ())),
        tuple(sorted(getattr(module, "scaling", {}).items())),
    )

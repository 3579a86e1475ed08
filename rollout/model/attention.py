"""Paged attention for transformers models, through their attention interface.

Shape letters: T packed tokens, Q tokens of one segment, H query heads, K key/value heads, D head
size, L lanes, P pages of a row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from rollout.errors import UnsupportedModel
from rollout.kernels import cudnn, flash
from rollout.kernels.custom_op import custom_op
from rollout.kernels.paged_attention import attend, decode, gather_kv, store_kv
from rollout.kernels.recurrent.runs import Runs
from rollout.memory.kv_cache import KVCache
from rollout.memory.states import States
from rollout.scheduler.batch import Segment
from rollout.support import attending_layers

PAGED_ATTENTION = "twinslot_paged"

_KV = tuple[Tensor, Tensor]  # keys, values

# Arguments of an attention function that do not change its result here.
_HARMLESS = frozenset({"dropout", "logits_to_keep", "position_ids", "use_cache"})


@dataclass(frozen=True)
class PagedAttention:
    """What every layer needs to attend over pages in one forward.

    Attributes:
        page_table_LP: Page ids of each lane, int64.
        lanes_T: Lane of each token, int64.
        positions_T: Position of each token in its row, int64.
        max_context: Upper bound of all context lengths, in tokens. Only decode reads it.
        segments: Prompt segments to prefill. `None`: decode, one token a row.
        runs_N4: The segments, int64: lane, first packed token, number of tokens, first position.
        exact: Run all prefill attention in our kernel, as the trainer does in exact mode.
        states: Recurrent states of the lanes, if the model has any.
        stored: What layers have stored in the current forward: kind and index.
    """

    kv_cache: KVCache
    page_table_LP: Tensor
    lanes_T: Tensor
    positions_T: Tensor
    max_context: int = 0
    segments: Sequence[Segment] | None = None
    runs_N4: Tensor | None = None
    exact: bool = False
    states: States | None = None
    stored: set[tuple[str, int]] = field(default_factory=set, compare=False)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let attention layers use these pages inside the `with` block.

        The pages do not pass through the model: torch.compile would compile a layer again for
        each combination of arguments.
        """
        self.stored.clear()
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def mark_stored(self, stored: tuple[str, int]) -> None:
        """Record that a layer has stored its keys and values, or a state: kind and index.

        Raises:
            Prefilled: This was the last of a prefill.
        """
        self.stored.add(stored)
        total = self.kv_cache.layout.num_layers
        if self.states is not None:
            total += self.states.layout.num_parts
        if self.segments is not None and len(self.stored) == total:
            raise Prefilled

    @property
    def lane_states(self) -> States:
        """The recurrent states, for layers that keep one."""
        assert self.states is not None
        return self.states

    @cached_property
    def slots_T(self) -> Tensor:
        """Slot of each token's state, int64."""
        return self.lane_states.slots(self.lanes_T)

    @property
    def state_runs(self) -> Runs:
        """The segments to prefill, by the slots of their states."""
        assert self.segments is not None
        slot = self.lane_states.slot
        return [(slot(part.lane), part.start, len(part.tokens)) for part in self.segments]

    def store(self, layer: int, keys_TKD: Tensor, values_TKD: Tensor) -> None:
        """Write the keys and values of the packed tokens to their pages."""
        cache = self.kv_cache.layer(layer)
        if keys_TKD.is_cuda:
            from rollout.kernels import store_kv_triton  # Triton may be missing on a CPU

            pages = (self.page_table_LP, self.lanes_T, self.positions_T)
            store_kv_triton.store_kv(keys_TKD, values_TKD, cache, *pages)
            return
        page_tokens = self.kv_cache.layout.page_tokens
        pages_T = self.page_table_LP[self.lanes_T, self.positions_T // page_tokens]
        store_kv(keys_TKD, values_TKD, cache, (pages_T, self.positions_T % page_tokens))

    def attend(
        self, layer: int, query_THD: Tensor, keys_TKD: Tensor, values_TKD: Tensor, **options: Any
    ) -> Tensor:
        """Attend with each packed token over its row's context; return `(T, H, D)`.

        The keys and values belong to the packed tokens. Call `store` with them first.
        """
        cache = self.kv_cache.layer(layer)
        pages = (self.page_table_LP, self.lanes_T, self.positions_T)
        if query_THD.is_cuda:
            from rollout.kernels import paged_attention_triton as kernels  # as above

            if self.segments is not None:
                return self._prefill_on_gpu(cache, query_THD, (keys_TKD, values_TKD), options)
            return kernels.decode(query_THD, cache, *pages, max_context=self.max_context, **options)
        if self.segments is None:
            return decode(query_THD, cache, *pages, max_context=self.max_context, **options)
        outputs, first = [], 0
        # Neighbours of one length are one batch: their number does not add calls.
        for (start, count), group in groupby(self.segments, lambda s: (s.start, len(s.tokens))):
            lanes = [segment.lane for segment in group]
            size, last = (len(lanes), count), first + len(lanes) * count
            query_NQHD = query_THD[first:last].unflatten(0, size)
            positions_NQ = self.positions_T[first:last].unflatten(0, size)
            keys, values = gather_kv(cache, self.page_table_LP[lanes], start + count)
            output = attend(query_NQHD, keys, values, positions_NQ, **options)
            outputs.append(output.flatten(0, 1))
            first = last
        return torch.cat(outputs)

    def _prefill_on_gpu(
        self, cache: _KV, query_THD: Tensor, new_kv: _KV, options: dict[str, Any]
    ) -> Tensor:
        """Run segments from position 0 on in torch's kernels, and the others in our kernel.

        The others come first in the batch. Our kernel runs all segments in exact mode, and in
        layers whose options torch's kernels do not support.
        """
        from rollout.kernels import paged_attention_triton as kernels  # as above

        assert self.segments is not None
        assert self.runs_N4 is not None
        counts = [len(segment.tokens) for segment in self.segments]
        num_paged = len(counts)
        if not self.exact and flash.serves(query_THD, options["softcap"], options["sinks_H"]):
            num_paged = sum(segment.start > 0 for segment in self.segments)
        first, outputs = sum(counts[:num_paged]), []
        if num_paged:
            runs_N4, longest = self.runs_N4[:num_paged], max(counts[:num_paged])
            paged = {"longest": longest, "page_table_LP": self.page_table_LP, **options}
            outputs.append(kernels.attend_runs(query_THD[:first], cache, runs_N4, **paged)[0])
        if num_paged < len(counts):
            query, keys, values = (states[first:] for states in (query_THD, *new_kv))
            scale, window, counts = options["scale"], options["window"], counts[num_paged:]
            if len(set(counts)) == 1 and cudnn.serves(query, window):
                output = cudnn.attend_rows(query, keys, values, len(counts), scale)
            else:
                starts_N = self.runs_N4[num_paged:, 1] - first
                fresh = {"longest": max(counts), "scale": scale, "window": window}
                output = flash.attend_packed(query, keys, values, starts_N, **fresh)
            outputs.append(output)
        output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        # Exact mode pads short prefills; padding belongs to no segment.
        missing = len(query_THD) - len(output)
        return pad(output, (0, 0, 0, 0, 0, missing)) if missing else output


class Prefilled(Exception):
    """Ends a prefill forward as soon as every layer has stored its keys and values, or state."""


_active: ContextVar[PagedAttention] = ContextVar("paged_attention")


def active_attention() -> PagedAttention:
    """What the current forward runs."""
    return _active.get()


def _fake(query_THD: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(query_THD, memory_format=torch.contiguous_format)


@custom_op(_fake)
def _attend_and_store(
    query_THD: Tensor,
    keys_TKD: Tensor,
    values_TKD: Tensor,
    layer: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Store the keys and values, then attend: one opaque node in a compiled graph.

    The pages are not an argument: torch.compile would copy an argument that is written to.
    """
    paged = _active.get()
    layout = paged.kv_cache.layout
    if keys_TKD.shape[1:] != (layout.num_kv_heads, layout.head_dim):
        raise UnsupportedModel(
            f"a layer has {keys_TKD.shape[1]} key heads of size {keys_TKD.shape[2]}, but KV pages "
            f"hold {layout.num_kv_heads} of size {layout.head_dim}; generate without the engine"
        )
    index = int(layer)
    if ("kv", index) in paged.stored:
        raise UnsupportedModel(
            f"layer {index} attends more than once in one forward, as looped models and "
            "differential attention do, but KV pages hold one set of keys and values a layer; "
            "generate without the engine"
        )
    with torch.autocast(query_THD.device.type, enabled=False):
        states = [states.to(layout.dtype) for states in (query_THD, keys_TKD, values_TKD)]
        paged.store(index, *states[1:])
        paged.mark_stored(("kv", index))
        output = paged.attend(
            index, *states, scale=scale, window=window, softcap=softcap, sinks_H=sinks_H
        )
    return output.to(query_THD.dtype)


def number_layers(base: nn.Module) -> None:
    """Set `kv_layer` and `mask_window` on each attention layer.

    `kv_layer` is its index in the KV cache, as a CPU tensor: torch.compile would compile every
    layer separately for a Python int. `mask_window` is the sliding window of the trainer's mask.
    """
    kv_layers = {layer: index for index, layer in enumerate(attending_layers(base))}
    module: Any  # gets attributes that nn.Module does not declare
    for module in base.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and index in kv_layers:
            module.kv_layer = torch.tensor(kv_layers[index])
            module.mask_window = _mask_window(getattr(module, "config", None), index)


def _mask_window(config: Any, index: int) -> int | None:
    """Sliding window of transformers' mask in tokens; `None`: the layer sees whole sequences."""
    types = getattr(config, "layer_types", None)
    if types and types[index : index + 1] != ["sliding_attention"]:
        return None
    if per_layer := getattr(config, "per_layer_config", None):
        config = per_layer[min(index, len(per_layer) - 1)]
    window = getattr(config, "sliding_window", None)
    longest = getattr(config, "max_position_embeddings", None)
    return None if not window or (longest and window >= longest) else int(window)


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers calls this in each layer of the twin. It uses the active `PagedAttention`.

    `query` is `(1, H, T, D)`; `key` and `value` are `(1, K, T, D)`.

    Args:
        module: The attention layer, with the attributes that `number_layers` sets.
        attention_mask: Must be `None`: causality follows from the positions.
        sliding_window: Tokens that a query sees, itself included. `None`: all.
        s_aux: Attention sinks, `(H,)`: extra scores without a value (gpt-oss).
        others: Refused unless known to be harmless.

    Returns:
        `(1, T, H, D)`, and no attention weights.

    Raises:
        UnsupportedModel: Paged attention does not support what the layer asks for.
    """
    harmless = _HARMLESS | {name for name in others if name.startswith("output_")}
    asked = [name for name, value in others.items() if value is not None and name not in harmless]
    if asked or attention_mask is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} passes {asked or ['attention_mask']} to its attention, which "
            "paged attention does not support; generate without the engine"
        )
    if getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(
            f"{type(module).__name__} lets tokens attend to later ones (is_causal=False), so the "
            "keys and values of earlier tokens cannot be cached; generate without the engine"
        )
    if sliding_window is None and module.mask_window is not None:
        raise UnsupportedModel(
            f"the config of {type(module).__name__} has a sliding window of {module.mask_window} "
            "tokens, but the layer does not pass it to its attention; the engine can run this "
            "model only if `sliding_window` is None or >= `max_position_embeddings`"
        )
    # Under autocast the trainer's attention computes in the dtype of its values.
    query_THD = query[0].transpose(0, 1).to(value.dtype).contiguous()
    keys_TKD, values_TKD = (states[0].transpose(0, 1) for states in (key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = _attend_and_store(
        query_THD, keys_TKD, values_TKD, module.kv_layer, scale, sliding_window, softcap, s_aux
    )
    return output[None], None


# No mask function is registered under this name, so transformers builds no mask.
AttentionInterface.register(PAGED_ATTENTION, paged_attention_forward)

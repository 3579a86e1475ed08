"""Lets the recurrent layers of a model keep their states in lanes.

transformers' mixers are alike: they project, mix tokens by one or two functions of their file, and
project back. The twin runs a mixer's own code, with these functions replaced by operators over the
active `PagedAttention`'s states.
"""

from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from rollout.kernels.custom_op import custom_op
from rollout.kernels.recurrent import delta_rule, short_conv
from rollout.memory.states import StateLayout
from rollout.model.attention import active_attention
from rollout.model.replace import in_place_of, replace
from rollout.support import forward_code, mixers_of


def use_lanes(base: nn.Module) -> None:
    """Replace the mixers of a twin's tree by ones that keep their states."""
    mixers = enumerate(mixer for _, mixer in mixers_of(base))
    replace(base, {mixer: _on_lanes(mixer, index) for index, mixer in mixers})


def state_layout(base: nn.Module, dtype: torch.dtype) -> StateLayout | None:
    """Shapes of a lane's states in a tree with `use_lanes`; `None`: it has no recurrent layers."""
    mixers: list[Any] = [mixer for _, mixer in mixers_of(base)]
    if not mixers:
        return None
    first = mixers[0]
    conv = next(module for module in first.modules() if isinstance(module, nn.Conv1d))
    shape = None
    if hasattr(first, "num_v_heads"):
        shape = (first.num_v_heads, first.head_v_dim, first.head_k_dim)
    return StateLayout(
        num_layers=len(mixers),
        conv_shape=(conv.out_channels, conv.kernel_size[0] - 1),
        conv_dtype=dtype,
        state_shape=shape,
    )


def _on_lanes(mixer: nn.Module, index: int) -> nn.Module:
    kind: Any = _lane_class(type(mixer))  # type: ignore[arg-type]  # mypy: modules are hashable
    made: Any = in_place_of(mixer, kind)
    # A tensor, because torch.compile would compile each layer separately for a Python int.
    made.lane_layer = torch.tensor(index)
    return made


@cache
def _lane_class(kind: type[nn.Module]) -> type[nn.Module]:
    run = _with_globals(forward_code(kind), _OPERATORS)

    @wraps(kind.forward)  # `forward_code` finds the mixer's code behind it
    def forward(
        self: Any,
        hidden_states: Tensor,
        cache: None = None,
        attention_mask: None = None,
        **kwargs: Any,
    ) -> Any:
        # No mask: rows are packed, without padding.
        return run(self, hidden_states, lane_layer=self.lane_layer, **kwargs)

    return type(f"Lane{kind.__name__}", (kind,), {"forward": forward})


def _with_globals(function: FunctionType, changes: dict[str, Any]) -> Callable[..., Any]:
    """The function's code, which finds `changes` instead of the globals of these names."""
    names = {**function.__globals__, **changes}
    # torch.compile would look names up in the module of this name, and find the old functions.
    del names["__name__"]
    code = function.__code__
    return FunctionType(code, names, code.co_name, function.__defaults__, function.__closure__)


def _like_first(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op(_like_first)
def _lane_conv(x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, layer: Tensor) -> Tensor:
    """Convolve the packed tokens, each row after its lane's last inputs."""
    paged, index = active_attention(), int(layer)
    states = paged.lane_states
    with torch.autocast(x_TC.device.type, enabled=False):
        bias_C = None if bias_C is None else bias_C.to(x_TC.dtype)
        inputs = x_TC, weight_CK.to(x_TC.dtype), bias_C, states.conv(index)
        if paged.segments is not None:
            output = short_conv.prefill(*inputs, paged.state_runs)
        elif x_TC.is_cuda:
            from rollout.kernels.recurrent import (
                short_conv_triton,
            )  # Triton may be missing on a CPU

            output = short_conv_triton.decode(*inputs, paged.slots_T, paged.positions_T)
        else:
            output = short_conv.decode(*inputs, paged.slots_T, paged.positions_T)
    paged.mark_stored(("conv", index))
    return output.contiguous()


@custom_op(lambda query, key, value, *others: _like_first(value))
def _lane_delta_rule(
    query_TGK: Tensor,
    key_TGK: Tensor,
    value_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    layer: Tensor,
    normalised: bool,
) -> Tensor:
    """Feed the packed tokens to the states of their lanes."""
    paged, index = active_attention(), int(layer)
    states = paged.lane_states
    inputs = query_TGK, key_TGK, value_THV, decay_TH, beta_TH, states.state(index)
    with torch.autocast(value_THV.device.type, enabled=False):
        where = paged.slots_T, paged.positions_T
        if paged.segments is not None:
            output = delta_rule.prefill(*inputs, paged.state_runs, normalised=normalised)
        elif value_THV.is_cuda:
            from rollout.kernels.recurrent import delta_rule_triton  # as above

            output = delta_rule_triton.decode(*inputs, *where, normalised=normalised)
        else:
            output = delta_rule.decode(*inputs, *where, normalised=normalised)
    paged.mark_stored(("state", index))
    return output.contiguous()


# They stand in for functions of transformers' files, so they have those arguments.


def _causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    lane_layer: Tensor,
    **others: Any,
) -> Tensor:
    output: Tensor = _lane_conv(hidden_states[0].T, weight, bias, lane_layer).T[None]
    return output if activation is None else ACT2FN[activation](output)


def _chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    lane_layer: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    tokens = (each[0] for each in (query, key, value, g, beta))
    return _lane_delta_rule(*tokens, lane_layer, use_qk_l2norm_in_kernel)[None], None


_OPERATORS = {
    "causal_conv1d_fn": _causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": _chunk_gated_delta_rule,
}

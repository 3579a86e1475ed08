"""Compiling decoder layers in exact mode, so that they give the bits of eager torch.

torch.compile would sum in another order than torch's reductions and use other formulas for
activations. So norms and gated activations stay opaque to it. They run in kernels of ours if a
check shows that these give torch's bits, else in torch's own. The compiler rounds everything else
after each operation, as eager torch does.
"""

from collections.abc import Iterable
from functools import cache
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.nn.functional import silu

from rollout.exact.ops import activation, activations, rms_norm, silu_and_mul

_aten, _ours = torch.ops.aten, torch.ops.twinslot
_CHECKED_ROWS = (32, 2048)


class _ExactReductions(CustomGraphPass):
    """Sends means to torch's kernel, and fuses our kernels with the adjacent sum or product."""

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            if node.target is _aten.mean.dim:
                node.target = _ours.mean.default
            elif node.target is _ours.rms_norm.default:
                _join_sum(graph, node)
            elif node.target is _aten.mul.Tensor:
                _join_activation(graph, node)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


options: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "triton.enable_pdl": True,
    "post_grad_custom_pre_pass": _ExactReductions(),
}


def _join_sum(graph: Graph, norm: Node) -> None:
    """Fuse a residual sum and its norm."""
    total, weight, eps = norm.args
    if not isinstance(total, Node) or total.target is not _aten.add.Tensor or total.kwargs:
        return
    if not all(isinstance(x, Node) for x in total.args) or weight.op != "placeholder":  # type: ignore[union-attr]
        return
    values = [x.meta["val"] for x in total.args]  # type: ignore[union-attr]
    if values[0].shape != values[1].shape or values[0].stride() != values[1].stride():
        return
    with graph.inserting_before(total):
        arguments = (*total.args, weight, eps)
        both = graph.call_function(_ours.add_rms_norm.default, arguments)
        both.meta["val"] = (total.meta["val"], norm.meta["val"])
        for index, node in enumerate((total, norm)):
            part = graph.call_function(getitem, (both, index))
            part.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(part)
    graph.erase_node(norm)
    graph.erase_node(total)


def _join_activation(graph: Graph, product: Node) -> None:
    """Fuse SiLU and the product with its other half."""
    gate, up = product.args
    if not isinstance(gate, Node) or not isinstance(up, Node) or len(gate.users) > 1:
        return
    if gate.target is not _ours.activation.default:
        return
    values = [gate.meta["val"], up.meta["val"]]
    if gate.args[1] not in _joined_activations or values[0].shape != values[1].shape:
        return
    with graph.inserting_before(product):
        arguments = (gate.args[0], up)
        node = graph.call_function(_ours.silu_and_mul.default, arguments)
        node.meta["val"] = product.meta["val"]
    product.replace_all_uses_with(node)
    graph.erase_node(product)
    graph.erase_node(gate)


class ExactActivation(nn.Module):
    """An activation that is opaque to torch.compile."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.index = _index(plain)

    def forward(self, states: Tensor) -> Tensor:
        """Return what the activation returns."""
        return activation(states, self.index)


class ExactRMSNorm(nn.Module):
    """An RMSNorm in our kernel, bit-equal to the module that it replaces."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        # ALIAS: shares the weight with the replaced module, under the same name
        self._parameters = plain._parameters
        self.eps = _eps(plain)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return what the norm returns."""
        return rms_norm(hidden_states, self.weight, self.eps)


def opaque_modules(layers: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Replacements for modules of decoder layers that torch.compile would round differently."""
    modules: dict[nn.Module, nn.Module] = {}
    for module in (module for layer in layers for module in layer.modules()):
        plain = getattr(module, "act_fn", None)
        if isinstance(plain, nn.Module) and not isinstance(plain, nn.Identity):
            modules[plain] = ExactActivation(plain).eval()
        elif _is_our_norm(module):
            modules[module] = ExactRMSNorm(module).eval()
    return modules


# Indices of activations that our kernel fuses with the product behind them.
_joined_activations: set[int] = set()


def _index(module: nn.Module) -> int:
    """Index of an activation's class in `activations`."""
    for index, known in enumerate(activations):
        if type(known) is type(module):
            return index
    activations.append(module)
    if type(module).__name__ in ("SiLU", "SiLUActivation") and _silu_and_mul_is_exact():
        _joined_activations.add(len(activations) - 1)
    return len(activations) - 1


@cache
def _silu_and_mul_is_exact() -> bool:
    """Whether our kernel gives torch's bits for every finite bfloat16 number."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate = every[every.isfinite()].to("cuda" if torch.cuda.is_available() else "cpu")
    pairs = ((gate, gate.flip(0)), (gate.float() / 3, gate.flip(0).float()))
    return all(torch.equal(silu_and_mul(*pair), silu(pair[0]) * pair[1]) for pair in pairs)


def _eps(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _is_our_norm(module: Any) -> bool:
    """Whether our kernel is bit-equal to this norm."""
    kind, weight = cast(Any, type(module)), getattr(module, "weight", None)
    if not kind.__name__.endswith("RMSNorm") or weight is None or _eps(module) is None:
        return False
    return _rms_norm_is_exact(kind, len(weight), weight.dtype, weight.device)


@cache
@torch.no_grad()
def _rms_norm_is_exact(kind: Any, size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Compare our kernel with a class of norms on random numbers."""
    norm = kind(size).to(device, dtype)
    generator = torch.Generator(device).manual_seed(0)
    norm.weight.normal_(generator=generator)
    for rows in _CHECKED_ROWS:
        states = torch.randn((1, rows, size), generator=generator, device=device)
        for given in (states, states.bfloat16()):
            ours, plain = rms_norm(given, norm.weight, _eps(norm)), norm(given)
            if ours.dtype != plain.dtype or not torch.equal(ours, plain):
                return False
    return True

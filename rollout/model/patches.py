"""Finds what changes a model from outside its classes and parameters, and refuses it by name.

The twin runs the forward of each module's class, and attends in the engine's own kernels. So a
forward that a user put on one module, an attention function of the user's own and a weight that a
hook computes would be dropped.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from transformers import AttentionInterface

from rollout.errors import UnsupportedModel
from rollout.model.hooks import KNOWN, name_of, package_of, unwrapped
from rollout.support import base_of, configs_of


def check_patches(model: nn.Module) -> None:
    """Raise `UnsupportedModel` for the first patch in a model."""
    for reason in (*_forwards(model), *_attentions(model), *_computed_weights(model)):
        raise UnsupportedModel(f"{reason}; otherwise, generate without the engine")


def _forwards(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        own = {vars(kind).get("forward") for kind in type(module).__mro__}
        for function in _functions(vars(module).get("forward")):
            if function not in own and package_of(function) not in KNOWN:
                yield (
                    f"{name or 'the model'} ({type(module).__name__}) has a forward of its own, "
                    f"{name_of(function)}, but rollouts run the forward of its class. Put the "
                    "change into a subclass"
                )


def _functions(forward: Any) -> Iterator[Callable[..., Any]]:
    """The function, and those that it wraps: accelerate and TRL keep the original in a closure."""
    pending, seen = [forward], set()
    while pending:
        function = pending.pop()
        if not callable(function) or isinstance(function, type | nn.Module) or id(function) in seen:
            continue
        seen.add(id(function))
        function = unwrapped(function)
        yield function
        if package_of(function) in KNOWN:
            pending += getattr(function, "__dict__", {}).values()
            pending += (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())


def _attentions(model: nn.Module) -> Iterator[str]:
    for name in {config._attn_implementation for config in configs_of(base_of(model))}:
        function = AttentionInterface._global_mapping.get(name)
        if function is not None and package_of(function) not in KNOWN:
            yield (
                f"the model attends by {name!r}, a function of your own ({name_of(function)}), but "
                "rollouts attend in the engine's kernels. Call "
                "model.set_attn_implementation('sdpa')"
            )


def _computed_weights(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod):
                weight = hook._tensor_name
                remedy = f"call torch.nn.utils.prune.remove(module, {weight!r}) first"
            elif isinstance(hook, WeightNorm | SpectralNorm):
                weight = hook.name
                remedy = "use torch.nn.utils.parametrizations instead, which needs no hook"
            else:
                continue
            kind = type(hook).__name__
            yield f"{kind} computes {name}.{weight} in a hook, but rollouts run no hooks; {remedy}"

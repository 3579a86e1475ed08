"""Copies of the trainer's module tree, over the same storage."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rollout.model.weights import is_part, is_sharded, shape_of

# Where FSDP keeps its state in a module's attributes, and ZeRO-3 parameters a second time.
_FSDP_STATE = "__composable_api_state_key"
_ZERO_STATE = ("_original_parameters", "_external_params")

# Where bitsandbytes notes that a layer may pack its 4-bit weights anew, on a CPU in a forward
# without gradients: what they were quantised by is shared, and the trainer's would be lost.
_PACKS = "support_avx512bf16_for_cpu"


def clone(live: nn.Module) -> nn.Module:
    """Copy the module tree over the same storage, without what FSDP, ZeRO and hooks added."""
    # Parts of a parameter are nothing to run on: the twin holds the whole.
    memo: dict[int, Any] = {id(p): _blank(p) if is_part(p) else alias(p) for p in live.parameters()}
    for module in live.modules():
        for key, value in vars(module).items():
            if key.startswith(_FSDP_STATE) or (key.endswith("_hooks") and value):
                memo[id(value)] = type(value)() if key.endswith("_hooks") else None
    _clone_fsdp_modules(live, memo)
    tree = copy.deepcopy(live, memo).eval()
    for module in tree.modules():
        _forget_trainer(module)
    return tree


def _clone_fsdp_modules(live: nn.Module, memo: dict[int, Any]) -> None:
    """Give `deepcopy` a clone of each module whose class FSDP has made, which refuses to be copied.

    A clone is of the plain class. All exist, still empty, before the first is filled, so that each
    finds the others.
    """
    modules: list[Any] = [module for module in live.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        plain: Any = _plain_type(module)
        memo[id(module)] = plain.__new__(plain)
    for module in modules:
        memo[id(module)].__setstate__(copy.deepcopy(module.__getstate__(), memo))


@torch.no_grad()
def bind(base: nn.Module, live: nn.Module) -> None:
    """Point every parameter and persistent buffer of a clone at the trainer's storage, by name."""
    modules = dict(live.named_modules())
    for name, module in base.named_modules():
        source = modules[name]
        for key, parameter in source._parameters.items():
            if parameter is None or not is_part(parameter):
                # ALIAS: the twin reads what the optimizer writes
                module._parameters[key] = None if parameter is None else alias(parameter)
        for key, buffer in source._buffers.items():
            if buffer is None or key not in source._non_persistent_buffers_set:
                # ALIAS: as above
                module._buffers[key] = buffer
            elif (mine := module._buffers[key]) is not None and mine.device == buffer.device:
                mine.copy_(buffer)
            else:
                module._buffers[key] = buffer.detach().clone()


def alias(parameter: nn.Parameter) -> nn.Parameter:
    """The same storage, class and attributes, without gradient."""
    twin = torch.Tensor._make_subclass(type(parameter), parameter.data, False)
    twin.__dict__.update(parameter.__dict__)
    return twin


def _blank(parameter: Tensor) -> nn.Parameter:
    shape, dtype = shape_of(parameter), parameter.dtype
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def _forget_trainer(module: nn.Module) -> None:
    """Take away what was set on the trainer's instance: patched forwards and hooks.

    They close over the trainer's own modules and would run those.
    """
    module.__dict__.pop("forward", None)
    if hasattr(module, _PACKS):
        setattr(module, _PACKS, False)
    # ZeRO-3's own mapping may gather what it is asked for.
    module._parameters = dict(module._parameters)
    for key in _ZERO_STATE:
        module.__dict__.pop(key, None)
    for key in [key for key in vars(module) if key.startswith(_FSDP_STATE)]:
        del module.__dict__[key]
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(module, name).clear()


def fingerprint(base: nn.Module) -> tuple[Any, ...]:
    """What the twin has copied and storage does not show: modules, sizes and adapter settings."""
    config: Any = base.config  # knows of resized embeddings
    return (
        is_sharded(base),
        config.vocab_size,
        *(
            (name, _plain_type(module), *_adapter_settings(module))
            for name, module in base.named_modules()
        ),
    )


def _plain_type(module: nn.Module) -> type[nn.Module]:
    """Its class; FSDP derives one from itself and the module's own, which is meant then."""
    return type(module).__bases__[1] if isinstance(module, FSDPModule) else type(module)


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

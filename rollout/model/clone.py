"""Copies of the trainer's module tree that share its storage."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rollout.model.weights import is_part, is_sharded, shape_of

# Attributes of a module in which FSDP keeps its state, and ZeRO-3 more references to parameters.
_FSDP_STATE = "__composable_api_state_key"
_ZERO_STATE = ("_original_parameters", "_external_params")

# If True, bitsandbytes repacks 4-bit weights in a CPU forward without gradients. The twin shares
# the quantisation state, so repacking would destroy the trainer's.
_REPACKS = "support_avx512bf16_for_cpu"


def clone(live: nn.Module) -> nn.Module:
    """Copy a module tree over the same storage, without hooks and the state of FSDP and ZeRO."""
    # A sharded parameter becomes an empty one: the twin gets a whole copy later.
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
    """Put clones of FSDP modules, which refuse `deepcopy`, into its memo.

    Clones have the class from before FSDP. They may refer to each other, so all of them exist
    before the first is filled.
    """
    modules: list[Any] = [module for module in live.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        plain: Any = _plain_type(module)
        memo[id(module)] = plain.__new__(plain)
    for module in modules:
        memo[id(module)].__setstate__(copy.deepcopy(module.__getstate__(), memo))


@torch.no_grad()
def bind(base: nn.Module, live: nn.Module) -> None:
    """Point each parameter and persistent buffer of a clone at the trainer's storage, by name.

    Sharded parameters stay as they are. Non-persistent buffers are copied.
    """
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
    """A parameter with the same storage, class and attributes, but without gradient."""
    twin = torch.Tensor._make_subclass(type(parameter), parameter.data, False)
    twin.__dict__.update(parameter.__dict__)
    return twin


def _blank(parameter: Tensor) -> nn.Parameter:
    shape, dtype = shape_of(parameter), parameter.dtype
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def _forget_trainer(module: nn.Module) -> None:
    """Remove patched forwards and hooks: they would run the trainer's own modules."""
    module.__dict__.pop("forward", None)
    if hasattr(module, _REPACKS):
        setattr(module, _REPACKS, False)
    # ZeRO-3's parameter dict may gather a parameter when it is read.
    module._parameters = dict(module._parameters)
    for key in _ZERO_STATE:
        module.__dict__.pop(key, None)
    for key in [key for key in vars(module) if key.startswith(_FSDP_STATE)]:
        del module.__dict__[key]
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(module, name).clear()


def fingerprint(base: nn.Module) -> tuple[Any, ...]:
    """All that the twin copies instead of sharing: modules, sizes and adapter settings."""
    config: Any = base.config
    return (
        is_sharded(base),
        config.vocab_size,
        *((name, _plain_type(m), *_adapter_settings(m)) for name, m in base.named_modules()),
    )


def _plain_type(module: nn.Module) -> type[nn.Module]:
    """The module's class, before FSDP derived another one from it."""
    return type(module).__bases__[1] if isinstance(module, FSDPModule) else type(module)


def _adapter_settings(module: nn.Module) -> tuple[Any, ...]:
    """Which adapters of a PEFT layer are active, disabled or merged, and their scaling."""
    # On a transformers model these names are methods; on an adapter layer they are values.
    if not isinstance(getattr(module, "disable_adapters", None), bool):
        return ()
    return (
        tuple(module.active_adapters),  # type: ignore[arg-type]
        module.disable_adapters,
        tuple(getattr(module, "merged_adapters", ())),
        tuple(sorted(getattr(module, "scaling", {}).items())),
    )

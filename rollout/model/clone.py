"""Copies of the trainer's module tree that share its storage.

A copy follows structure alone: modules, parameters, buffers, configs and containers become the
twin's own. All else that a module holds, such as a lock, a file or a second model, is shared by
reference.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rollout.model.weights import is_part, is_sharded, shape_of
from rollout.support import configs_of, towers_of

_HOOKS = re.compile("_hooks(_|$)")

# Attributes that a copy lacks: FSDP's state, ZeRO-3's references to parameters, a patched forward,
# and what `module.compile()` made, which would run the trainer's own modules.
_FSDP_STATE = "__composable_api_state_key"
_LEFT_OUT = {"_original_parameters", "_external_params", "forward", "_compiled_call_impl"}

# If True, bitsandbytes repacks 4-bit weights in a CPU forward without gradients. The twin shares
# the quantisation state, so repacking would destroy the trainer's.
_REPACKS = "support_avx512bf16_for_cpu"

_PLAIN = {bool, int, float, str, type(None), torch.dtype, FunctionType, BuiltinFunctionType}
_FROZEN = _PLAIN | {list, tuple, dict, OrderedDict}
# Modules of torch that are their parameters or children alone. Adapters bring thousands of them.
_WITHOUT_VALUES = {nn.Linear, nn.ModuleList, nn.ModuleDict, nn.ParameterDict, nn.Identity}
# What changes while a model trains, but not what a rollout computes.
_PASSING = re.compile(
    "_parameters|_buffers|_modules|.*_hooks(_.*)?|training|_?gradient_checkpointing.*|use_cache"
    "|_is_.*|ds_.*|return_dict|_?dtype|output_.*|.*_implementation(_internal)?|.*_token_ids?"
)

Fingerprint = dict[str, tuple[Any, ...]]
"""Name of a module or config -> its class and plain values."""


def clone(live: nn.Module) -> nn.Module:
    """Copy a model over the same storage, without hooks and the state of FSDP and ZeRO.

    What text alone does not run, such as a vision tower, is `None` in the copy.
    """
    copies = _Copies(live)
    for module in live.modules():
        copies.fill(module)
    tree: nn.Module = copies.of(live)
    for name in towers_of(live):
        parent, _, child = name.rpartition(".")
        setattr(tree.get_submodule(parent), child, None)
    return tree


class _Copies:
    """The copy of each original. Originals may refer to each other, so all copies exist first."""

    def __init__(self, live: nn.Module) -> None:
        # A sharded parameter becomes an empty one: the twin gets a whole copy later.
        pairs = ((p, _blank(p) if is_part(p) else alias(p)) for p in live.parameters())
        self._copies: dict[int, Any] = {id(parameter): copy for parameter, copy in pairs}
        configs = configs_of(live)
        for each in (*live.modules(), *configs):
            kind: Any = _plain_type(each)
            self._copies[id(each)] = kind.__new__(kind)
        for config in configs:
            vars(self._copies[id(config)]).update(self._attributes(config))

    def fill(self, module: nn.Module) -> None:
        """Give the copy of a module its attributes."""
        copy = self._copies[id(module)]
        vars(copy).update(self._attributes(module), training=False)
        for key in module._non_persistent_buffers_set:
            if (buffer := copy._buffers.get(key)) is not None:
                copy._buffers[key] = buffer.detach().clone()
        if hasattr(copy, _REPACKS):
            setattr(copy, _REPACKS, False)

    def of(self, value: Any) -> Any:
        """What the twin holds where the trainer's tree holds `value`."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, MethodType) and id(value.__self__) in self._copies:
            return MethodType(value.__func__, self.of(value.__self__))
        if type(value) is partial:
            return partial(
                self.of(value.func), *map(self.of, value.args), **self.of(value.keywords)
            )
        if type(value) in (tuple, set):
            return type(value)(map(self.of, value))
        if type(value) is list:
            copy = self._copies[id(value)] = []  # before its elements, which may hold the list
            copy.extend(map(self.of, value))
            return copy
        if type(value) in (dict, OrderedDict):
            copy = self._copies[id(value)] = type(value)()
            copy.update((key, self.of(each)) for key, each in value.items())
            return copy
        return value

    def _attributes(self, owner: Any) -> Iterator[tuple[str, Any]]:
        for key, value in vars(owner).items():
            if key in _LEFT_OUT or key.startswith(_FSDP_STATE):
                continue
            if key == "_parameters":
                # `dict.items`: ZeRO-3's own dict may gather a parameter when it is read.
                yield key, {name: self.of(each) for name, each in dict.items(value)}
            elif _HOOKS.search(key) and value:
                yield key, type(value)()  # hooks, too, would run the trainer's own modules
            else:
                yield key, self.of(value)


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


def fingerprint(base: nn.Module) -> Fingerprint:
    """All that the twin copies instead of sharing, but for buffers: if it changes, copy again."""
    modules = {name: (_plain_type(each), *_values(each)) for name, each in base.named_modules()}
    configs = {f"config {n}": (type(c), *_values(c)) for n, c in enumerate(configs_of(base))}
    return {**modules, **configs, "sharded": (is_sharded(base),)}


def first_change(before: Fingerprint, after: Fingerprint) -> str:
    """The first module or config, and its attributes, in which two fingerprints differ."""
    names = (name for name in {**after, **before} if before.get(name) != after.get(name))
    name = next(names, "nothing")
    values = set(before.get(name, ())) ^ set(after.get(name, ()))
    keys = dict.fromkeys(value[0] for value in values if isinstance(value, tuple))
    return f"{name or 'the model'}: {', '.join(keys) or 'its class'}"


def _plain_type(each: Any) -> type:
    """The object's class, before FSDP derived another one from it."""
    return type(each).__bases__[1] if isinstance(each, FSDPModule) else type(each)


def _values(owner: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of attributes that a rollout may depend on."""
    if type(owner) in _WITHOUT_VALUES:
        return
    for key, value in vars(owner).items():
        if type(value) in _FROZEN and _matters(key):
            yield key, value if type(value) in _PLAIN else _frozen(value)


@cache
def _matters(key: str) -> bool:
    return not (key in _LEFT_OUT or _PASSING.fullmatch(key) or key.startswith(_FSDP_STATE))


def _frozen(value: Any, depth: int = 4) -> Any:
    """A value that later changes leave as it is. Objects count by their class alone."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth and kind in (list, tuple):
        return tuple(_frozen(each, depth - 1) for each in value)
    if depth and kind in (dict, OrderedDict):
        return tuple((key, _frozen(each, depth - 1)) for key, each in value.items())
    return kind

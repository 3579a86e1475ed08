"""Finds hooks of the user's that change what a module computes. The twin runs without hooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

KNOWN = {"accelerate", "bitsandbytes", "deepspeed", "kernels", "liger_kernel", "peft", "rollout"}
KNOWN |= {"torch", "trainers", "transformers", "trl", "wandb"}
"""Packages whose hooks and patched forwards may run: without gradients they change no value, or the
twin does the same in its own way."""

Hook = Callable[..., Any]


@contextmanager
def watched_hooks(model: nn.Module) -> Iterator[list[str]]:
    """Watch the user's forward hooks inside the `with` block.

    Yields:
        A list, filled as the model runs: a sentence for each hook that changed an input or output.
    """
    changing: list[str] = []
    replaced: list[tuple[dict[int, Hook], int, Hook]] = []
    for name, module in model.named_modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                if package_of(hook) not in KNOWN:
                    replaced.append((hooks, key, hook))
                    where = f"{name or 'the model'} ({type(module).__name__})"
                    hooks[key] = _watched(hook, where, changing)
    try:
        yield changing
    finally:
        for hooks, key, hook in replaced:
            if key in hooks:  # a hook may remove itself
                hooks[key] = hook


def _watched(hook: Hook, where: str, changing: list[str]) -> Hook:
    def watched(module: nn.Module, *states: Any) -> Any:
        before = [leaf.clone() for leaf in _tensors(states)]
        result = hook(module, *states)
        after = _tensors(states)
        if result is not None:
            # A pre-hook may return one input alone, a forward hook returns the output.
            after = after[: len(before) - len(_tensors(result))] + _tensors(result)
        if not _equal(before, after):
            changing.append(f"{name_of(hook)}, a forward hook of {where}, changes what it computes")
        return result

    return watched


def _tensors(states: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(states) if isinstance(leaf, Tensor)]


def _equal(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether all numbers are equal; NaN equals NaN."""
    # SYNC: compares numbers, outside a rollout
    return len(before) == len(after) and all(
        old.shape == new.shape and torch.equal(old.nan_to_num(), new.nan_to_num())
        for old, new in zip(before, after, strict=True)
    )


def package_of(function: Any) -> str:
    """Top-level package in which a function, or the class of a callable object, was written."""
    function = unwrapped(function)
    # `functools.wraps` sets `__module__` to that of the function within.
    scope = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    return str(scope).partition(".")[0]


def name_of(function: Any) -> str:
    """Name of a function, or of the class of a callable object, with its module."""
    function = unwrapped(function)
    if isinstance(function, FunctionType):
        return f"{function.__globals__['__name__']}.{function.__code__.co_qualname}"
    return f"{type(function).__module__}.{type(function).__qualname__}"


def unwrapped(function: Any) -> Any:
    """The function under partials and bound methods."""
    while isinstance(function, partial | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    return function

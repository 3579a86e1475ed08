"""Finds hooks of the user's that change what a module computes. The twin runs without hooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# Hooks of these packages change no value in a forward without gradient, or the twin has its own
# way to do what they do.
_KNOWN = {"accelerate", "bitsandbytes", "deepspeed", "peft", "rollout", "torch", "trainers"}
_KNOWN |= {"transformers", "trl", "wandb"}

Hook = Callable[..., Any]


@contextmanager
def watched_hooks(model: nn.Module) -> Iterator[list[str]]:
    """Watch the user's forward hooks inside the `with` block.

    Yields:
        A list that comes to say of each hook that changed an input or an output: which module's,
        which function.
    """
    changing: list[str] = []
    replaced: list[tuple[dict[int, Hook], int, Hook]] = []
    for name, module in model.named_modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                if _package(hook) not in _KNOWN:
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
            changing.append(f"{_name(hook)}, a forward hook of {where}, changes what it computes")
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


def _package(hook: Hook) -> str:
    """Top-level package of the function that a hook calls."""
    return str(getattr(_function(hook), "__module__", "")).partition(".")[0]


def _name(hook: Hook) -> str:
    function = _function(hook)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}"


def _function(hook: Any) -> Any:
    """The function under partials and bound methods."""
    while (inner := getattr(hook, "func", None) or getattr(hook, "__func__", None)) is not None:
        hook = inner
    return hook

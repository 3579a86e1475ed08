"""Compiles decoder layers: one compilation for all layers and batch sizes."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from rollout.support import experts_of

# `emulate_precision_casts` rounds to 16 bit where the trainer's eager layers do. Without it the gap
# between the log-probabilities of rollout and trainer is a third larger (measured).
_CLOSE: dict[str, Any] = {"emulate_precision_casts": True, "triton.enable_pdl": True}


def compile_layers(base: nn.Module, *, exact: bool = False) -> None:
    """Compile each decoder layer of the twin that can be compiled, in its next forward.

    Call `number_layers` first. In exact mode, `replace_modules` must also have replaced all that
    torch.compile would round differently.
    """
    for layer in compiled_layers(base, exact=exact):
        layer.forward = partial(_run, _compile(type(layer).forward, exact), layer)


def compiled_layers(base: nn.Module, *, exact: bool) -> list[nn.Module]:
    """Decoder layers that can be compiled.

    In exact mode, layers with experts cannot: one bit can send a token to another expert.
    """
    return [layer for layer in decoder_layers(base) if not (exact and any(experts_of(layer)))]


def run_uncompiled(base: nn.Module) -> None:
    """Undo `compile_layers` in close mode. Exact mode needs a new tree instead."""
    for layer in decoder_layers(base):
        vars(layer).pop("forward", None)


def decoder_layers(base: nn.Module) -> Iterator[nn.Module]:
    """The repeated blocks of a decoder: modules that transformers never splits over devices."""
    names = set(getattr(base, "_no_split_modules", None) or ())
    return (module for module in base.modules() if type(module).__name__ in names)


def _run(compiled: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    states = args[0] if args else kwargs["hidden_states"]
    # torch.compile would specialise on 1 token. Decode never has 1, prefill hardly ever.
    run = compiled if states.shape[1] > 1 else type(layer).forward
    return run(layer, *args, **kwargs)


@cache
def _compile(forward: Callable[..., Any], exact: bool) -> Callable[..., Any]:
    """Compile once a layer class: weights are arguments, the number of tokens is symbolic."""
    options = _CLOSE
    if exact:
        from rollout.exact.compile import options  # the compiler takes a second to import
    return torch.compile(forward, dynamic=True, fullgraph=True, options=options)

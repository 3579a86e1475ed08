"""Decoder layers compiled once, for all layers and batch sizes, rounding as the trainer does."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from rollout.support import experts_of

# Without it the compiler keeps in float32 what the trainer's eager layers round to 16 bit on the
# way: measured, a third more distance between the log-probabilities of the two.
_CLOSE: dict[str, Any] = {"emulate_precision_casts": True, "triton.enable_pdl": True}


def compile_layers(base: nn.Module, *, exact: bool = False) -> None:
    """Let each decoder layer of the twin that can be compiled run so, from its next forward on.

    In exact mode `replace_modules` has replaced what a compiler would compute in another order or
    by another formula. `number_layers` has numbered the attention.
    """
    for layer in compiled_layers(base, exact=exact):
        layer.forward = partial(_run, _compile(type(layer).forward, exact), layer)


def compiled_layers(base: nn.Module, *, exact: bool) -> list[nn.Module]:
    """Decoder layers that can be compiled.

    In exact mode those with experts cannot: a last bit decides which expert a token goes to.
    """
    return [layer for layer in decoder_layers(base) if not (exact and any(experts_of(layer)))]


def run_uncompiled(base: nn.Module) -> None:
    """Let decoder layers that were to be compiled, and not in exact mode, run as they are."""
    for layer in decoder_layers(base):
        vars(layer).pop("forward", None)


def decoder_layers(base: nn.Module) -> Iterator[nn.Module]:
    """The blocks that a decoder repeats: what transformers never splits over devices."""
    names = set(getattr(base, "_no_split_modules", None) or ())
    return (module for module in base.modules() if type(module).__name__ in names)


def _run(compiled: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    states = args[0] if args else kwargs["hidden_states"]
    # A size of 1 would be compiled for itself; it is no decode's, and hardly ever a prefill's.
    run = compiled if states.shape[1] > 1 else type(layer).forward
    return run(layer, *args, **kwargs)


@cache
def _compile(forward: Callable[..., Any], exact: bool) -> Callable[..., Any]:
    """One compilation a class of layers: weights are arguments, the number of tokens a symbol."""
    options = _CLOSE
    if exact:
        from rollout.exact.compile import options  # the compiler takes a second to import
    return torch.compile(forward, dynamic=True, fullgraph=True, options=options)

"""Operators of the twin: functions that are one node to a compiler, which cannot look inside."""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("twinslot", "FRAGMENT")
_Function = Callable[..., Any]


def operator(fake: _Function) -> Callable[[_Function], _Function]:
    """Make a function an operator, without a gradient and with new tensors as its results.

    `torch.library.custom_op` does the same and checks each result for aliases: 15 us a call on a
    CPU, this 2, and a prefill calls five in each layer. The idea is vLLM's.

    Args:
        fake: The same function's results as far as shapes and dtypes go.
    """

    def register(function: _Function) -> _Function:
        name = function.__name__.strip("_")
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(f"{name}{schema}")
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"twinslot::{name}", fake, lib=_LIBRARY)
        made: _Function = getattr(torch.ops.twinslot, name).default
        return made

    return register

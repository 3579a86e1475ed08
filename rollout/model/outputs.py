"""Records what each module returns, to find the first module in which two forwards differ."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollout.model.compile import decoder_layers

Outputs = dict[str, Tensor]
"""Module name -> its output for some tokens, `(tokens, ...)`, in running order."""


@dataclass(frozen=True)
class Difference:
    """How two outputs of a module differ.

    Attributes:
        num_rows: Tokens whose outputs are not equal.
        largest: Largest absolute difference.
        relative: Root mean square of the difference over that of the outputs, of the worst token.
    """

    module: str
    num_rows: int
    largest: float
    relative: float


@contextmanager
def recorded(
    base: nn.Module, rows_of: Callable[[Tensor], Tensor], *, within_layers: bool = True
) -> Iterator[Outputs]:
    """Record the outputs of all modules in their last run.

    Args:
        rows_of: Picks the tokens from an output, `(batch, tokens, ...)`.
        within_layers: Also record the modules in decoder layers. Compiled layers do not run them.
    """
    outputs: Outputs = {}

    def record(name: str) -> Any:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor) and output.dim() > 2:
                outputs.pop(name, None)  # keep the order of the last run
                outputs[name] = rows_of(output).clone()

        return hook

    with ExitStack() as stack:
        hidden: set[nn.Module] = set()
        if not within_layers:
            hidden = {part for layer in decoder_layers(base) for part in layer.modules()}
            hidden -= set(decoder_layers(base))
        for name, module in base.named_modules():
            if name and module not in hidden:
                stack.callback(module.register_forward_hook(record(name)).remove)
        yield outputs


def compared(theirs: Outputs, ours: Outputs) -> Iterator[Difference]:
    """Compare the modules that both record, in the order of `ours`."""
    for name, output in ours.items():
        if name in theirs and theirs[name].shape == output.shape:
            yield difference(name, theirs[name], output)


def difference(name: str, theirs: Tensor, ours: Tensor) -> Difference:
    """Compare two outputs, `(tokens, ...)`. Infinities at the same places are equal."""
    theirs, ours = theirs.float().flatten(1), ours.float().flatten(1)
    gap = torch.where(theirs == ours, 0.0, ours - theirs)
    size = theirs.masked_fill(~theirs.isfinite(), 0.0).square().mean(1).sqrt()
    relative = (gap.square().mean(1).sqrt() / size.clamp(min=1e-30)).nan_to_num(nan=torch.inf)
    return Difference(
        name,
        int((gap != 0).any(dim=1).sum()),  # SYNC: compares numbers, outside a rollout
        float(gap.abs().max()),  # SYNC: as above
        float(relative.max()),  # SYNC: as above
    )

"""What exact mode asks of the trainer and of its products."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rollout.errors import UnsupportedModel
from rollout.exact.attention import EXACT_ATTENTION
from rollout.exact.linear import (
    InvariantShapes,
    Shape,
    batch_invariant_linear,
    patch_forwards,
)
from rollout.support import base_of, configs_of, experts_of, has_layers

logger = logging.getLogger(__name__)

# Batches of fewer rows are padded: below, cuBLASLt splits what it does not split above.
LEAST_ROWS = 32

# Rows of a product: every padded size of a rollout, and some of a prefill and of a trainer.
_SIZES = (*range(LEAST_ROWS, 256, 8), *range(256, 513, 16))
_SIZES += (777, 1024, 2048, 3000, 4096, 8192, 9600, 16_384)

# A product as wide as a vocabulary is looked at up to fewer rows, in 512 MiB of 16 bit.
_MOST_NUMBERS = 2**28


def prepare_trainer(model: nn.Module, shapes: InvariantShapes | None = None) -> Callable[[], None]:
    """Let the trainer's model compute what the rollout does.

    It attends by our kernel; positions count from a row's first real token, as they do in a
    rollout; and products go through cuBLASLt, whose rows do not depend on their number, or where
    they do through ours: those of the shapes that `batch_invariant_shapes` has found.

    Returns:
        What undoes it.

    Raises:
        UnsupportedModel: It has dropout, or 4-bit layers.
    """
    base: Any = base_of(model)
    _check_quantised(base)
    for name in _dropouts(model):
        raise UnsupportedModel(
            f"{name} has dropout, and a rollout has none; set it to 0, or on_policy='close'"
        )
    undo = ExitStack()
    undo.callback(_use_exact_attention(base))
    backbone = getattr(base, base.base_model_prefix)
    hook = backbone.register_forward_pre_hook(_count_positions, with_kwargs=True)
    undo.callback(hook.remove)
    library = _prefer_cublaslt(base)
    if library is not None:
        undo.callback(torch.backends.cuda.preferred_blas_library, library)
    undo.callback(patch_forwards(base, shapes or {}))
    logger.warning(
        "on_policy='exact': the trainer's model now attends by %s and counts positions from a "
        "row's first real token%s; detach() undoes it",
        EXACT_ATTENTION,
        "" if library is None else ", and products go through cuBLASLt or are never split",
    )
    return undo.close


def _use_exact_attention(base: Any) -> Callable[[], None]:
    """Let each attention layer attend by our kernel; what undoes it."""
    before = [(config, config._attn_implementation) for config in configs_of(base)]
    base.set_attn_implementation(EXACT_ATTENTION)
    for config, _ in before:
        config._attn_implementation = EXACT_ATTENTION

    def undo() -> None:
        for config, attention in before:
            config._attn_implementation = attention

    return undo


def _dropouts(model: nn.Module) -> Iterator[str]:
    """Names of what drops something while the trainer trains."""
    for name, module in model.named_modules():
        rate = module.p if isinstance(module, nn.Dropout) else 0.0
        if rate or getattr(module, "attention_dropout", 0.0):
            yield name


def _count_positions(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Positions from the mask, where the caller gives none: transformers would count padding."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is None and isinstance(mask, Tensor) and mask.dim() == 2:
        kwargs["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    return args, kwargs


def _prefer_cublaslt(base: nn.Module) -> Any:
    """Set it where the model lives on a GPU; what was set before."""
    if next(base.parameters()).device.type != "cuda":
        return None
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    return before


@torch.no_grad()
def batch_invariant_shapes(base: nn.Module) -> InvariantShapes:
    """See that a row of a product has the same bits whatever the number of rows.

    Each distinct shape of linear layer, the twin's fused ones and the trainer's own, is run at
    every size that a rollout or a trainer may have, on random numbers. Where cuBLASLt's products
    differ, ours take their place on both sides: below the size from which on its products have
    the same bits as ours, or always. cuBLASLt stays preferred in the process.

    Args:
        base: The twin's tree, on a GPU. To be called under the twin's autocast.

    Returns:
        The shapes whose products are ours.

    Raises:
        UnsupportedModel: It has 4-bit layers, or experts whose choice or products depend on how
            many rows meet.
    """
    device = next(base.parameters()).device
    _prefer_cublaslt(base)
    _check_quantised(base)
    _check_experts(base, device)
    shapes: dict[Shape, int] = {}
    for (shape, dtype), name in _products(base).items():
        library_rows = _library_rows(shape, dtype, device)
        if library_rows is not None:
            shapes[shape] = max(library_rows, shapes.get(shape, 0))
            rows = "any number of" if library_rows == sys.maxsize else f"up to {library_rows - 1}"
            text = "products like that of %s, %s, are split by their size: of %s rows ours run"
            logger.info(text, name, shape, rows)
    return shapes


def _check_quantised(base: nn.Module) -> None:
    if has_layers("Linear4bit", base):
        raise UnsupportedModel(
            "on_policy='exact': its 4-bit layers (bitsandbytes' Linear4bit) multiply one row by "
            "another kernel than many; load it in bfloat16, or on_policy='close'"
        )


def _check_experts(base: nn.Module, device: torch.device) -> None:
    """Refuse experts in float32, and routers whose products no kernel of ours replaces."""
    for name, parameter in experts_of(base):
        if parameter.dtype == torch.float32:
            raise UnsupportedModel(
                f"{name} are experts in float32, which autocast leaves so and whose products "
                "round by the number of rows; load the model in bfloat16, or on_policy='close'"
            )
    for (shape, dtype), name in _routers(base).items():
        if _library_rows(shape, dtype, device) is not None:
            raise UnsupportedModel(
                f"{name} chooses among {shape[0]} experts by a product that cuBLASLt splits by the "
                "number of rows; on_policy='close' runs it"
            )


def _routers(base: nn.Module) -> dict[tuple[Shape, torch.dtype], str]:
    """What multiplies by a matrix and is no linear layer, and the first module that does."""
    routers: dict[tuple[Shape, torch.dtype], str] = {}
    for name, module in base.named_modules():
        weight = module._parameters.get("weight")
        other = not isinstance(module, nn.Linear | nn.Embedding)
        if other and weight is not None and weight.dim() == 2:
            routers.setdefault(((weight.shape[0], weight.shape[1]), weight.dtype), name)
    return routers


def _products(base: nn.Module) -> dict[tuple[Shape, torch.dtype], str]:
    """What is multiplied by, alone as the trainer does and by groups, and the first layer to."""
    products: dict[tuple[Shape, torch.dtype], str] = {}
    for name, module in base.named_modules():
        if isinstance(module, nn.Linear):
            group = getattr(module, "group", None)  # the twin's projections
            for weight in (module.weight, getattr(group, "weight", None)):
                if weight is not None and weight.dtype.is_floating_point:
                    products.setdefault(((weight.shape[0], weight.shape[1]), weight.dtype), name)
    return products


def _library_rows(shape: Shape, dtype: torch.dtype, device: torch.device) -> int | None:
    """Rows from which on the library's bits are ours; `None`: it is batch-invariant itself."""
    generator = torch.Generator(device).manual_seed(0)
    outputs, inputs = shape
    sizes = [size for size in _SIZES if size * outputs <= _MOST_NUMBERS]
    weight = torch.randn(shape, generator=generator, device=device).to(dtype)
    states = torch.randn((sizes[-1], inputs), generator=generator, device=device).to(dtype)
    wanted = linear(states, weight)
    unequal = [s for s in sizes if not torch.equal(linear(states[:s], weight), wanted[:s])]
    if not unequal:
        return None
    ours = batch_invariant_linear(states[: sizes[0]], weight, None, sys.maxsize)
    alike = torch.equal(ours, wanted[: sizes[0]])
    return 2 * max(unequal) if alike else sys.maxsize

"""Exact mode: prepares the trainer's model, and finds products that are not batch-invariant."""

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
from rollout.support import base_of, configs_of, experts_of, has_layers, towers_of

logger = logging.getLogger(__name__)

# Smaller batches are padded: with fewer rows, cuBLASLt splits products that it otherwise does not.
LEAST_ROWS = 32

# Numbers of rows to try: every padded decode size, and some sizes of prefill and training.
_SIZES = (*range(LEAST_ROWS, 256, 8), *range(256, 513, 16))
_SIZES += (777, 1024, 2048, 3000, 4096, 8192, 9600, 16_384)

# Caps rows * outputs, 512 MiB in 16 bits, so that the head is tried with fewer rows.
_MOST_NUMBERS = 2**28


def prepare_trainer(model: nn.Module, shapes: InvariantShapes | None = None) -> Callable[[], None]:
    """Make the trainer's model compute what the rollout computes; return a function that undoes it.

    - Attention runs in the rollout's kernel.
    - Positions count from a row's first real token, as in a rollout, not from its padding.
    - Products run in cuBLASLt. Those of `shapes`, see `batch_invariant_shapes`, run in our kernel.

    Raises:
        UnsupportedModel: The model has dropout or 4-bit layers.
    """
    base: Any = base_of(model)
    _check_quantised(base)
    for name in _dropouts(base):
        raise UnsupportedModel(
            f"on_policy='exact': {name} has dropout and a rollout has none; set it to 0, or set "
            "on_policy='close'"
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
        "row's first real token%s. This is intended; detach() undoes it",
        EXACT_ATTENTION,
        "" if library is None else ", and multiplies by cuBLASLt or batch-invariant kernels",
    )
    return undo.close


def _use_exact_attention(base: Any) -> Callable[[], None]:
    """Switch all attention layers to our kernel; return a function that undoes it."""
    decoder = base.get_decoder()
    before = [(config, config._attn_implementation) for config in configs_of(decoder)]
    decoder.set_attn_implementation(EXACT_ATTENTION)
    for config, _ in before:
        config._attn_implementation = EXACT_ATTENTION

    def undo() -> None:
        for config, attention in before:
            config._attn_implementation = attention

    return undo


def _dropouts(base: nn.Module) -> Iterator[str]:
    """Names of modules with dropout in training mode."""
    towers = tuple(f"{name}." for name in towers_of(base))
    for name, module in base.named_modules():
        if f"{name}.".startswith(towers):
            continue
        rate = module.p if isinstance(module, nn.Dropout) else 0.0
        if rate or getattr(module, "attention_dropout", 0.0):
            yield name


def _count_positions(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add positions from the mask if the caller gave none: transformers would count padding."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is None and isinstance(mask, Tensor) and mask.dim() == 2:
        kwargs["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    return args, kwargs


def _prefer_cublaslt(base: nn.Module) -> Any:
    """Prefer cuBLASLt if the model is on a GPU; return the library preferred before."""
    if next(base.parameters()).device.type != "cuda":
        return None
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    return before


@torch.no_grad()
def batch_invariant_shapes(base: nn.Module) -> InvariantShapes:
    """Find the shapes of linear layers whose cuBLASLt products depend on the number of rows.

    Runs each shape, of single and of joined layers, on random numbers with every number of rows
    that rollout and training may use. Call it under the twin's autocast. cuBLASLt stays preferred
    in this process.

    Args:
        base: The twin's tree, on a GPU.

    Raises:
        UnsupportedModel: The model has 4-bit layers, or experts whose routing or products depend on
            the number of rows.
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
            text = "%s %s: the batch size changes cuBLASLt's bits, so our kernel runs %s rows"
            logger.info(text, name, shape, rows)
    return shapes


def _check_quantised(base: nn.Module) -> None:
    if has_layers("Linear4bit", base):
        raise UnsupportedModel(
            "on_policy='exact': 4-bit layers (bitsandbytes' Linear4bit) multiply one row in "
            "another kernel than many rows; load the model in bfloat16, or set on_policy='close'"
        )


def _check_experts(base: nn.Module, device: torch.device) -> None:
    """Refuse float32 experts, and routers whose products depend on the number of rows."""
    for name, parameter in experts_of(base):
        if parameter.dtype == torch.float32:
            raise UnsupportedModel(
                f"on_policy='exact': {name} holds experts in float32, whose products round by the "
                "number of rows; load the model in bfloat16, or set on_policy='close'"
            )
    for (shape, dtype), name in _routers(base).items():
        if _library_rows(shape, dtype, device) is not None:
            raise UnsupportedModel(
                f"on_policy='exact': {name} routes to {shape[0]} experts by a product that "
                "cuBLASLt splits by the number of rows; set on_policy='close'"
            )


def _routers(base: nn.Module) -> dict[tuple[Shape, torch.dtype], str]:
    """Shape and dtype of each matrix outside linear layers, and the first module that has it."""
    routers: dict[tuple[Shape, torch.dtype], str] = {}
    for name, module in base.named_modules():
        weight = module._parameters.get("weight")
        other = not isinstance(module, nn.Linear | nn.Embedding)
        if other and weight is not None and weight.dim() == 2:
            routers.setdefault(((weight.shape[0], weight.shape[1]), weight.dtype), name)
    return routers


def _products(base: nn.Module) -> dict[tuple[Shape, torch.dtype], str]:
    """Shape and dtype of each linear product, single or joined, and the first layer that has it."""
    products: dict[tuple[Shape, torch.dtype], str] = {}
    for name, module in base.named_modules():
        weights = [module.weight] if isinstance(module, nn.Linear) else []
        group = getattr(module, "group", None)  # the twin's projections, with or without adapters
        for weight in weights + ([] if group is None else group.products):
            if weight.dtype.is_floating_point:
                products.setdefault(((weight.shape[0], weight.shape[1]), weight.dtype), name)
    return products


def _library_rows(shape: Shape, dtype: torch.dtype, device: torch.device) -> int | None:
    """Rows from which cuBLASLt's bits equal our kernel's; `None`: it is batch-invariant itself."""
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

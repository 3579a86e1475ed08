"""What exact mode asks of the trainer and of its products, and where the two first differ."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rollout.errors import UnsupportedModel
from rollout.narrow import narrow_linear
from rollout.support import base_of
from rollout.trainer_attention import EXACT_ATTENTION
from rollout.twin import Twin

logger = logging.getLogger(__name__)

# Padded sizes to be looked at, and the tokens of a product as the trainer runs it.
_SIZES = (32, 64, 128, 256, 512)
_TRAINER_TOKENS = 2048


def prepare_trainer(model: nn.Module) -> Callable[[], None]:
    """Let the trainer's model compute what the rollout does.

    It attends by our kernel; positions count from a row's first real token, as they do in a
    rollout; and products go through cuBLASLt, whose rows do not depend on their number.

    Args:
        model: The trainer's model, perhaps with PEFT adapters.

    Returns:
        What undoes it.

    Raises:
        UnsupportedModel: It has dropout.
    """
    base: Any = base_of(model)
    for name in _dropouts(model):
        raise UnsupportedModel(
            f"{name} has dropout, and a rollout has none; set it to 0, or on_policy='close'"
        )
    before = base.config._attn_implementation
    base.set_attn_implementation(EXACT_ATTENTION)
    backbone = getattr(base, base.base_model_prefix)
    hook = backbone.register_forward_pre_hook(_count_positions, with_kwargs=True)
    library = _prefer_cublaslt(base)
    logger.warning(
        "on_policy='exact': the trainer's model now attends by %s and counts positions from a "
        "row's first real token%s; detach() undoes it",
        EXACT_ATTENTION,
        "" if library is None else ", and products go through cuBLASLt",
    )

    def undo() -> None:
        base.set_attn_implementation(before)
        hook.remove()
        if library is not None:
            torch.backends.cuda.preferred_blas_library(library)

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
def make_exact(twin: Twin) -> int:
    """See that each row of every product is the trainer's, whatever the number of rows.

    Each distinct shape of linear layer is run at padded sizes and at a trainer's, on random
    numbers. Where cuBLASLt splits a product, ours is tried; where that does not help, smaller
    batches are padded. Layers that still differ are named. cuBLASLt stays preferred in the process.

    Args:
        twin: On a GPU.

    Returns:
        The size that smaller batches are padded to.
    """
    _prefer_cublaslt(twin.base)
    least, unsplit = _SIZES[0], set()
    with twin.autocast():
        for name, weight, parts in _products(twin.base):
            wanted, states = _as_the_trainer(weight, parts)
            if not (unequal := _unequal(linear, states, weight, wanted)):
                continue
            shape = (weight.shape[0], weight.shape[1])
            if not (still := _unequal(_unsplit, states, weight, wanted)):
                unsplit.add(shape)
                continue
            least = max(least, next((s for s in _SIZES if s > max(unequal)), _SIZES[-1]))
            remedy = f"smaller batches are padded to {least} rows"
            if max(unequal) == _SIZES[-1]:
                remedy = "rollouts of this model are close, not exact"
            text = "products of %s, %s, differ from the trainer's at %s rows (%s unsplit): %s"
            logger.warning(text, name, shape, unequal, still, remedy)
    if unsplit:
        logger.info("unsplit products for shapes %s", sorted(unsplit))
        twin.use_unsplit_products(unsplit)
    return least


def _products(base: nn.Module) -> Iterator[tuple[str, Tensor, list[int]]]:
    """One layer's name for each shape and dtype, what it is multiplied by, and the trainer's parts.

    The trainer multiplies one after the other what the twin multiplies at once.
    """
    seen = set()
    for name, module in base.named_modules():
        product = getattr(module, "product", module)
        weight = getattr(product, "weight", None)
        if isinstance(module, nn.Linear) and isinstance(weight, Tensor):
            parts = getattr(product, "sizes", [len(weight)])
            kind = (tuple(weight.shape), weight.dtype, tuple(parts))
            if kind not in seen:
                seen.add(kind)
                yield name, weight, parts


def _as_the_trainer(weight: Tensor, parts: list[int]) -> tuple[Tensor, Tensor]:
    """A product of the trainer's size, one part after the other, and the states it is of."""
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (_TRAINER_TOKENS, weight.shape[1])
    states = torch.randn(shape, generator=generator, device=weight.device).to(weight.dtype)
    return torch.cat([linear(states, part) for part in weight.split(parts)], dim=1), states


def _unequal(multiply: Any, states: Tensor, weight: Tensor, wanted: Tensor) -> list[int]:
    """Sizes at which a product's rows are not the wanted ones."""
    return [s for s in _SIZES if not torch.equal(multiply(states[:s], weight), wanted[:s])]


def _unsplit(states: Tensor, weight: Tensor) -> Tensor:
    return narrow_linear(states, weight, None)

"""The trainer's attention in exact mode: bit-equal to the rollout's, with a backward.

Shape letters: B rows, T tokens of a row or all of them packed, N runs, H query heads, K key/value
heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rollout.errors import UnsupportedModel
from rollout.kernels import cudnn, flash
from rollout.kernels.paged_attention import attend

EXACT_ATTENTION = "twinslot_exact"


@torch.library.custom_op("twinslot::exact_attention", mutates_args=())
def exact_attention(
    query_THD: Tensor,
    keys_TKD: Tensor,
    values_TKD: Tensor,
    runs_N4: Tensor,
    longest: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Causal attention within runs of packed tokens. A run is one sequence.

    Args:
        runs_N4: 0, first token, number of tokens, 0 of each run, int64.
        longest: Upper bound of tokens in a run.
        window: Tokens that a query sees, itself included. `None`: all.
        sinks_H: Attention sinks: an extra score for each head, without a value.

    Returns:
        `(T, H, D)`, and the log-sum-exp of each query's scores, `(H, T)`, float32. Tokens outside
        all runs get 0 and inf.
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    if query_THD.is_cuda:
        from rollout.kernels import paged_attention_triton as kernels  # may be missing on a CPU

        states = (keys_TKD.contiguous(), values_TKD.contiguous())
        options |= {"longest": longest, "sinks_H": sinks_H, "with_lse": True}
        output, lse_HT = kernels.attend_runs(query_THD, states, runs_N4, **options)
        assert lse_HT is not None
        return output, lse_HT
    output = torch.zeros_like(query_THD, memory_format=torch.contiguous_format)
    for run in _slices(runs_N4):
        query, keys, values = query_THD[run], keys_TKD[run], values_TKD[run]
        output[run] = _definition(query, keys, values, sinks_H, **options)
    # The backward of the plain definition does not read the log-sum-exp.
    return output, output.new_full((query_THD.shape[1], len(query_THD)), torch.inf).float()


@exact_attention.register_fake
def _(query_THD: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    output = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
    shape = (query_THD.shape[1], query_THD.shape[0])
    return output, query_THD.new_empty(shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, keys, values, runs, longest, scale, window, softcap, sinks = inputs
    ctx.save_for_backward(query, keys, values, *output, runs, sinks)
    ctx.longest = longest
    ctx.options = {"scale": scale, "window": window, "softcap": softcap}


def _differentiate(ctx: Any, gradient_THD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients by cuDNN's or torch's flash backward, from our output and log-sum-exp.

    If neither supports the heads or scores, the plain definition runs. Its scores take memory
    quadratic in the length of a run.
    """
    query, keys, values, output, lse_HT, runs_N4, sinks_H = ctx.saved_tensors
    saved, options = (query, keys, values, output, lse_HT), dict(ctx.options)
    softcap = options.pop("softcap")
    in_rows = len(runs_N4) * ctx.longest == len(query)  # and not packed
    if not query.is_cuda or not flash.serves(query, softcap, sinks_H):
        inputs = (query, keys, values, sinks_H)
        gradients = _by_definition(gradient_THD, inputs, runs_N4, ctx.options)
    elif in_rows and cudnn.serves(query, options["window"]):
        scale = options["scale"]
        gradients = cudnn.backward_rows(gradient_THD, *saved, runs_N4[:, 1], scale=scale)
    else:
        options |= {"longest": ctx.longest}
        bounds = _bounds(runs_N4, len(query))
        gradients = flash.backward_packed(gradient_THD.contiguous(), *saved, bounds, **options)
    sinks = gradients[3] if sinks_H is not None else None
    return (*gradients[:3], None, None, None, None, None, sinks)


def _by_definition(
    gradient_THD: Tensor,
    inputs: tuple[Tensor | None, ...],
    runs_N4: Tensor,
    options: dict[str, Any],
) -> list[Tensor]:
    """Gradients of queries, keys, values and any sinks, run by run."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs if tensor is not None]
    gradients = [torch.zeros_like(leaf) for leaf in leaves]
    for run in _slices(runs_N4):
        with torch.enable_grad():
            query, keys, values = (leaf[run] for leaf in leaves[:3])
            sinks_H = leaves[3] if len(leaves) > 3 else None
            output = _definition(query, keys, values, sinks_H, **options)
        parts = torch.autograd.grad(output, leaves, gradient_THD[run])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient += part
    return gradients


exact_attention.register_autograd(_differentiate, setup_context=_save)


def _definition(
    query_THD: Tensor, keys_TKD: Tensor, values_TKD: Tensor, sinks_H: Tensor | None, **options: Any
) -> Tensor:
    """Attend within one run by the plain-torch function that defines the rollout's attention."""
    positions = torch.arange(len(query_THD), device=query_THD.device)[None]
    states = (query_THD[None], keys_TKD[None], values_TKD[None])
    return attend(*states, positions, sinks_H=sinks_H, **options)[0]


def _slices(runs_N4: Tensor) -> list[slice]:
    spans = runs_N4[:, 1:3].tolist()  # SYNC: the plain definition loops over runs on the host
    return [slice(start, start + count) for start, count in spans if count]


def _bounds(runs_N4: Tensor, num_tokens: int) -> Tensor:
    """Starts of all runs and of the padding between them, and the end of the last, `(2N + 2,)`."""
    starts, counts = runs_N4[:, 1], runs_N4[:, 2]
    inner = torch.stack([starts, starts + counts], dim=1).flatten()
    zero = inner.new_zeros(1)
    return torch.cat([zero, inner, zero + num_tokens])


def exact_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers calls this in each attention layer of the trainer's model.

    `query` is `(B, H, T, D)`; `key` and `value` are `(B, K, T, D)`; the output is `(B, T, H, D)`.

    Args:
        module: The attention layer.
        attention_mask: `(B, T)`, true for real tokens, which are contiguous in each row. `None`:
            all tokens are real.
        s_aux: Attention sinks, `(H,)` (gpt-oss).
        cu_seq_lens_q: Starts of packed sequences and the end of the last one, with B = 1.
        others: Do not change the result.

    Raises:
        UnsupportedModel: The rollout cannot compute the same.
    """
    batch, _, tokens, dim = query.shape
    if dropout or key.shape[2] != tokens:
        reason = f"dropout={dropout}" if dropout else "a KV cache"
        raise UnsupportedModel(
            f"{type(module).__name__}: on_policy='exact' cannot train with {reason}; set "
            "dropout to 0 and use_cache=False, or set on_policy='close'"
        )
    runs_N4 = _runs(attention_mask, cu_seq_lens_q, batch, tokens, query.device)
    query_THD, keys_TKD, values_TKD = (
        states.transpose(1, 2).flatten(0, 1).to(value.dtype) for states in (query, key, value)
    )
    scale = scaling if scaling is not None else dim**-0.5
    options = (tokens, scale, sliding_window, softcap, s_aux)
    output, _ = exact_attention(query_THD, keys_TKD, values_TKD, runs_N4, *options)
    return output.unflatten(0, (batch, tokens)), None


def _runs(
    mask_BT: Tensor | None, bounds: Tensor | None, batch: int, tokens: int, device: torch.device
) -> Tensor:
    """Runs of real tokens in a batch, as `exact_attention` takes them."""
    if bounds is not None:
        starts, counts = bounds[:-1].long(), bounds.diff().long()
    else:
        starts = torch.arange(batch, device=device) * tokens
        counts = torch.full_like(starts, tokens)
        if mask_BT is not None:
            real = mask_BT.bool()
            starts, counts = starts + real.int().argmax(1), real.sum(1)
    zeros = torch.zeros_like(starts)
    return torch.stack([zeros, starts, counts, zeros], dim=1)


def _padding_mask(*_: Any, attention_mask: Tensor | None = None, **others: Any) -> Tensor | None:
    """Hand the batch's own mask, `(B, T)`, to the attention function; build no 4-D mask."""
    return attention_mask


AttentionInterface.register(EXACT_ATTENTION, exact_attention_forward)
AttentionMaskInterface.register(EXACT_ATTENTION, _padding_mask)

"""What tokens cost at least: bytes that have to move, operations that have to run."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from rollout.support import experts_of

# Dense bf16 operations a second by their makers' data sheets; the first name that fits counts.
_PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "B100": 1.75e15,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}


_COPY_BYTES, _COPIES = 2**28, 20  # of one copy, and how many


def copy_bandwidth(source: str, target: str) -> float:
    """Bytes a second that copies move; within one device, read and write are both counted.

    Args:
        source: Device to copy from, `cpu` or `cuda`.
        target: Device to copy to.
    """
    on_gpu = "cuda" in (source, target)
    origin = torch.ones(_COPY_BYTES // 4, device=source, pin_memory=on_gpu and source == "cpu")
    copy = torch.empty(_COPY_BYTES // 4, device=target)
    copy.copy_(origin, non_blocking=True)  # warm up
    if on_gpu:
        torch.cuda.current_stream().synchronize()  # SYNC: a measurement, nothing is served
    began = time.perf_counter()
    for _ in range(_COPIES):
        copy.copy_(origin, non_blocking=True)
    if on_gpu:
        torch.cuda.current_stream().synchronize()  # SYNC: as above
    seconds = time.perf_counter() - began
    return _COPIES * _COPY_BYTES * (2 if source == target else 1) / seconds


def peak_operations(device_name: str) -> float | None:
    """Dense bf16 operations a second of a GPU by name, sparsity not counted; `None`: not known."""
    spaced = device_name.replace("-", " ")
    return next((peak for name, peak in _PEAKS.items() if f"{name} " in f"{spaced} "), None)


def contexts(prompt_tokens: Sequence[int], new_tokens: Sequence[int]) -> int:
    """Tokens whose keys and values decoding reads: for each new token, all of its row before it.

    Args:
        prompt_tokens: Of each row.
        new_tokens: Likewise.
    """
    prompts, rows = np.array(prompt_tokens, np.int64), np.array(new_tokens, np.int64)
    return int((rows * prompts + rows * (rows - 1) // 2).sum())


@dataclass(frozen=True)
class Cost:
    """What a model's tokens cost at least.

    Attention's share is that of full attention; a window needs less.

    Attributes:
        weight_bytes: Weights that a step reads: all but the input embedding, all experts included.
        kv_token_bytes: One token's keys and values.
        token_operations: Of one token's products: 2 a weight that it meets, so of experts those
            that it is sent to.
        context_operations: Of one token's attention, for each token in its context: 4 a layer,
            query head and head dimension.
    """

    weight_bytes: int
    kv_token_bytes: int
    token_operations: int
    context_operations: int

    @classmethod
    def of(cls, base: nn.Module, kv_token_bytes: int) -> Self:
        """That of a transformers model, with the weights as it holds them."""
        model: Any = base
        config, embedding = model.config, model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        # Where they are tied, the trainer has one parameter for both, and the twin may have two.
        read = [p for p in base.parameters() if p is head or p is not embedding]
        met = 2 * sum(p.numel() for p in read if p.dim() > 1)
        idle = 2 * sum(expert.numel() for _, expert in experts_of(base)) * _unmet_share(config)
        head_dim = getattr(config, "head_dim", None)
        heads = config.num_attention_heads
        width = heads * head_dim if head_dim else config.hidden_size
        return cls(
            weight_bytes=sum(p.nbytes for p in read),
            kv_token_bytes=kv_token_bytes,
            token_operations=int(met - idle),
            context_operations=4 * config.num_hidden_layers * width,
        )

    def decode_bytes(self, steps: int, num_contexts: int) -> int:
        """Bytes that decoding moves: in each step the weights, and what `contexts` counts."""
        return steps * self.weight_bytes + num_contexts * self.kv_token_bytes

    def operations(self, num_tokens: int, num_contexts: int) -> int:
        """Operations of so many tokens, and of their attention to as many in all their contexts."""
        return num_tokens * self.token_operations + num_contexts * self.context_operations


def _unmet_share(config: Any) -> float:
    """Share of the experts that a token is not sent to."""
    names = ("num_experts", "num_local_experts")
    num_experts = next((n for n in (getattr(config, name, None) for name in names) if n), None)
    return 1 - config.num_experts_per_tok / num_experts if num_experts else 0.0

"""The least that tokens cost: bytes to move, operations to run."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from rollout.support import attending_layers, experts_of, text_config_of, towers_of

# Dense bf16 operations a second, from data sheets; the first name that matches is used.
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


_COPY_BYTES, _COPIES = 2**28, 20  # bytes of one copy, number of copies


def copy_bandwidth(source: str, target: str) -> float:
    """Measured bytes a second of copies; within one device, reads and writes both count."""
    on_gpu = "cuda" in (source, target)
    origin = torch.ones(_COPY_BYTES // 4, device=source, pin_memory=on_gpu and source == "cpu")
    copy = torch.empty(_COPY_BYTES // 4, device=target)
    copy.copy_(origin, non_blocking=True)  # warm up
    if on_gpu:
        torch.cuda.current_stream().synchronize()  # SYNC: a measurement, no rollout runs
    began = time.perf_counter()
    for _ in range(_COPIES):
        copy.copy_(origin, non_blocking=True)
    if on_gpu:
        torch.cuda.current_stream().synchronize()  # SYNC: the end of the measurement
    seconds = time.perf_counter() - began
    return _COPIES * _COPY_BYTES * (2 if source == target else 1) / seconds


def peak_operations(device_name: str) -> float | None:
    """Dense bf16 operations a second by a GPU's name; `None` if it is unknown."""
    spaced = device_name.replace("-", " ")
    return next((peak for name, peak in _PEAKS.items() if f"{name} " in f"{spaced} "), None)


def contexts(prompt_tokens: Sequence[int], new_tokens: Sequence[int]) -> int:
    """Tokens whose KV decoding reads: for each new token, all tokens of its row before it."""
    prompts, rows = np.array(prompt_tokens, np.int64), np.array(new_tokens, np.int64)
    return int((rows * prompts + rows * (rows - 1) // 2).sum())


@dataclass(frozen=True)
class Cost:
    """The least that a model's tokens cost, with full attention in every attending layer.

    Attributes:
        weight_bytes: Weights that a step reads: all but the input embedding; all experts count.
        kv_token_bytes: Keys and values of one token.
        token_operations: 2 for each weight that a token meets; experts not chosen do not count.
        context_operations: Of one token's attention, for each token in its context: 4 a layer,
            query head and head dimension. Recurrent states do not count.
        state_bytes: Recurrent states of a row that a decode step reads and writes.
    """

    weight_bytes: int
    kv_token_bytes: int
    token_operations: int
    context_operations: int
    state_bytes: int = 0

    @classmethod
    def of(cls, base: nn.Module, kv_token_bytes: int, lane_bytes: int = 0) -> Self:
        """Cost of a transformers model, with weights in the dtypes that it has.

        `lane_bytes` are the recurrent states of one row.
        """
        model: Any = base
        config, embedding = text_config_of(base), model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        # If they are tied, one parameter is both, and the head still reads it.
        towers = {p for n in towers_of(base) for p in base.get_submodule(n).parameters()}
        text = [p for p in base.parameters() if p not in towers]
        read = [p for p in text if p is head or p is not embedding]
        met = 2 * sum(p.numel() for p in read if p.dim() > 1)
        experts = (expert for _, expert in experts_of(base) if expert not in towers)
        idle = 2 * sum(expert.numel() for expert in experts) * _unmet_share(config)
        head_dim = getattr(config, "head_dim", None)
        heads = config.num_attention_heads
        width = heads * head_dim if head_dim else config.hidden_size
        return cls(
            weight_bytes=sum(p.nbytes for p in read),
            kv_token_bytes=kv_token_bytes,
            token_operations=int(met - idle),
            context_operations=4 * len(attending_layers(base)) * width,
            state_bytes=2 * lane_bytes,
        )

    def decode_bytes(self, steps: int, num_tokens: int, num_contexts: int) -> int:
        """Bytes that decoding moves.

        These are the weights in each step, the state of its row for each new token, and the KV of
        `num_contexts` tokens.
        """
        state = num_tokens * self.state_bytes
        return steps * self.weight_bytes + state + num_contexts * self.kv_token_bytes

    def operations(self, num_tokens: int, num_contexts: int) -> int:
        """Operations of `num_tokens` that attend to `num_contexts` tokens in all."""
        return num_tokens * self.token_operations + num_contexts * self.context_operations


def _unmet_share(config: Any) -> float:
    """Share of the experts that a token does not use."""
    names = ("num_experts", "num_local_experts")
    num_experts = next((n for n in (getattr(config, name, None) for name in names) if n), None)
    return 1 - config.num_experts_per_tok / num_experts if num_experts else 0.0

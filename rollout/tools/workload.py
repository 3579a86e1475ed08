"""The benchmark's workload: a model, rows and lengths, and the least time they need."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.errors import ConfigError
from rollout.model.twin import Twin
from rollout.support import base_of, text_config_of
from rollout.telemetry.roofline import Cost, contexts

_QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}
SHAPES["qwen3.5-9b"] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
LENGTHS = ("fixed", "lognormal")
MODEL_HELP = f"{', '.join(SHAPES)}, or a Hub name or folder with a config"
_SIGMA = 0.8  # of log lengths: the middle half spans a factor of 3


@dataclass(frozen=True)
class Workload:
    """Rows that are all submitted at once.

    Attributes:
        new_tokens: Tokens of the longest completion.
        bandwidth: Bytes a second that a copy on the device moves, reads and writes counted.
        lengths: `fixed`, or `lognormal`: a median of `new_tokens / 4`, at most `new_tokens`.
        kv_bytes: Limit of KV memory. `None`: each mode's default.
    """

    model: nn.Module
    rows: int
    prompt_tokens: int
    new_tokens: int
    bandwidth: float
    lengths: str = "fixed"
    kv_bytes: int | None = None
    fuse_projections: bool | None = None
    on_policy: str = "close"

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Token ids, different in each row."""
        vocab_size = text_config_of(base_of(self.model)).vocab_size
        shape = (self.rows, self.prompt_tokens)
        ids: Any = np.random.default_rng(0).integers(vocab_size, size=shape)
        return ids.tolist()  # SYNC: on the CPU, nothing waits

    @cached_property
    def row_tokens(self) -> list[int]:
        """New tokens of each row."""
        if self.lengths == "fixed":
            return [self.new_tokens] * self.rows
        normal = np.random.default_rng(1).normal(size=self.rows)
        drawn = self.new_tokens / 4 * np.exp(_SIGMA * normal)
        return [max(1, min(self.new_tokens, int(length))) for length in drawn]

    @cached_property
    def cost(self) -> Cost:
        """The least that its tokens cost."""
        twin = Twin(self.model)
        states, kv_token_bytes = twin.state_layout(), twin.kv_layout(page_tokens=1).page_bytes
        lane_bytes = 0 if states is None else states.lane_bytes
        return Cost.of(base_of(self.model), kv_token_bytes, lane_bytes)

    def floor_s(self, steps: int, row_tokens: Sequence[int] | None = None) -> float:
        """Seconds to move the bytes of decoding; `row_tokens` are the workload's by default."""
        rows = self.row_tokens if row_tokens is None else row_tokens
        read = contexts([self.prompt_tokens] * len(rows), rows)
        return self.cost.decode_bytes(steps, sum(rows), read) / self.bandwidth


def build_model(name: str, device: torch.device, lora_rank: int = 0) -> nn.Module:
    """A model with random weights, bf16 on a GPU, else float32; LoRA adapters stay unmerged."""
    if name in SHAPES:
        config = AutoConfig.for_model(**{"max_position_embeddings": 40_960, **SHAPES[name]})
    else:
        try:
            config = AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--model {name}: no config found, use {MODEL_HELP}") from error
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"--model {name}: {config.model_type} is not a causal language model")
    with device:
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        return _with_adapters(model, lora_rank) if lora_rank else model


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model  # the engine does not need it
    except ImportError as error:
        raise ConfigError("--lora-rank needs PEFT: pip install peft") from error
    config = LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config, autocast_adapter_dtype=False).eval()

"""What the benchmark runs: a model, rows and lengths, and the least time they can take."""

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
from rollout.support import base_of
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
LENGTHS = ("fixed", "lognormal")
MODEL_HELP = f"{', '.join(SHAPES)}, or a name or folder with a config"
_SIGMA = 0.8  # of the logarithm of a length: the middle half lies within a factor of 3


@dataclass(frozen=True)
class Workload:
    """Rows that are all asked for at once.

    Attributes:
        model: Random weights.
        rows: Completions.
        prompt_tokens: Tokens of each prompt.
        new_tokens: Tokens of the longest completion.
        bandwidth: Bytes a second that a copy on the device moves, read and write counted.
        lengths: `fixed`, or `lognormal`: the median a quarter of `new_tokens`, none longer.
        kv_bytes: Most memory for keys and values. `None`: what each mode takes by default.
        fuse_projections: See `EngineConfig`.
        on_policy: Likewise.
    """

    model: nn.Module
    rows: int
    prompt_tokens: int
    new_tokens: int
    bandwidth: float
    lengths: str = "fixed"
    kv_bytes: int | None = None
    fuse_projections: bool = False
    on_policy: str = "close"

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Token ids, different in each row."""
        config: Any = base_of(self.model).config
        shape = (self.rows, self.prompt_tokens)
        ids: Any = np.random.default_rng(0).integers(config.vocab_size, size=shape)
        return ids.tolist()  # SYNC: an array of the host's

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
        """What its tokens cost at least."""
        kv_token_bytes = Twin(self.model).kv_layout(page_tokens=1).page_bytes
        return Cost.of(base_of(self.model), kv_token_bytes)

    def floor_s(self, steps: int, row_tokens: Sequence[int] | None = None) -> float:
        """Seconds that the bytes of decoding need at the measured bandwidth.

        Args:
            steps: Decode steps, each of which reads every weight.
            row_tokens: New tokens of each row, `row_tokens` by default; a row's step reads the
                keys and values of all its tokens so far.
        """
        rows = self.row_tokens if row_tokens is None else row_tokens
        read = contexts([self.prompt_tokens] * len(rows), rows)
        return self.cost.decode_bytes(steps, read) / self.bandwidth


def build_model(name: str, device: torch.device, lora_rank: int = 0) -> nn.Module:
    """A model with random weights.

    Args:
        name: One of `SHAPES`, or a name or folder with a config.
        device: Where to; bf16 on a GPU, else float32.
        lora_rank: Rank of unmerged adapters on every linear layer; 0 for none.

    Raises:
        ConfigError: No such shape, and no config under that name, or one of another kind of model.
    """
    if name in SHAPES:
        config = AutoConfig.for_model(**{"max_position_embeddings": 40_960, **SHAPES[name]})
    else:
        try:
            config = AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--model {name}: neither one of {', '.join(SHAPES)} nor a name or folder with a "
                "config"
            ) from error
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"--model {name}: a {config.model_type} is no causal language model")
    with device:
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        return _with_adapters(model, lora_rank) if lora_rank else model


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model  # the engine itself does not know it
    except ImportError as error:
        raise ConfigError("--lora-rank needs PEFT: pip install peft") from error
    config = LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config, autocast_adapter_dtype=False).eval()

"""Small random models of every supported family, and their plain forward."""

import string
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from rollout import RolloutEngine, SamplingParams

VOCAB, EOS = 61, 7

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
_MIXED_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 5},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": _MIXED_WINDOWS,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 12,
    },
    "gemma3_text": {"head_dim": 16, "sliding_window": 5, "layer_types": _MIXED_WINDOWS},
    "cohere": {"logit_scale": 0.5},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "qwen3_moe": {"head_dim": 16, **_EXPERTS},
    "gpt_oss": {  # attention sinks
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": _MIXED_WINDOWS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}


def build(family: str = "qwen3", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model with weights large enough for clear choices."""
    config = AutoConfig.for_model(family, **{**_SHAPE, **FAMILIES.get(family, {}), **changes})
    config._attn_implementation = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=config._attn_implementation
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            elif name.endswith("sinks"):
                parameter.uniform_(-1.0, 3.0)
    return model


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """`model.generate` on one prompt, greedily."""
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@torch.no_grad()
def logprobs(
    model: PreTrainedModel, prompt: list[int], completion: list[int], temperature: float = 1.0
) -> Tensor:
    """Log-probability of each completion token by one full forward."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    scores = (logits / temperature).log_softmax(-1)
    return scores.gather(1, torch.tensor(completion)[:, None])[:, 0]


def prompts(count: int, longest: int = 14, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(8, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def assert_on_policy(engine: RolloutEngine, model: torch.nn.Module) -> None:
    """Assert that the engine's log-probabilities are those of the model's forward now."""
    model.eval()
    for prompt in prompts(3, seed=9):
        (completion,) = engine.generate([prompt], SamplingParams(max_new_tokens=6))
        wanted = logprobs(model, prompt, completion.token_ids)
        assert completion.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)


def tokenizer() -> PreTrainedTokenizerFast:
    """One character per token, with the EOS and padding ids of `build`."""
    characters = list(string.ascii_letters + string.digits)
    words = ["<pad>", "<bos>", "<unk>", *characters[:4], "<eos>", *characters[4:]][:VOCAB]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def dataset(size: int = 64) -> Dataset:
    return Dataset.from_list([{"prompt": "xyzabcdef"[: 2 + i % 7]} for i in range(size)])

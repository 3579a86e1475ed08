"""A tiny task: the model must answer `a*5=` with `aaaaa` and `<eos>`. Nothing is downloaded."""

import random
from typing import Any, Literal

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

LETTERS = "abcd"
MAX_COUNT = 20
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
VOCAB = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *"abcd0123456789*="))}

Family = Literal["qwen3", "qwen3.5", "qwen3.5-moe"]
_SIZES: dict[str, Any] = {
    "vocab_size": len(VOCAB),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,  # so small a model hardly learns with the usual 0.02
}
_RECURRENT = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "depth": 1,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a character-level tokenizer that puts `<bos>` before each text and pads on the left."""
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", VOCAB["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        padding_side="left",
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, family: Family = "qwen3"
) -> PreTrainedModel:
    """Build a two-layer model with random float32 weights.

    Qwen3.5 is the vision-language class that TRL loads; its first layer is recurrent.
    """
    torch.manual_seed(seed)
    tokens = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "qwen3":
        return AutoModelForCausalLM.from_config(Qwen3Config(**_SIZES, **tokens))
    mixture = family == "qwen3.5-moe"
    config = AutoConfig.for_model(
        "qwen3_5_moe" if mixture else "qwen3_5",
        text_config={**_SIZES, **_RECURRENT, **(_EXPERTS if mixture else {}), **tokens},
        vision_config=_VISION,
        tie_word_embeddings=True,
        image_token_id=tokenizer.unk_token_id,
    )
    return AutoModelForImageTextToText.from_config(config)


def build_dataset(seed: int, size: int = 2048) -> Dataset:
    """Generate `size` rows with the columns `prompt` (`c*12=`) and `answer` (1 to 20 letters)."""
    rng = random.Random(seed)
    rows = []
    for _ in range(size):
        count, letter = rng.randint(1, MAX_COUNT), rng.choice(LETTERS)
        rows.append({"prompt": f"{letter}*{count}=", "answer": letter * count})
    return Dataset.from_list(rows)


def edit_distance(first: list[int], second: list[int]) -> int:
    """Count the insertions, deletions and replacements that turn `first` into `second`."""
    row = list(range(len(second) + 1))
    for i, left in enumerate(first, start=1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(second, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]


def right_ids(answer: str) -> list[int]:
    """Return the token ids of the only right completion: the letters, then `<eos>`."""
    return [*(VOCAB[letter] for letter in answer), VOCAB["<eos>"]]


def reward(completion_ids: list[list[int]], answer: list[str], **kwargs: Any) -> list[float]:
    """Return one score in [0, 1] per completion: 1 is the exact answer.

    The score is 1 minus the edit distance divided by the longer length. `<eos>` counts as a token,
    so a completion that does not end by itself scores less than 1.
    """
    scores = []
    for ids, text in zip(completion_ids, answer, strict=True):
        right = right_ids(text)
        scores.append(1.0 - edit_distance(ids, right) / max(len(ids), len(right)))
    return scores

"""A tiny task: the model must answer `a*5=` with `aaaaa` and `<eos>`. Nothing is downloaded."""

import random
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LETTERS = "abcd"
MAX_COUNT = 20
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
VOCAB = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *"abcd0123456789*="))}


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


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Build a two-layer Qwen3 model with random float32 weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.06,  # so small a model hardly learns with the usual 0.02
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


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

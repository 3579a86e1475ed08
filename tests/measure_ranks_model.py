"""Write random weights in the shape of Qwen3-1.7B: python tests/measure_ranks_model.py FOLDER

SHAPE=tiny writes a small model. The tokenizer is that of examples/run_length.py with made-up words.
"""

import json
import os
import sys

import run_length
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from rollout.tools import workload

folder = sys.argv[1]
full = {**workload.SHAPES["qwen3-0.6b"], "hidden_size": 2048, "intermediate_size": 6144}
tiny = {**full, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
tiny |= {"vocab_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
shape = tiny if os.environ.get("SHAPE") == "tiny" else full
workload.SHAPES["made"] = shape
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = workload.build_model("made", device).to(torch.bfloat16)

small = run_length.build_tokenizer()
backend = json.loads(small.backend_tokenizer.to_str())
words = backend["model"]["vocab"]
for index in range(len(words), shape["vocab_size"]):
    words[f"<w{index}>"] = index
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer.from_str(json.dumps(backend)),
    padding_side="left",
    **{name: getattr(small, name) for name in ("pad_token", "eos_token", "bos_token", "unk_token")},
)
for config in (model.config, model.generation_config):
    config.pad_token_id, config.bos_token_id = tokenizer.pad_token_id, tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
size = sum(parameter.numel() for parameter in model.parameters())
sys.stdout.write(f"{size:,} parameters, {len(tokenizer):,} words\n")

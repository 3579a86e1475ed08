"""Generates with the engine alone: prompts in, completions and log-probabilities out.

python examples/generate.py                                  # a small random model
python examples/generate.py --model Qwen/Qwen3-0.6B --prompt "Once upon a time"
"""

import argparse

import run_length
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout import EngineConfig, RolloutEngine, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="name or folder; default: a small random model")
    parser.add_argument("--prompt", default="a*5=")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--max_new_tokens", type=int, default=32)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.model is None:
        tokenizer = run_length.build_tokenizer()
        model = run_length.build_model(tokenizer, seed=0).to(device)
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").to(device)

    sampling = SamplingParams(
        max_new_tokens=options.max_new_tokens, eos_token_ids=(tokenizer.eos_token_id,)
    )
    prompt = tokenizer(options.prompt)["input_ids"]
    with RolloutEngine(model, EngineConfig(max_rows=options.rows)) as engine:
        for completion in engine.generate([prompt] * options.rows, sampling):
            text = tokenizer.decode(completion.token_ids)
            print(f"{sum(completion.logprobs):8.2f} {completion.finish_reason:6} {text!r}")
        stats = engine.stats
    print(f"{stats.generated_tokens} tokens, {stats.tokens_per_s:,.0f} tokens/s")


if __name__ == "__main__":
    main()

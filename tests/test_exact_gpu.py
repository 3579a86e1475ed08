"""Exact mode on a GPU: sampled log-probabilities equal the trainer's bit for bit."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout import EngineConfig, RolloutEngine, SamplingParams
from rollout.exact.setup import prepare_trainer
from rollout.runner.sampling import sample
from rollout.support import base_of
from rollout.tools.workload import SHAPES, build_model

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ROWS = 32
PAGE = 64 * 28 * 2 * 8 * 128 * 2  # bytes of 64 tokens in the 0.6B shape; all rows need 256 pages


@dataclass(frozen=True)
class Case:
    shape: str = "qwen3-0.6b"
    new_tokens: int = 300
    lora_rank: int = 0
    masters: bool = False
    group: int = 1
    rows: int = ROWS
    layers: int | None = None
    longest_prompt: int = 200
    knobs: dict[str, Any] = field(default_factory=dict)


CASES = {
    "8B": Case("qwen3-8b", 600),
    "8B, LoRA": Case("qwen3-8b", 200, lora_rank=32),
    "0.6B": Case(new_tokens=4096 - 200),
    "0.6B, LoRA": Case(lora_rank=32),
    "0.6B, float32 masters": Case(masters=True),
    "one slot, prefill in pieces": Case(knobs={"num_slots": 1, "prefill_tokens": 100}),
    "fewer lanes than rows": Case(knobs={"max_rows": 9}),
    "groups": Case(group=8, knobs={"page_tokens": 64}),
    "preempted, to the host": Case(knobs={"page_tokens": 64, "kv_bytes": 120 * PAGE}),
    "preempted, computed again": Case(
        knobs={"page_tokens": 64, "kv_bytes": 120 * PAGE, "offload_bytes": 0}
    ),
    # 64 rows need 64 * 260 pages of two layers.
    "preempted, 64 rows of 16K in half their memory": Case(
        new_tokens=16_384,
        rows=64,
        layers=2,
        knobs={"max_row_tokens": 16_640, "page_tokens": 64, "kv_bytes": 32 * 260 * PAGE // 14},
    ),
    "a prefill of few tokens": Case(rows=4, new_tokens=40, longest_prompt=6),
    "apart": Case(knobs={"fuse_projections": False}),
}


def ragged_prompts(vocab, rows, group, longest=200):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, longest, (rows // group,), generator=generator).tolist()
    own = [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]
    return [prompt for prompt in own for _ in range(group)]


def batch_of(prompts, completions):
    """TRL's layout: prompts padded on the left, completions on the right."""
    before = max(map(len, prompts))
    after = max(len(completion.token_ids) for completion in completions)
    ids = torch.zeros(len(prompts), before + after, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens = prompt + completion.token_ids
        place = slice(before - len(prompt), before - len(prompt) + len(tokens))
        ids[row, place], mask[row, place] = torch.tensor(tokens), 1
    return ids.cuda(), mask.cuda(), before


def draw_again(head, states, seed, first_position, temperature):
    """The sampler's draws from the trainer's hidden states of one row."""
    tokens, scores = [], []
    for start, part in zip(range(0, len(states), 1024), states.split(1024), strict=True):
        logits = head(part)
        positions = torch.arange(len(part), device="cuda") + first_position + start
        seeds = torch.full_like(positions, seed)
        temperatures = torch.full((len(part),), temperature, device="cuda")
        drawn, logprobs = sample(logits, temperatures, seeds, positions)
        tokens.append(drawn)
        scores.append(logprobs[:, 0])
    return torch.cat(tokens).tolist(), torch.cat(scores).cpu()


@pytest.mark.parametrize("name", CASES)
def test_every_token_is_drawn_again_from_the_trainers_forward(name):
    case = CASES[name]
    if case.layers is None:
        model = build_model(case.shape, torch.device("cuda"), case.lora_rank)
    else:
        shape = {**SHAPES[case.shape], "num_hidden_layers": case.layers}
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**shape), dtype=torch.bfloat16
            )
    autocast = torch.bfloat16 if case.masters else None
    model = model.float() if case.masters else model
    base = base_of(model)
    prompts = ragged_prompts(base.config.vocab_size, case.rows, case.group, case.longest_prompt)
    sampling = SamplingParams(max_new_tokens=case.new_tokens, temperature=0.9)
    knobs = {"max_rows": case.rows, "max_row_tokens": 4200, "on_policy": "exact", **case.knobs}
    with RolloutEngine(model, EngineConfig(**knobs), autocast_dtype=autocast) as engine:
        completions = engine.generate(prompts, sampling)
        assert (engine.stats.preemptions > 0) == name.startswith("preempted")
        assert engine.worker.graphs.num_eager == 0
        undo = prepare_trainer(model, engine.worker.invariant_shapes)
    ids, mask, before = batch_of(prompts, completions)
    with torch.no_grad(), torch.autocast("cuda", autocast, enabled=autocast is not None):
        states = base.model(ids, attention_mask=mask, use_cache=False).last_hidden_state
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            mine = states[row, before - 1 : before - 1 + len(completion.token_ids)]
            drawn = draw_again(base.lm_head, mine, row, len(prompt), sampling.temperature)
            assert drawn[0] == completion.token_ids
            assert torch.equal(drawn[1], torch.tensor(completion.logprobs))
    undo()

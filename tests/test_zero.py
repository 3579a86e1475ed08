"""The engine on a model under DeepSpeed, in processes of its own.

ZeRO-3 replaces `torch.nn.functional.linear` and never restores it.
"""

import pytest
from test_ranks import needs_deepspeed
from two_ranks import on_two_ranks

pytestmark = [needs_deepspeed, pytest.mark.slow]

MODELS = """
import deepspeed, tiny
from accelerate import PartialState
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig
from rollout import EngineConfig, RolloutEngine, SamplingParams, UnsupportedModel
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
rank = PartialState(cpu=True).process_index
stage, (family, *how) = int(kind[4]), kind.split(", ")[1:]
dtype = torch.bfloat16 if precision == "bf16" else None
config = EngineConfig(
    max_rows=4, page_tokens=4, prefill_tokens=20,
    fuse_projections="fused" in how, compile_layers="compiled" in how,
)
zero = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": stage},
    "bf16": {"enabled": dtype is not None},
}
model, plain = tiny.build(family), tiny.build(family)
if "by name" in how:
    model.save_pretrained(f"{folder}/model")
    torch.distributed.barrier()
    kept = HfDeepSpeedConfig(zero)  # what TRL's models are loaded under
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=dtype)

def rows_of(engine):
    found = engine.generate(tiny.prompts(6, seed=5), SamplingParams(max_new_tokens=6))
    return [(completion.token_ids, completion.logprobs) for completion in found]

def step(trained):
    ids = torch.tensor([tiny.prompts(1, seed=3)[0] * 4])
    trained.backward(trained(ids, labels=ids).loss)
    trained.step()

@torch.no_grad()
def follow():
    for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        with whole(theirs, theirs.dtype) as numbers:
            mine.data = numbers.clone()

engine = RolloutEngine(model, config, param_dtype=dtype)
found = {"begun": model.lm_head.weight.numel() == 0, "same": []}
try:
    rows_of(engine)
except UnsupportedModel as error:
    found["refused"] = str(error)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
trained, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=zero)
for _ in range(2):
    step(trained)
    follow()
    with RolloutEngine(plain, config) as other:
        found["same"].append(rows_of(engine) == rows_of(other))
    engine.sleep()
twin = engine.worker.twin
found |= {"fused": twin.num_fused, "compiled": twin.compiled, "builds": twin.num_builds}
found |= {"held": twin.shadow_bytes, "kept": twin.weight_bytes}
found["whole"] = sum(parameter.nbytes for parameter in plain.parameters())
found["left"] = sum(parameter.numel() for parameter in model.parameters())
write(found)
"""


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("zero1, qwen3, fused", "bf16"),
        ("zero3, qwen3, by name, fused", "bf16"),
        ("zero3, qwen3, compiled", "no"),
        ("zero3, qwen3_moe", "no"),
    ],
)
def test_rollouts_under_zero_are_those_of_its_weights(tmp_path, kind, precision):
    for found in on_two_ranks(tmp_path, {"run": (MODELS, kind, precision)})["run"]:
        assert found["same"] == [True, True]
        assert found["begun"] == ("by name" in kind)
        assert found["compiled"] == ("compiled" in kind)
        cast_later = precision == "bf16" and not found["begun"]
        assert ("`train()` has not cast them yet" in found.get("refused", "")) == cast_later
        if "zero3" in kind:
            assert (found["left"], found["held"]) == (0, found["whole"])
            assert found["kept"] == pytest.approx(found["whole"] / 2, rel=0.01)
        else:
            assert (found["held"], found["kept"]) == (0, found["whole"])

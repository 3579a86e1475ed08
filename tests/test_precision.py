"""Rollouts round as the trainer does, for all dtypes of weights, autocast and head."""

import pytest
import tiny
import torch
import trl_trainer
from peft import LoraConfig

from rollout import EngineConfig, RolloutEngine, SamplingParams
from rollout.model.twin import Twin

KINDS = {
    "float32": (torch.float32, {}, 1e-5),
    "bfloat16": (torch.bfloat16, {}, 0.05),
    "float16": (torch.float16, {}, 0.01),
    "float32 under bf16": (torch.float32, {"bf16": True}, 0.05),
    "bfloat16 under bf16": (torch.bfloat16, {"bf16": True}, 0.05),
}


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("head", [False, True], ids=["head", "float32-head"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_close_to_the_trainers_own(tmp_path, kind, head, tied):
    dtype, arguments, most = KINDS[kind]
    trainer = trl_trainer.build(
        tmp_path,
        model=tiny.build(tie_word_embeddings=tied).to(dtype),
        max_steps=2,
        learning_rate=1e-3,
        cast_lm_head_to_fp32=head,
        **arguments,
    )
    dtypes = {name: parameter.dtype for name, parameter in trainer.model.named_parameters()}
    trl_trainer.attach(trainer)
    trainer.train()
    assert {name: p.dtype for name, p in trainer.model.named_parameters()} == dtypes
    gaps = trl_trainer.logged(trainer, "rollout/logp_gap")
    assert len(gaps) == 2
    assert max(gaps) < most


@pytest.mark.parametrize("casts", [False, True])
def test_what_casting_weights_costs_is_logged_once_a_version(tmp_path, casts):
    """Float32 weights under bf16 autocast; the rollout's second turn casts nothing."""
    trainer = trl_trainer.build(tmp_path, bf16=casts)
    generator = trl_trainer.attach(trainer)
    single_turn, costs = trainer._generate_single_turn, []

    def two_turns(prompt_ids, *rest):
        for _ in range(2):
            result = single_turn(prompt_ids, *rest)
            stats = generator.engine.stats
            costs.append((stats.cast_bytes, stats.cast_s))
        return result

    trainer._generate_single_turn = two_turns
    trainer.train()
    linears = [m for m in trainer.model.modules() if isinstance(m, torch.nn.Linear)]
    size = sum(2 * linear.weight.numel() for linear in linears) if casts else 0
    assert [num_bytes for num_bytes, _ in costs] == [size, 0] * 3
    seconds = [seconds for _, seconds in costs[::2]]
    assert all(0 < each < 1 for each in seconds) == casts
    sizes, milliseconds = (
        trl_trainer.logged(trainer, f"rollout/cast_weights_{unit}") for unit in ("gib", "ms")
    )
    assert sizes == ([size / 2**30] * 3 if casts else [])
    assert milliseconds == pytest.approx([each * 1e3 for each in seconds] if casts else [])


def test_each_update_in_a_rollout_is_a_cast_of_its_own():
    config = EngineConfig(max_rows=2, page_tokens=4)
    with RolloutEngine(tiny.build(), config, autocast_dtype=torch.bfloat16) as engine:
        engine.submit([9, 10], SamplingParams(max_new_tokens=6))
        engine.step()
        with engine.paused():
            pass
        while engine.busy:
            engine.step()
        assert engine.stats.cast_bytes == 2 * engine.worker.twin.shadow_bytes


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.bfloat16, None), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_a_float32_head_gives_the_logits_of_trls_fused_head(tmp_path, dtype, autocast, tied):
    model = tiny.build(tie_word_embeddings=tied).to(dtype)
    trainer = trl_trainer.build(
        tmp_path, model=model, cast_lm_head_to_fp32=True, bf16=autocast is not None
    )
    model = trainer.model.eval()
    twin = Twin(model, autocast, float32_head=True)
    twin.base.config._attn_implementation = "sdpa"
    ids = torch.tensor([tiny.prompts(1, seed=3)[0]] * 2)
    with torch.no_grad():
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            states = model.model(ids).last_hidden_state
            logits = twin.base(ids).logits
        wanted = torch.nn.functional.linear(states.float(), model.lm_head.weight.float())
    assert logits.dtype == torch.float32
    assert torch.equal(logits, wanted)
    assert twin.base.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cast_that_the_advice_would_spare_is_advised_against(dtype, tmp_path, caplog):
    """Adapters are in float32 by PEFT's choice; only a model in float32 can be loaded in bf16."""
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = tiny.build().to(dtype)
    trainer = trl_trainer.build(tmp_path, model, bf16=True, peft_config=lora, max_steps=1)
    with caplog.at_level("WARNING", "rollout"):
        trl_trainer.attach(trainer)
        trainer.train()
    assert ("load the model with" in caplog.text) == (dtype == torch.float32)

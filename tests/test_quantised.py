"""4-bit layers of bitsandbytes, if installed: the twin shares their storage, too."""

import importlib.util

import pytest
import tiny
import torch
import trl_trainer
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from rollout import EngineConfig, RolloutEngine, SamplingParams, UnsupportedModel
from rollout.exact.setup import prepare_trainer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"
)

ENGINE = EngineConfig(max_rows=4, page_tokens=4)


@pytest.fixture(params=[False, True], ids=["nf4", "double"])
def model(request, tmp_path):
    """Loaded as users load it; a weight of its layers has half a byte."""
    tiny.build().save_pretrained(tmp_path / "model")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=request.param,
    )
    return AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=config)


def quantised(model):
    return [p for p in model.parameters() if hasattr(p, "quant_state")]


def test_rollouts_are_the_models_own_and_share_its_bytes(model):
    prompts, before = tiny.prompts(6, seed=5), [p.clone() for p in quantised(model)]
    with RolloutEngine(model, ENGINE) as engine:
        sampling = SamplingParams(max_new_tokens=6, temperature=0.0)
        completions = engine.generate(prompts, sampling)
        twin = engine.worker.twin
        assert twin.shadow_bytes == 0
        places = [p.data_ptr() for p in quantised(twin.base)]
    model.eval()
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == tiny.greedy(model, prompt, 6)
        wanted = tiny.logprobs(model, prompt, completion.token_ids)
        assert completion.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)
    assert len(before) == 7 * model.config.num_hidden_layers
    assert places == [p.data_ptr() for p in quantised(model)]
    for parameter, kept in zip(quantised(model), before, strict=True):
        assert torch.equal(parameter, kept)


def test_adapters_on_4_bit_layers_are_followed_while_they_learn(model, tmp_path):
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = trl_trainer.build(
        tmp_path, model=model, peft_config=lora, max_steps=3, learning_rate=1e-2
    )
    generator = trl_trainer.attach(trainer)
    trainer.train()
    # TRL keeps these adapters in bf16, and a different last bit gives gaps of 1e-4.
    assert max(trl_trainer.logged(trainer, "rollout/logp_gap_max")) < 1e-3
    assert generator.engine.worker.twin.num_builds == 1


def test_exact_mode_refuses_them(model):
    with pytest.raises(UnsupportedModel, match="multiply one row in another kernel than many"):
        prepare_trainer(model)

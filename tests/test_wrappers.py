"""Vision-language classes on text alone: their own numbers, and TRL's trainers with a processor."""

import pytest
import test_ppo
import tiny
import torch
import trl_family
import trl_trainer
import wrappers
from peft import LoraConfig, get_peft_model
from test_families import largest_gap
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from rollout import (
    EngineConfig,
    RolloutEngine,
    SamplingParams,
    UnsupportedModel,
    UnsupportedTrainer,
)
from rollout.model.compile import decoder_layers
from rollout.model.twin import Twin
from rollout.support import mixers_of, towers_of
from rollout.telemetry.roofline import Cost
from rollout.tools.parity import differences
from trainers import RolloutConfig, RolloutGenerator

CONFIG = EngineConfig(max_rows=4, page_tokens=4)
LORA = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
EACH = pytest.mark.parametrize("family", ["gemma3", "qwen3_vl", "qwen3_5", "mistral3", "lfm2_vl"])


@pytest.mark.parametrize("family", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
def test_a_wrapper_gives_its_own_numbers_or_is_refused(family):
    try:
        model = wrappers.build(family)
        model(input_ids=torch.tensor([[9, 10, 11]]))
    except Exception:  # configs raise many kinds of errors
        if family in wrappers.RUN:
            raise
        pytest.skip("cannot be made this small, or does not run text alone")
    try:
        gap = largest_gap(model)
    except UnsupportedModel:
        assert family not in wrappers.RUN
    else:
        assert gap < 2e-5


@EACH
def test_the_twin_holds_the_text_model_alone(family):
    model = wrappers.build(family)
    kinds = [type(module) for module in model.modules()]
    attention = model.config.get_text_config()._attn_implementation
    names = towers_of(model)
    assert names
    twin = Twin(model, torch.bfloat16)
    assert [type(module) for module in model.modules()] == kinds
    for config in (model.config, model.config.get_text_config(), model.config.vision_config):
        assert config._attn_implementation == attention
    towers = {p.data_ptr() for name in names for p in model.get_submodule(name).parameters()}
    assert towers.isdisjoint(p.data_ptr() for p in twin.base.parameters())
    assert len(list(decoder_layers(twin.base))) == 3
    linears = [m for m in model.get_decoder().modules() if isinstance(m, nn.Linear)]
    linears.append(model.get_output_embeddings())
    assert twin.shadow_bytes == sum(2 * linear.weight.numel() for linear in linears)
    page = twin.kv_layout(page_tokens=1).page_bytes
    assert Cost.of(Twin(model).base, page) == Cost.of(model, page)


@EACH
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
def test_greedy_rows_are_those_of_generate(family, adapters):
    model = wrappers.build(family)
    if adapters:
        model = get_peft_model(model, LORA)
    prompts = tiny.prompts(5, longest=20)
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0, eos_token_ids=(tiny.EOS,))
    with RolloutEngine(model, CONFIG) as engine:
        completions = engine.generate(prompts, greedy)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == tiny.greedy(model, prompt, 8)


@EACH
def test_exact_mode_gives_the_trainers_numbers(family):
    model = wrappers.build(family)
    if any(mixers_of(model)):
        pytest.skip("exact mode refuses recurrent layers")
    attention = model.config.vision_config._attn_implementation
    compared = differences(model, EngineConfig(page_tokens=4), num_tokens=40)
    assert len(compared) > 30
    assert max(difference.relative for difference in compared) < 1e-5
    assert model.config.vision_config._attn_implementation == attention


def test_text_models_have_no_towers_but_gemma_3_is_none_by_any_class():
    assert towers_of(tiny.build()) == []
    model = AutoModelForCausalLM.from_config(wrappers.config_of("gemma3"))
    assert towers_of(model) == ["model.vision_tower", "model.multi_modal_projector"]


@pytest.mark.parametrize("adapters", [None, LORA], ids=["whole", "lora"])
@EACH
def test_grpo_trains_with_a_processor(tmp_path, family, adapters):
    trainer = trl_trainer.build(
        tmp_path,
        model=wrappers.build(family),
        processing_class=wrappers.processor(),
        peft_config=adapters,
        generation_kwargs={"suppress_tokens": [33]},
    )
    assert trainer._is_vlm
    generator = trl_trainer.attach(trainer)
    generate, rows = generator.generate, []

    def watched(*args, **kwargs):
        result = generate(*args, **kwargs)
        rows.extend(result[1])
        return result

    generator.generate = watched
    trainer.train()
    assert max(trl_trainer.logged(trainer, "rollout/logp_gap_max")) < 1e-4
    tokens = {token for row in rows for token in row}
    assert len(tokens) > 40
    assert tokens.isdisjoint({wrappers.IMAGE, 33})


@pytest.mark.parametrize("kind", ["RLOO", "Distillation"])
def test_other_trainers_train_with_a_processor(tmp_path, kind, monkeypatch):
    tokenizer = trl_family._tokenizer()
    monkeypatch.setattr(trl_family, "_tokenizer", lambda: wrappers.Processor(tokenizer))
    trainer = trl_family.build(kind, tmp_path, model=wrappers.build("qwen3_5"))
    generator = RolloutGenerator(RolloutConfig(max_rows=5, page_tokens=4)).attach(trainer)
    gaps = trl_family.watch_gaps(trainer, generator)
    trainer.train()
    assert gaps
    assert max(gaps) < 1e-4


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
@pytest.mark.parametrize("critic", ["model", "adapter", "head"])
def test_ppo_trains_with_a_processor(tmp_path, critic, family):
    trainer = test_ppo.build(
        tmp_path,
        model=wrappers.build(family),
        processing_class=wrappers.processor(),
        critic=critic,
        peft_config=LORA if critic == "adapter" else None,
    )
    trainer.train()
    assert max(trl_trainer.logged(trainer, "rollout/logp_gap_max")) < 1e-4
    if critic != "head":
        names = [name for name, _ in trainer.critic.model.backbone.named_parameters()]
        assert not any("vis" in name for name in names)


def test_a_batch_with_images_is_refused_before_anything_runs(tmp_path):
    trainer = trl_trainer.build(
        tmp_path, model=wrappers.build("gemma3"), processing_class=wrappers.processor()
    )
    generator = trl_trainer.attach(trainer)
    message = "this batch has images, and the engine runs text alone"
    with pytest.raises(UnsupportedTrainer, match=message):
        generator.generate([[9, 10]] * 4, [["image"], None, None, None], 4)
    assert generator.engine.stats.engine_steps == 0

"""What a refusal advises works: each test is refused, does as it is told, and runs."""

import tempfile

import peft
import pytest
import tiny
import torch
import trl_trainer
from torch import nn
from transformers import AutoModelForCausalLM

from rollout import EngineConfig, RolloutEngine, UnsupportedModel, UnsupportedTrainer
from trainers.adapter.sampling import refused_settings
from trainers.adapter.seams import Settings
from trainers.ppo.value_model import ValueModel

CONFIG = EngineConfig(max_rows=4, page_tokens=4)


def refusal(model):
    with pytest.raises(UnsupportedModel) as error:
        RolloutEngine(model, CONFIG)
    return str(error.value)


def assert_runs(model):
    with RolloutEngine(model, CONFIG) as engine:
        tiny.assert_on_policy(engine, model)


def test_a_compiled_module():
    model = tiny.build()
    assert "use module.compile() instead" in refusal(torch.compile(model))
    model.compile(backend="eager")
    assert_runs(model)


def test_rope_that_changes_with_the_length():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    advice = refusal(tiny.build("llama", rope_parameters=rope))
    assert "set `rope_parameters` to the default or to a fixed scaling, e.g. yarn" in advice
    assert_runs(tiny.build("llama"))
    fixed = {**rope, "rope_type": "yarn", "original_max_position_embeddings": 128}
    assert_runs(tiny.build("llama", rope_parameters=fixed))


@pytest.mark.parametrize(
    "config",
    [
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[12, 13]),
    ],
    ids=["virtual tokens", "activated"],
)
def test_adapters_of_other_kinds(config):
    assert "use LoRA" in refusal(peft.get_peft_model(tiny.build(), config))
    assert_runs(peft.get_peft_model(tiny.build(), peft.LoraConfig(target_modules=["q_proj"])))


def test_a_forward_or_a_hook_becomes_a_subclass():
    model = tiny.build()
    layers = model.model.layers
    layers[1].mlp.forward = lambda states: 0.5 * type(layers[1].mlp).forward(layers[1].mlp, states)
    assert "Put the change into a subclass" in refusal(model)
    del layers[1].mlp.forward
    handle = layers[1].mlp.register_forward_hook(lambda module, args, output: 0.5 * output)
    assert "Put the change into a subclass of the module" in refusal(model)
    handle.remove()

    class Half(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, states):
            return 0.5 * self.inner(states)

    layers[1].mlp = Half(layers[1].mlp)
    assert_runs(model)


def test_parameters_without_values():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny.build().config)
    assert "or call `to_empty` and initialise them" in refusal(model)
    model.to_empty(device="cpu")
    model.init_weights()
    model.model.rotary_emb = tiny.build().model.rotary_emb  # a buffer, which has no initialiser
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    assert_runs(model)


def test_adapters_for_a_critic_of_its_own():
    folder, adapter = tempfile.mkdtemp(), tempfile.mkdtemp()
    tiny.build().save_pretrained(folder)
    lora = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    peft.get_peft_model(plain, lora).save_pretrained(adapter)
    with pytest.raises(UnsupportedTrainer, match=r"peft\.PeftModel\.from_pretrained\(model, fold"):
        ValueModel.from_policy(AutoModelForCausalLM.from_pretrained(adapter))
    model = AutoModelForCausalLM.from_pretrained(folder)
    wrapped = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    assert isinstance(ValueModel.from_policy(wrapped), ValueModel)


# A setting that is refused, and what the refusal says to set instead.
INSTEAD = {
    "max_tokens": ("max_completion_length", 5),
    "max_length": ("max_completion_length", 5),
    "temperature": ("temperature", 0.5),
    "min_length": ("min_new_tokens", 2),
    "ignore_eos": ("min_new_tokens", 2),
    "typical_p": ("top_p", 0.5),
    "no_repeat_ngram_size": ("repetition_penalty", 1.1),
    "bad_words": ("bad_words_ids", [[9]]),
    "logit_bias": ("suppress_tokens", [9]),
    "begin_suppress_tokens": ("suppress_tokens", [9]),
    "n": ("num_generations", 4),
}
OWN = {"max_completion_length", "temperature", "num_generations"}


@pytest.mark.parametrize("name", INSTEAD)
def test_settings_that_another_one_replaces(name, tmp_path):
    instead, value = INSTEAD[name]
    trainer = trl_trainer.build(tmp_path, generation_kwargs={})
    trainer.args.generation_kwargs = {name: 3}
    (reason,) = refused_settings(Settings(trainer))
    assert instead in reason
    changes = {instead: value} if instead in OWN else {"generation_kwargs": {instead: value}}
    settings = Settings(trl_trainer.build(tmp_path, **changes))
    assert list(refused_settings(settings)) == []


def test_more_set_ups_of_trainers(tmp_path):
    with pytest.raises(UnsupportedTrainer, match="for greedy decoding set"):
        trl_trainer.attach(trl_trainer.build(tmp_path, generation_kwargs={"do_sample": False}))
    trl_trainer.attach(trl_trainer.build(tmp_path, top_k=1))
    stops = {"generation_kwargs": {"stop": ["ab"], "stop_strings": "ab"}}
    with pytest.raises(UnsupportedTrainer, match="drop one of them"):
        trl_trainer.attach(trl_trainer.build(tmp_path, **stops))
    trl_trainer.attach(trl_trainer.build(tmp_path, generation_kwargs={"stop": ["ab"]}))
    with pytest.raises(UnsupportedTrainer, match="drop `use_vllm`, `use_transformers_continuous_"):
        trl_trainer.attach(trl_trainer.build(tmp_path, use_transformers_continuous_batching=True))

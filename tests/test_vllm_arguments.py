"""Each of TRL's arguments for vLLM is honoured, or said to have no effect."""

import logging
from dataclasses import fields

import pytest
import tiny
import trl_family
import trl_trainer
from families import config_of
from transformers import AutoModelForCausalLM

from rollout import ConfigError, EngineConfig, RolloutEngine, UnsupportedTrainer
from rollout.config import VLLM_NAMES
from trainers import (
    RolloutConfig,
    RolloutGenerator,
    RolloutGRPOTrainer,
    RolloutPPOConfig,
    RolloutPPOTrainer,
)
from trainers.adapter.vllm_arguments import WITHOUT_EFFECT

# Arguments that the generator or TRL itself still heeds.
HONOURED = (
    *("use_vllm", "vllm_mode", "vllm_max_model_length", "vllm_sync_frequency"),
    "vllm_structured_outputs_regex",  # refused
    "vllm_importance_sampling_correction",
    *("vllm_importance_sampling_mode", "vllm_importance_sampling_cap"),
    *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
)


@pytest.mark.parametrize("kind", trl_family.HOMES)
def test_every_argument_of_every_trainer_is_known(kind, tmp_path):
    arguments = fields(trl_family.build(kind, tmp_path).args)
    names = {argument.name for argument in arguments if "vllm" in argument.name}
    assert names <= {*HONOURED, *WITHOUT_EFFECT}
    assert not set(HONOURED) & set(WITHOUT_EFFECT)


def test_what_has_no_effect_is_said_once(tmp_path, caplog):
    left = {"vllm_gpu_memory_utilization": 0.5, "vllm_server_port": 9}
    trainer = trl_trainer.build(tmp_path, max_steps=1, vllm_max_model_length=64, **left)
    with caplog.at_level(logging.WARNING, "trainers"):
        trl_trainer.attach(trainer)
        trainer.train()
    (said,) = (message for message in caplog.messages if "vllm_" in message)
    for name, value in left.items():
        assert f"{name}={value} ({WITHOUT_EFFECT[name]})" in said
    assert "vllm_max_model_length" not in said
    assert "vllm_mode" not in said


def test_defaults_say_nothing(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "trainers"):
        trl_trainer.attach(trl_trainer.build(tmp_path))
    assert "vllm" not in caplog.text


@pytest.mark.parametrize(("own", "vllms", "most"), [(None, 12, 12), (10, 12, 10), (12, 10, 10)])
def test_vllms_longest_row_is_ours_and_cut_rows_are_warned_of(tmp_path, caplog, own, vllms, most):
    trainer = trl_trainer.build(tmp_path, max_steps=2, vllm_max_model_length=vllms)
    config = RolloutConfig(max_rows=5, page_tokens=4, max_row_tokens=own)
    with caplog.at_level(logging.WARNING, "trainers"):
        generator = trl_trainer.attach(trainer, config)
        trainer.train()
    assert generator.engine.max_row_tokens == most
    (said,) = (message for message in caplog.messages if "leaves room" in message)
    assert f"of max_completion_length=9 tokens: a row has at most {most} " in said


@pytest.mark.parametrize("kind", ["GRPO", "Distillation", "RLOO"])
def test_a_mode_that_is_left_in_place_becomes_the_one_that_asks_for_the_longest_row(tmp_path, kind):
    trainer = trl_family.build(kind, tmp_path, vllm_mode="server")
    generator = trl_trainer.attach(trainer)
    assert trainer.vllm_mode == "colocate"
    generator.detach()
    assert trainer.vllm_mode == "server"


def test_use_vllm_is_refused_before_trl_asks_for_vllm(tmp_path):
    arguments = {"model": tiny.build(), "reward_funcs": trl_trainer.reward}
    for trainer, config in ((RolloutGRPOTrainer, None), (RolloutPPOTrainer, RolloutPPOConfig)):
        kind = config or type(trl_trainer.build(tmp_path).args)
        args = kind(output_dir=str(tmp_path), use_vllm=True, use_cpu=True, bf16=False)
        with pytest.raises(UnsupportedTrainer, match=r"Config\(use_vllm=True\).*remove `use_vllm`"):
            trainer(**arguments, args=args)
        with pytest.raises(UnsupportedTrainer, match="remove `use_vllm`"):
            trainer(*arguments.values(), args)


@pytest.mark.parametrize("config", [EngineConfig, RolloutConfig])
@pytest.mark.parametrize("name", ["gpu_memory_utilization", "vllm_gpu_memory_utilization"])
def test_vllms_names_are_answered_with_ours(config, name):
    with pytest.raises(ConfigError, match=f"Config has no '{name}'; set kv_fraction, a share"):
        config(**{name: 0.5})


def test_what_is_said_of_vllms_names_names_our_knobs():
    knobs = {field.name for field in fields(EngineConfig)}
    assert not knobs & set(VLLM_NAMES)
    for instead in VLLM_NAMES.values():
        verb, _, rest = instead.partition(" ")
        assert verb != "set" or rest.split()[0].strip(",:") in {*knobs, "the"}, instead


def test_knobs_of_the_generator_belong_into_its_config():
    with pytest.raises(ConfigError, match=r"RolloutGenerator\(RolloutConfig\(max_rows=128\)\)"):
        RolloutGenerator(max_rows=128)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_rows_longer_than_a_table_of_positions_are_refused(family):
    model = AutoModelForCausalLM.from_config(config_of(family))
    longest = model.config.max_position_embeddings
    RolloutEngine(model, EngineConfig(max_row_tokens=longest)).close()
    with pytest.raises(ConfigError, match=f"table of {longest} learned positions; set at most"):
        RolloutEngine(model, EngineConfig(max_row_tokens=longest + 1))
    RolloutEngine(tiny.build(), EngineConfig(max_row_tokens=999)).close()  # RoPE has no table

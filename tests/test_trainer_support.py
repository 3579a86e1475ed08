"""What the generator refuses of TRL, and what it leans on in the TRL that is installed."""

from types import SimpleNamespace

import pytest
import trl
import trl_trainer
from accelerate.utils import DistributedType
from trl.generation.vllm_generation import VLLMGeneration

from rollout import UnsupportedTrainer
from trainers import RolloutGenerator
from trainers.support import check_trainer, check_trl


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 0.9}, "top_p=0.9 is not supported yet; leave it at 1.0"),
        ({"top_k": 5}, "top_k=5"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"generation_kwargs": {"min_new_tokens": 3}}, "generation_kwargs={'min_new_tokens': 3}"),
        ({"vllm_structured_outputs_regex": "a+"}, "structured outputs"),
        ({"loss_type": "vespo"}, "VESPO"),
        ({"use_transformers_continuous_batching": True}, "has another generator"),
    ],
    ids=str,
)
def test_settings_are_refused_by_name_and_the_trainer_is_left_alone(tmp_path, changes, message):
    trainer = trl_trainer.build(tmp_path, **changes)
    with pytest.raises(UnsupportedTrainer, match=message):
        trl_trainer.attach(trainer)
    assert not trainer.use_vllm
    assert not hasattr(trainer, "vllm_generation")


def test_vespo_with_a_token_level_correction_is_fine(tmp_path):
    mode = {"vllm_importance_sampling_mode": "token_truncate"}
    check_trainer(trl_trainer.build(tmp_path, loss_type="vespo", **mode))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("_is_vlm", True, "takes images"),
        ("args.use_vllm", True, "another generator"),
        ("use_vllm", True, "another generator"),
        ("accelerator.state.distributed_type", DistributedType.DEEPSPEED, "DEEPSPEED moves"),
        ("accelerator.state._mixed_precision", "fp8", "fp8"),
        ("accelerator.state.distributed_type", DistributedType.MEGATRON_LM, "MEGATRON_LM"),
    ],
)
def test_set_ups_are_refused_by_name(tmp_path, monkeypatch, path, value, message):
    trainer = trl_trainer.build(tmp_path)
    *owners, name = path.split(".")
    owner = trainer
    for part in owners:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(UnsupportedTrainer, match=message):
        check_trainer(trainer)


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_is_refused(tmp_path, monkeypatch, version):
    trainer = trl_trainer.build(tmp_path)
    state = trainer.accelerator.state
    monkeypatch.setattr(state, "distributed_type", DistributedType.FSDP)
    monkeypatch.setattr(state, "fsdp_plugin", SimpleNamespace(fsdp_version=version), raising=False)
    with pytest.raises(UnsupportedTrainer, match=f"FSDP{version} shards the weights"):
        check_trainer(trainer)


@pytest.mark.parametrize("kind", ["tp", "cp", "sp"])
def test_parallelism_within_a_model_is_refused(tmp_path, monkeypatch, kind):
    trainer = trl_trainer.build(tmp_path)
    sizes = SimpleNamespace(**{f"{kind}_size": 2})
    monkeypatch.setattr(type(trainer.accelerator), "parallelism_config", sizes)
    with pytest.raises(UnsupportedTrainer, match=f"{kind}_size > 1"):
        check_trainer(trainer)


@pytest.mark.parametrize("version", ["1.14.2", "1.17.0", "2.0.0"])
def test_unknown_trl_versions_are_refused(monkeypatch, version):
    monkeypatch.setattr(trl, "__version__", version)
    with pytest.raises(UnsupportedTrainer, match=rf"TRL {version} is unknown .* 1.15 and 1.16"):
        check_trl()


def test_a_seam_that_moved_is_refused(monkeypatch):
    monkeypatch.setattr(VLLMGeneration, "generate", lambda self, prompts, sampling: None)
    with pytest.raises(UnsupportedTrainer, match=r"calls its generator with \('prompts', 'samp"):
        check_trl()


def test_one_generator_serves_one_trainer(tmp_path):
    generator = trl_trainer.attach(trl_trainer.build(tmp_path))
    with pytest.raises(UnsupportedTrainer, match="already serves a trainer"):
        generator.attach(trl_trainer.build(tmp_path))


def test_a_trainer_with_a_rollout_func_cannot_be_attached(tmp_path):
    trainer = trl_trainer.build(tmp_path, rollout_func=lambda prompts, trainer: {})
    with pytest.raises(UnsupportedTrainer, match="pass this generator as rollout_func"):
        trl_trainer.attach(trainer)


def test_one_trainer_takes_one_generator(tmp_path):
    trainer = trl_trainer.build(tmp_path)
    trl_trainer.attach(trainer)
    with pytest.raises(UnsupportedTrainer, match="generators attached before"):
        trl_trainer.attach(trainer)


def test_a_rollout_func_serves_the_trainer_it_has_seen_first(tmp_path):
    generator = RolloutGenerator(trl_trainer.ENGINE)
    generator(["xyz"], trl_trainer.build(tmp_path))
    with pytest.raises(UnsupportedTrainer, match="already serves a trainer"):
        generator(["xyz"], trl_trainer.build(tmp_path))


def test_images_are_refused(tmp_path):
    generator = trl_trainer.attach(trl_trainer.build(tmp_path))
    with pytest.raises(UnsupportedTrainer, match="images"):
        generator.generate([[9]], [["an image"]], 1)


def test_a_refused_model_leaves_the_trainer_alone(tmp_path):
    trainer = trl_trainer.build(tmp_path)
    trainer.model.config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(NotImplementedError, match="dynamic RoPE"):
        trl_trainer.attach(trainer)
    assert not trainer.use_vllm

"""What the generator refuses of TRL, and what it leans on in the TRL that is installed."""

import logging
from types import SimpleNamespace

import pytest
import tiny
import trl
import trl_trainer
from accelerate.utils import DistributedType
from trl.generation.vllm_generation import VLLMGeneration

from rollout import UnsupportedTrainer
from rollout.request import Draw
from trainers import RolloutGenerator
from trainers.sampling import refused_settings, row_sampling
from trainers.support import check_trainer, check_trl


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 1.5}, r"top_p=1\.5: it must be from 1e-06 to 1\.0"),
        ({"min_p": -0.1}, r"min_p=-0\.1: it must be from"),
        ({"generation_kwargs": {"min_new_tokens": 99}}, "min_new_tokens=99: it must be at most"),
        ({"generation_kwargs": {"stop": ["a"]}}, r"stop=\['a'\] in generation_kwargs is not"),
        ({"generation_kwargs": {"bad_words_ids": [[3]]}}, "single tokens can be named in `suppr"),
        ({"generation_kwargs": {"temperature": 0.3}}, "set the trainer's own `temperature`"),
        ({"generation_kwargs": {"do_sample": False}}, "do_sample=False in generation_kwargs is"),
        ({"generation_kwargs": {"typical_p": 0.3}}, "typical_p=0.3 in .* not supported; drop it"),
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


def sampling_of(trainer, room=100):
    assert list(refused_settings(trainer)) == []
    return row_sampling(trainer, room)


def test_what_the_trainer_asks_is_what_the_engine_draws_by(tmp_path):
    own = {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}
    sampling = sampling_of(trl_trainer.build(tmp_path, **own))
    assert {name: getattr(sampling, name) for name in own} == own
    assert sampling.max_new_tokens == 9
    assert tiny.EOS in sampling.eos_token_ids


def test_generation_kwargs_win_in_either_librarys_words(tmp_path):
    extra = {
        "top_p": 0.5,
        "top_k": None,
        "min_tokens": 4,
        "suppress_tokens": [3, 4],
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "do_sample": True,
    }
    trainer = trl_trainer.build(tmp_path, top_p=0.9, top_k=6, generation_kwargs=extra)
    sampling = sampling_of(trainer)
    assert (sampling.top_p, sampling.top_k, sampling.min_new_tokens) == (0.5, 6, 4)
    assert sampling.suppress_tokens == (3, 4)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling_of(trainer, room=2).min_new_tokens == 2


def test_values_of_no_effect_ask_for_nothing(tmp_path):
    trainer = trl_trainer.build(tmp_path, generation_kwargs={"num_beams": 1, "stop": None})
    assert sampling_of(trainer).draw is Draw.PLAIN
    trainer.top_p = trainer.top_k = trainer.repetition_penalty = None
    assert sampling_of(trainer).draw is Draw.PLAIN


def test_the_models_generation_config_never_wins_and_settings_are_logged_once(tmp_path, caplog):
    model = tiny.build()
    model.generation_config.update(do_sample=True, temperature=0.1, top_k=2, top_p=0.2, min_p=0.3)
    with caplog.at_level(logging.INFO, "trainers.sampling"):
        for _ in range(2):  # each trainer has its line, though it is the same
            caplog.clear()
            trainer = trl_trainer.build(tmp_path, model, temperature=0.9, top_k=11)
            generator = trl_trainer.attach(trainer)
            for _ in range(2):
                generator.generate([[9], [10]], None, 1)
            (message,) = caplog.messages
            assert "temperature=0.9, top_k=11, top_p=1.0, min_p=0.0" in message
    sampling = sampling_of(trainer)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.9, 11, 1.0)
    assert sampling.min_p == 0
    trainer.temperature = 0.5
    with caplog.at_level(logging.INFO, "trainers.sampling"):
        generator.generate([[9]], None, 1)
    assert "temperature=0.5" in caplog.messages[-1]


def test_a_trainer_learns_from_filtered_rollouts(tmp_path):
    extra = {"min_new_tokens": 3, "suppress_tokens": [13]}
    own = {"top_p": 0.9, "repetition_penalty": 1.1, "generation_kwargs": extra}
    trainer = trl_trainer.build(tmp_path, **own)
    seen = []
    generate = trl_trainer.attach(trainer).engine.generate
    trainer.vllm_generation.engine.generate = lambda *a, **k: (
        seen.extend(generate(*a, **k)) or seen[-8:]
    )
    trainer.train()
    assert len(seen) >= 24
    assert all(13 not in completion.token_ids for completion in seen)
    assert all(len(completion.token_ids) >= 3 for completion in seen)
    # The trainer scores the same tokens over the full vocabulary, so the two sides agree.
    gaps = trl_trainer.logged(trainer, "sampling/sampling_logp_difference/max")
    assert max(gaps) < 1e-4


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

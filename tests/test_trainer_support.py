"""What the generator refuses, and what it relies on in the installed TRL."""

import copy
import functools
import logging
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import torch
import trl
import trl_family
import trl_trainer
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import GenerationConfig
from trl.generation.vllm_generation import VLLMGeneration

from rollout import ConfigError, EngineConfig, RolloutError, UnsupportedModel, UnsupportedTrainer
from rollout.sampling_params import Draw
from trainers import RolloutGenerator
from trainers.adapter.sampling import refused_settings, row_sampling
from trainers.adapter.support import check_trainer, check_trl


def extra(**settings):
    return {"generation_kwargs": settings}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 1.5}, r"top_p=1\.5: must be from 1e-06 to 1\.0"),
        ({"min_p": -0.1}, r"min_p=-0\.1: must be from"),
        ({"temperature": 0.0}, "the loss divides by it; for greedy decoding set `top_k` to 1"),
        (
            {"max_completion_length": None},
            "max_completion_length=None; set it to the largest number of tokens",
        ),
        (extra(min_new_tokens=99), "min_new_tokens=99: must be at most"),
        (extra(stop=[""]), "string in stop_strings='': must be non-empty"),
        (extra(stop_strings=5), "stop_strings=5: must be a non-empty list"),
        (extra(bad_words_ids=[3]), r"bad_words_ids=3: must be a tuple"),
        (
            extra(bad_words_ids=[[9, 11]]),
            r"bad_words_ids: the word \(9, 11\) has 2 tokens, .* in a reward function",
        ),
        (extra(bad_words=["a"]), "set `bad_words_ids` to their token ids"),
        (
            extra(stop=["a"], stop_strings=["b"]),
            "stop and stop_strings in generation_kwargs are one setting; drop one of them",
        ),
        (
            extra(min_new_tokens=2, min_tokens=3),
            "min_new_tokens and min_tokens in generation_kwargs are one setting",
        ),
        (extra(include_stop_str_in_output=False), "the stop string always stays in the completion"),
        (extra(seed=3), "set the trainer's own `seed`"),
        (extra(n=2), "set `num_generations`"),
        (extra(temperature=0.3), "set the trainer's own `temperature`"),
        (extra(do_sample=False), "do_sample=False in generation_kwargs or"),
        (extra(typical_p=0.3), "typical_p=0.3 in .* not supported; use `top_p`"),
        ({"vllm_structured_outputs_regex": "a+"}, "structured outputs"),
        ({"loss_type": "vespo"}, "VESPO"),
        ({"use_transformers_continuous_batching": True}, "already has a generator"),
    ],
    ids=str,
)
def test_settings_are_refused_by_name_and_the_trainer_is_left_alone(tmp_path, changes, message):
    trainer = trl_trainer.build(tmp_path, **changes)
    with pytest.raises(UnsupportedTrainer, match=message):
        trl_trainer.attach(trainer)
    assert not trainer.use_vllm
    assert not hasattr(trainer, "vllm_generation")


# Fields of vLLM's SamplingParams, present and past.
VLLM_NAMES = """
n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed
stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs
prompt_logprob_token_ids prompt_logprob_start logprob_token_ids flat_logprobs detokenize
skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind
stream_interval skip_clone structured_outputs guided_decoding logits_processors logit_bias
allowed_token_ids extra_args bad_words skip_reading_prefix_cache thinking_token_budget
repetition_detection routed_experts_prompt_start trace_decode_token_ids truncate_prompt_tokens
"""
SERVED = {
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "min_tokens": 3,
    "min_new_tokens": 3,
    "suppress_tokens": [9, 11],
    "bad_words_ids": [[9], [12]],
    "stop": ["ab", "c"],
    "stop_strings": "ab",
}


def test_every_name_of_vllm_and_transformers_has_an_effect_or_is_refused(tmp_path):
    trainer = trl_trainer.build(tmp_path)
    plain = sampling_of(trainer)
    names = {*VLLM_NAMES.split(), *GenerationConfig().to_dict(), "a_name_of_next_year"}
    assert SERVED.keys() <= names
    for name in sorted(names):
        trainer.args.generation_kwargs = {name: SERVED.get(name, 0.123)}
        if name in SERVED:
            assert sampling_of(trainer) != plain, name
        else:
            (reason,) = refused_settings(trainer)
            refused = (
                f"{name}=0.123 in generation_kwargs or trainer.generation_config is not supported; "
            )
            assert reason.startswith(refused), reason
            assert len(reason) >= len(refused) + len("drop it")


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
    trainer.args.generation_kwargs = {"num_beams": 1, "stop": None}  # without effect
    trainer.top_p = trainer.top_k = trainer.repetition_penalty = None
    assert sampling_of(trainer).draw is Draw.PLAIN


def test_the_models_generation_config_never_wins_and_settings_are_logged_once(tmp_path, caplog):
    model = tiny.build()
    model.generation_config.update(do_sample=True, temperature=0.1, top_k=2, top_p=0.2, min_p=0.3)
    with caplog.at_level(logging.INFO, "trainers.adapter.sampling"):
        for _ in range(2):  # each trainer logs its own line
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
    with caplog.at_level(logging.INFO, "trainers.adapter.sampling"):
        generator.generate([[9]], None, 1)
    assert "temperature=0.5" in caplog.messages[-1]


def test_bad_words_and_stop_strings_are_those_of_the_tokenizer(tmp_path):
    extra = {"bad_words_ids": [[9], [12]], "stop": ["ab", "c"], "suppress_tokens": []}
    trainer = trl_trainer.build(tmp_path, generation_kwargs=extra)
    sampling = sampling_of(trainer)
    assert sampling.bad_words_ids == ((9,), (12,))
    assert sampling.stop_strings.strings == ("ab", "c")
    assert sampling_of(trainer, room=3).stop_strings is sampling.stop_strings
    trainer.args.generation_kwargs = {"stop_strings": "ab", "include_stop_str_in_output": True}
    assert sampling_of(trainer).stop_strings.strings == ("ab",)
    for nothing in ([], (), None):
        trainer.args.generation_kwargs = {"stop": nothing}
        assert sampling_of(trainer).stop_strings is None


def test_a_trainer_learns_from_rollouts_that_its_own_text_ends(tmp_path):
    tokenizer, letters = tiny.tokenizer(), list("ABCDEFGHIJKLMNOP")
    extra = {"stop": letters, "bad_words_ids": [[8]]}
    trainer = trl_trainer.build(tmp_path, generation_kwargs=extra)
    seen, generate = [], trl_trainer.attach(trainer).generate
    trainer.vllm_generation.generate = lambda *a, **k: seen.append(generate(*a, **k)) or seen[-1]
    trainer.train()
    rows, ended = [row for r in seen for row in r[1]], 0
    for ids in rows:
        texts = [tokenizer.decode([token]) for token in ids]
        assert not set(texts[:-1]) & set(letters)
        assert texts[-1] in letters or ids[-1] == tiny.EOS or len(ids) == 9
        assert 8 not in ids
        ended += texts[-1] in letters
    assert len(rows) == 24
    assert ended > 8
    gaps = trl_trainer.logged(trainer, "sampling/sampling_logp_difference/max")
    assert max(gaps) < 1e-5


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
    # The trainer also scores over the full vocabulary, so both sides agree.
    gaps = trl_trainer.logged(trainer, "sampling/sampling_logp_difference/max")
    assert max(gaps) < 1e-4


@pytest.mark.parametrize("kind", ["GRPO", "RLOO", "Distillation", "GOLD"])
def test_a_temperature_that_the_loss_does_not_follow_is_warned_of(tmp_path, caplog, kind):
    trainer = trl_family.build(kind, tmp_path, temperature=0.9)
    generator = trl_trainer.attach(trainer)
    with caplog.at_level(logging.WARNING, "trainers.adapter.sampling"):
        for temperature, expected in ((0.9, 0), (0.5, 1), (0.5, 1), (0.9, 1), (0.4, 2)):
            trainer.temperature = temperature
            generator.generate([[9]], None, 1)
            assert len(caplog.messages) == (expected if kind in ("GRPO", "RLOO") else 0)
    if caplog.messages:
        assert "temperature=0.4 from now on, but the loss still divides by 0.9" in caplog.text


def test_stop_strings_that_the_loss_leaves_out_are_warned_of(tmp_path, caplog):
    stops = {"generation_kwargs": {"stop": ["ab"]}}
    for masked, strings, warned in ((True, {}, False), (False, stops, False), (True, stops, True)):
        trainer = trl_trainer.build(tmp_path, mask_truncated_completions=masked, **strings)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "trainers"):
            trl_trainer.attach(trainer)
        assert ("If most end so, nothing is learnt" in caplog.text) == warned


@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_a_mean_gap_beyond_rounding_is_warned_of_once(tmp_path, caplog, scale):
    trainer = trl_trainer.build(tmp_path)
    trl_trainer.attach(trainer)
    weigh = trainer._get_per_token_logps_and_entropies

    def scaled(*args, **kwargs):
        logps, *others = weigh(*args, **kwargs)
        return logps * scale, *others

    trainer._get_per_token_logps_and_entropies = scaled
    with caplog.at_level(logging.WARNING, "trainers"):
        trainer.train()
    said = [message for message in caplog.messages if "nats a token in the mean" in message]
    assert len(said) == (scale > 1)


def test_a_trainer_is_copied_without_its_generator_and_its_parts_at_any_time(tmp_path):
    trainer = trl_trainer.build(tmp_path)
    generator = trl_trainer.attach(trainer)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(RolloutError, match="cannot be copied or pickled"):
            duplicate(generator.engine)
    with pytest.raises(RolloutError, match="before `attach` or after `detach`"):
        copy.deepcopy(trainer)
    assert pickle.loads(pickle.dumps(trainer.args)).max_steps == 3
    model = copy.deepcopy(trainer.model)
    for own, copied in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, copied)
        assert own.data_ptr() != copied.data_ptr()
    trainer.train()
    generator.detach()
    other = copy.deepcopy(trainer)
    trl_trainer.attach(other)
    assert len(other.vllm_generation.generate([[9, 10]], None, 1)[1]) == 1


def fsdp(**changes):
    """What FSDP2 leaves on a trainer, with changed plugin settings."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    for name, value in changes.items():
        setattr(plugin, name, value)
    return {f"{STATE}.distributed_type": DistributedType.FSDP, f"{STATE}.fsdp_plugin": plugin}


def zero(**config):
    """What ZeRO-3 leaves on a trainer, without DeepSpeed; `config` is DeepSpeed's."""
    offload = {"offload_param": {"device": "none"}, "offload_optimizer": {"device": "cpu"}}
    config = {"zero_optimization": {"stage": 3, **offload}, **config}
    plugin = SimpleNamespace(deepspeed_config=config)
    kind = DistributedType.DEEPSPEED
    return {f"{STATE}.distributed_type": kind, f"{STATE}.deepspeed_plugins": plugin}


def put(monkeypatch, trainer, attributes):
    for path, value in attributes.items():
        *owners, name = path.split(".")
        monkeypatch.setattr(functools.reduce(getattr, owners, trainer), name, value, raising=False)


STATE = "accelerator.state"
PARALLELISM = "accelerator.__class__.parallelism_config"
OFFLOADED, QUANTISED = {"offload_param": {"device": "cpu"}}, {"zero_quantized_weights": True}


@pytest.mark.parametrize(
    ("set_up", "message"),
    [
        (lambda: {"args.use_vllm": True}, "already has a generator"),
        (lambda: {"use_vllm": True}, "already has a generator"),
        (lambda: {"eos_token_ids": [None, tiny.EOS]}, "no EOS token; set its `eos_token`"),
        (lambda: {f"{STATE}._mixed_precision": "fp8"}, "fp8"),
        (lambda: {f"{STATE}.distributed_type": DistributedType.MEGATRON_LM}, "MEGATRON_LM"),
        (lambda: {PARALLELISM: SimpleNamespace(tp_size=2)}, "tp_size > 1"),
        (lambda: {PARALLELISM: SimpleNamespace(cp_size=2)}, "cp_size > 1"),
        (lambda: {PARALLELISM: SimpleNamespace(sp_size=2)}, "sp_size > 1"),
        (lambda: fsdp(fsdp_version=1), "FSDP1 flattens parameters.*use FSDP2"),
        (lambda: fsdp(cpu_offload=CPUOffloadPolicy()), "drop `fsdp_offload_params`"),
        (lambda: fsdp(activation_checkpointing=True), "use the trainer's `gradient_checkpointing`"),
        (lambda: zero(zero_optimization=OFFLOADED), "drop `offload_param`"),
        (lambda: zero(zero_optimization=QUANTISED), "rounds the weights"),
        (lambda: zero(torch_autocast={"enabled": True}), "use `bf16` instead"),
        (lambda: zero(tensor_parallel={"autotp_size": 2}), "use ZeRO or DDP"),
    ],
)
def test_set_ups_are_refused_by_name(tmp_path, monkeypatch, set_up, message):
    trainer = trl_trainer.build(tmp_path)
    put(monkeypatch, trainer, set_up())
    with pytest.raises(UnsupportedTrainer, match=message):
        check_trainer(trainer)


@pytest.mark.parametrize("set_up", [fsdp, zero])
def test_sharded_weights_are_served_but_not_in_exact_mode(tmp_path, monkeypatch, set_up):
    trainer = trl_trainer.build(tmp_path)
    put(monkeypatch, trainer, set_up())
    check_trainer(trainer)
    kind = trainer.accelerator.distributed_type.value
    with pytest.raises(UnsupportedTrainer, match=f"not tested under {kind}; use DDP"):
        trl_trainer.attach(trainer, replace(trl_trainer.ENGINE, on_policy="exact"))


@pytest.mark.parametrize(
    "changes",
    [
        {"vllm_importance_sampling_mode": "token_truncate"},
        {"vllm_importance_sampling_correction": False},
    ],
    ids=str,
)
def test_vespo_with_a_token_level_correction_or_none_is_fine(tmp_path, changes):
    check_trainer(trl_trainer.build(tmp_path, loss_type="vespo", **changes))


def test_a_trl_that_is_unknown_or_whose_seam_moved_is_refused(monkeypatch):
    for version in ("1.14.2", "1.17.0", "2.0.0"):
        with monkeypatch.context() as patch:
            patch.setattr(trl, "__version__", version)
            message = rf"TRL {version} is not tested .* 1.15 or 1.16"
            with pytest.raises(UnsupportedTrainer, match=message):
                check_trl()
    monkeypatch.setattr(VLLMGeneration, "generate", lambda self, prompts, sampling: None)
    with pytest.raises(UnsupportedTrainer, match=r"calls its generator with \('prompts', 'samp"):
        check_trl()


def test_a_config_of_another_kind_and_images_are_refused(tmp_path):
    for config in ({"max_rows": 8}, EngineConfig(max_rows=8)):
        with pytest.raises(ConfigError, match=r"must be a trainers\.RolloutConfig\(\.\.\.\)"):
            RolloutGenerator(config)
    generator = trl_trainer.attach(trl_trainer.build(tmp_path))
    with pytest.raises(UnsupportedTrainer, match="images"):
        generator.generate([[9]], [["an image"]], 1)


def test_one_generator_serves_one_trainer_through_one_door(tmp_path):
    trainer, other = trl_trainer.build(tmp_path), trl_trainer.build(tmp_path)
    generator = trl_trainer.attach(trainer)
    with pytest.raises(UnsupportedTrainer, match="already serves a trainer"):
        generator.attach(other)
    with pytest.raises(UnsupportedTrainer, match="any generator attached before"):
        trl_trainer.attach(trainer)
    function = RolloutGenerator(trl_trainer.ENGINE)
    function(["xyz"], other)
    with pytest.raises(UnsupportedTrainer, match="already serves a trainer"):
        function(["xyz"], trl_trainer.build(tmp_path))
    with pytest.raises(UnsupportedTrainer, match="pass this generator as rollout_func"):
        trl_trainer.attach(trl_trainer.build(tmp_path, rollout_func=function))


def test_a_refused_model_leaves_the_trainer_alone(tmp_path):
    trainer = trl_trainer.build(tmp_path)
    trainer.model.config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(NotImplementedError, match="dynamic RoPE"):
        trl_trainer.attach(trainer)
    assert not trainer.use_vllm


def test_a_model_that_training_would_move_is_moved_before_there_is_an_engine(tmp_path, monkeypatch):
    trainer = trl_trainer.build(tmp_path)
    monkeypatch.setattr(trainer.accelerator.state, "device", torch.device("meta"))  # for a GPU
    with pytest.raises(UnsupportedModel, match="meta device"):
        trl_trainer.attach(trainer)

"""Stock TRL draws by `trainer.generation_config`, so what changes in it changes rollouts, too."""

import pytest
import trl_family
import trl_trainer
from transformers import GenerationConfig

from rollout import UnsupportedTrainer
from trainers.adapter.sampling import refused_settings, row_sampling
from trainers.adapter.seams import Settings

# Entries of transformers' config and what the engine then draws by.
SERVED = {
    "max_new_tokens": (5, {"max_new_tokens": 5}),
    "temperature": (0.5, {"temperature": 0.5}),
    "top_k": (3, {"top_k": 3}),
    "top_p": (0.7, {"top_p": 0.7}),
    "min_p": (0.2, {"min_p": 0.2}),
    "repetition_penalty": (1.3, {"repetition_penalty": 1.3}),
    "min_new_tokens": (4, {"min_new_tokens": 4}),
    "suppress_tokens": ([9, 10], {"suppress_tokens": (9, 10)}),
    "bad_words_ids": ([[9]], {"bad_words_ids": ((9,),)}),
    "eos_token_id": (9, {"eos_token_ids": (9,)}),
}


@pytest.mark.parametrize("kind", trl_family.HOMES)
def test_nothing_has_changed_in_a_new_trainer(kind, tmp_path):
    changes = {"temperature": 0.7, "max_completion_length": 11}
    trainer = trl_family.build(kind, tmp_path, **changes)
    settings = Settings(trainer)
    trainer.generation_config = None
    assert row_sampling(settings, 99) == row_sampling(Settings(trainer), 99)
    assert list(refused_settings(settings)) == []


@pytest.mark.parametrize("name", SERVED)
def test_a_change_is_followed_from_the_next_refresh(name, tmp_path):
    trainer = trl_trainer.build(tmp_path)
    settings = Settings(trainer)
    before = row_sampling(settings, 99)
    value, wanted = SERVED[name]
    setattr(trainer.generation_config, name, value)
    assert row_sampling(settings, 99) == before
    settings.refresh()
    sampling = row_sampling(settings, 99)
    assert {field: getattr(sampling, field) for field in wanted} == wanted
    assert row_sampling(Settings(trainer), 99) == sampling
    assert list(refused_settings(settings)) == []


def test_generation_kwargs_and_changes_come_together(tmp_path):
    trainer = trl_trainer.build(tmp_path, generation_kwargs={"min_new_tokens": 2, "top_k": 4})
    settings = Settings(trainer)
    assert (row_sampling(settings, 99).min_new_tokens, row_sampling(settings, 99).top_k) == (2, 4)
    trainer.generation_config.top_p = 0.5
    settings.refresh()
    sampling = row_sampling(settings, 99)
    assert (sampling.min_new_tokens, sampling.top_k, sampling.top_p) == (2, 4, 0.5)


def test_rollouts_follow_a_change_and_stop_at_one_that_is_refused(tmp_path):
    trainer = trl_trainer.build(tmp_path, max_steps=1, learning_rate=0.0)
    generator = trl_trainer.attach(trainer)
    trainer.generation_config.max_new_tokens = 3
    trainer.train()
    assert trl_trainer.logged(trainer, "completions/max_length") == [3]
    trainer.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(UnsupportedTrainer, match=r"no_repeat_ngram_size=2 in .*set `repetition_"):
        generator.generate([[9, 10]], None, 1)
    trainer.generation_config = GenerationConfig(max_new_tokens=4)
    assert len(generator.generate([[9, 10]], None, 1)[1][0]) <= 4


def test_a_change_before_attach_counts_as_well(tmp_path):
    trainer = trl_trainer.build(tmp_path)
    trainer.generation_config.num_beams = 4
    with pytest.raises(UnsupportedTrainer, match=r"num_beams=4 in .*no beam search"):
        trl_trainer.attach(trainer)

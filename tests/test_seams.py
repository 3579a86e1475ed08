"""Each TRL trainer that can generate with vLLM generates with the engine."""

import pytest
import tiny
import torch
import trl_family
import trl_trainer
from trl import RLOOTrainer, SFTConfig, SFTTrainer

from rollout import UnsupportedTrainer
from trainers.adapter.seams import SEAMS, Settings, find_seam

KINDS = tuple(trl_family.HOMES)
each_kind = pytest.mark.parametrize("kind", KINDS)


def test_every_trainer_of_the_table_is_tested():
    assert {f"{kind}Trainer" for kind in KINDS} == set(SEAMS)


@each_kind
def test_attach_sets_it_and_detach_leaves_nothing_behind(kind, tmp_path):
    trainer = trl_family.build(kind, tmp_path)
    before = dict(vars(trainer))
    generator = trl_trainer.attach(trainer)
    wanted = SEAMS[f"{kind}Trainer"].sets(trainer.args)
    assert {name: getattr(trainer, name) for name in wanted} == wanted
    assert trainer.use_vllm
    assert trainer.vllm_generation is generator
    generator.detach()
    assert vars(trainer) == before


@each_kind
def test_it_trains_on_what_the_engine_generates(kind, tmp_path):
    """In three steps, each rollout is the engine's, on the trainer's weights at that moment."""
    trainer = trl_family.build(kind, tmp_path)
    generator = trl_trainer.attach(trainer)
    trainer.model.generate = None
    gaps = trl_family.watch_gaps(trainer, generator)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert generator.engine.asleep
    assert len(gaps) == 3 * 8
    assert max(gaps) < 1e-5
    now = dict(trainer.model.named_parameters())
    assert any(not torch.equal(weight, now[name]) for name, weight in before.items())
    for name in ("rollout/generated_tok_s", "rollout/duration_s", "rollout/sleep_ms"):
        assert all(value > 0 for value in trl_trainer.logged(trainer, name))
        assert len(trl_trainer.logged(trainer, name)) == 3


def test_importance_weighted_distillation_reads_the_rollouts_own_logprobs(tmp_path):
    trainer = trl_family.build("IWOPD", tmp_path, distillation_objective="iw_opd")
    trl_trainer.attach(trainer)
    compute_loss, batches = trainer.compute_loss, []

    def spying(model, inputs, *args, **kwargs):
        batches.append(inputs)
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = spying
    trainer.train()
    assert len(batches) == 3
    for batch in batches:
        assert (batch["rollout_logprobs"][batch["labels"] != -100] < 0).all()


def test_a_trainer_without_the_seam_is_refused_by_what_it_lacks(tmp_path):
    arguments = SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    trainer = SFTTrainer(
        model=tiny.build(),
        args=arguments,
        train_dataset=tiny.dataset().rename_column("prompt", "text"),
        processing_class=tiny.tokenizer(),
    )
    with pytest.raises(
        UnsupportedTrainer, match=r"it has no `use_vllm`, .*GRPOTrainer, RLOOTrainer"
    ):
        trl_trainer.attach(trainer)


def test_an_unknown_trainer_with_a_seam_is_refused(tmp_path, monkeypatch):
    monkeypatch.delitem(SEAMS, "RLOOTrainer")
    with pytest.raises(UnsupportedTrainer, match=r"RLOOTrainer .* it is not among"):
        trl_trainer.attach(trl_family.build("RLOO", tmp_path))


@pytest.mark.parametrize("attribute", ["_generate", "_generate_and_score_completions"])
def test_a_trainer_of_another_trl_is_refused_by_the_attribute_it_lacks(
    tmp_path, monkeypatch, attribute
):
    trainer = trl_trainer.build(tmp_path)
    monkeypatch.delattr(type(trainer), attribute)
    with pytest.raises(UnsupportedTrainer, match=f"GRPOTrainer of TRL .* has no `{attribute}`"):
        trl_trainer.attach(trainer)


def test_a_users_own_class_takes_the_row_of_the_one_it_derives_from(tmp_path):
    class Mine(RLOOTrainer):
        pass

    trainer = trl_family.build("RLOO", tmp_path)
    trainer.__class__ = Mine
    assert find_seam(trainer) is SEAMS["RLOOTrainer"]


@each_kind
def test_settings_have_one_set_of_names(kind, tmp_path):
    settings = Settings(trl_family.build(kind, tmp_path, temperature=0.7))
    assert settings.temperature == 0.7
    assert settings.max_completion_length == 9
    assert settings.eos_token_ids == [tiny.EOS]
    assert (settings.top_p, settings.top_k, settings.repetition_penalty) == (1.0, 0, 1.0)
    assert settings.min_p in (None, 0.0)
    assert settings.args.generation_kwargs is None
    with pytest.raises(AttributeError, match="no_such_setting"):
        _ = settings.no_such_setting


def test_settings_are_read_where_they_are_changed(tmp_path):
    trainer = trl_family.build("GOLD", tmp_path)
    settings = Settings(trainer)
    trainer.temperature, trainer.args.max_completion_length = 0.3, 4
    assert (settings.temperature, settings.max_completion_length) == (0.3, 4)


def test_any_eos_id_of_the_model_or_the_tokenizer_ends_a_completion(tmp_path):
    model = tiny.build()
    model.generation_config.eos_token_id = [20, 21]
    trainer = trl_family.build("IWOPD", tmp_path, model=model)
    assert set(Settings(trainer).eos_token_ids) == {tiny.EOS, 20, 21}

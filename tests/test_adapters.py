"""Adapters in training: each rollout uses the adapters as they are at that moment."""

from itertools import chain

import pytest
import tiny
import torch
import trl_family
import trl_trainer
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForCausalLM

from rollout import EngineConfig, RolloutEngine, UnsupportedTrainer
from trainers.ppo.value_model import ValueModel

LORA = {"target_modules": ["q_proj", "down_proj"], "r": 4, "task_type": "CAUSAL_LM"}


def adapted(trainer):
    names = ("lora_", "modules_to_save")
    parameters = trainer.model.named_parameters()
    return {name: p.detach().clone() for name, p in parameters if any(n in name for n in names)}


def rows_of(batch):
    """Prompt, completion and reference scores of each row, without padding."""
    sides = [(batch[f"{side}_ids"], batch[f"{side}_mask"]) for side in ("prompt", "completion")]
    for row, scores in enumerate(batch["ref_per_token_logps"]):
        prompt, completion = (ids[row][mask[row].bool()].tolist() for ids, mask in sides)
        yield prompt, completion, scores[: len(completion)].tolist()


@pytest.mark.parametrize(
    "changes", [{"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}], ids=str
)
def test_each_kind_of_adapter_trains_on_its_own_rollouts(tmp_path, changes):
    config = LoraConfig(**LORA, **changes)
    trainer = trl_family.build("GRPO", tmp_path, peft_config=config, learning_rate=0.05)
    gaps = trl_family.watch_gaps(trainer, trl_trainer.attach(trainer))
    before = adapted(trainer)
    trainer.train()
    assert len(gaps) == 3 * 8
    assert max(gaps) < 1e-4
    assert any(not torch.equal(weight, before[name]) for name, weight in adapted(trainer).items())


def test_the_reference_is_the_model_without_its_adapters(tmp_path):
    """The reference pass switches adapters off and on again between rollouts."""
    config = LoraConfig(**LORA)
    trainer = trl_family.build("GRPO", tmp_path, peft_config=config, beta=0.1, learning_rate=0.05)
    gaps = trl_family.watch_gaps(trainer, trl_trainer.attach(trainer))
    score, scored = trainer._generate_and_score_completions, []
    trainer._generate_and_score_completions = lambda inputs: (
        scored.append(score(inputs)) or scored[-1]
    )
    trainer.train()
    assert max(gaps) < 1e-4
    untouched = tiny.build().train(False)
    assert len(scored) == 3
    for prompt, completion, scores in chain.from_iterable(map(rows_of, scored)):
        wanted = tiny.logprobs(untouched, prompt, completion)
        assert scores == pytest.approx(wanted.tolist(), abs=1e-5)
    first, *later = trl_trainer.logged(trainer, "kl")
    assert first == pytest.approx(0.0, abs=1e-6)
    assert max(later) > 1e-4


def scale(model):
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling = {name: 3 * value for name, value in module.scaling.items()}


def add(model):
    model.add_adapter("added", LoraConfig(**{**LORA, "r": 2}, init_lora_weights=False))
    model.set_adapter("added")


# Applied in this order. Merging and unmerging leave the result as it was.
CHANGES = {
    "scaled": scale,
    "added": add,
    "another": lambda model: model.set_adapter("default"),
    "two at once": lambda model: model.base_model.set_adapter(["default", "added"]),
    "merged": lambda model: model.merge_adapter(),
    "unmerged": lambda model: model.unmerge_adapter(),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "enabled": lambda model: model.base_model.enable_adapter_layers(),
}


def test_rollouts_follow_whatever_is_done_to_adapters_between_them(tmp_path):
    model = get_peft_model(tiny.build(), LoraConfig(**LORA, init_lora_weights=False))
    trainer = trl_family.build("GRPO", tmp_path, model=model)
    gaps = trl_family.watch_gaps(trainer, trl_trainer.attach(trainer))

    def score():
        return tiny.logprobs(model, [9, 10], [11, 12, 13])

    before = score()
    for name, change in CHANGES.items():
        change(model)
        now = score()
        assert torch.allclose(now, before, atol=1e-3) == (name in ("merged", "unmerged")), name
        before = now
        gaps.clear()
        trainer._generate(["xyzabc"] * 4)
        assert len(gaps) == 4
        assert max(gaps) < 1e-4, name


def test_a_teacher_that_is_an_adapter_of_the_same_model_does_not_generate(tmp_path):
    """SDFT adds its averaged teacher as an adapter to the model that the engine serves."""
    trainer = trl_family.build(
        "SDFT",
        tmp_path,
        peft_config=LoraConfig(**LORA),
        teacher_model_kind="ema",
        learning_rate=0.05,
    )
    gaps = trl_family.watch_gaps(trainer, trl_trainer.attach(trainer))
    trainer.train()
    assert "teacher" in trainer.model.peft_config
    assert trainer.model.active_adapter == "default"
    assert len(gaps) == 3 * 8
    assert max(gaps) < 1e-4


@pytest.fixture
def from_folder(tmp_path):
    """A model that transformers loads from a folder of adapters: no wrapper of PEFT's around it."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tiny.build().save_pretrained(base)
    config = LoraConfig(**LORA, init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(adapter)
    model = AutoModelForCausalLM.from_pretrained(adapter)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def test_a_folder_of_adapters_that_transformers_loaded_trains(from_folder, tmp_path):
    trainer = trl_family.build("GRPO", tmp_path, model=from_folder, learning_rate=0.05)
    gaps = trl_family.watch_gaps(trainer, trl_trainer.attach(trainer))
    trainer.train()
    assert len(gaps) == 3 * 8
    assert max(gaps) < 1e-4
    layers = [layer for layer in from_folder.modules() if isinstance(layer, BaseTunerLayer)]
    with RolloutEngine(from_folder, EngineConfig(max_rows=4, page_tokens=4)) as engine:
        for enabled in (False, True):
            for layer in layers:
                layer.enable_adapters(enabled)
            tiny.assert_on_policy(engine, from_folder)


def test_a_critic_beside_it_shares_its_frozen_weights_or_is_refused(from_folder):
    critic = ValueModel.beside_adapters(from_folder)
    trained = [name for name, parameter in critic.named_parameters() if parameter.requires_grad]
    assert any("lora_" in name for name in trained)
    ids = torch.tensor([[9, 10, 11]])
    assert critic(ids, torch.ones_like(ids), 2).shape == (1, 2)
    with pytest.raises(UnsupportedTrainer, match=r"load them by peft\.PeftModel"):
        ValueModel.from_policy(from_folder)

"""What changes a model from outside its classes and parameters is refused by name."""

import functools
import types

import pytest
import tiny
import torch
import trl_trainer
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rollout import EngineConfig, RolloutEngine, SamplingParams, UnsupportedModel

CONFIG = EngineConfig(max_rows=4, page_tokens=4, self_check=False)


def half_mlp(model):
    mlp = model.model.layers[1].mlp
    mlp.forward = types.MethodType(lambda self, x: 0.5 * type(self).forward(self, x), mlp)


def half_head(model):
    head = model.lm_head
    head.forward = functools.partial(halved, head)


def halved(head, states):
    return nn.functional.linear(states, head.weight) / 2


def wraps(model):
    """Names the function that it wraps as its own origin."""
    plain = model.forward

    @functools.wraps(plain)
    def forward(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = output.logits / 3.0
        return output

    model.forward = forward


PATCHES = {
    half_mlp: r"model\.layers\.1\.mlp \(Qwen3MLP\)",
    half_head: "lm_head",
    wraps: "the model",
}


@pytest.mark.parametrize("patch", PATCHES)
def test_a_forward_of_ones_own_is_refused_by_name(patch):
    model = tiny.build()
    patch(model)
    with pytest.raises(UnsupportedModel, match=rf"{PATCHES[patch]}.* has a forward of its own, "):
        RolloutEngine(model, CONFIG)


@pytest.mark.parametrize("patch", PATCHES)
def test_it_is_found_under_accelerates_and_trls_wrappers(patch, tmp_path):
    model = tiny.build()
    patch(model)
    trainer = trl_trainer.build(tmp_path, model, bf16=True)
    trainer.accelerator.prepare(trainer.model)
    with pytest.raises(UnsupportedModel, match="has a forward of its own"):
        trl_trainer.attach(trainer)


def test_wrappers_of_known_packages_alone_run(tmp_path):
    trainer = trl_trainer.build(tmp_path, tiny.build(), bf16=True, max_steps=1)
    trainer.accelerator.prepare(trainer.model)
    assert "forward" in vars(trainer.model)
    trl_trainer.attach(trainer)
    trainer.train()


def test_a_patch_of_the_class_runs(monkeypatch):
    kind = type(tiny.build().model.layers[0].mlp)
    monkeypatch.setattr(kind, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    model = tiny.build()
    with RolloutEngine(model, EngineConfig(max_rows=4, page_tokens=4)) as engine:
        tiny.assert_on_policy(engine, model)


def test_an_attention_function_of_ones_own_is_refused():
    AttentionInterface.register("mine", lambda *args, **kwargs: sdpa_attention_forward(*args))
    AttentionInterface.register("theirs", sdpa_attention_forward)
    model = tiny.build()
    model.set_attn_implementation("mine")
    with pytest.raises(UnsupportedModel, match=r"attends by 'mine', a function of your own"):
        RolloutEngine(model, CONFIG)
    for name in ("theirs", "eager", "sdpa"):
        model.set_attn_implementation(name)
        RolloutEngine(model, CONFIG).close()


def test_a_weight_that_a_hook_computes_is_refused_until_it_is_one():
    model = tiny.build()
    layer = prune.random_unstructured(model.model.layers[0].mlp.up_proj, "weight", amount=0.5)
    with pytest.raises(UnsupportedModel, match=r"Random.* computes .*0\.mlp\.up_proj\.w"):
        RolloutEngine(model, CONFIG)
    prune.remove(layer, "weight")
    with RolloutEngine(model, EngineConfig(max_rows=4, page_tokens=4)) as engine:
        tiny.assert_on_policy(engine, model)


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm], ids=lambda norm: norm.__name__)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_norms_of_weights_run_as_parametrizations_alone(norm):
    model = tiny.build()
    norm(model.model.layers[0].mlp.up_proj)
    with pytest.raises(UnsupportedModel, match=r"use torch\.nn\.utils\.parametrizations"):
        RolloutEngine(model, CONFIG)
    model = tiny.build()
    getattr(parametrizations, norm.__name__)(model.model.layers[0].mlp.up_proj)
    with RolloutEngine(model, EngineConfig(max_rows=4, page_tokens=4)) as engine:
        tiny.assert_on_policy(engine, model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        tiny.assert_on_policy(engine, model)


def test_the_check_does_not_run_the_model():
    model = tiny.build()
    model.register_forward_hook(lambda *_: pytest.fail("ran"))
    with RolloutEngine(model, CONFIG) as engine:
        engine.generate([[9]], SamplingParams(max_new_tokens=1))

"""The twin shares the trainer's storage and nothing else."""

import logging
import sys
import threading
from functools import partial

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from rollout import EngineConfig, RequestError, RolloutEngine, SamplingParams, UnsupportedModel
from rollout.model.twin import Twin

SMALL = EngineConfig(max_rows=4, page_tokens=4)
SIX = SamplingParams(max_new_tokens=6)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_and_persistent_buffers_are_the_same_storage(tied, autocast):
    model = tiny.build(tie_word_embeddings=tied).to(autocast or torch.float32)
    model.register_buffer("kept", torch.ones(3))
    twin = Twin(model, autocast)
    theirs = dict(twin.base.named_parameters(remove_duplicate=False))
    assert set(theirs) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert theirs[name].data_ptr() == parameter.data_ptr()
        assert not theirs[name].requires_grad
    assert twin.base.kept.data_ptr() == model.kept.data_ptr()
    frequencies = twin.base.model.rotary_emb.inv_freq
    assert frequencies.data_ptr() != model.model.rotary_emb.inv_freq.data_ptr()
    assert twin.shadow_bytes == 0


def test_modes_flags_and_config_are_the_twins_own():
    model = tiny.build().train()
    twin = Twin(model)
    assert not any(module.training for module in twin.base.modules())
    assert all(module.training for module in model.modules())
    assert twin.base.config is not model.config
    assert twin.base.model.layers[0].self_attn.config is twin.base.config
    assert model.config._attn_implementation == "sdpa"


def test_hooks_of_the_trainer_stay_behind():
    model, ran = tiny.build(), []
    for module in model.modules():
        module.register_forward_hook(lambda *_: ran.append("hook"))
        module.register_forward_pre_hook(lambda *_: ran.append("pre-hook"))
    with RolloutEngine(model, SMALL) as engine:
        ran.clear()  # the self-check runs the model
        engine.generate([[9, 10]], SIX)
    assert ran == []


def hide_reference(model):
    model.__dict__["reference"] = [torch.zeros(1000)]


def hide_cycle(model):
    model.notes = notes = [model, {"layer": model.model.layers[0]}]
    notes.append(notes)


HIDDEN = {
    "lock": lambda model: setattr(model, "lock", threading.Lock()),
    "file": lambda model: setattr(model, "log", sys.stderr),
    "generator": lambda model: setattr(model.model, "ids", (n for n in range(9))),
    "recorded": lambda model: setattr(model.lm_head, "out", torch.ones(2, requires_grad=True) * 2),
    "reference": hide_reference,
    "cycle": hide_cycle,
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_modules_hold_beside_numbers_is_shared_or_points_into_the_twin(name):
    model = tiny.build()
    HIDDEN[name](model)
    with RolloutEngine(model, SMALL) as engine:
        tiny.assert_on_policy(engine, model)
        base = engine.module
    if name == "reference":
        assert base.reference[0] is model.reference[0]
    if name == "cycle":
        assert base.notes[0] is base
        assert base.notes[1]["layer"] is base.model.layers[0]
        assert base.notes[2] is base.notes


class Routed(nn.Module):
    """Reaches modules of the tree by a list, a bound method and a partial."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.calls = [inner.forward, partial(self.scaled, scale=2.0)]

    def scaled(self, states, scale):
        return states * scale

    def forward(self, states):
        first, second = self.calls
        return second(first(states))


def test_methods_and_partials_run_the_twins_own_modules():
    model = tiny.build()
    mlp = model.model.layers[1].mlp = Routed(model.model.layers[1].mlp)
    with RolloutEngine(model, SMALL) as engine:
        tiny.assert_on_policy(engine, model)
        with torch.no_grad():
            mlp.inner.up_proj.weight.mul_(1.5)
        tiny.assert_on_policy(engine, model)
        twins = engine.module.model.layers[1].mlp
        assert [call.__self__ for call in (twins.calls[0], twins.calls[1].func)] == [
            twins.inner,
            twins,
        ]


def scale_attention(model):
    model.model.layers[0].self_attn.scaling *= 0.5


def widen(model):
    model.config.sliding_window = 9
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 9


CHANGES = {
    "scaling": ("qwen3", scale_attention),
    "window": ("mistral", widen),
    "softcap": ("gemma2", lambda m: setattr(m.config, "final_logit_softcapping", 1.0)),
    "epsilon": ("llama", lambda m: setattr(m.model.norm, "variance_epsilon", 0.5)),
    "head": ("granite", lambda m: setattr(m.config, "logits_scaling", 7.0)),
    "activation": ("llama", lambda m: setattr(m.model.layers[1].mlp, "act_fn", nn.ReLU())),
    "experts": ("qwen3_moe", lambda m: setattr(m.model.layers[0].mlp.gate, "top_k", 1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_settings_that_change_are_followed(name, caplog):
    family, change = CHANGES[name]
    model = tiny.build(family)
    with caplog.at_level(logging.INFO), RolloutEngine(model, SMALL) as engine:
        tiny.assert_on_policy(engine, model)
        before = tiny.logprobs(model.eval(), [9] * 9, [10] * 9)
        change(model)
        assert not torch.equal(tiny.logprobs(model.eval(), [9] * 9, [10] * 9), before)
        tiny.assert_on_policy(engine, model)
    (said,) = (m for m in caplog.messages if "copies the module tree again" in m)
    assert len(said) < 200


def test_weights_that_moved_are_found_by_name():
    model = tiny.build()
    with RolloutEngine(model, SMALL) as engine:
        tiny.assert_on_policy(engine, model)
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.1
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 0.7)
        tiny.assert_on_policy(engine, model)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [80, 50])
def test_resized_embeddings_are_followed(size, autocast):
    model, marked = tiny.build(), SamplingParams(max_new_tokens=6, repetition_penalty=1.2)
    with RolloutEngine(model, SMALL, autocast_dtype=autocast) as engine:
        engine.generate([[9, 10]], marked)
        model.resize_token_embeddings(size, mean_resizing=False)
        with pytest.raises(RequestError, match=f"outside the vocabulary, 0 to {size - 1}"):
            engine.generate([[size]], marked)
        (completion,) = engine.generate([[size - 1]], marked)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            wanted = tiny.logprobs(model.eval(), [size - 1], completion.token_ids)
        close = 1e-5 if autocast is None else 0.1
        assert completion.logprobs == pytest.approx(wanted.tolist(), abs=close)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"trainable_token_indices": [9, 10]},
        # PEFT copies layers with their own config, so changing the model's config is not enough.
        {"layer_replication": [[0, 3], [1, 3]]},
    ],
    ids=str,
)
def test_adapters_that_change_more_than_linear_layers_are_followed(changes):
    config = {"target_modules": ["q_proj", "down_proj"], "r": 4, "init_lora_weights": False}
    model = get_peft_model(tiny.build("llama"), LoraConfig(**{**config, **changes}))
    with RolloutEngine(model, SMALL) as engine:
        tiny.assert_on_policy(engine, model)


@pytest.mark.parametrize("adapters", [None, {}, {"use_dora": True}], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_under_autocast_the_twin_gives_exactly_the_trainers_numbers(adapters, tied, caplog):
    """Float32 weights under bf16 autocast: no gap with the same shapes and attention."""
    model = tiny.build(attention_bias=True, tie_word_embeddings=tied)
    if adapters is not None:
        targets = ["q_proj", "v_proj", "up_proj"]
        config = LoraConfig(target_modules=targets, init_lora_weights=False, **adapters)
        model = get_peft_model(model, config)
    model.eval()
    ids = torch.tensor([prompt[:5] for prompt in tiny.prompts(40, seed=2) if len(prompt) >= 5])
    with caplog.at_level(logging.WARNING):
        twin = Twin(model, torch.bfloat16)
    twin.base.config._attn_implementation = "sdpa"
    for _ in range(2):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            theirs = model(ids).logits
            assert torch.equal(twin.base(ids).logits, theirs)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        twin.refresh()
    if adapters and adapters["use_dora"]:
        return  # this kind reads some weights before autocast casts them
    linears = [m for m in twin.base.modules() if isinstance(m, nn.Linear)]
    assert {linear.weight.dtype for linear in linears} == {torch.bfloat16}
    assert twin.base.model.embed_tokens.weight.dtype == torch.float32
    assert twin.shadow_bytes == sum(2 * linear.weight.numel() for linear in linears)
    announced = [record.message for record in caplog.records if "GiB" in record.message]
    assert len(announced) == 1
    assert 'model_init_kwargs={"dtype": "bfloat16"}' in announced[0]


def test_experts_run_when_the_trainer_records_its_router():
    model = tiny.build("qwen3_moe")
    model.config.output_router_logits = True
    model.eval()(torch.tensor([[9, 10]]))  # installs the recording hooks
    with RolloutEngine(model, SMALL) as engine:
        tiny.assert_on_policy(engine, model)


def test_parameters_that_were_sharded_after_attach_are_refused_at_the_next_version():
    model = tiny.build()
    with RolloutEngine(model, SMALL) as engine:
        model.lm_head._flat_param = torch.nn.Parameter(torch.zeros(1))  # FSDP1's name
        with pytest.raises(UnsupportedModel, match=r"'lm_head._flat_param' is sharded"):
            engine.generate([[9]], SIX)
        del model.lm_head._flat_param
        tiny.assert_on_policy(engine, model)

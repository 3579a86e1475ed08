"""q/k/v and gate/up as one product over the trainer's own storage."""

from dataclasses import replace

import pytest
import tiny
import torch
import trl_trainer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rollout import EngineConfig, RolloutEngine, SamplingParams
from rollout.model.projections import groups_of, lay_together

FUSED = EngineConfig(max_rows=4, page_tokens=4, fuse_projections=True)
SIX = SamplingParams(max_new_tokens=6)


def test_parameters_keep_identity_values_and_names_and_share_a_buffer():
    model = tiny.build("qwen2")  # q, k and v have biases
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    assert lay_together(groups_of(model)) == 2 * 3
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.is_contiguous()
    attention = model.model.layers[0].self_attn
    first, second = attention.q_proj.weight, attention.k_proj.weight
    assert first.data_ptr() + first.nbytes == second.data_ptr()


def test_checkpoints_are_what_they_were(tmp_path):
    model, plain = tiny.build(), tiny.build()
    lay_together(groups_of(model))
    model.save_pretrained(tmp_path / "fused")
    plain.save_pretrained(tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fused").state_dict()
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    assert set(loaded) == set(wanted)
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
    size = sum(file.stat().st_size for file in (tmp_path / "fused").glob("*.safetensors"))
    assert size == sum(f.stat().st_size for f in (tmp_path / "plain").glob("*.safetensors"))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rollouts_are_on_policy_through_updates(family):
    model = tiny.build(family)
    with RolloutEngine(model, FUSED) as engine:
        groups = 1 if family in ("qwen3_moe", "gpt_oss") else 2  # experts are no linear layers
        assert engine.worker.twin.num_fused == groups * 3
        tiny.assert_on_policy(engine, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model.train()
        model(torch.tensor([[9, 10, 11]]), labels=torch.tensor([[9, 10, 11]])).loss.backward()
        optimizer.step()
        tiny.assert_on_policy(engine, model)
        assert engine.worker.twin.num_fused == groups * 3


def test_weights_that_were_pulled_apart_are_separate_products_again():
    model = tiny.build()
    with RolloutEngine(model, FUSED) as engine:
        layer = model.model.layers[1].self_attn.k_proj
        layer.weight.data = layer.weight.data.clone() * 1.5
        tiny.assert_on_policy(engine, model)
        assert engine.worker.twin.num_fused == 5


@pytest.mark.parametrize(
    "targets", [["v_proj"], ["q_proj", "v_proj", "up_proj"], "all-linear"], ids=str
)
def test_adapters_go_with_their_group_through_updates_and_switches(targets):
    config = LoraConfig(r=3, target_modules=targets, init_lora_weights=False)
    model = get_peft_model(tiny.build("qwen2"), config)
    with RolloutEngine(model, FUSED) as engine:
        for change in (
            lambda: None,
            lambda: [p.data.mul_(1.5) for name, p in model.named_parameters() if "lora" in name],
            model.merge_adapter,
            model.unmerge_adapter,
            model.base_model.disable_adapter_layers,
            model.base_model.enable_adapter_layers,
        ):
            change()
            tiny.assert_on_policy(engine, model)
            assert engine.worker.twin.num_fused == 6


def test_adapters_that_are_more_than_a_product_are_left_alone():
    config = LoraConfig(target_modules=["v_proj"], init_lora_weights=False, use_dora=True)
    model = get_peft_model(tiny.build(), config)
    with RolloutEngine(model, FUSED) as engine:
        assert engine.worker.twin.num_fused == 3
        tiny.assert_on_policy(engine, model)


def test_cast_weights_lie_together_unasked():
    model = tiny.build()
    with RolloutEngine(
        model, replace(FUSED, fuse_projections=False), autocast_dtype=torch.bfloat16
    ) as engine:
        assert engine.worker.twin.num_fused == 6
        (completion,) = engine.generate([[9, 10, 11]], SIX)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            wanted = tiny.logprobs(model.eval(), [9, 10, 11], completion.token_ids)
        assert completion.logprobs == pytest.approx(wanted.tolist(), abs=0.03)


def test_nothing_is_fused_unless_asked():
    model = tiny.build()
    with RolloutEngine(model, EngineConfig(max_rows=4, page_tokens=4)) as engine:
        assert engine.worker.twin.num_fused == 0


def test_training_ends_in_the_same_weights(tmp_path):
    results = []
    for fused in (False, True):
        trainer = trl_trainer.build(tmp_path / str(fused), max_steps=5)
        config = trl_trainer.RolloutConfig(max_rows=5, page_tokens=4, fuse_projections=fused)
        trl_trainer.attach(trainer, config)
        trainer.train()
        assert max(trl_trainer.logged(trainer, "rollout/logp_gap")) < 1e-5
        results.append(dict(trainer.model.named_parameters()))
    for name, parameter in results[0].items():
        torch.testing.assert_close(results[1][name], parameter, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_narrow_products_are_the_same_products_and_outlive_a_change_of_adapters(fused, adapters):
    model = tiny.build("qwen2")
    if adapters:
        config = LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, config)
    shapes = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    with RolloutEngine(model, replace(FUSED, fuse_projections=fused)) as engine:
        groups = {(96, 48), (128, 48), (9, 48), (6, 48)}
        engine.worker.twin.use_invariant_shapes(dict.fromkeys({*shapes, *groups}, 256))
        tiny.assert_on_policy(engine, model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)  # as an optimizer's step: each product has to take it over
        tiny.assert_on_policy(engine, model)
        left = [
            type(m).__name__
            for m in engine.worker.twin.base.modules()
            if type(m) is torch.nn.Linear
        ]
        assert left == []
        if adapters:
            model.merge_adapter()
            tiny.assert_on_policy(engine, model)


@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_products_of_few_rows_are_ours_in_each_version_and_others_are_not(
    fused, adapters, monkeypatch
):
    skinny_linear_triton = pytest.importorskip("rollout.kernels.skinny_linear_triton")
    rows, model = [], tiny.build("qwen2")
    if adapters:
        config = LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, config)

    def product(states, weight, bias):
        rows.append(states.numel() // states.shape[-1])
        return torch.nn.functional.linear(states, weight, bias)

    for module in ("linear", "projections"):
        monkeypatch.setattr(f"rollout.model.{module}.serves", lambda weight: True)
    monkeypatch.setattr(skinny_linear_triton, "skinny_linear", product)
    with RolloutEngine(model, replace(FUSED, fuse_projections=fused)) as engine:
        tiny.assert_on_policy(engine, model)
        assert rows
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)  # as an optimizer's step
        tiny.assert_on_policy(engine, model)
        rows.clear()
        engine.generate([list(range(9, 60))], SamplingParams(max_new_tokens=1))
        assert max(rows) <= skinny_linear_triton.MOST_ROWS
        left = [
            name
            for name, module in engine.worker.twin.base.model.named_modules()
            if type(module) is torch.nn.Linear
        ]
        assert left == []

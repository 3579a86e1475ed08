"""q/k/v, gate/up and the like as one product over the trainer's own storage."""

from dataclasses import replace

import pytest
import tiny
import torch
import trl_trainer
from peft import LoraConfig, get_peft_model
from test_families import build

from rollout import EngineConfig, RolloutEngine, SamplingParams
from rollout.model.projections import groups_of, lay_together

FUSED = EngineConfig(max_rows=4, page_tokens=4, fuse_projections=True)
SIX = SamplingParams(max_new_tokens=6)


def test_parameters_and_checkpoints_stay_and_share_a_buffer(tmp_path):
    model = tiny.build("qwen2")  # q, k and v have biases
    model.save_pretrained(tmp_path / "before")
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    assert lay_together(groups_of(model)) == 2 * 3
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.is_contiguous()
    attention = model.model.layers[0].self_attn
    first, second = attention.q_proj.weight, attention.k_proj.weight
    assert first.data_ptr() + first.nbytes == second.data_ptr()
    model.save_pretrained(tmp_path / "after")
    files = [tmp_path / name / "model.safetensors" for name in ("before", "after")]
    assert files[0].read_bytes() == files[1].read_bytes()


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


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "olmo_hybrid"])
def test_projections_of_recurrent_layers_are_one_product(family):
    """One product of an attending layer, two of recurrent layers, three of MLPs."""
    model = build(family)
    with RolloutEngine(model, FUSED) as engine:
        assert engine.worker.twin.num_fused == 6
        tiny.assert_on_policy(engine, model)


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


def test_only_cast_weights_lie_together_unasked():
    model, config = tiny.build(), replace(FUSED, fuse_projections=False)
    with RolloutEngine(model, config) as engine:
        assert engine.worker.twin.num_fused == 0
    with RolloutEngine(model, config, autocast_dtype=torch.bfloat16) as engine:
        assert engine.worker.twin.num_fused == 6
        (completion,) = engine.generate([[9, 10, 11]], SIX)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            wanted = tiny.logprobs(model.eval(), [9, 10, 11], completion.token_ids)
        assert completion.logprobs == pytest.approx(wanted.tolist(), abs=0.03)


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


@pytest.mark.parametrize("kind", ["batch-invariant", "skinny"])
@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_every_product_is_ours_in_each_version_and_after_a_change_of_adapters(
    fused, adapters, kind, monkeypatch
):
    kernels = pytest.importorskip("rollout.kernels.skinny_linear_triton")
    model, rows = tiny.build("qwen2"), []
    if adapters:
        config = LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, config)

    def skinny_linear(states, weight, bias):
        rows.append(states.numel() // states.shape[-1])
        return torch.nn.functional.linear(states, weight, bias)

    for module in ("linear", "projections"):
        monkeypatch.setattr(f"rollout.model.{module}.serves", lambda weight: True)
    monkeypatch.setattr(kernels, "skinny_linear", skinny_linear)
    with RolloutEngine(model, replace(FUSED, fuse_projections=fused)) as engine:
        twin = engine.worker.twin
        if kind == "batch-invariant":
            linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
            shapes = {tuple(linear.weight.shape) for linear in linears}
            groups = {(96, 48), (128, 48), (9, 48), (6, 48)}
            twin.use_invariant_shapes(dict.fromkeys({*shapes, *groups}, 256))
        for change in ("none", "a step", "merge"):
            if change == "a step":
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.1)  # each product has to take it over
            elif change == "merge" and adapters:
                model.merge_adapter()
            rows.clear()
            tiny.assert_on_policy(engine, model)
            assert bool(rows) == (kind == "skinny")
            tree = twin.base.model if kind == "skinny" else twin.base  # the head, too
            assert not any(type(module) is torch.nn.Linear for module in tree.modules())
        engine.generate([list(range(9, 60))], SamplingParams(max_new_tokens=1))
        assert max(rows, default=0) <= kernels.MOST_ROWS

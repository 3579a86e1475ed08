"""Exact mode under a stock trainer: its changes, its promises, and how it is undone."""

import copy
import functools
import logging
from dataclasses import replace
from itertools import product

import pytest
import tiny
import torch
import trl_trainer
from peft import LoraConfig
from rich.console import Console

from rollout import (
    EngineConfig,
    RolloutEngine,
    SamplingParams,
    UnsupportedModel,
    UnsupportedTrainer,
)
from rollout.exact.attention import EXACT_ATTENTION
from rollout.exact.setup import batch_invariant_shapes, prepare_trainer
from rollout.model.twin import Twin
from rollout.runner.sampling import sample
from rollout.tools import parity as difference
from rollout.tools.parity import differences
from trainers import generator

EXACT = replace(trl_trainer.ENGINE, on_policy="exact")


@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "lora"])
def test_without_correction_the_curve_is_that_with_it_and_the_gap_is_watched(tmp_path, adapters):
    curves = {}
    for exact in (False, True):
        config = LoraConfig(target_modules="all-linear", r=4) if adapters else None
        trainer = trl_trainer.build(
            tmp_path / str(exact),
            max_steps=4,
            peft_config=config,
            vllm_importance_sampling_correction=not exact,
        )
        trl_trainer.attach(trainer, EXACT if exact else trl_trainer.ENGINE)
        trainer.train()
        curves[exact] = trl_trainer.logged(trainer, "reward")
        gaps = trl_trainer.logged(trainer, "rollout/logp_gap_max")
        assert len(gaps) == 4
        assert max(gaps) < 1e-5
        assert bool(trl_trainer.logged(trainer, "sampling/importance_sampling_ratio/mean")) != exact
    assert curves[True] == pytest.approx(curves[False], abs=1e-6)


def test_detach_leaves_the_trainer_as_it_was(tmp_path, caplog):
    trainer = trl_trainer.build(tmp_path)
    before = dict(vars(trainer))
    hooks = len(trainer.model.model._forward_pre_hooks)
    with caplog.at_level(logging.WARNING):
        attached = trl_trainer.attach(trainer, EXACT)
    (message,) = [r.getMessage() for r in caplog.records if "exact" in r.getMessage()]
    assert "detach() undoes it" in message
    assert trainer.model.config._attn_implementation == EXACT_ATTENTION
    assert len(trainer.model.model._forward_pre_hooks) == hooks + 1
    attached.detach()
    attached.detach()
    assert trainer.model.config._attn_implementation == "sdpa"
    assert len(trainer.model.model._forward_pre_hooks) == hooks
    assert dict(vars(trainer)) == before
    trainer.train()  # with TRL's own generation
    trl_trainer.attach(trl_trainer.build(tmp_path, model=trainer.model), EXACT)


def test_a_gap_is_warned_of_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(generator, "_EXACT_GAP", -1.0)
    trainer = trl_trainer.build(tmp_path, vllm_importance_sampling_correction=False)
    trl_trainer.attach(trainer, EXACT)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    warnings = [r.getMessage() for r in caplog.records if "doctor --exact" in r.getMessage()]
    assert len(warnings) == 1


def test_positions_count_from_a_rows_first_real_token():
    model = tiny.build().eval()
    undo = prepare_trainer(model)
    prompt = [9, 10, 11, 12]
    ids = torch.tensor([[0, 0, 0, *prompt]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits
        logits = model(ids, attention_mask=mask).logits[:, 3:]
        torch.testing.assert_close(logits, wanted, rtol=1e-6, atol=1e-6)
        own = model(ids, attention_mask=mask, position_ids=torch.arange(7)[None] + 5).logits[:, 3:]
        assert not torch.equal(own, logits)  # explicit positions are kept
    undo()


def test_batch_invariant_layers_of_the_trainer_learn_alike_and_leave_no_trace():
    model, gradients = tiny.build("qwen2"), []
    ids = torch.randint(8, tiny.VOCAB, (2, 9))
    patched = model.model.layers[0].mlp.down_proj
    patched.forward = own = functools.partial(type(patched).forward, patched)
    for shapes in ({}, dict.fromkeys([(24, 48), (48, 48), (48, 64)], 10)):
        undo = prepare_trainer(model, shapes)
        forwards = [vars(each)["forward"] for each in model.modules() if "forward" in vars(each)]
        assert len(forwards) == (15 if shapes else 1)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        with RolloutEngine(model, trl_trainer.ENGINE) as engine:
            tiny.assert_on_policy(engine, model)
        undo()
        assert [each for each in model.modules() if "forward" in vars(each)] == [patched]
        assert patched.forward is own
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0.02, atol=2e-3)


def test_layers_with_configs_of_their_own_attend_by_the_kernel_too():
    model = tiny.build()
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])
    configs = [layer.self_attn.config for layer in model.model.layers]
    assert configs[1] is not configs[0]
    undo = prepare_trainer(model)
    assert {config._attn_implementation for config in configs} == {EXACT_ATTENTION}
    undo()
    assert {config._attn_implementation for config in configs} == {"sdpa"}


def test_dropout_is_refused(tmp_path):
    config = LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
    trainer = trl_trainer.build(tmp_path, peft_config=config)
    with pytest.raises(UnsupportedModel, match=r"lora_dropout.default has dropout.*set it to 0"):
        trl_trainer.attach(trainer, EXACT)
    model = tiny.build(attention_dropout=0.1)
    with pytest.raises(UnsupportedModel, match="self_attn has dropout"):
        prepare_trainer(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cast_lm_head_to_fp32": True}, "drop `cast_lm_head_to_fp32`"),
        ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5\.0 .* drop it, or set"),
    ],
    ids=str,
)
def test_what_a_rollout_could_not_repeat_is_refused(tmp_path, changes, message):
    trainer = trl_trainer.build(tmp_path, **changes)
    with pytest.raises(UnsupportedTrainer, match=message):
        trl_trainer.attach(trainer, EXACT)


def test_embeddings_that_are_resized_later_are_refused():
    """The check of the head's product does not cover the new head."""
    model = tiny.build()
    with RolloutEngine(model, EXACT) as engine:
        model.resize_token_embeddings(80, mean_resizing=False)
        with pytest.raises(
            UnsupportedModel, match=f"resized to 80 tokens, .* for {tiny.VOCAB}; make a new engine"
        ):
            engine.generate([[9]], SamplingParams(max_new_tokens=1))


def test_experts_in_float32_are_refused():
    with pytest.raises(UnsupportedModel, match=r"layers.0.mlp.experts.*holds experts in float32"):
        batch_invariant_shapes(Twin(tiny.build("qwen3_moe")).base)


def test_a_router_whose_product_is_split_is_refused(monkeypatch):
    model = tiny.build("qwen3_moe").bfloat16()
    batch_invariant_shapes(Twin(model).base)
    monkeypatch.setattr(
        "rollout.exact.setup._library_rows", lambda shape, *_: 600 if shape[0] == 4 else None
    )
    with pytest.raises(UnsupportedModel, match=r"layers.0.mlp.gate routes to 4 experts"):
        batch_invariant_shapes(Twin(model).base)


def test_differences_are_found_where_they_begin():
    model = tiny.build()
    mode = model.training
    compared = differences(model, replace(EXACT, prefill_tokens=40), num_rows=6, num_tokens=20)
    names = [difference.module for difference in compared]
    wanted = [
        "model.embed_tokens",
        "model.layers.0.input_layernorm",
        "model.layers.2.mlp",
        "lm_head",
    ]
    assert [name for name in names if name in wanted] == wanted
    # On a CPU only the rounding of products of other sizes differs.
    assert max(difference.largest for difference in compared) < 1e-4
    assert compared[0].num_rows == compared[1].num_rows == 0
    assert model.training == mode
    assert model.config._attn_implementation == "sdpa"


def test_doctor_says_how_many_modules_are_equal(capsys, tmp_path):
    tiny.build().config.save_pretrained(tmp_path)
    arguments = ["--model", str(tmp_path), "--rows", "3", "--tokens", "9"]
    difference.main(arguments, Console(width=200))
    assert "modules give the trainer's numbers" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("family", "autocast"),
    [*product(["qwen3", "qwen2", "gemma3_text"], [None, torch.bfloat16]), ("qwen3_moe", None)],
    ids=str,
)
def test_a_decode_step_gives_the_trainers_numbers_to_the_last_bit(family, autocast, compiled):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 1024}
    sizes |= {"num_experts": 32, "moe_intermediate_size": 128} if family == "qwen3_moe" else {}
    dtype = torch.bfloat16 if autocast is None else torch.float32
    model = tiny.build(family, **sizes).to("cuda", dtype)
    config = EngineConfig(page_tokens=16, prefill_tokens=500)
    options = {"num_tokens": 200, "autocast_dtype": autocast, "compiled": compiled}
    compared = differences(model, config, **options)
    assert [difference for difference in compared if difference.num_rows] == []
    assert len(compared) >= (3 if compiled else 30)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_of_equal_states_are_those_of_trls_fused_head(temperature):
    """Qwen3-8B's head: TRL takes 2,048 tokens per vocabulary chunk, the rollout 32 rows at once."""
    chunked = pytest.importorskip("trl.kernels.chunked_logprob")
    before = torch.backends.cuda.preferred_blas_library("cublaslt")
    generator = torch.Generator("cuda").manual_seed(0)
    states = torch.randn(2048, 4096, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(151_936, 4096, generator=generator, device="cuda").mul_(2 / 64).bfloat16()
    with torch.no_grad():
        inputs = torch.full((32,), temperature, device="cuda"), torch.arange(32, device="cuda")
        logits = torch.nn.functional.linear(states[:32], weight)
        tokens, scores = sample(logits, *inputs, torch.zeros_like(inputs[1]), 1)
        targets = torch.cat([tokens, torch.zeros(2016, dtype=tokens.dtype, device="cuda")])
        wanted, *_ = chunked.ChunkedLogProbFunction.apply(
            states, weight, None, targets, temperature, 32_768, None, 1.0, ()
        )
    torch.backends.cuda.preferred_blas_library(before)
    assert tokens.unique().numel() > 20
    assert (scores[:, 0] - wanted[:32]).abs().max() <= 1e-6

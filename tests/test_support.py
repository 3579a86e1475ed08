"""What the engine refuses, with the reason and the way out."""

import pytest
import tiny
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from rollout import EngineConfig, RolloutEngine, SamplingParams, UnsupportedModel
from rollout.support import check_model, check_placed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder; use a decoder-only model"),
        ({"kv_lora_rank": 8}, r"multi-head latent attention \(MLA\)"),
        ({"v_head_dim": 8}, r"value heads \(8\) and key heads have unequal sizes"),
        ({"head_dim": 512}, "head_dim is 512; the attention kernels run up to 256"),
        ({"num_kv_shared_layers": 2}, "2 of its layers share the KV cache"),
        (
            {"layer_types": ["linear_attention"] * 3},
            "3 of its layers are linear_attention; ",
        ),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention layers"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic RoPE"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "longrope RoPE"),
    ],
    ids=str,
)
def test_models_are_refused_by_config(changes, message):
    model = tiny.build()
    for name, value in changes.items():
        object.__setattr__(model.config, name, value)
    with pytest.raises(
        UnsupportedModel, match=f"Qwen3ForCausalLM cannot run.*{message}.*; otherwise, generate"
    ):
        check_model(model)


TINY = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
HEADS = {"num_key_value_heads": 2}
WINDOW = {**TINY, **HEADS, "sliding_window": 5}
WINDOW_UNTOLD = "has a sliding window of 5 tokens, but the layer does not pass it"
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def real_config(name, **changes):
    return AutoConfig.for_model(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v3", {"kv_lora_rank": 16}, "MLA"),
        ("llama4_text", {}, "chunked_attention"),
        ("mamba2", {}, "Mamba2Mixer calls mamba2_chunk_scan, .* does not run yet"),
        ("jamba", {}, "JambaMambaMixer calls mamba_selective_scan, .* does not run yet"),
        ("minimax", {}, "keeps states in MiniMaxLightningAttention, which the engine does not run"),
        ("gemma4_text", TINY, r"differ in head_dim \(16, 512\)"),
        ("roberta", {**TINY, "is_decoder": True}, "positions from the padding token's id"),
        (
            "llama4_text",
            {**TINY, "layer_types": ["full_attention"] * 2},
            "`attn_temperature_tuning` counts positions itself",
        ),
    ],
)
def test_real_families_that_cannot_run_are_refused(name, changes, message):
    config = real_config(name, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModel, match=message):
        check_model(model)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bert", TINY, "BertSelfAttention lets tokens attend to later ones"),
        ("gemma", {**TINY, **HEADS, "use_bidirectional_attention": True}, "attend to later ones"),
        ("diffllama", {**TINY, **HEADS}, "layer 0 attends more than once in one forward"),
        ("phimoe", {**WINDOW, **EXPERTS}, f"PhimoeAttention {WINDOW_UNTOLD}"),
        ("smollm3", {**WINDOW, "layer_types": ["sliding_attention"] * 2}, WINDOW_UNTOLD),
    ],
)
def test_real_families_are_refused_when_they_run(name, changes, message):
    """Their config does not show what their layers ask of attention; their forward does."""
    model = AutoModelForCausalLM.from_config(real_config(name, **changes))
    with pytest.raises(UnsupportedModel, match=message):
        RolloutEngine(model)
    with (
        RolloutEngine(model, EngineConfig(self_check=False)) as engine,
        pytest.raises(UnsupportedModel, match=message),
    ):
        engine.generate([[9, 10]], SamplingParams(max_new_tokens=2))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("phimoe", {**WINDOW, **EXPERTS, "sliding_window": 64}),  # no row outgrows this window
        ("gemma4_text", {**WINDOW, "global_head_dim": 16}),  # all pages have one size
    ],
)
def test_real_families_near_those_run(name, changes):
    model = AutoModelForCausalLM.from_config(real_config(name, **changes))
    with RolloutEngine(model) as engine:
        tiny.assert_on_policy(engine, model)


def adapted(config):
    return get_peft_model(tiny.build(), config)


def layer_compiled():
    model = tiny.build()
    model.model.layers[1] = torch.compile(model.model.layers[1])
    return model


def eight_bit(*, adapters):
    """A layer with the name of bitsandbytes' class, which also derives from `nn.Linear`."""
    model = tiny.build()
    model.model.layers[1].mlp.up_proj = type("Linear8bitLt", (torch.nn.Linear,), {})(48, 64)
    lora = LoraConfig(target_modules=["q_proj"], r=2)
    return get_peft_model(model, lora) if adapters else model


def real_eight_bit():
    model = tiny.build()
    layers = pytest.importorskip("bitsandbytes").nn
    model.model.layers[1].mlp.up_proj = layers.Linear8bitLt(48, 64, bias=False)
    return get_peft_model(model, LoraConfig(target_modules=["up_proj"], r=2))


PROMPT_TUNING = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
ALORA = LoraConfig(target_modules=["q_proj"], r=2, alora_invocation_tokens=[12, 13])
EIGHT_BITS = "Linear8bitLt.* all rows of a batch for outliers.* load it in bfloat16"
COMPILED = r"use module.compile\(\) instead"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), "not a transformers model"),
        (lambda: adapted(PROMPT_TUNING), "virtual tokens into the KV cache; use LoRA"),
        (lambda: adapted(ALORA), "activated LoRA .* use LoRA without `alora"),
        (lambda: eight_bit(adapters=False), EIGHT_BITS),
        (lambda: eight_bit(adapters=True), EIGHT_BITS),
        (real_eight_bit, EIGHT_BITS),
        (lambda: torch.compile(tiny.build()), COMPILED),
        (layer_compiled, COMPILED),
    ],
)
def test_models_are_refused_by_their_modules(build, message):
    with pytest.raises(UnsupportedModel, match=message):
        check_model(build())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("_supports_attention_backend", False, "AttentionInterface"),
        ("forward", lambda self, input_ids: None, "no `logits_to_keep`"),
    ],
)
def test_models_are_refused_by_their_class(name, value, message, monkeypatch):
    model = tiny.build()
    monkeypatch.setattr(type(model), name, value)
    with pytest.raises(UnsupportedModel, match=message):
        check_model(model)


def test_a_model_over_several_devices_is_refused():
    model = tiny.build()
    model.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(UnsupportedModel, match="over 2 devices; load it without `device_map`"):
        check_placed(model)


def test_a_model_that_has_lost_a_layer_is_refused_at_the_next_version():
    model = tiny.build()
    with RolloutEngine(model) as engine:
        del model.model.layers[2]
        model.config.num_hidden_layers = 2
        with pytest.raises(UnsupportedModel, match="has 2 layers, but the engine was made for 3"):
            engine.generate([[9]], SamplingParams(max_new_tokens=2))

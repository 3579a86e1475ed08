"""What the engine refuses: each with the sentence that says why and what to do."""

import pytest
import tiny
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from rollout import RolloutEngine, SamplingParams, UnsupportedModel
from rollout.support import check_model, check_placed


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_supported_families_pass(family):
    check_model(tiny.build(family))
    check_placed(tiny.build(family))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder; use a decoder-only model"),
        ({"kv_lora_rank": 8}, r"multi-head latent attention \(MLA\)"),
        ({"v_head_dim": 8}, r"value heads \(8\) and key heads have unequal sizes"),
        ({"head_dim": 512}, "head size is 512, and 256 is the largest"),
        ({"num_kv_shared_layers": 2}, "2 of its layers share the KV cache"),
        ({"layer_types": ["linear_attention"] * 3}, "linear_attention layers"),
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
        UnsupportedModel, match=f"Qwen3ForCausalLM cannot run.*{message}.*; failing that, generate"
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
        ("qwen3_next", {}, "linear_attention"),
        ("gemma4_text", TINY, r"unequal head_dim \(16, 512\); one page cannot"),
        ("roberta", {**TINY, "is_decoder": True}, "positions by the padding token's id"),
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
    """What their layers ask of attention is not in the config, so it shows in their forward."""
    model = AutoModelForCausalLM.from_config(real_config(name, **changes))
    with RolloutEngine(model) as engine, pytest.raises(UnsupportedModel, match=message):
        engine.generate([[9, 10]], SamplingParams(max_new_tokens=2))


def test_windows_that_no_row_outgrows_need_not_be_passed():
    changes = {**WINDOW, **EXPERTS, "sliding_window": 64}
    model = AutoModelForCausalLM.from_config(real_config("phimoe", **changes))
    with RolloutEngine(model) as engine:
        tiny.assert_on_policy(engine, model)


def test_layers_that_a_config_lists_one_by_one_run_if_their_pages_are_alike():
    config = real_config("gemma4_text", **TINY, **HEADS, global_head_dim=16, sliding_window=5)
    model = AutoModelForCausalLM.from_config(config)
    with RolloutEngine(model) as engine:
        tiny.assert_on_policy(engine, model)


def test_multimodal_models_are_refused():
    model = tiny.build()
    model.config.get_text_config = lambda: object()
    with pytest.raises(UnsupportedModel, match="images or audio; load its text model alone"):
        check_model(model)


def test_modules_that_are_no_transformers_model_are_refused():
    with pytest.raises(UnsupportedModel, match="not a transformers model"):
        check_model(torch.nn.Linear(2, 2))


def test_prompt_learning_is_refused():
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UnsupportedModel, match="virtual tokens into the KV cache; use LoRA"):
        check_model(get_peft_model(tiny.build(), config))


def test_adapters_that_begin_in_the_middle_of_a_row_are_refused():
    config = LoraConfig(target_modules=["q_proj"], r=2, alora_invocation_tokens=[12, 13])
    with pytest.raises(UnsupportedModel, match=r"activated LoRA .* use LoRA without them"):
        check_model(get_peft_model(tiny.build(), config))


EIGHT_BITS = "Linear8bitLt.* outliers over all rows of a batch.* load it in bfloat16"


@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "lora"])
def test_8_bit_layers_are_refused_by_name(adapters):
    """A class of that name stands in for bitsandbytes' own, which derives from `nn.Linear` too."""
    model = tiny.build()
    model.model.layers[1].mlp.up_proj.__class__ = type("Linear8bitLt", (torch.nn.Linear,), {})
    if adapters:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(UnsupportedModel, match=EIGHT_BITS):
        check_model(model)


def test_bitsandbytes_own_8_bit_layers_are_refused():
    layers = pytest.importorskip("bitsandbytes").nn
    model = tiny.build()
    model.model.layers[1].mlp.up_proj = layers.Linear8bitLt(48, 64, bias=False)
    model = get_peft_model(model, LoraConfig(target_modules=["up_proj"], r=2))
    with pytest.raises(UnsupportedModel, match=EIGHT_BITS):
        check_model(model)


def test_models_outside_the_attention_interface_are_refused(monkeypatch):
    model = tiny.build()
    monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    with pytest.raises(UnsupportedModel, match="AttentionInterface"):
        check_model(model)


@pytest.mark.parametrize("part", ["model", "layer"])
def test_modules_wrapped_by_torch_compile_are_refused(part):
    model = tiny.build()
    if part == "model":
        model = torch.compile(model)
    else:
        model.model.layers[1] = torch.compile(model.model.layers[1])
    with pytest.raises(UnsupportedModel, match=r"use module.compile\(\) instead"):
        check_model(model)


def test_a_forward_that_always_computes_all_logits_is_refused(monkeypatch):
    model = tiny.build()
    monkeypatch.setattr(type(model), "forward", lambda self, input_ids: None)
    with pytest.raises(UnsupportedModel, match="no `logits_to_keep`"):
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
        with pytest.raises(UnsupportedModel, match="made for 3 layers, and the model has 2"):
            engine.generate([[9]], SamplingParams(max_new_tokens=2))


def test_parameters_sharded_by_fsdp1_are_refused():
    model = tiny.build()
    model.lm_head._flat_param = torch.nn.Parameter(torch.zeros(1))  # FSDP1's name
    with pytest.raises(UnsupportedModel, match=r"'lm_head._flat_param' is sharded by FSDP1; use"):
        check_placed(model)

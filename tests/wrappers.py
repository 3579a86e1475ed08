"""Vision-language classes as TRL loads them, at toy size, and a processor without images."""

from typing import Any

import tiny
import torch
from families import HYBRIDS, SIZES
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)

# Families that must run, as of transformers 5.24.
NAMES = """
    aria aya_vision cohere2_vision cosmos3_edge cosmos3_omni exaone4_5 gemma3 got_ocr2
    granite_docling hunyuan_vl hyperclovax_vision_v2 idefics2 idefics3 internvl lfm2_vl
    lfm3_vl lighton_ocr llava llava_next llava_next_video llava_onevision minimax_m3_vl
    mistral3 mllama ovis2 paddleocr_vl pp_chart2table qianfan_ocr qwen2_5_vl qwen2_vl
    qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe shieldgemma2 smolvlm video_llava vipllava
"""
RUN = set(NAMES.split())
IMAGE = 60
_VISION: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "depth"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 2),
    **{"image_size": 28, "patch_size": 14, "num_position_embeddings": 16},
    **{"out_hidden_size": 48, "deepstack_visual_indexes": [0]},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 2]}
_TEXT = {**tiny._SHAPE, **_EXPERTS, "head_dim": 12, "rope_parameters": _ROPE}
_TEXT |= {"cross_attention_layers": [1]}  # of Mllama, which skips them where there is no image
_TEXT |= {name: SIZES[name] for name in SIZES if name.startswith("linear_")}


def config_of(family: str) -> PreTrainedConfig:
    usual = AutoConfig.for_model(family)
    text, vision = usual.get_text_config(decoder=True), getattr(usual, "vision_config", None)
    kinds = {} if vision is None else {"model_type": vision.model_type}
    sizes = {**_TEXT, **HYBRIDS.get(text.model_type, {}), "model_type": text.model_type}
    if "full_attention" in (getattr(text, "rope_parameters", None) or {}):
        del sizes["rope_parameters"]  # it has one for each type of layer
    return AutoConfig.for_model(
        family,
        text_config=sizes,
        vision_config={**_VISION, **kinds},
        **{"image_token_index": IMAGE, "image_token_id": IMAGE, "mm_tokens_per_image": 1},
    )


@torch.no_grad()
def build(family: str) -> PreTrainedModel:
    """A random model with weights large enough for clear choices."""
    config = config_of(family)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) < 30_000_000
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4.0)
    return model


class Processor(ProcessorMixin):
    """Makes TRL take the model for one of images and text."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer=tokenizer)

    def __call__(self, text: Any = None, **others: Any) -> Any:
        return self.tokenizer(text)


def processor() -> Processor:
    return Processor(tiny.tokenizer())

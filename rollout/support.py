"""Which models the engine refuses, and the reason it gives for each."""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from torch import nn

from rollout.errors import ConfigError, UnsupportedModel

_ATTENDING = {"full_attention", "sliding_attention"}
_STATEFUL = {"linear_attention", "conv"}
# Functions by which transformers' recurrent layers mix tokens, and whose work the engine does over
# states in lanes; then those that such a layer calls only with a cache, or in training.
_MIXING = {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"}
_IDLE = {"causal_conv1d_update", "torch_recurrent_gated_delta_rule", "apply_mask_to_padding_states"}
_CACHE_METHODS = {"get_conv_state", "update_conv_state", "get_recurrent_state"}
_CACHE_METHODS |= {"update_recurrent_state", "get_linear_cache"}
_ROPE_TYPES = {"dynamic", "longrope"}
_MAX_HEAD_DIM = 256


def base_of(model: nn.Module) -> nn.Module:
    """The transformers model under a PEFT wrapper, or the model itself.

    A model that transformers loaded with its adapters (`peft_config`) has no wrapper.
    """
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def adapters_of(model: nn.Module) -> dict[str, Any]:
    """Configs of the model's PEFT adapters by name, whether PEFT or transformers loaded them."""
    return getattr(model, "peft_config", None) or {}


def text_config_of(base: nn.Module) -> Any:
    """Config of the language model. That of a vision-language class lacks most sizes."""
    config: Any = base.config
    return config.get_text_config(decoder=True)


def towers_of(base: nn.Module) -> list[str]:
    """Names of the modules that text alone does not run, such as a vision tower's.

    None in a model of text. In others, what stands beside the decoder, but for the output head.
    """
    model: Any = base
    if text_config_of(base) is model.config:
        return []
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    modules = dict(base.named_modules())
    path = next(name for name, module in modules.items() if module is decoder).split(".")
    above = {".".join(path[:depth]) for depth in range(len(path))}
    kept = {*(modules[name] for name in above), decoder, head}
    beside = (name for name in modules if name and name.rpartition(".")[0] in above)
    return [name for name in beside if modules[name] not in kept]


def attending_layers(base: nn.Module) -> list[int]:
    """Indices of the decoder layers that attend, and so keep keys and values."""
    config = text_config_of(base)
    types = list(getattr(config, "layer_types", None) or ())
    if not _STATEFUL.intersection(types):
        return list(range(config.num_hidden_layers))
    return [index for index, kind in enumerate(types) if kind in _ATTENDING]


def mixers_of(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of the recurrent layers whose states the engine can keep."""
    for name, module in base.named_modules():
        if hasattr(module, "layer_idx") and _MIXING & _names_in(type(module)):
            yield name, module


def forward_code(kind: type[nn.Module]) -> FunctionType:
    """The forward of a module's class, without its decorators."""
    function: Any = inspect.unwrap(kind.forward)
    return function


def _names_in(kind: type[nn.Module]) -> set[str]:
    """Names of globals and attributes in the code of a class's forward."""
    return set(getattr(getattr(forward_code(kind), "__code__", None), "co_names", ()))


def configs_of(base: nn.Module) -> list[Any]:
    """All configs that attention layers read.

    Usually one, but layers copied by PEFT's `layer_replication` have copies of the config.
    """
    owned = (getattr(module, "config", None) for module in base.modules())
    configs = {id(config): config for config in owned if hasattr(config, "_attn_implementation")}
    return list(configs.values())


def experts_of(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and weights of the experts: parameters of 3 dimensions, one matrix per expert."""
    convs = {id(each.weight) for each in module.modules() if isinstance(each, nn.Conv1d)}
    weights = module.named_parameters()
    return ((name, each) for name, each in weights if each.dim() == 3 and id(each) not in convs)


def has_layers(name: str, model: nn.Module) -> bool:
    """Whether any layer's class, or one of its base classes, has this name."""
    return any(kind.__name__ == name for each in model.modules() for kind in type(each).__mro__)


def check_model(model: nn.Module) -> None:
    """Raise `UnsupportedModel` for a model that the engine would run wrongly."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(
            f"model={model!r:.80}: must be an nn.Module; load it first, for example with "
            "AutoModelForCausalLM.from_pretrained"
        )
    for reason in _reasons(model):
        name = type(base_of(model)).__name__
        raise UnsupportedModel(
            f"{name} cannot run on the engine: {reason}; otherwise, generate without the engine"
        )


def check_placed(model: nn.Module) -> None:
    """Raise `UnsupportedModel` for parameters on `meta`, on several devices, or under FSDP1."""
    name = type(base_of(model)).__name__
    devices = {parameter.device for parameter in model.parameters()}
    if any(device.type == "meta" for device in devices):
        raise UnsupportedModel(
            f"{name} has parameters on the meta device, which have no values; load its weights "
            "with `from_pretrained`, or call `to_empty` and initialise them"
        )
    num_devices = max(len(devices), len(set(getattr(model, "hf_device_map", {}).values())))
    if num_devices > 1:
        raise UnsupportedModel(
            f"{name} is spread over {num_devices} devices; load it without `device_map`, so that "
            "each process has the whole model on its own GPU"
        )
    for parameter_name, _ in model.named_parameters():
        if "._flat_param" in f".{parameter_name}":
            raise UnsupportedModel(
                f"parameter {parameter_name!r} is sharded by FSDP1; use FSDP2 "
                "(`fsdp_version: 2`) or DDP"
            )


def check_length(model: nn.Module, max_row_tokens: int) -> None:
    """Raise `ConfigError` if rows may outgrow a table of learned positions, as GPT-2's and OPT's.

    Positions that are computed, as RoPE's, have no end.
    """
    base: Any = base_of(model)
    most, tokens = text_config_of(base).max_position_embeddings, base.get_input_embeddings()
    for name, module in base.get_decoder().named_modules():
        is_table = isinstance(module, nn.Embedding) and module is not tokens
        # OPT's table begins with two rows that stand for no position.
        if is_table and most <= module.num_embeddings <= most + 2 and max_row_tokens > most:
            raise ConfigError(
                f"max_row_tokens={max_row_tokens}: {name} is a table of {most} learned positions; "
                f"set at most {most}"
            )


def _reasons(model: nn.Module) -> Iterator[str]:
    """Why the engine cannot run this model, the most useful reason first."""
    base = base_of(model)
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
        yield "torch.compile(module) wraps it or a part of it; use module.compile() instead"
        return
    config: Any = getattr(base, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        yield "it is not a transformers model with a config"
        return
    if config.is_encoder_decoder or text_config_of(base).is_encoder_decoder:
        yield "it is an encoder-decoder; use a decoder-only model"
        return
    config = text_config_of(base)
    if has_layers("Linear8bitLt", model):  # by name, because bitsandbytes may not be installed
        yield (
            "its 8-bit layers (bitsandbytes' Linear8bitLt) search all rows of a batch for "
            "outliers, so a row's output would depend on the other rows; load it in bfloat16"
        )
    yield from _mixer_reasons(base)
    yield from _attention_reasons(config)
    yield from _position_reasons(base)
    yield from _rope_reasons(config)
    yield from _adapter_reasons(adapters_of(model).values())
    if not _attends_through_interface(base):
        yield "its attention does not go through transformers' AttentionInterface"
    if "logits_to_keep" not in inspect.signature(type(base).forward).parameters:
        yield "its forward has no `logits_to_keep`, so it computes logits for every token"


def _mixer_reasons(base: Any) -> Iterator[str]:
    """Of layers that are neither attention nor known to keep a state of their row alone."""
    decoder, types = base.get_decoder(), getattr(text_config_of(base), "layer_types", None) or ()
    mixers = [module for _, module in mixers_of(decoder)]
    for kind in dict.fromkeys(type(module) for module in decoder.modules()):
        if kind not in map(type, mixers) and _CACHE_METHODS & _names_in(kind):
            yield f"it keeps states in {kind.__name__}, which the engine does not run yet"
    for kind in dict.fromkeys(map(type, mixers)):
        if others := ", ".join(sorted(_unknown_functions(kind))):
            yield f"its {kind.__name__} calls {others}, which the engine does not run yet"
        elif not _passes_arguments_on(kind):
            yield f"its {kind.__name__} does not pass arguments on to the functions that mix tokens"
    stateful = sum(kind in _STATEFUL for kind in types)
    if stateful != len(mixers):
        kinds = ", ".join(sorted(_STATEFUL.intersection(types))) or "recurrent"
        yield f"{stateful} of its layers are {kinds}; the engine knows the code of {len(mixers)}"


def _unknown_functions(kind: type[nn.Module]) -> set[str]:
    """Functions of the mixer's own file, but for classes, that no operator replaces."""
    code = forward_code(kind)
    others = {name: code.__globals__.get(name) for name in _names_in(kind) - _MIXING - _IDLE}
    return {
        name
        for name, value in others.items()
        if getattr(value, "__module__", "") == code.__module__ and not isinstance(value, type)
    }


def _passes_arguments_on(kind: type[nn.Module]) -> bool:
    """Whether the functions that mix tokens get the forward's `**kwargs`, so our operators do."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(forward_code(kind))))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    mixing = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id in _MIXING]
    return all(any(keyword.arg is None for keyword in call.keywords) for call in mixing)


def _attends_through_interface(base: Any) -> bool:
    """Whether all attention goes through transformers' AttentionInterface.

    Models with recurrent layers do not say so, so look for it in their code.
    """
    decoder = base.get_decoder()
    if not any(mixers_of(decoder)):
        return bool(getattr(base, "_supports_attention_backend", False))
    kinds = [type(module) for module in decoder.modules()]
    attending = sum("ALL_ATTENTION_FUNCTIONS" in _names_in(kind) for kind in kinds)
    return attending == len(attending_layers(base))


def _adapter_reasons(adapters: Iterable[Any]) -> Iterator[str]:
    """Reads attributes of the adapter configs, because PEFT may not be installed."""
    for adapter in adapters:
        if adapter.is_prompt_learning:
            yield "prompt-learning PEFT puts virtual tokens into the KV cache; use LoRA"
        if getattr(adapter, "alora_invocation_tokens", None):
            yield (
                "its adapter is an activated LoRA (`alora_invocation_tokens`), which starts in "
                "the middle of a row; use LoRA without `alora_invocation_tokens`"
            )


def _attention_reasons(config: Any) -> Iterator[str]:
    others = set(getattr(config, "layer_types", None) or ()) - _ATTENDING - _STATEFUL
    if others:
        yield f"it has {', '.join(sorted(others))} layers, which the engine does not run yet"
    # Gemma 4 gives its full-attention layers other heads, visible only in `per_layer_config`.
    layers = list(getattr(config, "per_layer_config", None) or [config])
    for name in ("head_dim", "num_key_value_heads"):
        sizes = dict.fromkeys(str(getattr(layer, name, None)) for layer in layers)
        if len(sizes) > 1:
            yield f"its layers differ in {name} ({', '.join(sizes)}); all must share one KV page"
    config = layers[0]
    if getattr(config, "kv_lora_rank", None):
        yield "its multi-head latent attention (MLA) has unequal key and value head sizes"
    elif getattr(config, "v_head_dim", None) not in (None, getattr(config, "head_dim", None)):
        yield f"its value heads ({config.v_head_dim}) and key heads have unequal sizes"
    if (getattr(config, "head_dim", None) or 0) > _MAX_HEAD_DIM:
        yield f"its head_dim is {config.head_dim}; the attention kernels run up to {_MAX_HEAD_DIM}"
    if getattr(config, "num_kv_shared_layers", 0):
        yield f"{config.num_kv_shared_layers} of its layers share the KV cache of others"


def _position_reasons(base: Any) -> Iterator[str]:
    # Rows of one batch are packed together, so the model must use the positions that it is given.
    decoder: Any = base.get_decoder()
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in decoder.modules()):
        yield "it derives positions from the padding token's id, as RoBERTa does, not from input"
    if getattr(text_config_of(base), "attn_temperature_tuning", False):
        yield "its `attn_temperature_tuning` counts positions itself, ignoring the given ones"


def _rope_reasons(config: Any) -> Iterator[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    flat = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for kind in {str(rope.get("rope_type")) for rope in flat} & _ROPE_TYPES:
        yield (
            f"its {kind} RoPE changes with the sequence's length, so cached KV becomes wrong as "
            "the row grows; set `rope_parameters` to the default or to a fixed scaling, e.g. yarn"
        )

"""What a user changed in `trainer.generation_config`. Stock TRL draws by it, so rollouts do."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import GenerationConfig

# Entries that name a trainer's own setting.
_SETTINGS = {"max_new_tokens": "max_completion_length", "eos_token_id": "eos_token_ids"}
_SETTINGS |= {name: name for name in ("temperature", "top_p", "top_k", "min_p")}
_SETTINGS |= {"repetition_penalty": "repetition_penalty"}
# Entries that change no token, or that TRL sets without an argument.
_HARMLESS = re.compile(
    "_.*|(pad|bos)_token_id|transformers_version|use_cache|cache_.*|output_.*|return_.*"
    "|disable_compile|compile_config|max_length|continuous_batching_config"
)


def changed_settings(
    trainer: Any, arguments: Any, generation_kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Entries that differ from those that TRL made of its arguments and `generation_kwargs`.

    Returns:
        The trainer's own settings by name, and all other entries by transformers' names.
    """
    config = getattr(trainer, "generation_config", None)
    changed = {} if config is None else dict(_changed(config, arguments, generation_kwargs))
    own = {_SETTINGS[name]: value for name, value in changed.items() if name in _SETTINGS}
    if isinstance(own.get("eos_token_ids"), int):
        own["eos_token_ids"] = [own["eos_token_ids"]]
    return own, {name: value for name, value in changed.items() if name not in _SETTINGS}


def _changed(
    config: GenerationConfig, arguments: Any, generation_kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    made = {**GenerationConfig().to_dict(), "do_sample": True}
    made |= {name: getattr(arguments, setting) for name, setting in _SETTINGS.items()}
    made |= generation_kwargs
    for name, value in config.to_dict().items():
        if value is None or _HARMLESS.fullmatch(name) or _plain(value) == _plain(made.get(name)):
            continue
        # Some trainers leave out the tokenizer's EOS token.
        if name != "eos_token_id" or not _ids(value) <= _ids(made[name]):
            yield name, value


def _ids(value: Any) -> set[int]:
    return {value} if isinstance(value, int) else set(value)


def _plain(value: Any) -> Any:
    """A value by which equal settings are equal: no `top_k` is 0, one EOS token a list of one."""
    if isinstance(value, list | tuple):
        return _plain(value[0]) if len(value) == 1 else sorted(map(_plain, value))
    return value or 0

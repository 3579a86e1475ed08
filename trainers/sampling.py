"""A trainer's sampling settings, as the engine takes them, and the sentence for each it refuses."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rollout.errors import RequestError
from rollout.request import SamplingParams

logger = logging.getLogger(__name__)

_OWN = ("top_p", "top_k", "min_p", "repetition_penalty")
# Names that `generation_kwargs` may have, which are transformers' or vLLM's, and ours.
_NAMES = {
    **{name: name for name in (*_OWN, "presence_penalty", "frequency_penalty")},
    "min_new_tokens": "min_new_tokens",
    "min_tokens": "min_new_tokens",
    "suppress_tokens": "suppress_tokens",
}
_NO_EFFECT = {"do_sample": True, "num_beams": 1, "n": 1}
_INSTEAD = {
    "temperature": "set the trainer's own `temperature`, by which its loss divides too",
    "max_new_tokens": "set `max_completion_length`",
    "max_tokens": "set `max_completion_length`",
    "min_length": "set `min_new_tokens`, which does not count the prompt",
    "seed": "set the trainer's own `seed`",
    "stop": "the engine sees no text; end completions by an EOS token",
    "stop_strings": "the engine sees no text; end completions by an EOS token",
    "bad_words": "single tokens can be named in `suppress_tokens`",
    "bad_words_ids": "single tokens can be named in `suppress_tokens`",
    "eos_token_id": "give the tokenizer, or the model's generation config, that EOS token",
    "stop_token_ids": "give the tokenizer, or the model's generation config, that EOS token",
}


def row_sampling(trainer: Any, room: int) -> SamplingParams:
    """The trainer's settings, with lengths clipped to what the row can hold.

    Args:
        trainer: A TRL trainer that was not refused.
        room: Tokens that a completion can have.
    """
    sampling = _sampling(trainer)
    most = min(sampling.max_new_tokens, room)
    return replace(sampling, max_new_tokens=most, min_new_tokens=min(sampling.min_new_tokens, most))


def refused_settings(trainer: Any) -> Iterator[str]:
    """Why the engine cannot draw as a trainer asks; nothing where it can."""
    for name, value in _extra(trainer).items():
        if name not in _NAMES:
            instead = _INSTEAD.get(name, "drop it")
            yield f"{name}={value!r} in generation_kwargs is not supported; {instead}"
    try:
        _sampling(trainer)
    except RequestError as error:
        yield str(error)


def _extra(trainer: Any) -> dict[str, Any]:
    """Those of the trainer's `generation_kwargs` that ask for something."""
    return {
        name: value
        for name, value in (trainer.args.generation_kwargs or {}).items()
        if value is not None and _NO_EFFECT.get(name) != value
    }


def _sampling(trainer: Any) -> SamplingParams:
    """What the trainer asks for; `generation_kwargs` win over its own arguments, as in TRL.

    The model's generation config is asked for nothing but its EOS tokens, which TRL takes from it.
    """
    asked = {name: getattr(trainer, name) for name in _OWN}
    asked |= {_NAMES[name]: value for name, value in _extra(trainer).items() if name in _NAMES}
    if isinstance(asked.get("suppress_tokens"), list):
        asked["suppress_tokens"] = tuple(asked["suppress_tokens"])
    return SamplingParams(
        max_new_tokens=trainer.max_completion_length,
        temperature=trainer.temperature,
        eos_token_ids=tuple(trainer.eos_token_ids),
        **{name: value for name, value in asked.items() if value is not None},
    )


def announce(trainer: Any, before: SamplingParams | None) -> SamplingParams:
    """Say what a trainer's completions are drawn by, unless that is what was said before.

    Args:
        trainer: A TRL trainer that was not refused.
        before: What this has returned for the same trainer, if it was called.

    Returns:
        What they are drawn by.
    """
    sampling = _sampling(trainer)
    if sampling != before:
        logger.info("completions are drawn by %s", sampling)
    return sampling

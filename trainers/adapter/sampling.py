"""A trainer's sampling settings, as the engine takes them, and the sentence for each it refuses.

`stop` and `stop_strings` are one setting, vLLM's and transformers' name for it. A string ends a
completion wherever it ends in the text of its last token, and the tokens that complete it stay in
the completion: in transformers, and in the token ids that TRL takes from vLLM, they do so too.
TRL's `clipped_ratio` and `mask_truncated_completions` look for an EOS token, and take a completion
that ends otherwise for one that was cut off, whichever engine made it.
"""

import inspect
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from typing import Any

from torch import nn

from rollout.errors import RequestError
from rollout.sampling_params import SamplingParams
from rollout.stop_strings import StopStrings
from rollout.support import base_of

logger = logging.getLogger(__name__)

_OWN = ("top_p", "top_k", "min_p", "repetition_penalty")
# Names that `generation_kwargs` may have, which are transformers' or vLLM's, and ours.
_NAMES = {
    **{name: name for name in (*_OWN, "presence_penalty", "frequency_penalty")},
    "min_new_tokens": "min_new_tokens",
    "min_tokens": "min_new_tokens",
    "suppress_tokens": "suppress_tokens",
    "bad_words_ids": "bad_words_ids",
    "stop": "stop_strings",
    "stop_strings": "stop_strings",
}
_NO_EFFECT = {
    "do_sample": True,
    "num_beams": 1,
    "n": 1,
    "num_return_sequences": 1,
    "include_stop_str_in_output": True,
}
_ONE_EACH = "set `num_generations`, of which each is a row of its own"
_OTHER_CUTS = "draw by `top_p`, `top_k` or `min_p` instead"
_NOT_BIASED = "name tokens that must not come in `suppress_tokens` or `bad_words_ids`"
_LATER_EOS = "set `min_new_tokens`, up to `max_completion_length`"
_OTHER_EOS = "give the tokenizer, or the model's generation config, that EOS token"
_OWN_CACHE = "the engine has a cache of its own; drop it"
_OWN_OUTPUT = "the trainer is given ids and their log-probabilities, and no more; drop it"
_NO_BEAMS = "the engine draws, and does not search; drop it"
_INSTEAD = {
    "temperature": "set the trainer's own `temperature`, by which its loss divides too",
    "max_new_tokens": "set `max_completion_length`",
    "max_tokens": "set `max_completion_length`",
    "max_length": "set `max_completion_length`, which does not count the prompt",
    "min_length": "set `min_new_tokens`, which does not count the prompt",
    "seed": "set the trainer's own `seed`, from which those of all rows are derived",
    "do_sample": "the engine draws; set the trainer's `top_k` to 1 for the most likely token",
    "include_stop_str_in_output": "what completes a stop string stays in the completion; drop it",
    "bad_words": "give their token ids as `bad_words_ids`",
    "no_repeat_ngram_size": "set `repetition_penalty` or `frequency_penalty`",
    "ignore_eos": _LATER_EOS,
    "exponential_decay_length_penalty": _LATER_EOS,
    "begin_suppress_tokens": "name them in `suppress_tokens`, for the whole completion",
    "structured_outputs": "its text cannot be held to a form; check that in a reward function",
    **dict.fromkeys(("n", "num_return_sequences"), _ONE_EACH),
    **dict.fromkeys(("eos_token_id", "stop_token_ids", "forced_eos_token_id"), _OTHER_EOS),
    **dict.fromkeys(("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"), _OTHER_CUTS),
    **dict.fromkeys(("logit_bias", "sequence_bias", "allowed_token_ids"), _NOT_BIASED),
    **dict.fromkeys(("use_cache", "cache_implementation", "cache_config"), _OWN_CACHE),
    **dict.fromkeys(("logprobs", "prompt_logprobs", "output_scores", "output_logits"), _OWN_OUTPUT),
    **dict.fromkeys(("num_beams", "num_beam_groups", "early_stopping"), _NO_BEAMS),
}


def row_sampling(trainer: Any, room: int) -> SamplingParams:
    """The settings of a supported trainer, with lengths clipped to `room` tokens a completion."""
    sampling = _sampling(trainer)
    most = min(sampling.max_new_tokens, room)
    return replace(sampling, max_new_tokens=most, min_new_tokens=min(sampling.min_new_tokens, most))


def refused_settings(trainer: Any) -> Iterator[str]:
    """Why the engine cannot draw as a trainer asks; nothing where it can."""
    if trainer.max_completion_length is None:
        yield "max_completion_length=None; set it to the most tokens that a completion may have"
        return
    if None in trainer.eos_token_ids:
        yield "its tokenizer has no EOS token; set its `eos_token`"
        return
    if trainer.temperature == 0:
        yield "temperature=0, by which its loss divides; set `top_k` to 1 for the most likely token"
    extra = _extra(trainer)
    for name, value in extra.items():
        if name not in _NAMES:
            instead = _INSTEAD.get(name, "drop it")
            yield f"{name}={value!r} in generation_kwargs is not supported; {instead}"
    for one, other in combinations(filter(_NAMES.get, extra), 2):
        if _NAMES[one] == _NAMES[other]:
            yield f"{one} and {other} in generation_kwargs are one setting; drop either"
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
    asked |= {
        _NAMES[name]: _as_tuples(value) for name, value in _extra(trainer).items() if name in _NAMES
    }
    if asked.get("stop_strings", ()) != ():
        strings, tokenizer = asked["stop_strings"], trainer.processing_class
        strings = (strings,) if isinstance(strings, str) else strings
        asked["stop_strings"] = _stop_strings(tokenizer, len(tokenizer), strings)
    return SamplingParams(
        max_new_tokens=trainer.max_completion_length,
        temperature=trainer.temperature,
        eos_token_ids=tuple(trainer.eos_token_ids),
        **{name: value for name, value in asked.items() if value not in (None, ())},
    )


def _as_tuples(value: Any) -> Any:
    """A list, and those in it, as tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


@lru_cache(maxsize=2)
def _stop_strings(tokenizer: Any, vocab_size: int, strings: tuple[str, ...]) -> StopStrings:
    """Made once for all rows: it takes a while."""

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return StopStrings(strings, decode, vocab_size)


def loss_temperature(model: nn.Module) -> float | None:
    """What the loss divides logits by, where TRL has patched it into the model's forward."""
    forward = vars(base_of(model)).get("forward")
    if not inspect.ismethod(forward):
        return None
    temperature: float | None = inspect.getclosurevars(forward).nonlocals.get("temperature")
    return temperature


def announce(
    trainer: Any, before: SamplingParams | None, loss_temperature: float | None = None
) -> SamplingParams:
    """Log and return what a trainer's completions are drawn by; log nothing if it is `before`.

    Warns where the loss keeps dividing by another temperature, `loss_temperature`.
    """
    sampling = _sampling(trainer)
    if sampling == before:
        return sampling
    if loss_temperature not in (None, sampling.temperature):
        logger.warning(
            "completions are drawn at temperature=%s from now on, and the loss still divides by "
            "%s, which TRL reads once, when a trainer is made: rollouts are no longer on-policy; "
            "set `temperature` in the arguments of a new trainer",
            sampling.temperature,
            loss_temperature,
        )
    logger.info("completions are drawn by %s", sampling)
    return sampling

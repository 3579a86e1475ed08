"""Translates a trainer's sampling settings into SamplingParams, or says why the engine refuses one.

`stop` (vLLM) and `stop_strings` (transformers) are one setting. The tokens that complete a stop
string stay in the completion, as in transformers and in the token ids that TRL reads from vLLM.
TRL's `clipped_ratio` and `mask_truncated_completions` count a completion without an EOS token as
truncated, with any generator.
"""

import inspect
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from typing import Any

from torch import nn

from rollout.errors import RequestError, UnsupportedTrainer
from rollout.sampling_params import SamplingParams
from rollout.stop_strings import StopStrings
from rollout.support import base_of, text_config_of
from trainers.adapter.seams import tokenizer_of

logger = logging.getLogger(__name__)

_OWN = ("top_p", "top_k", "min_p", "repetition_penalty")
# Supported names in `generation_kwargs` (transformers' or vLLM's) -> fields of SamplingParams.
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
_ONE_EACH = "set `num_generations` of the trainer"
_OTHER_CUTS = "use `top_p`, `top_k` or `min_p`"
_NOT_BIASED = "to exclude tokens, use `suppress_tokens` or `bad_words_ids`"
_LATER_EOS = "set `min_new_tokens`, at most `max_completion_length`"
_OTHER_EOS = "set this EOS token in the tokenizer or in the model's generation config"
_OWN_CACHE = "the engine uses its own KV cache; drop it"
_OWN_OUTPUT = "the trainer receives token ids and their log-probabilities only; drop it"
_NO_BEAMS = "the engine samples and has no beam search; drop it"
_INSTEAD = {
    "temperature": "set the trainer's own `temperature`, which its loss uses, too",
    "max_new_tokens": "set `max_completion_length`",
    "max_tokens": "set `max_completion_length`",
    "max_length": "set `max_completion_length`, which excludes the prompt",
    "min_length": "set `min_new_tokens`, which excludes the prompt",
    "seed": "set the trainer's own `seed`; every row's seed derives from it",
    "do_sample": "the engine always samples; for greedy decoding set the trainer's `top_k` to 1",
    "include_stop_str_in_output": "the stop string always stays in the completion; drop it",
    "bad_words": "set `bad_words_ids` to their token ids",
    "no_repeat_ngram_size": "set `repetition_penalty` or `frequency_penalty`",
    "ignore_eos": _LATER_EOS,
    "exponential_decay_length_penalty": _LATER_EOS,
    "begin_suppress_tokens": "use `suppress_tokens`, which covers the whole completion",
    "structured_outputs": "check the completion's format in a reward function",
    **dict.fromkeys(("n", "num_return_sequences"), _ONE_EACH),
    **dict.fromkeys(("eos_token_id", "stop_token_ids", "forced_eos_token_id"), _OTHER_EOS),
    **dict.fromkeys(("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"), _OTHER_CUTS),
    **dict.fromkeys(("logit_bias", "sequence_bias", "allowed_token_ids"), _NOT_BIASED),
    **dict.fromkeys(("use_cache", "cache_implementation", "cache_config"), _OWN_CACHE),
    **dict.fromkeys(("logprobs", "prompt_logprobs", "output_scores", "output_logits"), _OWN_OUTPUT),
    **dict.fromkeys(("num_beams", "num_beam_groups", "early_stopping"), _NO_BEAMS),
}


def row_sampling(trainer: Any, room: int) -> SamplingParams:
    """Settings of a supported trainer, with lengths clipped to `room` tokens per completion."""
    sampling = _sampling(trainer)
    most = min(sampling.max_new_tokens, room)
    return replace(sampling, max_new_tokens=most, min_new_tokens=min(sampling.min_new_tokens, most))


def refused_settings(trainer: Any) -> Iterator[str]:
    """Yield a reason for each sampling setting that the engine refuses."""
    if trainer.max_completion_length is None:
        yield "max_completion_length=None; set it to the largest number of tokens per completion"
        return
    if None in trainer.eos_token_ids:
        yield "the tokenizer has no EOS token; set its `eos_token`"
        return
    if trainer.temperature == 0:
        yield "temperature=0: the loss divides by it; for greedy decoding set `top_k` to 1"
    extra = _extra(trainer)
    for name, value in extra.items():
        if name not in _NAMES:
            instead = _INSTEAD.get(name, "drop it")
            where = "in generation_kwargs or trainer.generation_config"
            yield f"{name}={value!r} {where} is not supported; {instead}"
    for one, other in combinations(filter(_NAMES.get, extra), 2):
        if _NAMES[one] == _NAMES[other]:
            yield f"{one} and {other} in generation_kwargs are one setting; drop one of them"
    try:
        _sampling(trainer)
    except RequestError as error:
        yield str(error)


def _extra(trainer: Any) -> dict[str, Any]:
    """`generation_kwargs` without entries that have no effect."""
    return {
        name: value
        for name, value in (trainer.args.generation_kwargs or {}).items()
        if value is not None and _NO_EFFECT.get(name) != value
    }


def _sampling(trainer: Any) -> SamplingParams:
    """The trainer's settings. `generation_kwargs` win over its own arguments, as in TRL.

    Of the model's generation config only the EOS tokens count, as in TRL.
    """
    fields = {name: getattr(trainer, name) for name in _OWN}
    fields |= {
        _NAMES[name]: _as_tuples(value) for name, value in _extra(trainer).items() if name in _NAMES
    }
    if fields.get("stop_strings", ()) != ():
        strings, tokenizer = fields["stop_strings"], tokenizer_of(trainer)
        strings = (strings,) if isinstance(strings, str) else strings
        fields["stop_strings"] = _stop_strings(tokenizer, len(tokenizer), strings)
    if (image := _image_token(trainer.model)) is not None:
        fields["suppress_tokens"] = tuple({*fields.get("suppress_tokens", ()), image})
    return SamplingParams(
        max_new_tokens=trainer.max_completion_length,
        temperature=trainer.temperature,
        eos_token_ids=tuple(trainer.eos_token_ids),
        **{name: value for name, value in fields.items() if value not in (None, ())},
    )


def _image_token(model: nn.Module) -> int | None:
    """The token that stands for an image: drawn, it would lack the image's features."""
    base: Any = base_of(model)
    if text_config_of(base) is base.config:
        return None
    token: int | None = getattr(base.config, "image_token_id", None)
    return token


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


@lru_cache(maxsize=2)
def _stop_strings(tokenizer: Any, vocab_size: int, strings: tuple[str, ...]) -> StopStrings:
    # Cached: it decodes the whole vocabulary.
    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return StopStrings(strings, decode, vocab_size)


def warn_of_masked_stops(trainer: Any) -> None:
    """Warn if the loss would leave out every completion that a stop string ends."""
    if trainer.mask_truncated_completions and _sampling(trainer).stop_strings:
        logger.warning(
            "mask_truncated_completions=True leaves out completions without an EOS token, also "
            "those that a stop string has ended. If most end so, nothing is learnt: set "
            "mask_truncated_completions=False, or make the stop string end in the EOS token"
        )


def loss_temperature(model: nn.Module) -> float | None:
    """The temperature that TRL patched into the model's forward, by which the loss divides."""
    forward = vars(base_of(model)).get("forward")
    if not inspect.ismethod(forward):
        return None
    temperature: float | None = inspect.getclosurevars(forward).nonlocals.get("temperature")
    return temperature


def announce(
    trainer: Any, before: SamplingParams | None, loss_temperature: float | None = None
) -> SamplingParams:
    """Return the trainer's sampling settings; log them if they differ from `before`.

    Warn if the loss keeps dividing by another temperature, `loss_temperature`.

    Raises:
        UnsupportedTrainer: A setting was changed to a value that the engine refuses.
    """
    for reason in refused_settings(trainer):
        raise UnsupportedTrainer(reason)
    sampling = _sampling(trainer)
    if sampling == before:
        return sampling
    if loss_temperature not in (None, sampling.temperature):
        logger.warning(
            "rollouts use temperature=%s from now on, but the loss still divides by %s: TRL reads "
            "the temperature once, when the trainer is constructed. Training is now off-policy. To "
            "change the temperature, set it in the arguments of a new trainer",
            sampling.temperature,
            loss_temperature,
        )
    logger.info("rollouts use %s", sampling)
    return sampling

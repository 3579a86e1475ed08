"""How a row's tokens are drawn, and when it ends."""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from rollout.errors import RequestError, check_count, is_real, refuse_unknown
from rollout.stop_strings import StopStrings

# Logits divided by less could overflow; by more they would be multiplied by 0, which -inf must not.
_COLDEST, _HOTTEST = 1e-6, 1e30

# vLLM's bounds of the penalties, but for the strongest repetition penalty.
_BOUNDS = {
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-2, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}

# A row's settings, and values of no effect; a row may stop from position `first_stop` on.
SETTINGS = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "first_stop": 0,
}


class Draw(IntEnum):
    """What drawing a token involves; a step does for all of its rows what one of them needs."""

    PLAIN = 0
    """Softmax of the logits."""
    FILTERED = 1
    """That, among the tokens that `top_k`, `top_p` and `min_p` keep."""
    PENALISED = 2
    """That, after penalties and suppression, which read flags of each token on the device."""


@refuse_unknown(RequestError)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one row's tokens are drawn, and when it ends.

    Logits are penalised, then tokens are suppressed, then the logits are divided by the
    temperature, then `top_k`, `top_p` and `min_p` each keep some of what the one before has left:
    transformers' order. vLLM applies `min_p` first. Tokens that tie with the last one kept are kept
    too. Whatever is asked, log-probabilities are those of the logits as the model gives them, at
    the temperature, over the full vocabulary, which is what a trainer computes.

    Raises:
        RequestError: A name is unknown or a value cannot work.
    """

    max_new_tokens: int
    """Most tokens to generate, the final EOS included."""

    min_new_tokens: int = 0
    """No `eos_token_ids` is drawn before so many tokens are, and no `stop_strings` ends the row
    with fewer, though transformers lets it; vLLM's `min_tokens`."""

    temperature: float = 1.0
    """Divides the logits. 0 takes the most likely token; its log-probability is then at 1."""

    top_k: int = 0
    """Draw among so many most likely tokens. 0 or -1: among all."""

    top_p: float = 1.0
    """Draw among the fewest most likely tokens with this probability together."""

    min_p: float = 0.0
    """Draw among tokens with this share, or more, of the most likely one's probability."""

    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt and completion, and multiplies negative ones."""

    presence_penalty: float = 0.0
    """Is taken off the logits of tokens in the completion; vLLM's, transformers has none."""

    frequency_penalty: float = 0.0
    """Is taken off a token's logit for each time it is in the completion; vLLM's too."""

    suppress_tokens: tuple[int, ...] = ()
    """These are never drawn."""

    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Words of one token each, which are never drawn. As in transformers, a word that is an EOS
    token is ignored; `suppress_tokens` suppresses EOS tokens too."""

    eos_token_ids: tuple[int, ...] = ()
    """Any of these ends the row; it is kept as the completion's last token."""

    stop_strings: StopStrings | None = None
    """Any of these ends the row, and the tokens that complete it are kept, as in transformers. Of
    the prompt no string takes a part, as in vLLM; in transformers one may begin there."""

    @property
    def draw(self) -> Draw:
        """What drawing a token of such a row involves."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        suppressed_eos = self.min_new_tokens > 0 and self.eos_token_ids
        if penalties != (1, 0, 0) or self.suppressed_tokens or suppressed_eos:
            return Draw.PENALISED
        keeps_all = (max(self.top_k, 0), self.top_p, self.min_p) == (0, 1, 0)
        return Draw.PLAIN if keeps_all else Draw.FILTERED

    @cached_property
    def suppressed_tokens(self) -> tuple[int, ...]:
        """Tokens that are never drawn."""
        bad_tokens = [token for (token,) in self.bad_words_ids]
        return (*self.suppress_tokens, *(t for t in bad_tokens if t not in self.eos_token_ids))

    def __post_init__(self) -> None:
        check_count(RequestError, "max_new_tokens", self.max_new_tokens)
        check_count(RequestError, "min_new_tokens", self.min_new_tokens, least=0)
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens={self.min_new_tokens}: it must be at most max_new_tokens="
                f"{self.max_new_tokens}"
            )
        self._check_temperature()
        check_count(RequestError, "top_k", self.top_k, least=-1)
        for name, (least, most) in _BOUNDS.items():
            _check_between(name, getattr(self, name), least, most)
        for name in ("eos_token_ids", "suppress_tokens"):
            _check_tokens(name, getattr(self, name))
        _check_bad_words(self.bad_words_ids)
        if not isinstance(self.stop_strings, StopStrings | None):
            raise RequestError(
                f"stop_strings={self.stop_strings!r}: it must be a StopStrings, which knows the "
                "tokenizer"
            )

    def _check_temperature(self) -> None:
        value = self.temperature
        if not is_real(value) or (value != 0 and not _COLDEST <= value <= _HOTTEST):
            raise RequestError(
                f"temperature={value!r}: it must be 0, or from {_COLDEST} to {_HOTTEST}"
            )


def _check_between(name: str, value: Any, least: float, most: float) -> None:
    if not is_real(value) or not least <= value <= most:
        raise RequestError(f"{name}={value!r}: it must be from {least} to {most}")


def _check_tokens(name: str, tokens: Any) -> None:
    if not isinstance(tokens, tuple):
        raise RequestError(f"{name}={tokens!r}: it must be a tuple of ids")
    for token in tokens:
        check_count(RequestError, f"a token of {name}", token, least=0)


def _check_bad_words(bad_words: Any) -> None:
    if not isinstance(bad_words, tuple) or () in bad_words:
        raise RequestError(f"bad_words_ids={bad_words!r}: it must be a tuple of tuples of ids")
    for word in bad_words:
        _check_tokens("a word of bad_words_ids", word)
        if len(word) > 1:
            raise RequestError(
                f"bad_words_ids: {word} has {len(word)} tokens, and a word must be a single token; "
                "give the token ids one by one, or as `suppress_tokens`, or check the text in a "
                "reward function"
            )

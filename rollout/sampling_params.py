"""SamplingParams: how a row's tokens are drawn and when the row ends."""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from rollout.errors import RequestError, check_count, is_real, refuse_unknown
from rollout.stop_strings import StopStrings

# Below 1e-6, logits / temperature can overflow. Far above 1e30, 1 / temperature is 0 in float32,
# and -inf * 0 is NaN.
_TEMPERATURES = 1e-6, 1e30

# The bounds of the penalties are vLLM's, except the upper bound of `repetition_penalty`.
_BOUNDS = {
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-2, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}

# Name and neutral value of each setting. A row may end from position `first_stop` on.
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
    """The work to draw a token. One step does the most demanding draw for all of its rows."""

    PLAIN = 0
    """Softmax of the logits."""
    FILTERED = 1
    """Softmax over the tokens that `top_k`, `top_p` and `min_p` keep."""
    PENALISED = 2
    """Penalties and suppression first, from per-token flags on the device; then as `FILTERED`."""


@refuse_unknown(RequestError)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one row's tokens are drawn and when the row ends.

    The order is transformers': penalties, suppression, temperature, `top_k`, `top_p`, `min_p`.
    (vLLM applies `min_p` first.) Tokens that tie with the last kept token are kept too.

    These settings do not change the returned log-probabilities, except for the temperature: they
    come from the model's own logits over the full vocabulary, as a trainer computes them.

    Raises:
        RequestError: A name is unknown or a value is invalid.
    """

    max_new_tokens: int
    """Most tokens to generate, the final EOS included."""

    min_new_tokens: int = 0
    """Until the row has this many tokens, no EOS is drawn and no stop string ends it: vLLM's
    `min_tokens`. (In transformers, a stop string may end the row earlier.)"""

    temperature: float = 1.0
    """Divides the logits. 0: take the most likely token; log-probabilities are then at 1."""

    top_k: int = 0
    """Draw among the `top_k` most likely tokens. 0 or -1: among all."""

    top_p: float = 1.0
    """Draw among the fewest most likely tokens whose total probability reaches `top_p`."""

    min_p: float = 0.0
    """Draw among tokens with at least `min_p` times the most likely token's probability."""

    repetition_penalty: float = 1.0
    """For tokens in the prompt or completion: divides positive logits, multiplies negative ones."""

    presence_penalty: float = 0.0
    """Subtracted from the logit of each token in the completion. As in vLLM."""

    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the completion. As in vLLM."""

    suppress_tokens: tuple[int, ...] = ()
    """Token ids that are never drawn."""

    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Words of one token each that are never drawn. As in transformers, EOS tokens in it are
    ignored; `suppress_tokens` suppresses them too."""

    eos_token_ids: tuple[int, ...] = ()
    """Any of these ends the row and stays as the completion's last token."""

    stop_strings: StopStrings | None = None
    """Any of these ends the row, and its tokens stay in the completion, as in transformers. A
    string must lie wholly in the completion, as in vLLM; in transformers it may begin in the
    prompt."""

    @property
    def draw(self) -> Draw:
        """The work to draw this row's tokens."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        suppressed_eos = self.min_new_tokens > 0 and self.eos_token_ids
        if penalties != (1, 0, 0) or self.suppressed_tokens or suppressed_eos:
            return Draw.PENALISED
        keeps_all = (max(self.top_k, 0), self.top_p, self.min_p) == (0, 1, 0)
        return Draw.PLAIN if keeps_all else Draw.FILTERED

    @cached_property
    def suppressed_tokens(self) -> tuple[int, ...]:
        """Token ids of `suppress_tokens` and `bad_words_ids` that are never drawn."""
        bad_tokens = [token for (token,) in self.bad_words_ids]
        return (*self.suppress_tokens, *(t for t in bad_tokens if t not in self.eos_token_ids))

    def __post_init__(self) -> None:
        check_count(RequestError, "max_new_tokens", self.max_new_tokens)
        check_count(RequestError, "min_new_tokens", self.min_new_tokens, least=0)
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens={self.min_new_tokens}: must be at most max_new_tokens="
                f"{self.max_new_tokens}"
            )
        value, (least, most) = self.temperature, _TEMPERATURES
        if not is_real(value) or (value != 0 and not least <= value <= most):
            raise RequestError(f"temperature={value!r}: must be 0, or from {least} to {most}")
        check_count(RequestError, "top_k", self.top_k, least=-1)
        for name, (least, most) in _BOUNDS.items():
            _check_between(name, getattr(self, name), least, most)
        for name in ("eos_token_ids", "suppress_tokens"):
            _check_tokens(name, getattr(self, name))
        _check_bad_words(self.bad_words_ids)
        if not isinstance(self.stop_strings, StopStrings | None):
            raise RequestError(
                f"stop_strings={self.stop_strings!r}: must be a StopStrings(strings, decode, "
                "vocab_size)"
            )


def _check_between(name: str, value: Any, least: float, most: float) -> None:
    if not is_real(value) or not least <= value <= most:
        raise RequestError(f"{name}={value!r}: must be from {least} to {most}")


def _check_tokens(name: str, tokens: Any) -> None:
    if not isinstance(tokens, tuple):
        raise RequestError(f"{name}={tokens!r}: must be a tuple of token ids")
    for token in tokens:
        check_count(RequestError, f"token in {name}", token, least=0)


def _check_bad_words(bad_words: Any) -> None:
    if not isinstance(bad_words, tuple) or () in bad_words:
        raise RequestError(
            f"bad_words_ids={bad_words!r}: must be a tuple of non-empty tuples of token ids"
        )
    for word in bad_words:
        _check_tokens("word in bad_words_ids", word)
        if len(word) > 1:
            raise RequestError(
                f"bad_words_ids: the word {word} has {len(word)} tokens, but only words of 1 token "
                "are supported; list its token ids as separate words, or penalise the text in a "
                "reward function"
            )

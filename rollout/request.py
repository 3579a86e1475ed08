"""The nouns that travel: what is asked, what one step runs, what comes back."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rollout.sampling_params import SamplingParams

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

# More tokens than any vocabulary has, which float64 and int64 both hold.
_ALL_TOKENS = 2**31


class FinishReason(StrEnum):
    """Why a row ended, in vLLM's words."""

    STOP = "stop"
    """It sampled one of its `eos_token_ids`, or completed one of its `stop_strings`."""
    LENGTH = "length"
    """It reached `max_new_tokens`."""


@dataclass(frozen=True, eq=False)
class Request:
    """One row to generate.

    Attributes:
        prompt: Token ids, `(prompt_tokens,)`.
        sampling: How to draw, when to stop.
        seed: Key of the row's random numbers, `0 <= seed < 2**63`. The same logits and seed give
            the same draw in any batch; logits round a little with the batch's size.
    """

    prompt: Ints
    sampling: SamplingParams
    seed: int = 0

    @property
    def settings(self) -> tuple[float, ...]:
        """Its sampling settings besides the temperature, in the order of `SETTINGS`."""
        asked = self.sampling
        first_stop = len(self.prompt) + asked.min_new_tokens
        penalties = (asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty)
        top_k = min(max(asked.top_k, 0), _ALL_TOKENS)
        return (top_k, asked.top_p, asked.min_p, *penalties, first_stop)

    @property
    def max_tokens(self) -> int:
        """Prompt and longest completion, in tokens."""
        return len(self.prompt) + self.sampling.max_new_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Tokens whose KV is written: that of a row's last token never is."""
        return self.max_tokens - 1


@dataclass(frozen=True, eq=False)
class Completion:
    """What one request became.

    Attributes:
        row: The id that `submit` returned.
        token_ids: Generated tokens, with the final EOS if there was one; at least one token.
        logprobs: Natural-log probability of each token at the row's temperature over the full
            vocabulary.
        finish_reason: Why it ended.
        policy_versions: The weights that generated it: each policy version, in order, with the
            number of tokens that are its.
        entropies: Entropy, in nats, of each token's distribution at the temperature over the full
            vocabulary; `None` unless `EngineConfig(entropies=True)`.
        kept_mass: Probability, in that distribution, of all tokens among which each was drawn;
            `None` unless `EngineConfig(kept_mass=True)`.
    """

    row: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    policy_versions: list[tuple[int, int]]
    entropies: list[float] | None = None
    kept_mass: list[float] | None = None

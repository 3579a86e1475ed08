"""What a caller asks for (`Request`) and what it gets back (`Completion`)."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rollout.sampling_params import SamplingParams

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

# Caps `top_k`: larger than any vocabulary, and exact in float64.
_ALL_TOKENS = 2**31


class FinishReason(StrEnum):
    """Why a row ended, in vLLM's words."""

    STOP = "stop"
    """The row sampled one of its `eos_token_ids` or completed one of its `stop_strings`."""
    LENGTH = "length"
    """The row reached `max_new_tokens`."""


@dataclass(frozen=True, eq=False)
class Request:
    """One row to generate.

    Attributes:
        prompt: Token ids, `(prompt_tokens,)`.
        seed: Key of the row's random numbers, `0 <= seed < 2**63`. The same logits and seed give
            the same draw in any batch. Logits may round differently in another batch.
    """

    prompt: Ints
    sampling: SamplingParams
    seed: int = 0

    @property
    def settings(self) -> tuple[float, ...]:
        """Sampling settings without the temperature, in the order of `SETTINGS`."""
        params = self.sampling
        first_stop = len(self.prompt) + params.min_new_tokens
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        top_k = min(max(params.top_k, 0), _ALL_TOKENS)
        return (top_k, params.top_p, params.min_p, *penalties, first_stop)

    @property
    def max_tokens(self) -> int:
        """Tokens of the prompt plus `max_new_tokens`."""
        return len(self.prompt) + self.sampling.max_new_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Tokens that need KV: all but the last one, which no later token attends to."""
        return self.max_tokens - 1


@dataclass(frozen=True, eq=False)
class Completion:
    """The result of one request.

    Attributes:
        row: The id that `submit` returned.
        token_ids: Generated tokens, at least one. A final EOS is included.
        logprobs: Natural-log probability of each token, at the row's temperature, over the full
            vocabulary.
        policy_versions: `(policy version, number of tokens)` of the weights that generated the
            tokens, in order.
        entropies: Entropy of that distribution at each token, in nats; `None` unless
            `EngineConfig(entropies=True)`.
        kept_mass: Total probability, in that distribution, of the tokens that each was drawn from;
            `None` unless `EngineConfig(kept_mass=True)`.
    """

    row: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    policy_versions: list[tuple[int, int]]
    entropies: list[float] | None = None
    kept_mass: list[float] | None = None

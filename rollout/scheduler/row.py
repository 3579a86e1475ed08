"""One row: what was asked, and, while it has no lane, what it has so far."""

from dataclasses import dataclass, field

import numpy as np

from rollout.request import Completion, FinishReason, Floats, Ints, Request

NO_AGE = -1
_NO_TOKENS = np.empty(0, np.int64)
_NO_SCORES = np.empty((0, 1), np.float32)


@dataclass(eq=False)
class Row:
    """One row. What it has so far is kept here only while it has no lane.

    Attributes:
        id: What `submit` returned.
        request: What was asked.
        expected_new: Tokens that it is expected to generate; 0 where nothing is known.
        age: How many rows had been admitted before it first was.
        tokens: Tokens generated and settled, `(tokens,)`.
        scores: Their scores, `(tokens, num_scores)`.
        versions: Each policy version that generated some of them, and the index of its first.
        num_launched: Tokens settled or in flight.
        policy_version: Weights under which its prompt was admitted; its KV is no older.
        host_pages: Host pages that hold its KV; none where it is to be computed, or again.
    """

    id: int
    request: Request
    expected_new: int = 0
    age: int = NO_AGE
    tokens: Ints = field(default_factory=lambda: _NO_TOKENS)
    scores: Floats = field(default_factory=lambda: _NO_SCORES)
    versions: list[tuple[int, int]] = field(default_factory=list)
    num_launched: int = 0
    policy_version: int = -1
    host_pages: list[int] = field(default_factory=list)

    @property
    def in_flight(self) -> bool:
        """Whether a token of it is still to be settled."""
        return self.num_launched > len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of its prompt and settled ones. The last has no KV yet."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def context(self) -> Ints:
        """Its prompt, and what it has generated."""
        return np.concatenate([self.request.prompt, self.tokens])

    def ends_with_text(self, tokens: Ints) -> bool:
        """Whether the last of the tokens that it has generated completes a stop string."""
        stop, least = self.request.sampling.stop_strings, self.request.sampling.min_new_tokens
        return stop is not None and len(tokens) >= least and stop.ends(tokens)

    def settle(self, token: int, scores: Floats, policy_version: int) -> FinishReason | None:
        """Record the token that was in flight when the row lost its lane; why that ends it."""
        if not self.versions or self.versions[-1][0] != policy_version:
            self.versions.append((policy_version, len(self.tokens)))
        self.tokens = np.append(self.tokens, token)
        self.scores = np.concatenate([self.scores.reshape(-1, len(scores)), scores[None]])
        sampling = self.request.sampling
        if token in sampling.eos_token_ids or self.ends_with_text(self.tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) == sampling.max_new_tokens else None

    def completed(self, reason: FinishReason, *, entropies: bool, kept_mass: bool) -> Completion:
        """What it became."""
        ends = [*(first for _, first in self.versions[1:]), len(self.tokens)]
        spans = [(v, end - first) for (v, first), end in zip(self.versions, ends, strict=True)]
        scores = self.scores.T.tolist()
        return Completion(
            row=self.id,
            token_ids=self.tokens.tolist(),
            logprobs=scores[0],
            finish_reason=reason,
            policy_versions=spans,
            entropies=scores[1] if entropies else None,
            kept_mass=scores[-1] if kept_mass else None,
        )

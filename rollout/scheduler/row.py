"""Row: a request, and its tokens while it has no lane."""

from dataclasses import dataclass, field

import numpy as np

from rollout.request import Completion, FinishReason, Floats, Ints, Request

NO_AGE = -1
_NO_TOKENS = np.empty(0, np.int64)
_NO_SCORES = np.empty((0, 1), np.float32)


@dataclass(eq=False)
class Row:
    """A row. While it has a lane, its tokens, scores and versions are in the lane's `TokenLog`.

    Attributes:
        expected_new: Expected number of generated tokens; 0 if unknown.
        age: Rows that were admitted before this one was first admitted.
        tokens: Settled generated tokens, `(tokens,)`.
        scores: Their scores, `(tokens, num_scores)`.
        versions: `(policy version, index of its first token)`, in order.
        num_launched: Generated tokens, settled or in flight.
        policy_version: Version at the admission that computed its KV, which is no older.
        host_pages: Host pages with its KV; empty if the KV must be computed.
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
        """Whether one of its tokens is not settled yet."""
        return self.num_launched > len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and settled tokens. The last one has no KV yet."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def context(self) -> Ints:
        """The prompt followed by the settled tokens."""
        return np.concatenate([self.request.prompt, self.tokens])

    def ends_with_text(self, tokens: Ints) -> bool:
        """Whether the last of the generated `tokens` completes a stop string."""
        stop, min_tokens = self.request.sampling.stop_strings, self.request.sampling.min_new_tokens
        return stop is not None and len(tokens) >= min_tokens and stop.ends(tokens)

    def settle(self, token: int, scores: Floats, policy_version: int) -> FinishReason | None:
        """Record the token in flight at preemption. Returns why it ends the row, if it does."""
        if not self.versions or self.versions[-1][0] != policy_version:
            self.versions.append((policy_version, len(self.tokens)))
        self.tokens = np.append(self.tokens, token)
        self.scores = np.concatenate([self.scores.reshape(-1, len(scores)), scores[None]])
        sampling = self.request.sampling
        if token in sampling.eos_token_ids or self.ends_with_text(self.tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) == sampling.max_new_tokens else None

    def completed(self, reason: FinishReason, *, entropies: bool, kept_mass: bool) -> Completion:
        """The completion of this row, which has no lane any more."""
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

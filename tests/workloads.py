"""Rows that arrive while others run, and what each becomes on its own."""

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from rollout.config import EngineConfig
from rollout.request import FinishReason, Request
from rollout.sampling_params import SamplingParams
from rollout.scheduler.pages import pages_for
from rollout.stop_strings import StopStrings

VOCAB = 12
EOS_SETS = [(), (VOCAB,), (3,), (0, 5, 8, 9), tuple(range(VOCAB))]  # never ... at once

# Pages are known by what they hold under one policy version alone.
version_steps = st.sampled_from([3, 6, 1000])


# --- the model, and what it makes of a row


def text_of(tokens: list[int]) -> str:
    return "".join("abcdefghijkl"[token] for token in tokens)


STOPS = [None, None, StopStrings(["a", "cd", "ceb"], text_of, VOCAB)]


def next_token(seed: int, position: int, token: int) -> int:
    """The model: one row's next token, from nothing but that row."""
    return hash((seed, position, token)) % VOCAB


def logprob(seed: int, position: int, temperature: float) -> float:
    return -(hash((seed, position)) % 97) / 8 - temperature  # exact in float32


def expected(request: Request) -> tuple[list[int], list[float], FinishReason]:
    """Tokens, log-probabilities and finish reason of a row generated on its own."""
    seed, sampling = request.seed, request.sampling
    tokens, logprobs, token = [], [], int(request.prompt[-1])
    for position in range(len(request.prompt), request.max_tokens):
        token = next_token(seed, position, token)
        tokens.append(token)
        logprobs.append(logprob(seed, position, sampling.temperature))
        stop = sampling.stop_strings
        by_text = stop is not None and any(string in text_of(tokens) for string in stop.strings)
        if token in sampling.eos_token_ids or by_text:
            return tokens, logprobs, FinishReason.STOP
    return tokens, logprobs, FinishReason.LENGTH


# --- workloads


@dataclass(frozen=True)
class Workload:
    """Rows with the step each arrives at, how much room they get, and what befalls them.

    `spare_pages` are on top of what the longest row needs, at the start and after each of
    `growths`. Steps count from 0. Every `version_steps` the weights change. `aborts` are rows to
    drop before a step; before each step of `renewals` the KV of all rows is dropped. `keeps_state`:
    the model has recurrent layers.
    """

    config: EngineConfig
    requests: list[Request]
    arrivals: list[int] = field(default_factory=list)
    spare_pages: int = 0
    growths: dict[int, int] = field(default_factory=dict)
    reset_step: int | None = None
    num_host_pages: int = 0
    version_steps: int = 6
    aborts: dict[int, set[int]] = field(default_factory=dict)
    renewals: frozenset[int] = frozenset()
    keeps_state: bool = False

    @property
    def max_row_pages(self) -> int:
        longest = max(request.max_tokens for request in self.requests)
        return pages_for(longest - 1, self.config.page_tokens)


def make_request(
    seed: int, num_prompt: int, max_new: int, group: int | None = None, **sampling
) -> Request:
    # No two prompt tokens are alike, but for rows of one group.
    prompt = 1000 * ((seed if group is None else group) + 1) + np.arange(num_prompt)
    return Request(prompt, SamplingParams(max_new_tokens=max_new, **sampling), seed)


@st.composite
def workloads(draw) -> Workload:
    """Up to 14 rows that arrive while others run, on 1 to 5 lanes."""
    config = EngineConfig(
        max_rows=draw(st.integers(1, 5)),
        page_tokens=draw(st.integers(1, 6)),
        prefill_tokens=draw(st.integers(1, 20)),
    )
    rows = st.tuples(
        st.integers(1, 14),  # prompt
        st.integers(1, 14),  # max_new_tokens
        st.sampled_from(EOS_SETS),
        st.sampled_from(STOPS),
        st.sampled_from([0.0, 0.5, 1.0]),  # temperature
        st.sampled_from([0, 0, 0, 0, 1, 3, 9]),  # steps after the row before
        st.sampled_from([None, None, 20, 20, 21]),  # group
        st.sampled_from([None, None, 0, 3, 5]),  # the row whose next turn it is
    )
    requests, arrivals = [], []
    for seed, (num_prompt, max_new, eos, stop, temperature, gap, group, turn_of) in enumerate(
        draw(st.lists(rows, min_size=1, max_size=14))
    ):
        sampling = {"eos_token_ids": eos, "stop_strings": stop, "temperature": temperature}
        num_prompt = num_prompt if group is None else 5 + 4 * (group - 20)
        requests.append(make_request(seed, num_prompt, max_new, group, **sampling))
        if turn_of is not None and turn_of < seed:
            before = requests[turn_of]
            turn = [*before.prompt, *expected(before)[0], 7_000_000 + seed]
            requests[-1] = replace(requests[-1], prompt=np.array(turn[-40:]))
        arrivals.append(arrivals[-1] + gap if arrivals else 0)
    return Workload(
        config,
        requests,
        arrivals,
        # With few pages, what one row frees another is given in the next batch.
        spare_pages=draw(st.integers(0, draw(st.sampled_from([0, 2, 12])))),
        growths=draw(st.dictionaries(st.integers(0, 20), st.integers(1, 30), max_size=2)),
        reset_step=draw(st.none() | st.integers(0, 15)),
        num_host_pages=draw(st.sampled_from([0, 0, 2, 5, 100])),
        version_steps=draw(version_steps),
        keeps_state=draw(st.booleans()),
    )


@st.composite
def tight_workloads(draw) -> Workload:
    """Groups of long rows on many lanes, with little more memory than the longest of them needs."""
    config = EngineConfig(
        max_rows=draw(st.integers(2, 6)),
        page_tokens=draw(st.integers(1, 4)),
        prefill_tokens=draw(st.integers(2, 20)),
    )
    group = st.tuples(
        st.integers(1, 10),  # prompt
        st.integers(1, 4),  # rows
        st.integers(1, 30),  # max_new_tokens
        st.sampled_from(EOS_SETS[:4]),
    )
    requests = []
    for index, (num_prompt, num_rows, max_new, eos) in enumerate(
        draw(st.lists(group, min_size=1, max_size=5))
    ):
        for seed in range(len(requests), len(requests) + num_rows):
            requests.append(make_request(seed, num_prompt, max_new, 50 + index, eos_token_ids=eos))
    steps, undisturbed = st.integers(0, 40), draw(st.booleans())
    return Workload(
        config,
        requests,
        spare_pages=draw(st.integers(0, 8)),
        # Pages that come while rows are preempted: one may come back, and give way again.
        growths=draw(st.dictionaries(st.integers(0, 30), st.integers(1, 12), max_size=3)),
        num_host_pages=draw(st.sampled_from([0, 1, 4, 9, 500])),
        version_steps=draw(version_steps),
        keeps_state=draw(st.booleans()),
        aborts={}
        if undisturbed
        else draw(st.dictionaries(steps, st.sets(st.integers(0, 12), max_size=3), max_size=6)),
        renewals=frozenset() if undisturbed else draw(st.frozensets(steps, max_size=3)),
    )

"""Turns what a caller asks for into requests, or says what is wrong with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from rollout.config import EngineConfig
from rollout.errors import OutOfPages, RequestError, check_count
from rollout.request import Request
from rollout.sampling_params import Draw, SamplingParams
from rollout.scheduler.pages import pages_for


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one row may ask for.

    Attributes:
        vocab_size: Token ids are below it.
        max_row_tokens: Longest prompt plus completion.
        max_pages: KV pages that there is memory for, the trash page included.
        page_bytes: Bytes of one.
        config: For what an error says of its knobs.
    """

    vocab_size: int
    max_row_tokens: int
    max_pages: int
    page_bytes: int
    config: EngineConfig


def build_requests(
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    seeds: Sequence[int] | None,
    limits: Limits,
) -> list[Request]:
    """Check every row before any of them runs.

    Args:
        prompts: Token ids of each row.
        sampling: One for all rows, or one for each.
        seeds: One for each row. `None`: 0, 1, 2, ...
        limits: What a row may ask for.

    Raises:
        RequestError: A row cannot be served.
        OutOfPages: One row alone needs more KV pages than there can be.
    """
    if isinstance(sampling, SamplingParams):
        sampling = [sampling] * len(prompts)
    seeds = range(len(prompts)) if seeds is None else seeds
    for name, values in (("sampling", sampling), ("seeds", seeds)):
        if not hasattr(values, "__len__"):
            raise RequestError(f"{name}={values!r:.80}: it must be one for each prompt")
        if len(values) != len(prompts):
            raise RequestError(f"{len(values)} {name} for {len(prompts)} prompts")
    return [_build_request(*row, limits) for row in zip(prompts, sampling, seeds, strict=True)]


def _build_request(
    prompt: Sequence[int], sampling: SamplingParams, seed: int, limits: Limits
) -> Request:
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling={sampling!r:.80}: it must be a SamplingParams(...)")
    try:
        tokens = np.array(prompt)  # a copy: the caller may change theirs
    except ValueError:  # lists of unequal lengths within
        tokens = np.array(["ragged"])
    if tokens.size == 0:
        raise RequestError(
            "empty prompt: a row needs at least one token to start from; drop the prompt, or begin "
            "it with a BOS token"
        )
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise RequestError(f"prompt {prompt!r:.80}: it must be a flat sequence of token ids")
    outside = tokens[(tokens < 0) | (tokens >= limits.vocab_size)]
    if outside.size:
        raise RequestError(
            f"token id {outside[0]} is outside the vocabulary, 0 to {limits.vocab_size - 1}"
        )
    check_count(RequestError, "seed", seed, least=0)
    if seed >= 2**63:
        raise RequestError(f"seed={seed}: it must be from 0 to 2**63 - 1")
    _check_drawable(sampling, limits.vocab_size)
    request = Request(tokens.astype(np.int64), sampling, int(seed))
    _check_fits(request, limits)
    return request


def _check_drawable(sampling: SamplingParams, vocab_size: int) -> None:
    """Tokens that must not be drawn are known to the model, and leave one that may be."""
    if sampling.draw < Draw.PENALISED:
        return
    suppressed_eos = sampling.eos_token_ids if sampling.min_new_tokens else ()
    for name, tokens in (
        ("suppress_tokens", sampling.suppress_tokens),
        ("bad_words_ids", tuple(chain(*sampling.bad_words_ids))),
        ("min_new_tokens needs eos_token_ids", suppressed_eos),
    ):
        if max(tokens, default=0) >= vocab_size:
            raise RequestError(
                f"{name}: token id {max(tokens)} is outside the vocabulary, 0 to {vocab_size - 1}"
            )
    if len({*sampling.suppressed_tokens, *suppressed_eos}) == vocab_size:
        raise RequestError(
            "suppress_tokens, bad_words_ids and min_new_tokens leave none of the "
            f"{vocab_size} tokens to draw"
        )


def _check_fits(request: Request, limits: Limits) -> None:
    config, max_new_tokens = limits.config, request.sampling.max_new_tokens
    if request.max_tokens > limits.max_row_tokens:
        raise RequestError(
            f"a prompt of {len(request.prompt)} tokens and max_new_tokens={max_new_tokens} pass "
            f"the {limits.max_row_tokens} tokens that a row can hold; shorten the prompt, lower "
            "max_new_tokens or raise max_row_tokens"
        )
    wanted = pages_for(request.max_kv_tokens, config.page_tokens)
    most = max(limits.max_pages - 1, 0)
    if wanted > most:
        raise OutOfPages(
            f"one row of {request.max_tokens} tokens needs {wanted} KV pages of "
            f"{limits.page_bytes} bytes, and there is memory for {most} and the trash page "
            f"(kv_bytes={config.kv_bytes}, kv_fraction={config.kv_share}, "
            f"train_reserve_bytes={config.train_reserve_bytes}); raise one of the first two, or "
            "lower the third or max_new_tokens"
        )

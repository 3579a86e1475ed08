"""Builds requests from a caller's arguments, or raises an error that says what to change."""

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
    """Limits for each row: `max_row_tokens` is for prompt plus completion.

    `max_pages` is the number of KV pages that fit into memory, including the trash page.
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
    """Check all rows, before any of them runs. Arguments as for `RolloutEngine.generate`.

    Raises:
        RequestError: A prompt, a seed or a sampling parameter is invalid.
        OutOfPages: One row needs more KV pages than memory allows.
    """
    if isinstance(sampling, SamplingParams):
        sampling = [sampling] * len(prompts)
    seeds = range(len(prompts)) if seeds is None else seeds
    for name, values in (("sampling", sampling), ("seeds", seeds)):
        if not hasattr(values, "__len__"):
            raise RequestError(f"{name}={values!r:.80}: must be a sequence, one per prompt")
        if len(values) != len(prompts):
            raise RequestError(f"{len(values)} {name} for {len(prompts)} prompts: pass one each")
    return [_build_request(*row, limits) for row in zip(prompts, sampling, seeds, strict=True)]


def _build_request(
    prompt: Sequence[int], sampling: SamplingParams, seed: int, limits: Limits
) -> Request:
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling={sampling!r:.80}: must be a SamplingParams(...)")
    try:
        tokens = np.array(prompt)  # a copy, because the caller may change the original
    except ValueError:  # nested lists of unequal lengths
        tokens = np.array(["ragged"])
    if tokens.size == 0:
        raise RequestError("empty prompt: must have at least 1 token, for example the BOS token")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise RequestError(f"prompt={prompt!r:.80}: must be a flat sequence of token ids")
    outside = tokens[(tokens < 0) | (tokens >= limits.vocab_size)]
    if outside.size:
        raise RequestError(
            f"token id {outside[0]} is outside the vocabulary, 0 to {limits.vocab_size - 1}; use "
            "the model's own tokenizer, or resize the model's embeddings"
        )
    check_count(RequestError, "seed", seed, least=0)
    if seed >= 2**63:
        raise RequestError(f"seed={seed}: must be from 0 to 2**63 - 1")
    _check_drawable(sampling, limits.vocab_size)
    request = Request(tokens.astype(np.int64), sampling, int(seed))
    _check_fits(request, limits)
    return request


def _check_drawable(sampling: SamplingParams, vocab_size: int) -> None:
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
            "suppress_tokens, bad_words_ids and min_new_tokens suppress all of the "
            f"{vocab_size} tokens; allow at least one"
        )


def _check_fits(request: Request, limits: Limits) -> None:
    config, max_new_tokens = limits.config, request.sampling.max_new_tokens
    if request.max_tokens > limits.max_row_tokens:
        raise RequestError(
            f"a prompt of {len(request.prompt)} tokens and max_new_tokens={max_new_tokens} exceed "
            f"max_row_tokens={limits.max_row_tokens}; shorten the prompt, lower max_new_tokens or "
            "raise max_row_tokens"
        )
    wanted = pages_for(request.max_kv_tokens, config.page_tokens)
    most = max(limits.max_pages - 1, 0)
    if wanted > most:
        raise OutOfPages(
            f"a row of {request.max_tokens} tokens needs {wanted} KV pages of {limits.page_bytes} "
            f"bytes, but memory allows {most}; raise kv_bytes={config.kv_bytes} or "
            f"kv_fraction={config.kv_share}, or lower max_new_tokens={max_new_tokens} or "
            f"train_reserve_bytes={config.train_reserve_bytes}"
        )

"""Other generators for a transformers model: its `generate`, and its continuous batching."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import is_flash_attn_3_available

from rollout.errors import RolloutError
from rollout.support import base_of
from rollout.tools.workload import Workload

Generate = Callable[[Sequence[int]], None]
"""Takes the number of new tokens of each row."""

_PAGE = 256


@contextmanager
def plain_generate(work: Workload) -> Iterator[tuple[Generate, str]]:
    """`model.generate`: one padded batch, which runs until the last row ends."""
    model: Any = work.model
    base: Any = base_of(work.model)
    ids = torch.tensor(work.prompts, device=base.device)

    def generate(row_tokens: Sequence[int]) -> None:
        longest = max(row_tokens)
        lengths = {"max_new_tokens": longest, "min_new_tokens": longest}
        model.generate(ids, do_sample=True, top_k=0, pad_token_id=0, **lengths)

    yield generate, base.config._attn_implementation


@contextmanager
def continuous_batching(work: Workload) -> Iterator[tuple[Generate, str]]:
    """Continuous batching at its best: asynchronous, CUDA graphs, one manager. Needs a GPU."""
    model: Any = base_of(work.model)
    sampling = _sampling(work)
    pages = -(-(work.prompt_tokens + work.new_tokens + 1) // _PAGE)
    config = ContinuousBatchingConfig(
        use_async_batching=True,
        use_cuda_graph=True,
        page_size=_PAGE,
        num_blocks=work.kv_bytes and work.kv_bytes // (_PAGE * work.cost.kv_token_bytes),
        max_requests_per_batch=work.rows,
        max_blocks_per_request=pages,
        max_memory_percent=0.8,
    )
    before = model.config._attn_implementation
    manager = model.init_continuous_batching(sampling, config)
    manager.warmup()
    manager.start()

    def generate(row_tokens: Sequence[int]) -> None:
        for prompt, count in zip(work.prompts, row_tokens, strict=True):
            manager.add_request(prompt, max_new_tokens=count)
        done = 0
        while done < work.rows:
            result = manager.get_result(timeout=1)
            done += result is not None and result.is_finished()
            if result is None and not manager.is_running():
                raise RolloutError(
                    f"transformers' continuous batching stopped after {done} of {work.rows} rows: "
                    "see its log, or remove its mode from --modes"
                )

    try:
        yield generate, _attention()
    finally:
        manager.stop(block=True, timeout=5)
        manager.destroy()
        model.set_attn_implementation(before)


@contextmanager
def trl_continuous_batching(work: Workload) -> Iterator[tuple[Generate, str]]:
    """Continuous batching as TRL calls it: a new manager for each call. Needs a GPU."""
    model: Any = base_of(work.model)
    sampling = _sampling(work)

    def generate(row_tokens: Sequence[int]) -> None:
        sampling.max_new_tokens = max(row_tokens)
        config = ContinuousBatchingConfig(max_memory_percent=0.5)  # TRL's default
        outputs = model.generate_batch(work.prompts, sampling, config)
        if len(outputs) != work.rows:
            raise RolloutError(
                f"transformers' continuous batching returned {len(outputs)} of {work.rows} rows: "
                "see its log, or remove its mode from --modes"
            )

    yield generate, _attention()


def _sampling(work: Workload) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=work.new_tokens
    )


def _attention() -> str:
    """The attention of continuous batching, which uses FlashAttention-3 if it is installed."""
    installed = is_flash_attn_3_available()
    return "FlashAttention-3" if installed else "slower: FlashAttention-3 is not installed"

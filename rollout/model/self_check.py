"""Compares the twin's logits with those of the model's own forward, on a few rows.

A model may compute what a copy of its tree does not: by a hook, by an adapter that mixes the tokens
of a batch, by rules of its own. No list of such things is complete, but the numbers tell.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rollout.errors import UnsupportedModel
from rollout.memory.kv_cache import KVCache
from rollout.memory.states import States
from rollout.model.attention import PagedAttention, Prefilled
from rollout.model.hooks import watched_hooks
from rollout.model.outputs import Outputs, compared, difference, recorded
from rollout.model.twin import Twin
from rollout.model.weights import reshard
from rollout.scheduler.batch import Segment
from rollout.scheduler.pages import pages_for
from rollout.support import base_of, experts_of

logger = logging.getLogger(__name__)

_LENGTHS = (3, 11, 19, 31)  # tokens of each row

# `Difference.relative` of logits that rounding always explains, in 16 bits. `python
# tests/random_models.py 200` prints how far random models go; examples/measurements.md has it.
_TOLERANCES = {torch.float16: 0.02, torch.bfloat16: 0.1}
_WIDE_TOLERANCE = 1e-4  # in float32 and float64
_EXPERTS_TOLERANCE = 0.5  # in 16 bits: rounding may send a token to another expert
# A model that amplifies rounding may differ by this many times what `run_model` measures.
_MARGIN = 4


@torch.no_grad()
def check_twin(
    model: nn.Module, twin: Twin, page_tokens: int, *, exact: bool, within_layers: bool
) -> None:
    """Compare the logits of each row's last token, and log how much they differ.

    Sharded models: a collective.

    Args:
        model: The trainer's model. It runs as the trainer calls it, but in eval mode.
        page_tokens: Tokens in a KV page.
        within_layers: Look into decoder layers for the first module that differs. Compiled layers
            do not run their modules.

    Raises:
        UnsupportedModel: A hook changes an output, or the logits differ by more than rounding.
    """
    began = time.perf_counter()
    rows = _rows(twin)
    theirs, rounding = run_model(model, twin)
    ours = _run_twin(twin, rows, page_tokens, exact=exact, within_layers=within_layers)
    tolerance = max(_tolerance(twin), _MARGIN * rounding)
    gap = difference("", theirs.pop(""), ours.pop("")).relative
    if gap > tolerance:
        unequal = (each.module for each in compared(theirs, ours) if each.relative > tolerance)
        name = next(unequal, "")
        kind = type(base_of(model).get_submodule(name)).__name__
        raise UnsupportedModel(
            f"the engine's logits differ from the model's own by {gap:.1e} of their size, but "
            f"rounding explains at most {tolerance:.0e}. The first module that differs is "
            f"{name or 'the model itself'} ({kind}). Either something outside its class and "
            "parameters changes what it computes, or the engine does not know this kind of "
            "module. Generate without the engine; EngineConfig(self_check=False) turns this "
            "check off"
        )
    text = "self-check: the logits differ from the model's own by %.1e of their size (%.2f s)"
    logger.info(text, gap, time.perf_counter() - began)


def is_runnable(model: nn.Module) -> bool:
    """Whether the model may run one more forward. Under ZeRO-3 it may not.

    DeepSpeed gathers weights ahead in the order of earlier forwards. After one through the head,
    TRL's fused head finds the head's weight in flight, and training ends in an error.
    """
    return not any(hasattr(parameter, "ds_id") for parameter in model.parameters())


@torch.no_grad()
def run_model(model: nn.Module, twin: Twin) -> tuple[Outputs, float]:
    """Run the model twice, the second time with embeddings that are off by a rounding.

    Sharded models: a collective.

    Returns:
        The outputs of its modules, and its logits under the name `""`; and `Difference.relative` of
        the logits of both runs.

    Raises:
        UnsupportedModel: A hook changes an output.
    """
    rows = [row.to(twin.device) for row in _rows(twin)]
    ids = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    lanes, last = torch.arange(len(rows), device=twin.device), mask.sum(1) - 1

    def last_tokens(output: Tensor) -> Tensor:
        return output[lanes, last] if output.shape[:2] == ids.shape else output[:0]

    def logits() -> Tensor:
        return last_tokens(model(input_ids=ids, attention_mask=mask, use_cache=False).logits)

    with _undisturbed(model), twin.autocast():
        with recorded(base_of(model), last_tokens) as outputs, watched_hooks(model) as changing:
            outputs[""] = logits()
        with _rounded_embeddings(model, twin.kv_layout(1).dtype):
            rounding = difference("", outputs[""], logits()).relative
    reshard(model)
    for hook in changing:
        raise UnsupportedModel(
            f"{hook}, but rollouts run without hooks. Put the change into a subclass of the "
            "module, or generate without the engine"
        )
    return outputs, rounding


def _rows(twin: Twin) -> list[Tensor]:
    """Token ids of each row, on the CPU, the same each time."""
    lengths = [min(length, twin.max_positions) for length in _LENGTHS]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(twin.vocab_size, (length,), generator=generator) for length in lengths]


def _run_twin(
    twin: Twin, rows: list[Tensor], page_tokens: int, *, exact: bool, within_layers: bool
) -> Outputs:
    """The outputs of the twin: it prefills all tokens but the last of each row, then decodes."""
    device = twin.device
    prompts, tokens = [row[:-1] for row in rows], torch.stack([row[-1] for row in rows]).to(device)
    counts = torch.tensor([len(prompt) for prompt in prompts])
    lanes, starts = torch.arange(len(rows)), counts.cumsum(0) - counts
    pages = _memory(twin, len(rows), page_tokens)
    prefill = PagedAttention(
        **pages,
        exact=exact,
        lanes_T=lanes.repeat_interleave(counts).to(device),
        positions_T=torch.cat([torch.arange(len(prompt)) for prompt in prompts]).to(device),
        segments=[Segment(lane, 0, prompt.numpy()) for lane, prompt in enumerate(prompts)],
        runs_N4=torch.stack([lanes, starts, counts, torch.zeros_like(counts)], 1).to(device),
    )
    lanes, last = lanes.to(device), counts.to(device)
    with suppress(Prefilled):
        twin.logits(torch.cat(prompts).to(device), prefill.positions_T, lanes[:0], prefill)
    decode = PagedAttention(**pages, lanes_T=lanes, positions_T=last, max_context=max(_LENGTHS))
    with recorded(twin.base, lambda output: output[0], within_layers=within_layers) as outputs:
        outputs[""] = twin.logits(tokens, last, lanes, decode)
    return outputs


def _memory(twin: Twin, num_rows: int, page_tokens: int) -> dict[str, Any]:
    """A KV cache for the rows alone, their page table, and their recurrent states."""
    row_pages = pages_for(max(_LENGTHS), page_tokens)
    cache = KVCache(twin.kv_layout(page_tokens), twin.device)
    cache.grow(1 + num_rows * row_pages)
    ids = 1 + torch.arange(num_rows * row_pages, device=twin.device)
    states = None
    if (layout := twin.state_layout()) is not None:
        states = States(layout, num_rows, twin.device)
        states.grow(num_rows)
    table = ids.view(num_rows, row_pages)
    return {"kv_cache": cache, "page_table_LP": table, "states": states}


def _tolerance(twin: Twin) -> float:
    dtype = twin.kv_layout(1).dtype
    if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        dtype = torch.float16  # TF32 has as many digits
    if dtype in _TOLERANCES and any(experts_of(twin.base)):
        return _EXPERTS_TOLERANCE
    return _TOLERANCES.get(dtype, _WIDE_TOLERANCE)


@contextmanager
def _rounded_embeddings(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Change each number that the embedding returns by up to one unit in its last place."""
    generator = torch.Generator().manual_seed(0)

    def change(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        noise = torch.rand(output.shape, generator=generator, dtype=torch.float64) * 2 - 1
        factor = 1 + torch.finfo(dtype).eps * noise.to(output.device)
        return (output * factor).to(output.dtype)

    base: Any = base_of(model)
    with base.get_input_embeddings().register_forward_hook(change):
        yield


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode; leave modes and random states as found."""
    modes = {module: module.training for module in model.modules()}
    devices = {p.device for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices):
        try:
            for module in modes:
                module.training = False
            yield
        finally:
            for module, training in modes.items():
                module.training = training

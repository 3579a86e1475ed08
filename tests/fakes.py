"""Stand-ins: a model that is exact in any batch, a device that lags behind, an interrupt."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from rollout import EngineConfig, RolloutEngine
from rollout.kernels.paged_attention import gather_kv
from rollout.kernels.recurrent.runs import begun
from rollout.memory.kv_cache import KVCache
from rollout.runner.forward import Forward
from rollout.runner.slots import IOSlot
from rollout.scheduler.batch import Batch


def interrupted_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its first call raises KeyboardInterrupt at the end."""
    calls = count()

    def interrupted(*args: Any) -> Any:
        if next(calls) == 0:
            raise KeyboardInterrupt
        return make(*args)

    return interrupted


@contextmanager
def interrupt_at_line(number):
    """Ctrl-C at so many lines of the engine from now; yields the lines that were passed."""
    passed = [0]

    def line(frame, event, argument):
        passed[0] += event == "line"
        if event == "line" and passed[0] == number:
            raise KeyboardInterrupt
        return line

    def call(frame, event, argument):
        return line if f"{os.sep}rollout{os.sep}" in frame.f_code.co_filename else None

    before, depth = sys.gettrace(), _autocast_depth()
    autocast = torch.is_autocast_enabled("cpu")
    sys.settrace(call)
    try:
        yield passed
    finally:
        sys.settrace(before)
        # Python itself leaves a `with` block without `__exit__` if the interrupt comes just before
        # that call. Autocast would then keep its casts of the weights for the rest of the process.
        for _ in range(_autocast_depth() - depth):
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cpu", autocast)


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def poison_new_pages(monkeypatch) -> None:
    grow = KVCache.grow

    def poisoned(cache: KVCache, num_pages: int) -> None:
        before = cache.num_pages
        grow(cache, num_pages)
        for index in range(before, cache.num_pages):
            cache.page(index).fill_(torch.nan)

    monkeypatch.setattr(KVCache, "grow", poisoned)


class HistoryModel:
    """Logits are an integer hash of the row's own tokens, so they are bit-identical in any batch.

    The KV cache stores the tokens as keys, so a mixed-up page or lane changes the logits.
    """

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def logits(self, tokens_T: Tensor, positions_T: Tensor, rows: Tensor, paged) -> Tensor:
        layout = paged.kv_cache.layout
        states = tokens_T[:, None, None].expand(-1, layout.num_kv_heads, layout.head_dim)
        paged.store(0, states.float(), states.float())
        if len(rows) == 0:
            return torch.zeros(0, self._vocab)
        tables = paged.page_table_LP[paged.lanes_T]
        keys, _ = gather_kv(paged.kv_cache.layer(0), tables, paged.max_context)
        places = torch.arange(paged.max_context)
        weighed = (keys[:, :, 0, 0].long() + 1) * (places * 7 + 3)
        history = (weighed * (places <= positions_T[:, None])).sum(1) % 99_991
        return ((history[:, None] * (torch.arange(self._vocab) + 1) * 31) % 997).float() / 100


class HashModel:
    """A lane's state is a hash of the tokens that it was fed, so logits are exact in any batch.

    A token that is fed twice or to another lane, or a state that is not copied, changes the logits.
    """

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def logits(self, tokens_T: Tensor, positions_T: Tensor, rows: Tensor, paged) -> Tensor:
        state_S = paged.lane_states.conv(0)[:, 0, 0]
        if paged.segments is not None:
            tokens = iter(tokens_T.tolist())
            for slot, start, num_tokens in paged.state_runs:
                value = int(state_S[slot]) if start else 0
                for _ in range(num_tokens):
                    value = self._fed(value, next(tokens))
                state_S[slot] = value
            return torch.zeros(0, self._vocab)
        slots_R = paged.lane_states.slots(paged.lanes_T)
        history_R = self._fed(begun(state_S[slots_R], positions_T).long(), tokens_T)
        state_S[slots_R] = history_R.float()
        numbers_RV = history_R[:, None] * (torch.arange(self._vocab) + 1) * 31
        return (numbers_RV % 997).float() / 100

    def _fed(self, state: Any, token: Any) -> Any:
        return (31 * state + token + 1) % 99_991  # exact in float32


def with_hash_model(engine: RolloutEngine) -> RolloutEngine:
    worker = engine.worker
    model, lanes = HashModel(worker.twin.vocab_size), worker.graphs.forward.lanes
    worker.graphs.forward = Forward(model, worker.kv_cache, lanes, states=worker.states)
    return engine


def with_history_model(engine: RolloutEngine) -> RolloutEngine:
    model, lanes = HistoryModel(engine.worker.twin.vocab_size), engine.worker.graphs.forward.lanes
    engine.worker.graphs.forward = Forward(model, engine.worker.kv_cache, lanes)
    return engine


def with_lagging_device(engine: RolloutEngine) -> RolloutEngine:
    """Make `engine`'s device run a batch only when the host waits for it.

    Uploads, kernels and downloads are queued. If the host overwrites memory too early or reads it
    before waiting, the tokens change.
    """
    queue: list[tuple[IOSlot, Callable[[], None]]] = []

    def later(call: Callable[..., None], slot: IOSlot) -> Callable[..., None]:
        return lambda *args: queue.append((slot, partial(call, *args)))

    def waiting(slot: IOSlot, wait: Callable[[], Any]) -> Any:
        while queue and queue[0][0] is slot:
            queue.pop(0)[1]()
        return wait()

    def moving(batch: Batch) -> None:
        slot = next(slot for slot in engine.slots.slots if slot.batch is batch)
        queue.append((slot, partial(move, batch)))

    def draining() -> None:
        while queue:
            queue.pop(0)[1]()
        drain()

    run, move, drain = engine.worker.graphs.run, engine.worker.swap.move, engine.slots.drain
    engine.slots.drain = draining
    engine.worker.graphs.run = lambda slot: queue.append((slot, partial(run, slot)))
    engine.worker.swap.move = moving
    for slot in engine.slots.slots:
        slot.upload, slot.download = later(slot.upload, slot), later(slot.download, slot)
        slot.wait = partial(waiting, slot, slot.wait)
    return engine


ROOM: dict[str, Any] = {"max_rows": 8, "page_tokens": 4, "prefill_tokens": 9, "num_slots": 2}


def short_of_pages(model: nn.Module, page_bytes: int) -> Iterator[RolloutEngine]:
    """Engines in which 8 rows of 30 tokens are preempted, by recompute or by offload."""
    for offload in (0, 100 * page_bytes):
        tight = EngineConfig(**ROOM, kv_bytes=22 * page_bytes, offload_bytes=offload)
        engine = with_history_model(RolloutEngine(model, tight))
        with with_lagging_device(engine):
            yield engine

"""GPU memory: mapped memory comes back, and graphs captured over it stay valid."""

import gc
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import fakes
import pytest
import tiny
import torch

import rollout.memory.arena
from rollout import EngineConfig, RolloutEngine, SamplingParams
from rollout.memory.arena import MappedArena
from rollout.scheduler.waiting import Lengths  # noqa: F401 -- the script below uses it

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_memory_of_lengths")]

ROOT = Path(__file__).resolve().parent.parent
MIB, GIB = 2**20, 2**30
CONFIG = EngineConfig(max_rows=24, page_tokens=16, prefill_tokens=64, compile_layers=False)
# Pages of 6 MiB, as in real models; few enough to list.
LARGE = replace(CONFIG, page_tokens=8192)
# cuBLAS keeps a workspace per stream, and CUDA loads kernels on first use.
LIBRARIES = 128 * MIB
AUTOCAST = pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)


def on_gpu(**changes):
    return tiny.build("qwen3", **changes).to("cuda")


def work(count=60):
    prompts = tiny.prompts(count, longest=40, seed=7)
    sampling = [
        SamplingParams(max_new_tokens=1 + i % 30, eos_token_ids=(tiny.EOS, 9, 10 + i % 5))
        for i in range(count)
    ]
    return prompts, sampling, list(range(count))


def rows_of(completions):
    return [(completion.token_ids, completion.logprobs) for completion in completions]


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture(autouse=True)
def empty_gpu():
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


# --- the arena


def test_what_is_mapped_comes_back_to_the_driver_and_views_stay():
    torch.zeros(1, device="cuda")
    device = torch.device("cuda", 0)
    arena, before = MappedArena(device, torch.cuda.synchronize), free_bytes()
    arena.grow(300 * MIB)
    view = arena.data[: 1000 * 4].view(torch.float32)
    view.copy_(torch.arange(1000.0))
    arena.grow(3 * GIB + 1)
    assert before - free_bytes() >= 3 * GIB
    assert view.data_ptr() == arena.address == arena.data.data_ptr()
    assert view.tolist() == list(range(1000))
    arena.data[-1] = 7  # the last byte of the last chunk is there
    arena.release()
    assert before - free_bytes() < 8 * MIB
    arena.grow(MIB)
    view.fill_(3.0)
    assert view.sum().item() == 3000.0
    del view, arena
    gc.collect()
    assert before - free_bytes() < 8 * MIB


def test_more_than_there_is_changes_nothing():
    torch.zeros(1, device="cuda")
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    arena, before = MappedArena(device, torch.cuda.synchronize), free_bytes()
    arena.grow(GIB)
    with pytest.raises(torch.OutOfMemoryError):
        arena.grow(total - 64 * MIB)  # the driver itself uses more than 64 MiB
    assert arena.num_bytes == GIB
    assert before - free_bytes() < GIB + 8 * MIB


# --- sleep and wake


@AUTOCAST
def test_graphs_captured_before_a_sleep_replay_right_after_it(autocast, caplog):
    with (
        caplog.at_level(logging.INFO),
        RolloutEngine(on_gpu(), CONFIG, autocast_dtype=autocast) as engine,
    ):
        wanted = rows_of(engine.generate(*work()))
        captured, mapped = engine.worker.graphs.num_captures, engine.worker.kv_cache.num_bytes
        assert captured > 0
        for wake in (False, True):
            engine.sleep()
            assert engine.asleep
            # Other use of the memory meanwhile overwrites it.
            torch.full((2 * GIB,), 255, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            if wake:
                engine.wake()
                assert engine.worker.kv_cache.num_bytes == mapped
            assert rows_of(engine.generate(*work(), same_weights=True)) == wanted
        assert engine.worker.graphs.num_captures == captured
        assert engine.worker.graphs.num_eager == 0
    assert "capturing CUDA graphs again" not in caplog.text


def test_graphs_survive_growth_under_live_rows(caplog):
    prompts, sampling, seeds = work()
    with RolloutEngine(on_gpu(), CONFIG) as engine:
        wanted = rows_of(engine.generate(prompts, sampling, seeds))
    with caplog.at_level(logging.INFO), RolloutEngine(on_gpu(), CONFIG) as engine:
        done, sizes = {}, set()
        for row in zip(prompts, sampling, seeds, strict=True):
            engine.submit(*row)
            done.update((completion.row, completion) for completion in engine.step())
            sizes.add(engine.worker.kv_cache.num_pages)
        while engine.busy:
            done.update((completion.row, completion) for completion in engine.step())
        assert engine.worker.graphs.num_captures > 0
    assert "capturing CUDA graphs again" not in caplog.text
    assert len(sizes) > 5
    for row, (token_ids, logprobs) in enumerate(wanted):
        assert done[row].token_ids == token_ids
        assert done[row].logprobs == pytest.approx(logprobs, abs=1e-4)


def test_what_new_pages_hold_has_no_influence(monkeypatch):
    """Nothing clears new pages, so they may hold even NaN."""
    with RolloutEngine(on_gpu(), CONFIG) as engine:
        wanted = rows_of(engine.generate(*work()))
    fakes.poison_new_pages(monkeypatch)
    with RolloutEngine(on_gpu(), CONFIG) as engine:
        for _ in range(2):
            assert rows_of(engine.generate(*work())) == wanted
            engine.sleep()


def test_after_sleep_the_trainer_can_allocate_all_of_it():
    with RolloutEngine(on_gpu(), LARGE) as engine:
        wanted_rows = rows_of(engine.generate(*work()))
        engine.sleep()
        before = free_bytes()
        wanted = int(0.95 * before)
        engine.worker.grow(wanted // engine.worker.kv_cache.layout.page_bytes)
        assert free_bytes() < 0.1 * before
        engine.sleep()
        assert before - free_bytes() < 64 * MIB
        everything = torch.empty(wanted, dtype=torch.uint8, device="cuda")
        everything.fill_(1)
        del everything
        # torch's cache has all of it now and must give it back.
        engine.wake()
        assert engine.stats.released_bytes > 0.8 * before
        assert rows_of(engine.generate(*work())) == wanted_rows


@pytest.mark.parametrize(
    "cached_gib",
    [
        0,
        pytest.param(
            80,
            marks=pytest.mark.xfail(
                reason="the driver takes 65 ms to free 80 GiB of torch's, and 130 to clear them",
                raises=AssertionError,
                strict=False,  # some drivers are fast enough
            ),
        ),
    ],
)
def test_sleep_and_wake_of_80_gib_are_short(cached_gib, record_property):
    size = 80 * GIB
    free, _ = torch.cuda.mem_get_info()
    if free < 100 * GIB:
        pytest.skip(f"{free / GIB:.0f} GiB are free, 100 are needed")
    with RolloutEngine(on_gpu(), LARGE) as engine:
        wanted = rows_of(engine.generate(*work()))
        engine.worker.grow(size // engine.worker.kv_cache.layout.page_bytes)
        torch.cuda.synchronize()
        taken = []
        for _ in range(3):
            began = time.perf_counter()
            engine.sleep()
            slept = time.perf_counter() - began
            # Training allocates blocks of 1 GiB, which torch then caches.
            blocks = [torch.ones(GIB // 4, device="cuda") for _ in range(cached_gib)]
            del blocks
            torch.cuda.synchronize()
            # The driver clears freed memory, and an allocation waits for that: 0.1 s
            # for 80 GiB. Training takes longer.
            time.sleep(1)
            began = time.perf_counter()
            engine.wake()
            woken = time.perf_counter() - began
            taken.append((slept * 1e3, woken * 1e3))
            assert engine.worker.kv_cache.num_bytes >= size - GIB
            assert (engine.stats.released_bytes > 40 * GIB) == (cached_gib > 0)
            assert rows_of(engine.generate(*work(), same_weights=True)) == wanted
        # The memory is still there when the trainer needs it.
        engine.sleep()
        began = time.perf_counter()
        blocks = [torch.ones(GIB // 4, device="cuda") for _ in range(40)]
        torch.cuda.synchronize()
        record_property("40 GiB allocated anew, ms", str((time.perf_counter() - began) * 1e3))
        del blocks
    record_property("sleep and wake, ms", str(taken))
    assert min(sum(both) for both in taken) < 150, taken


def test_closing_gives_everything_back():
    model, free = on_gpu(), []
    for _ in range(4):
        with RolloutEngine(model, CONFIG, autocast_dtype=torch.bfloat16) as engine:
            engine.generate(*work())
            engine.worker.grow(GIB // engine.worker.kv_cache.layout.page_bytes)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        free.append(free_bytes())
    assert free[0] - min(free) < 8 * MIB


def test_kv_pages_are_sized_by_need_and_bounded_by_the_fraction():
    with RolloutEngine(on_gpu(), CONFIG) as engine:
        engine.generate([[9, 10]], SamplingParams(max_new_tokens=3))
        cache, free = engine.worker.kv_cache, free_bytes()
        assert cache.num_pages == 2
        assert 2**29 < engine.worker.max_pages() * cache.layout.page_bytes < 0.95 * free


# --- beside training


def train_step(model, optimizer):
    ids = torch.randint(8, tiny.VOCAB, (64, 200), device="cuda")
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_backward_between_rollouts_whose_cache_is_in_the_way():
    model = on_gpu()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    # 25 pages of 6 MiB: more than stays free below.
    with RolloutEngine(model, LARGE) as engine:
        wanted = rows_of(engine.generate(*work()))
        for _ in range(3):
            engine.sleep()
            train_step(model, optimizer)
            blocks = []
            while free_bytes() > 80 * MIB:  # torch may take the first one from its cache
                left = free_bytes() - 64 * MIB
                blocks.append(torch.empty(left, dtype=torch.uint8, device="cuda"))
            del blocks
            assert free_bytes() < 80 * MIB
            assert rows_of(engine.generate(*work())) == wanted
            assert engine.stats.released_bytes > GIB
        train_step(model, optimizer)


@AUTOCAST
def test_training_beside_a_sleeping_engine_takes_what_the_plan_says(autocast, record_property):
    model = on_gpu(hidden_size=1024, intermediate_size=4096)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    train_step(model, optimizer)

    def peak():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        train_step(model, optimizer)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    alone = peak()
    torch.cuda.empty_cache()
    free, plans = free_bytes(), []
    options = {"autocast_dtype": autocast, "show_plan": plans.append}
    with RolloutEngine(model, CONFIG, **options) as engine:
        engine.generate(*work())
        engine.sleep()
        (plan,) = plans
        beside = peak()
        torch.cuda.empty_cache()
        taken = free - free_bytes()
    record_property("plan", str(plan))
    record_property("peak alone, beside; taken", f"{alone}, {beside}; {taken}")
    assert plan.graphs > 0
    assert beside - alone <= plan.between_rollouts + LIBRARIES
    assert taken <= plan.between_rollouts + LIBRARIES


def test_beside_expandable_segments():
    script = """
import pytest, torch
import test_gpu_memory as tests

torch.zeros(1, device="cuda")
assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
tests.Lengths.note = lambda *_: None  # as the fixture does
tests.test_a_backward_between_rollouts_whose_cache_is_in_the_way()
tests.test_after_sleep_the_trainer_can_allocate_all_of_it()
tests.test_what_new_pages_hold_has_no_influence(pytest.MonkeyPatch())
print("fine")
"""
    environment = {
        **os.environ,
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"), *sys.path)),
    }
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("fine")


# --- without virtual memory


@AUTOCAST
def test_without_virtual_memory_rows_are_the_same_and_it_is_said_once(
    monkeypatch, caplog, autocast
):
    with RolloutEngine(on_gpu(), CONFIG, autocast_dtype=autocast) as engine:
        wanted = rows_of(engine.generate(*work()))
    reason = f"it is away under {autocast}"  # each reason is logged once per process
    monkeypatch.setattr(rollout.memory.arena, "why_no_virtual_memory", lambda device: reason)
    with RolloutEngine(on_gpu(), CONFIG, autocast_dtype=autocast) as engine:
        for _ in range(3):
            engine.generate(work(4)[0], SamplingParams(max_new_tokens=4))
            assert rows_of(engine.generate(*work())) == wanted
            engine.sleep()
            assert engine.asleep
    assert len([r for r in caplog.records if "no virtual memory" in r.message]) == 1

"""Sleep frees memory, waking changes no token, and many rollouts leak nothing."""

import gc
import logging
import os
import tracemalloc

import fakes
import pytest
import tiny
import torch

import rollout.runner.worker
from rollout import (
    EngineBusy,
    EngineClosed,
    EngineConfig,
    OutOfMemory,
    RolloutEngine,
    SamplingParams,
)
from rollout.memory.kv_cache import KVCache

pytestmark = pytest.mark.usefixtures("no_memory_of_lengths")

CONFIG = EngineConfig(max_rows=4, page_tokens=4, prefill_tokens=11, num_slots=2)
AUTOCAST = pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
FIVE = SamplingParams(max_new_tokens=5)


def work(count=12):
    sampling = [
        SamplingParams(max_new_tokens=1 + i % 9, eos_token_ids=(20 + i % 4,)) for i in range(count)
    ]
    return tiny.prompts(count, seed=4), sampling, list(range(count))


def rows_of(completions):
    return [(completion.token_ids, completion.logprobs) for completion in completions]


def allocated(engine):
    pages, twin = engine.worker.kv_cache.num_bytes, engine.worker.twin
    return pages, 0 if twin.missing_bytes else twin.shadow_bytes


@AUTOCAST
@pytest.mark.parametrize("wake", [False, True], ids=["generate", "wake"])
def test_sleep_between_rollouts_frees_everything_and_changes_no_row(autocast, wake):
    with RolloutEngine(tiny.build(), CONFIG, autocast_dtype=autocast) as engine:
        wanted = rows_of(engine.generate(*work()))
        pages, cast = allocated(engine)
        assert pages > 0
        assert (cast > 0) == (autocast is not None)
        engine.wake()
        assert not engine.asleep
        for same_weights in (True, False, True):
            engine.sleep()
            engine.sleep()
            assert engine.asleep
            assert allocated(engine) == (0, 0)
            version = engine.policy_version
            for _ in range(2 * wake):
                engine.wake()
                assert allocated(engine) == (pages, cast)
                assert engine.policy_version == version
            assert rows_of(engine.generate(*work(), same_weights=same_weights)) == wanted
            assert allocated(engine) == (pages, cast)
            assert engine.policy_version == version + (not same_weights)
            engine.scheduler.check()


def test_weights_that_change_while_it_sleeps_are_the_ones_it_wakes_with():
    model = tiny.build()
    with RolloutEngine(model, CONFIG, autocast_dtype=torch.bfloat16) as engine:
        engine.generate(*work())
        engine.sleep()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)
        rows = rows_of(engine.generate(*work()))
    with RolloutEngine(model, CONFIG, autocast_dtype=torch.bfloat16) as engine:
        assert rows == rows_of(engine.generate(*work()))


def test_submit_wakes_it_too():
    with RolloutEngine(tiny.build(), CONFIG) as engine:
        (wanted,) = engine.generate([[9, 10]], FIVE)
        engine.sleep()
        engine.submit([9, 10], FIVE)
        done = []
        while engine.busy:
            done += engine.step()
        assert done[0].token_ids == wanted.token_ids


def test_rows_are_not_put_to_sleep():
    with RolloutEngine(tiny.build(), CONFIG) as engine:
        for _ in range(6):
            engine.submit([9, 10], FIVE)
        engine.step()
        with pytest.raises(EngineBusy, match=r"4 rows are live and 2 wait; .* step\(\) until"):
            engine.sleep()
        while engine.busy:
            engine.step()
        engine.sleep()


def test_a_closed_engine_holds_nothing_and_neither_sleeps_nor_wakes():
    engine = RolloutEngine(tiny.build(), CONFIG, autocast_dtype=torch.bfloat16)
    engine.generate(*work())
    worker = engine.worker
    engine.close()
    assert worker.asleep
    assert engine.asleep
    for call in (engine.sleep, engine.wake):
        with pytest.raises(EngineClosed):
            call()


def test_a_wake_that_finds_no_memory_says_so_and_can_be_tried_again(monkeypatch):
    with RolloutEngine(tiny.build(), CONFIG) as engine:
        wanted = rows_of(engine.generate(*work()))
        engine.sleep()

        def failing(self, num_pages):
            raise torch.OutOfMemoryError("cuMemCreate: out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "grow", failing)
            for call in (engine.wake, lambda: engine.generate(*work())):
                with pytest.raises(OutOfMemory, match=r"kv_bytes=None, kv_fraction=0.9"):
                    call()
        engine.wake()
        assert rows_of(engine.generate(*work())) == wanted


def test_pages_leave_room_for_the_cast_weights_that_come_back_before_them(monkeypatch):
    asked = []
    monkeypatch.setattr(rollout.runner.worker, "max_kv_bytes", lambda *args: asked.append(args[2]))
    with RolloutEngine(tiny.build(), CONFIG, autocast_dtype=torch.bfloat16) as engine:
        engine.generate(*work())
        pages = engine.worker.kv_cache.num_bytes
        engine.generate(*work())
        engine.sleep()
        cast = engine.worker.twin.missing_bytes
        engine.generate(*work())
        prefill = engine.worker.plan().workspaces
    assert prefill > 0
    # Each rollout asks once; after the first, the plan and the call above ask, too.
    assert [room + prefill for room in asked] == [0, pages, pages, -cast, pages]


# --- prefixes


def test_known_beginnings_survive_growth_and_never_a_sleep():
    prompt, greedy = list(range(8, 24)), SamplingParams(max_new_tokens=4, temperature=0.0)
    with RolloutEngine(tiny.build(), CONFIG) as engine:
        wanted = engine.generate([prompt], greedy)
        pages = engine.worker.kv_cache.num_pages
        grown = engine.generate([prompt] * 4, greedy, same_weights=True)
        assert engine.worker.kv_cache.num_pages > pages
        assert engine.stats.prefilled_tokens == 15 - 12  # all except the three full pages, once
        engine.sleep()
        slept = engine.generate([prompt], greedy, same_weights=True)
        assert engine.stats.prefilled_tokens == 15
    for completion in (*grown, *slept):
        assert completion.token_ids == wanted[0].token_ids
        assert completion.logprobs == pytest.approx(wanted[0].logprobs, abs=1e-5)


def test_rows_that_are_live_survive_growth():
    prompts, sampling, seeds = work()
    with fakes.with_history_model(RolloutEngine(tiny.build(), CONFIG)) as engine:
        wanted = rows_of(engine.generate(prompts, sampling, seeds))
    with fakes.with_history_model(RolloutEngine(tiny.build(), CONFIG)) as engine:
        sizes, done = set(), {}
        for row in zip(prompts, sampling, seeds, strict=True):
            engine.submit(*row)
            done.update((completion.row, completion) for completion in engine.step())
            sizes.add(engine.worker.kv_cache.num_pages)
        while engine.busy:
            done.update((completion.row, completion) for completion in engine.step())
    assert len(sizes) > 2
    assert rows_of(done[row] for row in range(len(prompts))) == wanted


def test_what_new_pages_hold_has_no_influence(monkeypatch):
    """Nothing clears new pages, so they may hold even NaN."""
    with RolloutEngine(tiny.build(), CONFIG) as engine:
        wanted = rows_of(engine.generate(*work()))
    fakes.poison_new_pages(monkeypatch)
    with RolloutEngine(tiny.build(), CONFIG) as engine:
        assert rows_of(engine.generate(*work())) == wanted
        engine.sleep()
        assert rows_of(engine.generate(*work())) == wanted


# --- logs and counts


def test_the_plan_is_logged_once_before_the_first_batch(caplog):
    with caplog.at_level(logging.INFO, logger="rollout.engine"):
        with RolloutEngine(tiny.build(), CONFIG, autocast_dtype=torch.bfloat16) as engine:
            caplog.clear()
            engine.submit([9, 10], FIVE)
            (message,) = caplog.messages
            while engine.busy:
                engine.step()
            engine.generate([[9]], FIVE)
        assert caplog.messages == [message]
    assert message.startswith("memory plan for CPU: weights 0.000 GiB (the trainer's own)")


def test_the_plan_counts_what_is_allocated():
    plans = []
    model = tiny.build()
    with RolloutEngine(
        model, CONFIG, autocast_dtype=torch.bfloat16, show_plan=plans.append
    ) as engine:
        engine.generate([[9, 10]], FIVE)
        (plan,) = plans
        cache = engine.worker.kv_cache
        assert plan.weights == sum(p.nbytes for p in model.parameters())
        assert plan.cast_weights == engine.worker.twin.shadow_bytes > 0
        assert plan.kv_pages == cache.num_bytes == 3 * cache.layout.page_bytes
        assert plan.buffers > 0
        assert (plan.kv_limit, plan.free, plan.graphs) == (None, None, 0)


def test_stats_tell_what_memory_took():
    with RolloutEngine(tiny.build(), CONFIG) as engine:
        engine.generate(*work())
        stats = engine.stats
        assert stats.mapped_bytes == engine.worker.kv_cache.num_bytes
        assert stats.wake_s > 0
        assert (stats.released_bytes, stats.sleep_s) == (0, 0.0)
        engine.sleep()
        assert stats.sleep_s > 0
        assert stats.whole_s == stats.duration_s + stats.sleep_s
        assert stats.time_shares["sleep"] >= (stats.wake_s + stats.sleep_s) / stats.whole_s - 1e-9
        engine.wake()
        engine.generate(*work())
        assert engine.stats.wake_s == engine.stats.sleep_s == 0.0


# --- nothing leaks


def count_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.slow
def test_hundreds_of_rollouts_and_updates_leak_nothing():
    model = tiny.build(num_hidden_layers=1, hidden_size=16, intermediate_size=16, head_dim=4)
    prompts, sampling = tiny.prompts(60, longest=9), SamplingParams(max_new_tokens=2)
    tensors, files, traced = set(), set(), []
    with RolloutEngine(model, CONFIG, autocast_dtype=torch.bfloat16) as engine:
        for cycle in range(1, 501):
            engine.generate(prompts[cycle % 57 :][:3], sampling, [cycle] * 3)
            if cycle % 2:
                engine.sleep()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0001)
            if cycle % 100 == 0:
                engine.scheduler.check()
                assert engine.scheduler.pages.num_used == engine.scheduler.num_live == 0
                tensors.add(count_tensors())
                files.add(len(os.listdir("/proc/self/fd")))
            if cycle == 300:
                tracemalloc.start()  # slow, so only now
            if cycle in (400, 500):
                gc.collect()
                traced.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert len(tensors) == len(files) == 1
    assert abs(traced[1] - traced[0]) < 2**16

"""Weights that change during a rollout, aborted rows, and streamed completions."""

from contextlib import closing, suppress
from itertools import count

import fakes
import pytest
import tiny
import torch

import rollout.scheduler.scheduler
from rollout import (
    ConfigError,
    EngineBusy,
    EngineClosed,
    EngineConfig,
    EnginePaused,
    OutOfMemory,
    RequestError,
    RolloutEngine,
    SamplingParams,
)
from rollout.scheduler.admission import Admitter
from rollout.scheduler.host_pages import HostPages

PAGE = 4
SMALL = {"max_rows": 4, "page_tokens": PAGE, "prefill_tokens": 9, "num_slots": 2}


def engine_for(model, **changes):
    return RolloutEngine(model, EngineConfig(**{**SMALL, **changes}))


def tight(model, **changes):
    """Memory for one and a half of the longest row of `work`."""
    with engine_for(model) as engine:
        page_bytes = engine.worker.kv_cache.layout.page_bytes
    return engine_for(model, kv_bytes=16 * page_bytes, offload_bytes=8 * page_bytes, **changes)


def work(count=9):
    prompts = [tiny.prompts(3, longest=9, seed=2)[i // 3 % 3] for i in range(count)]
    sampling = [SamplingParams(max_new_tokens=14 + 2 * i, temperature=1.2) for i in range(count)]
    return prompts, sampling, [5 * i for i in range(count)]


def submit_all(engine, rows):
    return [engine.submit(*row) for row in zip(*rows, strict=True)]


def run(engine):
    done = []
    while engine.busy:
        done += engine.step()
        engine.scheduler.check()
    return {completion.row: completion for completion in done}


def change(model, factor=1.15):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


# --- pause, update, resume


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_recomputed_rows_go_on_as_the_new_weights_would(steps, num_slots):
    old, model = tiny.build().eval(), tiny.build().eval()
    prompts, sampling, seeds = work(4)
    with engine_for(model, num_slots=num_slots) as engine:
        submit_all(engine, (prompts, sampling, seeds))
        done = {}
        for _ in range(steps):
            assert engine.step() == []
        engine.pause()
        change(model)
        engine.resume(kv="recompute")
        done = run(engine)
    for row, prompt in enumerate(prompts):
        completion = done[row]
        versions = completion.policy_versions
        assert [version for version, _ in versions] == [1, 2][-len(versions) :]
        assert sum(count for _, count in versions) == len(completion.token_ids)
        num_old = sum(count for version, count in versions if version == 1)
        # Expected: one full forward with the weights that made each token.
        by_old, by_new = (
            tiny.logprobs(m, prompt, completion.token_ids, temperature=1.2).tolist()
            for m in (old, model)
        )
        wanted = by_old[:num_old] + by_new[num_old:]
        assert completion.logprobs == pytest.approx(wanted, abs=1e-5)


def test_kept_kv_is_neither_the_old_weights_nor_the_new_ones():
    old, model = tiny.build().eval(), tiny.build().eval()
    prompt, sampling = [9, 10, 11], SamplingParams(max_new_tokens=12)
    with engine_for(model) as engine:
        engine.submit(prompt, sampling)
        for _ in range(6):
            engine.step()
        with engine.paused():
            change(model)
        (completion,) = run(engine).values()
    (_, num_old), (_, num_new) = completion.policy_versions
    assert num_old + num_new == 12
    by_old, by_new = (tiny.logprobs(m, prompt, completion.token_ids) for m in (old, model))
    logprobs = torch.tensor(completion.logprobs)
    assert torch.allclose(logprobs[:num_old], by_old[:num_old], atol=1e-5)
    gaps = [(logprobs - wanted)[num_old:].abs().max() for wanted in (by_old, by_new)]
    assert min(gaps) > 1e-3


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_pause_without_an_update_changes_no_token(kv):
    rows = work()
    with fakes.with_history_model(engine_for(tiny.build())) as engine:
        wanted = [(c.token_ids, c.logprobs) for c in engine.generate(*rows)]
    with fakes.with_history_model(tight(tiny.build())) as engine:
        ids, done = submit_all(engine, rows), {}
        while engine.busy:
            done.update((completion.row, completion) for completion in engine.step())
            if engine.stats.engine_steps % 7 == 0:
                with engine.paused(kv, same_weights=True):
                    pass
        assert engine.policy_version == 1
    assert [(done[row].token_ids, done[row].logprobs) for row in ids] == wanted


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_spans_cover_every_token_and_no_beginning_of_old_weights_is_served(kv):
    model = tiny.build()
    prompts, sampling, seeds = work()
    with tight(model) as engine:
        submit_all(engine, (prompts, sampling, seeds))
        done = {}
        while engine.busy:
            done.update((completion.row, completion) for completion in engine.step())
            if engine.stats.engine_steps % 10 == 0:
                engine.pause()
                engine.resume(kv)
                if kv == "recompute":
                    assert engine.scheduler.num_live == 0
            engine.scheduler.check()
    for completion in done.values():
        spans = completion.policy_versions
        assert sum(count for _, count in spans) == len(completion.token_ids)
        assert [version for version, _ in spans] == sorted({version for version, _ in spans})
    assert max(len(completion.policy_versions) for completion in done.values()) > 2
    with engine_for(model) as engine:
        engine.generate([[9] * 20], SamplingParams(max_new_tokens=2))
        with engine.paused(kv):
            pass
        engine.generate([[9] * 20], SamplingParams(max_new_tokens=2), same_weights=True)
        assert engine.stats.shared_tokens == 0


def test_what_cannot_be_done_in_a_pause_says_so():
    with engine_for(tiny.build()) as engine:
        sampling = SamplingParams(max_new_tokens=5)
        with pytest.raises(EnginePaused, match="without pause"):
            engine.resume()
        engine.submit([9], sampling)
        engine.pause()
        for call in (
            engine.step,
            engine.pause,
            lambda: engine.submit([9], sampling),
            lambda: engine.generate([[9]], sampling),
        ):
            with pytest.raises(EnginePaused, match=r"call resume\(\)"):
                call()
        with pytest.raises(ConfigError, match="kv='drop': must be 'keep' or 'recompute'"):
            engine.resume(kv="drop")
        engine.resume()
        assert len(run(engine)) == 1


def test_rows_whose_new_weights_cannot_be_followed_are_given_up(monkeypatch):
    def short_of_memory():
        raise torch.OutOfMemoryError("no memory for cast weights")

    model = tiny.build().eval()
    with engine_for(model) as engine:
        submit_all(engine, work(4))
        engine.step()
        engine.pause()
        change(model)
        with monkeypatch.context() as patch:
            patch.setattr(engine.worker, "refresh", short_of_memory)
            with pytest.raises(OutOfMemory):
                engine.resume()
        assert not engine.busy
        engine.scheduler.check()
        tiny.assert_on_policy(engine, model)
        assert engine.policy_version == 4  # three rollouts and the one before


# --- aborted rows


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("which", [[0], [1], [4], [0, 1, 2], [5, 8], list(range(9))], ids=str)
def test_rows_are_dropped_at_any_step_and_the_others_never_notice(which, num_slots):
    rows = work()
    with fakes.with_history_model(engine_for(tiny.build())) as engine:
        wanted = [(c.token_ids, c.logprobs) for c in engine.generate(*rows)]
    model = tiny.build()
    with fakes.with_history_model(tight(model, num_slots=num_slots)) as engine:
        for step in range(sum(which) % 7, 40, 7):
            ids, done = submit_all(engine, rows), {}
            for _ in range(step):
                done.update((completion.row, completion) for completion in engine.step())
            finished = set(done)
            dropped = {ids[index] for index in which}
            engine.abort(dropped)
            engine.scheduler.check()
            done.update(run(engine))
            assert set(done) == set(ids) - dropped | finished
            for row, completion in done.items():
                assert (completion.token_ids, completion.logprobs) == wanted[ids.index(row)]
            assert engine.scheduler.pages.num_used == 0


def test_dropping_every_row_that_waits_leaves_an_idle_engine():
    with engine_for(tiny.build()) as engine:
        row = engine.submit([9, 10], SamplingParams(max_new_tokens=5))
        engine.abort([row, 12345])
        assert not engine.busy
        assert len(engine.generate([[9]], SamplingParams(max_new_tokens=5))) == 1


def test_an_interrupt_while_rows_are_dropped_ends_every_row():
    """At any line after the first row may be gone; 4 rows have a lane and 5 wait."""
    with tight(tiny.build()) as engine:
        wanted = [completion.token_ids for completion in engine.generate(*work())]
        for number in count(10, 40):
            ids = submit_all(engine, work())
            for _ in range(12):
                engine.step()
            with suppress(KeyboardInterrupt), fakes.interrupt_at_line(number) as passed:
                engine.abort(ids)
            if passed[0] < number:
                break
            assert not engine.busy
            engine.scheduler.check()
        assert number > 200
        run(engine)
        assert [completion.token_ids for completion in engine.generate(*work())] == wanted


def test_what_is_no_collection_of_ids_drops_no_row():
    with engine_for(tiny.build()) as engine:
        row = engine.submit([9, 10], SamplingParams(max_new_tokens=5))
        with pytest.raises(TypeError):
            engine.abort(row)
        assert list(run(engine)) == [row]


# --- streaming


def test_rows_are_yielded_as_they_finish():
    prompts = tiny.prompts(9)
    sampling = [SamplingParams(max_new_tokens=20 - 2 * i) for i in range(9)]
    with fakes.with_history_model(engine_for(tiny.build(), max_rows=9)) as engine:
        wanted = engine.generate(prompts, sampling)
        stream = engine.stream(prompts, sampling)
        first = next(stream)
        assert engine.busy
        with pytest.raises(EngineBusy):
            next(engine.stream(prompts, sampling))
        rows = [first, *stream]
        assert not engine.busy
    assert [len(completion.token_ids) for completion in rows] == list(range(4, 21, 2))
    rows.sort(key=lambda completion: completion.row)
    assert [c.token_ids for c in rows] == [c.token_ids for c in wanted]


def test_a_stream_that_is_closed_early_drops_its_rows():
    with engine_for(tiny.build()) as engine:
        with closing(engine.stream(*work())) as stream:
            assert next(stream).row == 0
        assert not engine.busy
        engine.scheduler.check()
        assert engine.scheduler.pages.num_used == 0
        assert len(engine.generate(*work())) == 9
        engine.stream(*work()).close()  # closed before the first completion
        assert not engine.busy


@pytest.mark.parametrize("part", [HostPages, Admitter])
@pytest.mark.parametrize("call", ["close", "sleep"])
def test_an_interrupt_in_stream_close_or_sleep_leaves_a_usable_engine(monkeypatch, part, call):
    with engine_for(tiny.build()) as engine:
        wanted = [completion.token_ids for completion in engine.generate(*work())]
        stream = engine.stream(*work())
        if call == "close":
            next(stream)
        interrupted = fakes.interrupted_once(part)
        monkeypatch.setattr(rollout.scheduler.scheduler, part.__name__, interrupted)
        with pytest.raises(KeyboardInterrupt):
            (stream.close if call == "close" else engine.sleep)()
        assert not engine.busy
        engine.scheduler.check()
        assert [completion.token_ids for completion in engine.generate(*work())] == wanted
        engine.sleep()
        assert engine.asleep


def test_a_stream_says_at_once_what_is_wrong_and_begins_when_it_is_asked():
    with engine_for(tiny.build()) as engine:
        with pytest.raises(RequestError, match="empty prompt"):
            engine.stream([[]], SamplingParams(max_new_tokens=5))
        stream = engine.stream([[9]], SamplingParams(max_new_tokens=5))
        assert not engine.busy
        assert [len(completion.token_ids) for completion in stream] == [5]


def test_a_stream_that_is_first_asked_too_late_says_so():
    with engine_for(tiny.build()) as engine:
        first, second = engine.stream(*work()), engine.stream(*work())
        with engine.paused(same_weights=True), pytest.raises(EnginePaused):
            next(first)
        assert engine.policy_version == 0
    with pytest.raises(EngineClosed):
        next(second)


def test_weights_change_between_two_rows_of_a_stream():
    model = tiny.build()
    with engine_for(model) as engine:
        versions = []
        for completion in engine.stream(*work()):
            versions.append(completion.policy_versions)
            engine.pause()
            change(model, 1.01)
            engine.resume("recompute")
        assert engine.policy_version == 10
    assert len(versions) == 9
    assert len(versions[-1]) > 1

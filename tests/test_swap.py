"""KV pages offloaded to host memory and back, with real models."""

import fakes
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout import EngineConfig, RolloutEngine, SamplingParams
from rollout.runner.offload import chunk_sizes

PAGE = 4
PLENTY = 1 << 30


def page_bytes():
    with RolloutEngine(tiny.build(), EngineConfig(page_tokens=PAGE)) as engine:
        return engine.worker.kv_cache.layout.page_bytes


PAGE_BYTES = page_bytes()


def tight_engine(model, offload_bytes=PLENTY, *, pages=20, **changes):
    """Only a few more pages than the longest row of `work` needs."""
    settings = {"max_rows": 6, "page_tokens": PAGE, "prefill_tokens": 16, "num_slots": 2, **changes}
    kv_bytes = (1 + pages) * PAGE_BYTES
    config = EngineConfig(kv_bytes=kv_bytes, offload_bytes=offload_bytes, **settings)
    return RolloutEngine(model, config)


def work(count=10):
    """Pairs of rows with one prompt. No row ends early, so memory stays short."""
    prompts = [prompt for prompt in tiny.prompts(count // 2, seed=3) for _ in range(2)]
    sampling = [SamplingParams(max_new_tokens=20 + i, temperature=1.3) for i in range(count)]
    return prompts, sampling, [7 * i for i in range(count)]


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("offload_bytes", [0, 9 * PAGE_BYTES, PLENTY])
def test_rows_that_gave_way_are_bitwise_what_they_were(num_slots, offload_bytes):
    settings = {"num_slots": num_slots}

    def rows(pages, wrap):
        with wrap(tight_engine(tiny.build(), offload_bytes, pages=pages, **settings)) as engine:
            done = engine.generate(*work())
            engine.scheduler.check()
            return [(c.token_ids, c.logprobs) for c in done], engine.stats

    wanted, undisturbed = rows(500, fakes.with_history_model)
    assert undisturbed.preemptions == undisturbed.offloaded_bytes == 0
    for wrap in (
        fakes.with_history_model,
        lambda engine: fakes.with_lagging_device(fakes.with_history_model(engine)),
    ):
        tight, stats = rows(20, wrap)
        assert tight == wanted
        assert stats.preemptions > 3
        assert (stats.offloaded_bytes > 0) == (offload_bytes > 0)
        assert stats.least_free_pages == 0
        assert stats.peak_pages == 20


@pytest.mark.parametrize("offload_bytes", [0, PLENTY])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
def test_rows_that_gave_way_score_as_a_full_forward_does(family, offload_bytes):
    model = tiny.build(family)
    prompts, sampling, seeds = work()
    with tight_engine(model, offload_bytes) as engine:
        done = engine.generate(prompts, sampling, seeds)
        assert engine.stats.preemptions > 3
    model.eval()
    for prompt, completion in zip(prompts, done, strict=True):
        wanted = tiny.logprobs(model, prompt, completion.token_ids, temperature=1.3)
        assert completion.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)


def test_a_page_comes_back_byte_for_byte():
    with tight_engine(tiny.build()) as engine:
        swap, cache = engine.worker.swap, engine.worker.kv_cache
        move, left, num_back = swap.move, {}, 0

        def checked(batch):
            nonlocal num_back
            left.update((host, cache.page(page).clone()) for page, host in batch.offloads.tolist())
            move(batch)
            for host, page in batch.restores.tolist():
                assert torch.equal(cache.page(page), left[host])
                assert left[host].count_nonzero() > 0
                num_back += 1

        swap.move = checked
        engine.generate(*work())
        engine.scheduler.check()
        assert num_back > 10


def test_host_memory_is_taken_when_it_is_needed_and_no_more_than_asked_for():
    offload_bytes = 9 * PAGE_BYTES
    with tight_engine(tiny.build(), offload_bytes, pages=500) as engine:
        engine.generate(*work())
        assert engine.worker.swap.host_bytes == 0
        assert 0 < engine.worker.swap.num_host_pages <= 9
    with tight_engine(tiny.build(), offload_bytes) as engine:
        engine.generate(*work())
        assert 0 < engine.worker.swap.host_bytes <= offload_bytes
    with tight_engine(tiny.build(), None) as engine:
        assert engine.worker.swap.num_host_pages == 0  # on a CPU, host memory is the same memory


@given(st.integers(0, 1 << 36), st.integers(1, 1 << 34))
def test_pieces_of_host_memory_stay_within_the_budget_when_rounded_up(budget, page_size):
    pieces = list(chunk_sizes(budget, page_size))
    rounded = [1 << (pages * page_size - 1).bit_length() for pages in pieces]
    assert sum(rounded) <= budget
    assert all(size <= 1 << 29 or pages == 1 for size, pages in zip(rounded, pieces, strict=True))
    if budget >= 2 * page_size:
        assert sum(pieces) * page_size > budget / 5


def test_host_memory_for_less_than_a_page_is_said_to_be_useless(caplog):
    with tight_engine(tiny.build(), PAGE_BYTES - 1) as engine:
        engine.generate(*work())
        assert engine.worker.swap.host_bytes == 0
    assert "no KV page (0 MiB) fits into offload_bytes" in caplog.text


def test_growing_keeps_what_rows_have_while_pages_are_on_their_way():
    model = tiny.build()
    prompts, sampling, seeds = work()
    with tight_engine(model) as engine:
        rows = [engine.submit(*row) for row in zip(prompts, sampling, seeds, strict=True)]
        done = []
        while engine.stats.preemptions < 2:
            done += engine.step()
        engine.config = engine.worker.config = EngineConfig(max_rows=6, page_tokens=PAGE)
        rows.append(engine.submit([9] * 30, SamplingParams(max_new_tokens=30)))
        assert engine.worker.kv_cache.num_pages > 21
        while engine.busy:
            done += engine.step()
        engine.scheduler.check()
    model.eval()
    assert sorted(completion.row for completion in done) == rows
    for completion in done:
        prompt = [*prompts, [9] * 30][completion.row]
        temperature = 1.3 if completion.row < len(prompts) else 1.0
        wanted = tiny.logprobs(model, prompt, completion.token_ids, temperature)
        assert completion.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)

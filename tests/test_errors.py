"""Bad input gives an error that names the value, and the engine goes on."""

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from rollout import (
    ConfigError,
    EngineBusy,
    EngineClosed,
    EngineConfig,
    OutOfPages,
    RequestError,
    RolloutEngine,
    SamplingParams,
    UnsupportedModel,
)

FIVE = SamplingParams(max_new_tokens=5)


@pytest.fixture
def engine():
    with RolloutEngine(tiny.build(), EngineConfig(max_rows=2, page_tokens=4)) as engine:
        yield engine
        # The engine still works after a refusal.
        assert len(engine.generate([[9, 10]], FIVE)[0].token_ids) == 5
        engine.scheduler.check()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty prompt"),
        ([9, 61], "token id 61 is outside the vocabulary, 0 to 60"),
        ([-1], "token id -1 is outside"),
        ([1.7, 2], r"prompt=\[1.7, 2\]: must be a flat sequence of token ids"),
        (["a"], "flat sequence"),
        ([[9, 9]], "flat sequence"),
        ([[9], [9, 9]], r"prompt=\[\[9\], \[9, 9\]\]: must be a flat sequence"),
        ([9] * 252, "a prompt of 252 tokens and max_new_tokens=5 exceed max_row_tokens=256;"),
    ],
)
def test_a_bad_prompt_is_named_and_nothing_runs(engine, prompt, message):
    with pytest.raises(RequestError, match=message):
        engine.generate([[9], prompt], FIVE)
    with pytest.raises(RequestError, match=message):
        engine.submit(prompt, FIVE)
    assert not engine.busy
    assert engine.policy_version == 0


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, None, "a"])
def test_a_seed_out_of_range_is_named(engine, seed):
    with pytest.raises(RequestError, match=f"seed={seed!r}"):
        engine.generate([[9]], FIVE, seeds=[seed])


@pytest.mark.parametrize(
    ("sampling", "seeds", "message"),
    [
        (FIVE, [1], "1 seeds for 2 prompts"),
        ([FIVE] * 3, None, "3 sampling for 2 prompts"),
        (FIVE, 3, "seeds=3: must be a sequence, one per prompt"),
        (None, None, "sampling=None: must be a sequence, one per prompt"),
        ([FIVE, {"top_k": 1}], None, r"sampling=\{'top_k': 1\}: must be a SamplingParams"),
        ({"max_new_tokens": 5, "top_k": 1}, None, "sampling='max_new_tokens': must be"),
    ],
)
def test_sampling_and_seeds_that_do_not_match_are_named(engine, sampling, seeds, message):
    with pytest.raises(RequestError, match=message):
        engine.generate([[9], [9]], sampling, seeds=seeds)


def test_an_engine_is_given_a_config_and_a_model():
    with pytest.raises(ConfigError, match=r"config=\{'max_rows': 4\}: must be an EngineConfig"):
        RolloutEngine(tiny.build(), {"max_rows": 4})
    with pytest.raises(UnsupportedModel, match=r"must be an nn\.Module; load"):
        RolloutEngine("some/name")


def test_one_row_larger_than_all_pages_says_what_to_raise():
    probe = RolloutEngine(tiny.build(), EngineConfig(page_tokens=4))
    page_bytes = probe.worker.kv_cache.layout.page_bytes
    config = EngineConfig(max_rows=2, page_tokens=4, kv_bytes=3 * page_bytes + 1)
    with RolloutEngine(tiny.build(), config) as engine:
        wanted = rf"10 tokens needs 3 KV pages .* allows 2; raise kv_bytes={config.kv_bytes} or "
        wanted += r"kv_fraction=0.9, or lower max_new_tokens=5 or train_reserve_bytes=None"
        with pytest.raises(OutOfPages, match=wanted):
            engine.generate([[9], [9] * 5], FIVE)
        assert len(engine.generate([[9], [9] * 4], FIVE)) == 2


def test_a_prompt_is_copied(engine):
    import numpy as np

    prompt = np.array([9, 10])
    row = engine.submit(prompt, SamplingParams(max_new_tokens=5, temperature=0.0))
    prompt[:] = 60
    done = {}
    while engine.busy:
        done.update((completion.row, completion.token_ids) for completion in engine.step())
    (wanted,) = engine.generate([[9, 10]], SamplingParams(max_new_tokens=5, temperature=0.0))
    assert done[row] == wanted.token_ids


def test_a_model_that_was_cast_after_the_engine_was_made_is_refused():
    model = tiny.build()
    with RolloutEngine(model) as engine:
        model.to(torch.bfloat16)
        with pytest.raises(UnsupportedModel, match=r"bfloat16 on cpu, but .* for torch.float32 on"):
            engine.generate([[9]], FIVE)
        model.to(torch.float32)
        assert len(engine.generate([[9]], FIVE)) == 1


def test_generate_waits_for_nobody_elses_rows(engine):
    engine.submit([9, 10], FIVE)
    with pytest.raises(EngineBusy, match="submit"):
        engine.generate([[9]], FIVE)
    while engine.busy:
        engine.step()


def test_a_closed_engine_says_so():
    engine = RolloutEngine(tiny.build())
    engine.submit([9], FIVE)
    engine.close()
    engine.close()
    for call in (
        lambda: engine.generate([[9]], FIVE),
        lambda: engine.submit([9], FIVE),
        engine.step,
        lambda: engine.paused().__enter__(),
    ):
        with pytest.raises(EngineClosed, match="make a new one"):
            call()
    assert not engine.busy


def test_an_engine_whose_device_has_failed_can_still_be_closed(monkeypatch):
    engine = RolloutEngine(tiny.build())
    engine.submit([9], FIVE)

    def failing():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(engine.streams, "wait", failing)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.close()
    engine.close()
    assert not engine.busy


def test_a_model_on_meta_is_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny.build().config)
    with pytest.raises(UnsupportedModel, match="meta device"):
        RolloutEngine(model)

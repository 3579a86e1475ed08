"""The engine against `model.generate`, against a full forward, and against itself."""

import random
from contextlib import closing

import fakes
import numpy as np
import pytest
import tiny
import torch

import rollout.runner.worker
from rollout import EngineConfig, RolloutEngine, SamplingParams

SMALL = {"max_rows": 4, "page_tokens": 4, "prefill_tokens": 11, "num_slots": 2}


def engine_for(model, **changes):
    return RolloutEngine(model, EngineConfig(**{**SMALL, **changes}))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_tokens_equal_generate_and_logprobs_a_full_forward(family):
    model, prompts = tiny.build(family), tiny.prompts(7)
    sampling = SamplingParams(max_new_tokens=16, temperature=0.0, eos_token_ids=(tiny.EOS,))
    with engine_for(model) as engine:
        completions = engine.generate(prompts, sampling)
    model.eval()
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == tiny.greedy(model, prompt, 16)
        wanted = tiny.logprobs(model, prompt, completion.token_ids)
        assert completion.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)
        by_eos = completion.token_ids[-1] == tiny.EOS
        assert completion.finish_reason == ("stop" if by_eos else "length")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_sampled_logprobs_are_the_trainers_at_temperature(family):
    model, prompts = tiny.build(family), tiny.prompts(9, seed=1)
    sampling = SamplingParams(max_new_tokens=20, temperature=1.7, eos_token_ids=(tiny.EOS,))
    with engine_for(model) as engine:
        completions = engine.generate(prompts, sampling, seeds=range(100, 109))
    model.eval()
    for prompt, completion in zip(prompts, completions, strict=True):
        wanted = tiny.logprobs(model, prompt, completion.token_ids, temperature=1.7)
        assert completion.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)
    assert len({tuple(completion.token_ids) for completion in completions}) == len(prompts)


def rows_of(prompts, sampling, seeds, order, wrap=lambda engine: engine, **changes):
    """Completions in the order of `prompts`, from a run in shuffled order."""
    with wrap(engine_for(tiny.build(), **changes)) as engine:
        completions = engine.generate(
            [prompts[i] for i in order], [sampling[i] for i in order], [seeds[i] for i in order]
        )
        engine.scheduler.check()
        assert not engine.busy
    back = dict(zip(order, completions, strict=True))
    return [(back[i].token_ids, back[i].logprobs) for i in range(len(prompts))]


@pytest.fixture(scope="module")
def wanted():
    """Expected rows of `workload`, by the history model and by a real model."""
    work = workload()
    order = range(len(work[0]))
    return rows_of(*work, order, wrap=fakes.with_history_model), rows_of(*work, order)


def workload(count=23):
    prompts = tiny.prompts(count, seed=3)
    sampling = [
        SamplingParams(
            max_new_tokens=1 + i % 19, temperature=0.5 + i % 3, eos_token_ids=(tiny.EOS, 20 + i % 4)
        )
        for i in range(count)
    ]
    return prompts, sampling, [i * i + 5 for i in range(count)]


SETTINGS = [
    {"num_slots": 1},
    {"max_rows": 1},
    {"max_rows": 7},
    {"max_rows": 64, "page_tokens": 16},
    {"prefill_tokens": 1},
    {"prefill_tokens": 1000, "page_tokens": 3},
    {"num_slots": 1, "max_rows": 5, "page_tokens": 1},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("shuffle", [0, 1])
def test_rows_are_bitwise_the_same_in_any_batch(settings, shuffle, wanted):
    work = workload()
    order = list(range(len(work[0])))
    random.Random(shuffle).shuffle(order)
    assert rows_of(*work, order, wrap=fakes.with_history_model, **settings) == wanted[0]
    assert len({tuple(tokens) for tokens, _ in wanted[0]}) > 15


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_real_models_give_equal_tokens_in_any_batch(settings, wanted):
    work = workload()
    order = list(range(len(work[0])))
    random.Random(1).shuffle(order)
    found = rows_of(*work, order, **settings)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted[1]]
    for (_, ours), (_, theirs) in zip(found, wanted[1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_kv_bytes_bounds_the_pages_and_changes_no_row(wanted):
    work = workload()
    order = list(range(len(work[0])))
    with engine_for(tiny.build()) as engine:
        page_bytes = engine.worker.kv_cache.layout.page_bytes
    # The longest row has 14 + 19 tokens and needs 8 pages of 4, plus the trash page.
    tight = {"kv_bytes": 9 * page_bytes}
    assert rows_of(*work, order, wrap=fakes.with_history_model, **tight) == wanted[0]


def test_submit_and_step_serve_rows_that_arrive_while_others_run(wanted):
    prompts, sampling, seeds = workload()
    with fakes.with_history_model(engine_for(tiny.build())) as engine:
        waiting, done, ids = list(range(len(prompts))), {}, {}
        while waiting or engine.busy:
            if waiting:
                i = waiting.pop(0)
                ids[engine.submit(prompts[i], sampling[i], seeds[i])] = i
            for completion in engine.step():
                done[ids[completion.row]] = (completion.token_ids, completion.logprobs)
        assert engine.step() == []
        assert engine.policy_version == 1
    assert [done[i] for i in range(len(prompts))] == wanted[0]


def test_a_larger_row_that_arrives_while_others_run_finds_pages():
    with engine_for(tiny.build(), max_rows=1) as engine:
        engine.submit([9], SamplingParams(max_new_tokens=2))
        engine.step()
        engine.submit([9] * 8, SamplingParams(max_new_tokens=8))
        steps = 0
        while engine.busy:
            engine.step()
            steps += 1
            assert steps < 30


def test_each_rollout_runs_on_the_weights_of_its_moment():
    model = tiny.build()
    sampling = SamplingParams(max_new_tokens=12, temperature=1.0)
    prompt = tiny.prompts(1)[0]
    with engine_for(model) as engine:
        for version in range(1, 4):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            (completion,) = engine.generate([prompt], sampling)
            assert completion.policy_versions == [(version, len(completion.token_ids))]
            assert engine.policy_version == version
            wanted = tiny.logprobs(model.eval(), prompt, completion.token_ids)
            assert completion.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)
        engine.generate([prompt], sampling, same_weights=True)
        assert engine.policy_version == 3


def states(model):
    """All state of a model that a rollout must not change."""
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "modes": [module.training for module in model.modules()],
        "storage": [(t.data_ptr(), t.dtype, t.shape, t.requires_grad) for t in tensors],
        "values": [t.detach().clone() for t in tensors],
        "attention": model.config._attn_implementation,
        "attributes": [sorted(module.__dict__) for module in model.modules()],
    }


def global_random_states():
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_model_and_global_random_states_are_left_as_found(fail, training):
    model = tiny.build().train(training)
    model.gradient_checkpointing_enable()
    before, randomness = states(model), global_random_states()
    with engine_for(model) as engine:
        if fail:
            engine.worker.graphs.forward.decode = None
            with pytest.raises(TypeError):
                engine.generate(tiny.prompts(5), SamplingParams(max_new_tokens=5))
        else:
            engine.generate(tiny.prompts(5), SamplingParams(max_new_tokens=5))
    after = states(model)
    assert global_random_states() == randomness
    assert all(map(torch.equal, before.pop("values"), after.pop("values")))
    assert after == before


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("part", ["prefill", "decode"])
@pytest.mark.parametrize("nth", [1, 5])
def test_a_failure_in_a_step_raises_frees_everything_and_the_next_call_works(
    num_slots, part, nth, wanted
):
    work = workload()
    with fakes.with_history_model(engine_for(tiny.build(), num_slots=num_slots)) as engine:
        run, calls = getattr(engine.worker.graphs.forward, part), []

        def failing(*args):
            calls.append(args)
            if len(calls) == nth:
                raise MemoryError("injected")
            return run(*args)

        setattr(engine.worker.graphs.forward, part, failing)
        with pytest.raises(MemoryError, match="injected"):
            engine.generate(*work)
        assert not engine.busy
        assert engine.scheduler.pages.num_used == 0
        engine.scheduler.check()
        completions = engine.generate(*work)
    assert [(c.token_ids, c.logprobs) for c in completions] == wanted[0]


def test_graphs_are_prepared_for_all_rows_at_hand_whenever_memory_or_rows_change():
    asked = []
    model = tiny.build()
    with engine_for(model) as engine:
        engine.worker.graphs.prepare = lambda *arguments: asked.append(arguments)
        engine.submit([9] * 20, SamplingParams(max_new_tokens=30))
        engine.step()
        engine.step()
        engine.submit([9], SamplingParams(max_new_tokens=2))
        with engine.paused():
            model.lm_head.weight.data = model.lm_head.weight.data.clone()
        with pytest.raises(MemoryError), engine.paused(same_weights=True):
            raise MemoryError("injected")
        rows = [(demand.num_rows, demand.max_context) for demand, _ in asked]
        assert rows == [(1, 50), (2, 50), (2, 50), (2, 50)]
        signatures = [signature for _, signature in asked]
        assert signatures[1] != signatures[2] == signatures[3]
        while engine.busy:
            engine.step()


def test_an_interrupt_between_two_steps_leaves_a_usable_engine(wanted):
    work = workload()
    with fakes.with_history_model(engine_for(tiny.build())) as engine:
        with closing(engine.stream(*work)) as stream:
            next(stream)
            with pytest.raises(KeyboardInterrupt):
                stream.throw(KeyboardInterrupt)
        assert not engine.busy
        assert [(c.token_ids, c.logprobs) for c in engine.generate(*work)] == wanted[0]


def test_a_failed_growth_leaves_no_pages_that_are_not_there(monkeypatch):
    prompts, sampling, seeds = workload()
    with engine_for(tiny.build()) as engine:
        wanted = [c.token_ids for c in engine.generate(prompts, sampling, seeds)]
        page_bytes = engine.worker.kv_cache.layout.page_bytes

        def failing(num_pages):
            raise MemoryError("injected")

        long = SamplingParams(max_new_tokens=100)
        with monkeypatch.context() as patch:
            patch.setattr(engine.worker.kv_cache, "grow", failing)
            with pytest.raises(MemoryError):
                engine.generate([[9]] * 4, long)
        monkeypatch.setattr(rollout.runner.worker, "max_kv_bytes", lambda *_: 12 * page_bytes)
        assert [c.token_ids for c in engine.generate(prompts, sampling, seeds)] == wanted


def test_a_failure_in_a_pause_still_opens_a_version():
    model = tiny.build()
    with engine_for(model) as engine:
        engine.submit([9, 10], SamplingParams(max_new_tokens=6))
        engine.step()
        with pytest.raises(MemoryError), engine.paused():
            raise MemoryError("injected")
        assert engine.policy_version == 2
        while engine.busy:
            engine.step()


@pytest.mark.parametrize("built_inside", [False, True])
def test_the_mode_of_the_caller_does_not_stick(built_inside):
    model, sampling = tiny.build(), SamplingParams(max_new_tokens=5)
    with torch.inference_mode(built_inside):
        engine = engine_for(model)
    with torch.inference_mode():
        first = engine.generate([[9, 10]], sampling)
    second = engine.generate([[9, 10]] * 3, sampling, seeds=[0, 1, 2])
    assert second[0].token_ids == first[0].token_ids


def test_the_global_default_dtype_has_no_say():
    model = tiny.build()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with engine_for(model) as engine:
            assert len(engine.generate([[9, 10]], SamplingParams(max_new_tokens=5))) == 1
    finally:
        torch.set_default_dtype(torch.float32)


def test_logits_that_are_not_numbers_are_an_error_not_a_completion():
    from rollout import RolloutError

    model = tiny.build()
    with engine_for(model) as engine:
        healthy = model.lm_head.weight.detach().clone()
        with torch.no_grad():
            model.lm_head.weight.fill_(torch.nan)
        with pytest.raises(RolloutError, match="logits are not finite"):
            engine.generate([[9]], SamplingParams(max_new_tokens=5))
        with torch.no_grad():
            model.lm_head.weight.copy_(healthy)
        assert len(engine.generate([[9]], SamplingParams(max_new_tokens=5))) == 1


def test_stats_count_what_was_done():
    with fakes.with_history_model(engine_for(tiny.build())) as engine:
        completions = engine.generate(*workload())
        stats = engine.stats
    by_eos = sum(completion.finish_reason == "stop" for completion in completions)
    assert stats.generated_tokens == sum(len(completion.token_ids) for completion in completions)
    # A row that reaches max_new_tokens has no overrun, even if its last token is an EOS.
    assert 0 < stats.overrun_tokens <= by_eos
    assert 1 < stats.rows_live <= 4
    assert 0 < stats.peak_pages <= 4 * 9
    assert stats.duration_s > 0

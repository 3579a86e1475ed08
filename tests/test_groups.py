"""Rows with one prompt: prefilled once, forked page by page, each as if it ran alone."""

import fakes
import pytest
import tiny
import torch

from rollout import EngineConfig, RolloutEngine, SamplingParams

PAGE = 4
CONFIG = EngineConfig(max_rows=8, page_tokens=PAGE, prefill_tokens=16, num_slots=2)
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, eos_token_ids=(tiny.EOS,))


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(8, tiny.VOCAB, (length,), generator=generator).tolist()


@pytest.mark.parametrize("length", [2, 4, 5, 9, 38, 41])
def test_a_group_costs_one_prefill_and_one_copy_of_its_pages(length):
    model = tiny.build()
    with RolloutEngine(model, CONFIG) as engine:
        completions = engine.generate([prompt(length)] * 8, GREEDY)
        stats = engine.stats
        assert stats.prefilled_tokens == length - 1
        assert stats.attended_tokens == length * (length - 1) // 2
        assert stats.shared_tokens == 7 * (length - 1)
        full, own = (length - 1) // PAGE, -(-(length + 6) // PAGE) - (length - 1) // PAGE
        assert stats.peak_pages <= full + 8 * own
        engine.scheduler.check()
        assert engine.scheduler.pages.num_used == 0
    wanted = tiny.greedy(model.eval(), prompt(length), 6)
    assert [completion.token_ids for completion in completions] == [wanted] * 8


def test_rows_of_groups_are_those_they_are_alone():
    """The history model is exact, so rows are bit-identical."""
    prompts = [p for i in range(5) for p in [prompt(3 + 7 * i, i)] * (1 + i)]
    sampling = [
        SamplingParams(max_new_tokens=1 + 5 * i % 17, eos_token_ids=(3, 4 + i % 9))
        for i in range(len(prompts))
    ]
    seeds = [31 * i for i in range(len(prompts))]

    def rows(max_rows, num_slots, together):
        config = EngineConfig(
            max_rows=max_rows, page_tokens=PAGE, prefill_tokens=9, num_slots=num_slots
        )
        with RolloutEngine(tiny.build(), config) as engine:
            fakes.with_history_model(engine)
            if together:
                done = engine.generate(prompts, sampling, seeds)
                assert engine.stats.shared_tokens > 0
            else:
                each = zip(prompts, sampling, seeds, strict=True)
                done = [engine.generate([p], s, [seed])[0] for p, s, seed in each]
        return [(completion.token_ids, completion.logprobs) for completion in done]

    alone = rows(1, 1, together=False)
    for max_rows, num_slots in ((15, 2), (15, 1), (4, 2), (2, 1)):
        assert rows(max_rows, num_slots, together=True) == alone


def test_new_weights_share_nothing_of_the_old_ones():
    model = tiny.build().eval()
    with RolloutEngine(model, CONFIG) as engine:
        for row in range(2):
            engine.submit(prompt(11), GREEDY, row)
        done = engine.step()
        with engine.paused(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)
        late = engine.submit(prompt(11), GREEDY, 2)
        while engine.busy:
            done += engine.step()
        assert engine.stats.prefilled_tokens == 2 * 10
        assert engine.stats.shared_tokens == 10
        (completion,) = (completion for completion in done if completion.row == late)
    assert completion.token_ids == tiny.greedy(model, prompt(11), 6)


@pytest.mark.parametrize("length", [7, 8, 9, 10])
def test_a_later_turn_prefills_what_it_adds_under_the_same_weights(length):
    model = tiny.build().eval()
    with RolloutEngine(model, CONFIG) as engine:
        first = prompt(length)
        (done,) = engine.generate([first], GREEDY)
        turn = [*first, *done.token_ids, 9, 10]
        (again,) = engine.generate([turn], GREEDY, same_weights=True)
        written = len(first) + len(done.token_ids) - 1  # the last token's KV is never written
        shared = written // PAGE * PAGE
        assert engine.stats.shared_tokens == shared
        assert engine.stats.prefilled_tokens == len(turn) - 1 - shared
        assert engine.stats.attended_tokens == sum(range(shared + 1, len(turn)))
        assert again.token_ids == tiny.greedy(model, turn, 6)
        engine.generate([turn], GREEDY)  # the weights may have changed
        assert engine.stats.shared_tokens == 0


def test_known_beginnings_give_way_to_rows_that_need_the_pages():
    model = tiny.build().eval()
    pages = 9
    probe = RolloutEngine(model, CONFIG)
    page_bytes = probe.worker.kv_cache.layout.page_bytes
    probe.close()
    config = EngineConfig(max_rows=2, page_tokens=PAGE, kv_bytes=(pages + 1) * page_bytes)
    with RolloutEngine(model, config) as engine:
        for seed in range(6):
            given = prompt(20, seed)
            (done,) = engine.generate([given], GREEDY, same_weights=seed > 0)
            assert done.token_ids == tiny.greedy(model, given, 6)
            engine.scheduler.check()
        assert engine.scheduler.pages.num_cached > 0
        assert engine.worker.kv_cache.num_pages <= pages + 1

"""Counts of one rollout, and the observers of its batches."""

import numpy as np
import pytest
import tiny

from rollout import EngineConfig, RolloutEngine, SamplingParams
from rollout.telemetry.observer import Observer
from rollout.telemetry.stats import RolloutStats

CONFIG = EngineConfig(max_rows=3, page_tokens=4, prefill_tokens=9, num_slots=2)


class Witness(Observer):
    def __init__(self):
        self.calls, self.batches, self.num_bytes, self.completions = [], [], 0, []

    def planned(self, batch):
        self.calls.append(("planned", batch))

    def launched(self, batch, num_bytes):
        self.calls.append(("launched", batch))
        self.batches.append(batch)
        self.num_bytes += num_bytes

    def settled(self, batch, completions, stamps):
        self.calls.append(("settled", batch))
        self.completions += completions
        assert stamps.uploading.elapsed_time(stamps.downloaded) >= 0


def observed(engine, prompts, sampling):
    witness = Witness()
    with engine.observing(witness):
        engine.generate(prompts, sampling)
    return witness


def test_nothing_has_happened_yet():
    stats = RolloutStats(policy_version=3)
    assert (stats.generated_tokens, stats.engine_steps, stats.peak_pages) == (0, 0, 0)
    assert (stats.duration_s, stats.tokens_per_s, stats.rows_live) == (0.0, 0.0, 0.0)
    assert (stats.overrun_tokens, stats.prefix_hit_rate, stats.least_free_pages) == (0, 0, None)


def test_counts_are_those_of_the_batches_that_ran():
    sampling = [SamplingParams(max_new_tokens=3 + i, eos_token_ids=(tiny.EOS,)) for i in range(6)]
    prompts = [*tiny.prompts(4), *[[9, 10, 11, 12, 13, 14]] * 2]
    with RolloutEngine(tiny.build(), CONFIG) as engine:
        witness, stats = observed(engine, prompts, sampling), engine.stats
        again = observed(engine, prompts[:1], sampling[:1])
        assert engine.stats is not stats
        assert engine.stats.engine_steps == len(again.batches)
    decoding = [len(batch.rows) for batch in witness.batches if len(batch.rows)]
    assert (stats.engine_steps, stats.decode_steps) == (len(witness.batches), len(decoding))
    assert stats.decoded_rows == sum(decoding)
    assert stats.rows_live == np.mean(decoding)
    assert stats.h2d_bytes == witness.num_bytes
    for name in ("prefilled", "attended", "shared"):
        wanted = sum(getattr(batch, f"num_{name}") for batch in witness.batches)
        assert getattr(stats, f"{name}_tokens") == wanted > 0
    assert stats.prefix_hit_rate == stats.shared_tokens / (
        stats.shared_tokens + stats.prefilled_tokens
    )
    assert stats.lengths == [len(completion.token_ids) for completion in witness.completions]
    assert stats.generated_tokens == sum(stats.lengths)
    assert stats.overrun_tokens == stats.decoded_rows - stats.generated_tokens
    assert stats.num_stopped == sum(c.finish_reason == "stop" for c in witness.completions)
    assert stats.tokens_per_s == pytest.approx(stats.generated_tokens / stats.duration_s)
    assert stats.peak_pages >= stats.peak_shared_pages > 0
    assert stats.mapped_bytes > 0
    assert stats.whole_s == stats.duration_s
    assert "idle" in stats.time_shares


@pytest.mark.parametrize("num_slots", [1, 2])
def test_each_batch_is_planned_launched_and_settled_in_that_order(num_slots):
    config = EngineConfig(max_rows=3, page_tokens=4, num_slots=num_slots)
    with RolloutEngine(tiny.build(), config) as engine:
        witness = observed(engine, tiny.prompts(5), SamplingParams(max_new_tokens=4))
        engine.generate(tiny.prompts(2), SamplingParams(max_new_tokens=2))  # not observed
    steps = [(call, batch) for call, batch in witness.calls if batch is not None]
    for batch in witness.batches:
        assert [call for call, each in steps if each is batch] == ["planned", "launched", "settled"]
    names = [call for call, _ in steps]
    in_flight = np.cumsum([(name == "launched") - (name == "settled") for name in names])
    assert in_flight.max() == num_slots
    assert in_flight[-1] == 0


def test_an_overrun_is_a_decoded_row_that_no_completion_has():
    with RolloutEngine(tiny.build(), CONFIG) as engine:
        every = tuple(range(tiny.VOCAB))
        engine.generate([[9, 10]] * 2, SamplingParams(max_new_tokens=4, eos_token_ids=every))
        assert (engine.stats.generated_tokens, engine.stats.overrun_tokens) == (2, 2)
        assert engine.stats.num_stopped == 2

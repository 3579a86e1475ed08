"""Time stamps of the GPU: against a timeline, and their cost."""

import time

import pytest
import torch

from rollout import EngineConfig, RolloutEngine, SamplingParams
from rollout.telemetry.recorder import Recorder
from rollout.telemetry.trace import Tracer
from rollout.tools.workload import build_model
from trainers.reporting.utilisation import Utilisation

pytestmark = pytest.mark.gpu

PROMPTS = [[7 + row, *range(100, 163)] for row in range(13)]
CONFIG = EngineConfig(max_rows=13, max_row_tokens=512, kv_bytes=1 << 30)


@pytest.fixture(scope="module")
def model():
    return build_model("qwen3-0.6b", torch.device("cuda"))


def lengths(row):
    return SamplingParams(max_new_tokens=60 + 20 * row)


def generate(engine):
    engine.generate(PROMPTS, [lengths(row) for row in range(len(PROMPTS))])
    return engine.stats


def test_shares_add_up_to_1_and_agree_with_a_timeline(model):
    with RolloutEngine(model, CONFIG) as engine:
        generate(engine)  # captures
        tracer = Tracer(engine.device)
        with engine.observing(tracer):
            stats = generate(engine)
    shares = stats.time_shares
    assert sum(shares.values()) == pytest.approx(1, abs=0.01)
    assert min(shares.values()) >= 0
    inside = sum(shares[part] for part in ("compute", "prefill", "tail"))
    assert inside * stats.whole_s == pytest.approx(tracer.timeline.busy_s("compute"), rel=0.02)
    assert shares["tail"] > 0.1  # the longest row has five times the tokens of the shortest


def test_graphs_are_counted_where_they_are_captured(model):
    with RolloutEngine(model, CONFIG) as engine:
        assert generate(engine).captured_graphs == engine.num_graphs > 0
        assert generate(engine).captured_graphs == 0


def test_telemetry_lets_the_host_wait_for_nothing(model, monkeypatch):
    settled, spent = Recorder.settled, []

    def timed(*args):
        began = time.perf_counter()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            settled(*args)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            spent.append(time.perf_counter() - began)

    with RolloutEngine(model, CONFIG) as engine:
        generate(engine)
        monkeypatch.setattr(Recorder, "settled", timed)
        generate(engine)
    assert sorted(spent)[len(spent) // 2] < 100e-6


def test_bandwidth_and_operations_are_used_in_part(model):
    with RolloutEngine(model, CONFIG) as engine:
        utilisation = Utilisation(engine)
        generate(engine)
        stats = generate(engine)
        found = utilisation.metrics(
            stats, PROMPTS, [lengths(row).max_new_tokens for row in range(13)]
        )
        weights = stats.engine_steps * engine.cost().weight_bytes
    assert 0 < found["rollout/mfu"] < found["rollout/mbu"] < 1
    # A share of the measured bandwidth, because others may use this GPU.
    least = weights / utilisation._bandwidth / stats.duration_s
    assert found["rollout/mbu"] > least

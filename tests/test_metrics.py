"""Our metrics in the trainer's log, beside TRL's."""

import math
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import trl_trainer

from rollout.telemetry.stats import RolloutStats
from rollout.telemetry.time_shares import PARTS
from trainers.reporting.metrics import gap_metrics, rollout_metrics, summary, time_metrics
from trainers.reporting.step_timer import StepClock

RAW = "sampling/raw_importance_sampling_ratio"


class Ranks:
    """An accelerator of two ranks; both have this rank's data, or the other has other rows."""

    def __init__(self, scale=1.0):
        self._scale = scale

    def gather(self, tensor):
        return torch.cat([tensor, tensor * self._scale])


def trainer(mode="token_truncate", accelerator=None):
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    return SimpleNamespace(
        accelerator=accelerator or Ranks(), vllm_importance_sampling_mode=mode, _metrics=metrics
    )


def scored(difference, mask=None, *, corrected=True):
    """TRL's result if log-probabilities are `difference` above the rollout's."""
    sampled = torch.full_like(difference, -2.0)
    extra = {"importance_sampling_ratio": torch.ones(())} if corrected else {}
    return {
        "sampling_per_token_logps": sampled,
        "old_per_token_logps": sampled + difference,
        "completion_mask": torch.ones_like(difference).long() if mask is None else mask,
        **extra,
    }


def test_drift_is_told_apart_by_position():
    difference = torch.zeros(2, 20_000)
    difference[:, :1024], difference[:, 1024:4096] = 0.1, -0.2
    difference[:, 4096:16384], difference[:, 16384:] = 0.3, -0.4
    found = gap_metrics(trainer(), scored(difference, corrected=False), sample=False)
    assert found == pytest.approx(
        {
            "rollout/logp_gap": difference.abs().mean().item(),
            "rollout/logp_gap_max": 0.4,
            "rollout/logp_gap/0-1K": 0.1,
            "rollout/logp_gap/1-4K": 0.2,
            "rollout/logp_gap/4-16K": 0.3,
            "rollout/logp_gap/16K+": 0.4,
        },
        rel=1e-4,
    )


def test_positions_without_tokens_have_no_metric():
    difference, mask = torch.full((2, 3000), 0.5), torch.zeros(2, 3000).long()
    mask[:, :10] = 1
    found = gap_metrics(trainer(), scored(difference, mask), sample=False)
    assert found["rollout/logp_gap"] == found["rollout/logp_gap/0-1K"] == pytest.approx(0.5)
    assert "rollout/logp_gap/1-4K" not in found


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
def test_rows_that_are_all_masked_are_no_agreement(mode):
    """`mask_truncated_completions` masks every row until the model learns to stop."""
    output = scored(torch.ones(2, 5), torch.zeros(2, 5).long())
    assert gap_metrics(trainer(mode), output, sample=False) == {}


def test_tokens_of_tools_do_not_count():
    output = scored(torch.tensor([[0.1, 9.0]]))
    output["tool_mask"] = torch.tensor([[1, 0]])
    found = gap_metrics(trainer(), output, sample=False)
    assert found["rollout/logp_gap_max"] == pytest.approx(0.1)
    assert found[f"{RAW}/max"] == pytest.approx(math.exp(0.1))


@pytest.mark.parametrize(
    ("mode", "ratios"),
    [("token_truncate", [math.e, 1.0, math.exp(2.0)]), ("sequence_mask", [math.e, math.exp(2.0)])],
)
def test_the_raw_ratio_is_trls_before_clipping(mode, ratios):
    output = scored(torch.tensor([[1.0, 0.0], [2.0, 7.0]]), torch.tensor([[1, 1], [1, 0]]))
    found = gap_metrics(trainer(mode), output, sample=False)
    assert found[f"{RAW}/mean"] == pytest.approx(sum(ratios) / len(ratios))
    assert found[f"{RAW}/max"] == pytest.approx(max(ratios))


def test_other_ranks_count():
    found = gap_metrics(
        trainer(accelerator=Ranks(3.0)), scored(torch.full((1, 4), 0.1)), sample=False
    )
    assert found["rollout/logp_gap_max"] == pytest.approx(0.3)
    assert found["rollout/logp_gap"] == pytest.approx(0.1)


def test_without_log_probabilities_there_is_nothing_to_compare():
    output = scored(torch.zeros(1, 2))
    assert gap_metrics(trainer(), {**output, "sampling_per_token_logps": None}, sample=True) == {}
    assert gap_metrics(trainer(), {**output, "old_per_token_logps": None}, sample=False) == {}


def finished(lengths, num_stopped):
    return RolloutStats(
        policy_version=4,
        lengths=lengths,
        num_stopped=num_stopped,
        generated_tokens=sum(lengths),
        duration_s=2.0,
    )


def test_a_rollouts_lengths_and_ends_are_told():
    found = rollout_metrics(finished([*range(1, 21), 100], 7))
    told = {name: found[f"rollout/length/{name}"] for name in ("mean", "p50", "p95", "max")}
    assert told == pytest.approx({"mean": 310 / 21, "p50": 11, "p95": 20, "max": 100})
    assert found["rollout/finished/stop"] == pytest.approx(1 / 3)
    assert found["rollout/finished/length"] == pytest.approx(2 / 3)
    assert not [name for name in rollout_metrics(RolloutStats()) if "length" in name]


def test_every_count_goes_to_its_own_metric():
    """All counts differ here, so a swapped pair shows."""
    stats = RolloutStats(
        policy_version=3,
        generated_tokens=1000,
        decode_steps=16,
        decoded_rows=1008,
        peak_pages=30,
        peak_shared_pages=5,
        least_free_pages=7,
        preemptions=11,
        offloaded_bytes=2**28,
        prefilled_tokens=30,
        shared_tokens=10,
        mapped_bytes=2**31,
        released_bytes=2**32,
        wake_s=0.25,
        sleep_s=0.75,
        cast_bytes=2**29,
        cast_s=0.5,
        captured_graphs=13,
        duration_s=4.0,
        device={"gpu_sm_active": 0.125},
    )
    wanted = {
        "generated_tok_s": 250,
        "duration_s": 4,
        "kv_pages_used": 30,
        "kv_pages_shared": 5,
        "kv_pages_free": 7,
        "preemptions": 11,
        "offloaded_gib": 0.25,
        "rows_live": 63,
        "overrun_rows": 8,
        "prefix_hit_rate": 0.25,
        "policy_version": 3,
        "graphs_captured": 13,
        "kv_mapped_gib": 2,
        "released_gib": 4,
        "wake_ms": 250,
        "cast_weights_gib": 0.5,
        "cast_weights_ms": 500,
        "gpu_sm_active": 0.125,
    }
    assert rollout_metrics(stats) == {f"rollout/{name}": value for name, value in wanted.items()}


def test_every_share_goes_to_its_own_metric(monkeypatch):
    shares = {part: (1 + i) / 15 for i, part in enumerate(PARTS)}
    monkeypatch.setattr(RolloutStats, "time_shares", shares)
    found = time_metrics(RolloutStats())
    assert found == {f"rollout/time/{part}": share for part, share in shares.items()}


def test_a_rollouts_line_says_the_most_important():
    assert summary(finished([10, 1200], 1)) == (
        "rollout: 2 rows, 1,210 tokens, 2.0 s, 605 tok/s; mean length 605, max 1,200, 1 stopped; "
        "idle 100%"
    )
    assert summary(RolloutStats()).startswith("rollout: 0 rows, 0 tokens, ")


def test_steps_are_measured_without_what_lies_between_them(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    model = SimpleNamespace(training=True)
    owner = trainer(accelerator=SimpleNamespace(num_processes=4))
    owner.model = model
    clock, found = StepClock(owner), owner._metrics

    def step(seconds, num_tokens=0, rollout_s=0.0):
        clock.on_step_begin(None, None, None)
        if num_tokens:
            clock.begin()
            clock.count(num_tokens=num_tokens)
            clock.count(seconds=rollout_s)
        now[0] += seconds
        clock.on_step_end(None, None, None)
        now[0] += 1000  # time for logging and saving

    def evaluate():
        model.training = False
        clock.begin()
        clock.count(num_tokens=30, seconds=0.5)
        now[0] += 1.0
        clock.on_prediction_step(None, None, None)
        clock.on_prediction_step(None, None, None)
        model.training = True

    step(4.0, 800, 1.0)
    step(2.0)  # trains on the same completions
    evaluate()
    step(2.0, 800, 1.0)
    evaluate()
    assert found["train"] == {
        "rollout/effective_tok_s": [200, 200],
        "rollout/tok_s_per_gpu": [50, 50],
        "rollout/step_share": [0.25, 0.25],
    }
    assert found["eval"]["rollout/effective_tok_s"] == [30, 30]
    assert found["eval"]["rollout/step_share"] == [0.5, 0.5]


def test_a_step_that_failed_counts_to_none_of_the_next_training(tmp_path):
    """Its rollout counted, but not its seconds, so shares exceeded 1."""
    run = trl_trainer.build(tmp_path, max_steps=1)
    trl_trainer.attach(run)
    (reward,), run.reward_funcs = run.reward_funcs, [fail]
    with pytest.raises(ZeroDivisionError):
        run.train()
    run._metrics["train"].clear()  # TRL keeps the failed rollout's numbers here
    run.reward_funcs = [reward]
    run.train()
    (share,) = trl_trainer.logged(run, "rollout/step_share")
    (tokens_per_s,) = trl_trainer.logged(run, "rollout/effective_tok_s")
    assert share < 1
    assert tokens_per_s < trl_trainer.logged(run, "rollout/generated_tok_s")[0]


def test_an_evaluation_after_one_that_was_interrupted_counts_its_own_time(tmp_path):
    run = trl_trainer.build(tmp_path)
    engine = trl_trainer.attach(run).engine
    step, engine.step = engine.step, fail
    with pytest.raises(ZeroDivisionError):
        run.evaluate()
    engine.step = step
    time.sleep(1.0)
    run.evaluate()
    shares = run._metrics["eval"].get("rollout/step_share") or [
        entry["eval_rollout/step_share"] for entry in run.state.log_history
    ]
    assert min(shares) > 0.2


def fail(**columns):
    raise ZeroDivisionError


def test_a_training_logs_them_for_training_and_evaluation_apart(tmp_path):
    run = trl_trainer.build(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    trl_trainer.attach(run)
    run.train()
    names = ("rollout/logp_gap/0-1K", f"{RAW}/mean", f"{RAW}/max")
    for name in (*names, *(f"eval_{name}" for name in names)):
        assert len(trl_trainer.logged(run, name)) == 2
    for value in trl_trainer.logged(run, f"{RAW}/max"):
        assert value == pytest.approx(1.0, abs=1e-4)
    gaps = trl_trainer.logged(run, "rollout/logp_gap")
    assert trl_trainer.logged(run, "rollout/logp_gap/0-1K") == gaps
